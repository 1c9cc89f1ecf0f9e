"""What is said of a worker's process that Ray ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.launch import RayLauncher

TOLD = (
    "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: c37f) was "
    "22.02GB used / 23.54GB limit (0.935414)\nOOM kill reason: Memory usage 24075177984B exceeded threshold"
)


def launcher(monkeypatch: pytest.MonkeyPatch, error: Exception, run_dir: Path) -> RayLauncher:
    import ray

    def get(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    made = RayLauncher.__new__(RayLauncher)
    made._started = {"critic[1]": SimpleNamespace(main=None, spec=SimpleNamespace(run_dir=run_dir))}  # type: ignore[dict-item]
    return made


def test_a_process_that_ray_killed_for_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    cause = launcher(monkeypatch, ray.exceptions.OutOfMemoryError(TOLD), tmp_path).why_dead("critic[1]", 1.0)
    assert "out of memory (22.02GB used / 23.54GB limit)" in cause
    assert "cluster.virtual_devices" in cause
    assert "OOM kill reason" not in cause, "one line that says what to do, not Ray's page"


def test_another_error_of_ray_is_a_cause_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    cause = launcher(monkeypatch, ray.exceptions.RaySystemError("the raylet is gone"), tmp_path).why_dead(
        "critic[1]", 1.0
    )
    assert "RaySystemError" in cause and "the raylet is gone" in cause
