"""CPU slots stand for devices where there is no accelerator, and where they are asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_core import accelerators, cluster


def settings(slots: int | None = None, debug: bool = False) -> SimpleNamespace:
    return SimpleNamespace(address=None, virtual_devices=slots, debug=debug)


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in accelerators.HIDING:
        monkeypatch.delenv(name, raising=False)


def test_an_accelerator_is_seen_and_can_be_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not accelerators.accelerator_here(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not accelerators.accelerator_here(tmp_path), "the driver's control file is no device"
    (tmp_path / "nvidia0").touch()
    assert accelerators.accelerator_here(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not accelerators.accelerator_here(tmp_path)


@pytest.mark.parametrize(
    ("there", "asked", "slots"), [(False, None, 2), (False, 5, 5), (True, None, 0), (True, 3, 3), (False, 0, 0)]
)
def test_slots(monkeypatch: pytest.MonkeyPatch, there: bool, asked: int | None, slots: int) -> None:
    monkeypatch.setattr(cluster, "accelerator_here", lambda: there)
    assert cluster.slots_here(settings(asked)) == slots
    found = cluster.local_info(settings(asked))
    if there and asked is None:
        assert found is None, "Ray finds the accelerators"
    else:
        assert found is not None and len(found.devices) == slots
    debugged = cluster.local_info(settings(asked, debug=True))
    assert debugged is not None and len(debugged.devices) == max(1, slots)
