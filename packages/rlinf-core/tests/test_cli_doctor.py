"""``rlinf doctor``: what it says about the installation and the machine."""

from __future__ import annotations

import os
import socket
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlinf_core import registry
from rlinf_core.cli import doctor, machine
from rlinf_core.cli.machine import GIB, Machine, Raylet
from rlinf_core.cli.main import main
from rlinf_core.config import sources
from rlinf_core.errors import RLinfError
from rlinf_core.registry import GROUPS, Entry, kind_of

HEALTHY = Machine(
    python="3.11.9",
    cores=8,
    cores_total=8,
    load=1.0,
    memory_total=64 * GIB,
    memory_available=50 * GIB,
    shm_total=32 * GIB,
    shm_free=32 * GIB,
    open_files=20_000,
    open_files_hard=20_000,
    disk_free={"/": 100 * GIB},
)


def test_a_healthy_machine_hurts_nowhere() -> None:
    assert list(doctor.hurts(HEALTHY)) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"thread_variables": {"OMP_NUM_THREADS": "64"}}, "OMP_NUM_THREADS=64"),
        ({"cpu_quota": 2.0}, "2 of 8 cores"),
        ({"load": 20.0}, "load 20.0 on 8 cores"),
        ({"memory_limit": 2 * GIB}, "2.0 GiB of memory can be used"),
        ({"swap_used": 3 * GIB}, "3.0 GiB are swapped out"),
        ({"shm_total": 64 * 2**20}, "/dev/shm has 0.06 GiB"),
        ({"open_files_hard": 1024}, "at most 1024 open files"),
        ({"disk_free": {"/": GIB}}, "/ has 1.0 GiB free"),
        ({"disk_nearly_full": frozenset({"/"})}, "95 % full"),
        ({"stale_locks": ("/x/lock",)}, "stale compile lock /x/lock"),
        ({"allocator": "A=b"}, "A=b: expandable segments"),
        ({"raylets": (Raylet(7), Raylet(8))}, "raylet 7, 8: its driver is gone and its cluster does not answer"),
        ({"raylets": (Raylet(7), Raylet(8))}, "left over (ray stop)"),
        ({"raylets": (Raylet(7), Raylet(8, "in use by process 6"))}, "left over (kill 7)"),
    ],
)
def test_what_hurts_is_named_with_its_number(change: dict[str, object], part: str) -> None:
    found = list(doctor.hurts(replace(HEALTHY, **change)))  # type: ignore[arg-type]
    assert len(found) == 1 and part in found[0]


def test_devices_and_ray_are_described() -> None:
    assert any("virtual_devices" in line for line in doctor.describe_machine(HEALTHY))
    seen = replace(HEALTHY, gpus=("0, H200, GPU-1, 140 GiB",), ray_address="10.0.0.1:6379", ray_address_from="x")
    assert "device 0, H200, GPU-1, 140 GiB" in list(doctor.describe_machine(seen))
    assert any("10.0.0.1:6379" in line for line in doctor.describe_ray(seen))


def test_a_raylet_in_use_hurts_nobody() -> None:
    seen = replace(HEALTHY, raylets=(Raylet(8, "in use by process 6"), Raylet(9)))
    lines = list(doctor.describe_ray(seen))
    assert "raylet process 8: in use by process 6" in lines and "raylet process 9: left over" in lines
    assert list(doctor.hurts(replace(HEALTHY, raylets=seen.raylets[:1]))) == []


class OneProcess:
    """As psutil shows it."""

    def __init__(self, words: list[str], ppid: int = 1, name: str = "raylet", fault: Exception | None = None) -> None:
        self.info = {"name": name}
        self.pid = 7
        self._words, self._ppid, self._fault = words, ppid, fault

    def cmdline(self) -> list[str]:
        if self._fault:
            raise self._fault
        return self._words

    def ppid(self) -> int:
        return self._ppid


def test_a_raylet_is_used_by_its_driver_or_by_a_cluster_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(
            machine.socket, "create_connection", only(server.getsockname()[1], socket.create_connection)
        )
        began = "--session-name=session_2026-01-01_00-00-00_1_41"
        silent = "--gcs-address=127.0.0.1:1"
        shown = [
            OneProcess([began, silent], ppid=41),
            OneProcess([began, silent], ppid=42),
            OneProcess([began, f"--gcs-address={answers}"]),
            OneProcess([]),
            OneProcess([began], ppid=41, name="python"),
            OneProcess([], fault=psutil.NoSuchProcess(7)),
            OneProcess([], fault=psutil.AccessDenied(7)),
        ]
        monkeypatch.setattr(psutil, "process_iter", lambda names: iter(shown))
        assert [raylet.used_by for raylet in machine.find_raylets()] == [
            "in use by process 41",
            "",
            f"in use by the cluster at {answers}",
            "",
            "of another user",
        ]


def only(port: int, connect: Callable[..., socket.socket]) -> Callable[..., socket.socket]:
    """``create_connection`` that is refused elsewhere than at ``port``."""

    def refusing(address: tuple[str, int], **options: float) -> socket.socket:
        if address[1] != port:
            raise ConnectionRefusedError(address)
        return connect(address, **options)

    return refusing


def test_every_kind_is_named_in_the_singular() -> None:
    kinds = {kind_of(group) for group in GROUPS}
    assert {"trainer", "rollout", "policy", "loss", "advantage", "recipe"} <= kinds and "policie" not in kinds


def test_missing_parts_say_what_they_add_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "rlinf-engines" else "1.0")
    lines = list(doctor.missing())
    vllm = next(line for line in lines if line.startswith("rlinf-engines[vllm]"))
    assert "adds rollout vllm" in vllm and "tools/install 'rlinf-engines[vllm]'" in vllm
    assert any("trainer torch, rollout transformers" in line for line in lines)


def test_the_report_names_what_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entries: list[Entry] = []
    monkeypatch.setattr(registry, "installed_entries", lambda: tuple(entries))
    monkeypatch.setattr(sources, "installed_entries", lambda: tuple(entries))
    monkeypatch.setattr(sources, "_loaded", {})
    monkeypatch.setattr(doctor, "inspect_machine", lambda: HEALTHY)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for title in ("Installed", "Could be added", "Machine", "Ray", "Broken\n  nothing", "Will hurt\n  nothing found"):
        assert title in out
    entries += [
        Entry("rlinf.rewards", "own", "m:A", "dist-one", "1.0"),
        Entry("rlinf.rewards", "own", "m:B", "dist-two", "2.0"),
        Entry("rlinf.recipes", "sick", "no_such_conf", "dist-sick", "1.0"),
    ]
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "reward 'own' is claimed by dist-one 1.0 and dist-two 2.0" in out
    assert "dist-sick 1.0: no_such_conf cannot be imported" in out


def good_section(ask: doctor.Ask) -> list[str]:
    return [f"measured anew: {ask.measure}"]


def bad_section(ask: doctor.Ask) -> list[str]:
    raise OSError("no such thing")


def test_packages_add_sections_and_a_failing_one_is_broken_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = types.ModuleType("plugins_of_the_doctor")
    plugins.good, plugins.bad = good_section, bad_section  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugins.__name__, plugins)
    entries = [Entry("rlinf.doctor", "fast_links", "plugins_of_the_doctor:good", "dist-one", "1.0")]
    monkeypatch.setattr(registry, "installed_entries", lambda: tuple(entries))
    monkeypatch.setattr(sources, "installed_entries", lambda: tuple(entries))
    monkeypatch.setattr(sources, "_loaded", {})
    monkeypatch.setattr(doctor, "inspect_machine", lambda: HEALTHY)
    assert main(["doctor", "--measure"]) == 0
    assert "Fast links\n  measured anew: True" in capsys.readouterr().out
    entries += [
        Entry("rlinf.doctor", "sick", "plugins_of_the_doctor:bad", "dist-two", "2.0"),
        Entry("rlinf.doctor", "absent", "no_such_plugins:lines", "dist-three", "3.0"),
    ]
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "Fast links\n  measured anew: False" in out
    assert "the section 'sick' of dist-two 2.0 failed: OSError: no such thing" in out
    assert "of dist-three 3.0 cannot be imported" in out


def test_asking_a_cluster_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "inspect_machine", lambda: HEALTHY)
    with pytest.raises(RLinfError, match="no Ray cluster is up"):
        doctor.command(["--cluster"])


def test_this_machine_can_be_inspected() -> None:
    found = machine.inspect_machine()
    assert found.cores >= 1 and found.memory_total > 0 and found.open_files > 0 and found.python.startswith("3.")


def test_locks_that_are_old_are_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, age in (("old", 3600), ("new", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (time.time() - age,) * 2)
    assert machine.stale_locks() == [str(tmp_path / "old" / "lock")]


def test_settings_that_break_sharing_memory_are_found() -> None:
    assert machine.bad_allocator({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert not machine.bad_allocator({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})


def test_a_ray_cluster_counts_only_when_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert machine.find_ray() == (address, "RAY_ADDRESS")
    assert machine.find_ray() == ("", "")
