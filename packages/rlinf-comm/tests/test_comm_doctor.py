"""The doctor's section: what each kind of pair takes with what is there, and why not something better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_comm import doctor, measure
from rlinf_comm.doctor import Node, rows, section, shown
from rlinf_comm.errors import CommError
from rlinf_comm.selection import Thresholds
from rlinf_comm.thresholds import Point
from rlinf_core.cli.doctor import Ask

ALL = frozenset({"inproc", "shm", "tcp", "gloo", "nccl", "cuda_ipc"})
TABLE = Thresholds(256 << 10)


def node(lacks: str = "", identity: str = "m", table: Thresholds = TABLE) -> Node:
    missing = {name: f"no {name} today" for name in lacks.split()}
    return Node(identity, ALL - set(missing), missing, table)


def test_a_full_machine_takes_the_best_of_each_kind() -> None:
    assert dict(rows(node(), node())) == {
        "one process": "inproc",
        "processes of one node": "tcp, from 256 KiB shm",
        "processes of two nodes": "tcp",
        "one accelerator, two processes": "cuda_ipc",
        "two accelerators of one node": "nccl",
        "accelerators of two nodes": "nccl",
        "accelerator to host, one node": "tcp by a copy to host memory, from 256 KiB shm by a copy to host memory",
        "accelerator to host, two nodes": "tcp by a copy to host memory",
        "host to accelerator, one node": "tcp, from 256 KiB shm",
        "host to accelerator, two nodes": "tcp",
    }


def test_what_is_missing_is_shown_with_its_reason() -> None:
    found = dict(rows(node("nccl cuda_ipc"), node("nccl cuda_ipc shm")))
    assert found["processes of one node"] == "tcp  (shm is missing: no shm today)"
    assert found["accelerators of two nodes"] == "tcp by a copy to host memory  (nccl is missing: no nccl today)"
    assert "(cuda_ipc is missing: no cuda_ipc today" in found["one accelerator, two processes"]
    nothing = dict(rows(node("tcp gloo"), node("tcp gloo"), apart=True))
    text = "nothing: tcp is missing: no tcp today; gloo is missing: no gloo today"
    assert nothing["processes of two nodes"] == text


def test_gloo_is_shown_from_its_threshold() -> None:
    table = Thresholds(1 << 10, 2 << 20)
    assert dict(rows(node(table=table), node()))["processes of two nodes"] == "tcp, from 2 MiB gloo"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (1 << 30, "1 GiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert shown(size) == text


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tcp and inproc work, shm does not, gloo cannot be imported; no thresholds are kept."""
    monkeypatch.setattr(doctor, "usable", lambda: frozenset({"tcp", "inproc"}))
    monkeypatch.setattr(doctor, "unusable", lambda: {"shm": "the cable is out", "gloo": "it cannot be imported"})
    monkeypatch.setattr(doctor, "cuda_missing", lambda: "no CUDA")
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_each_installed_transport_is_said_to_work_or_why_not() -> None:
    said = doctor.this_node()
    assert {"inproc", "shm", "tcp"} <= {*said["available"], *said["missing"]}
    assert all(said["missing"].values()) and not set(said["available"]) & set(said["missing"])


def test_the_section_of_this_machine(installed: None) -> None:
    lines = list(section(Ask()))
    assert lines[0] == "transports: inproc, tcp"
    assert lines[1:3] == ["not here: gloo: it cannot be imported", "not here: shm: the cable is out"]
    assert lines[3].endswith("(built in; rlinf doctor --measure measures this machine)")
    assert "one process             inproc" in lines
    assert "processes of one node   tcp  (shm is missing: the cable is out)" in lines
    assert lines[-1] == "pairs with accelerators are not shown: no CUDA"


def test_measuring_keeps_and_shows_the_curve(installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    points = [Point(1 << 10, 10.0, 20.0), Point(1 << 20, 300.0, 200.0)]
    monkeypatch.setattr(measure, "measure", lambda: (Thresholds(1 << 20, None, "measured 2026-01-01"), points))
    lines = list(section(Ask(measure=True)))
    assert lines[0].endswith(f"kept in {tmp_path / 'rlinf' / 'comm.json'}:")
    assert lines[3] == "     1 MiB     300.0          200.0  <- shared memory from here"
    assert any(line.startswith("thresholds: shared memory from 1 MiB (measured ") for line in lines)
    (tmp_path / "rlinf" / "comm.json").write_text("{")
    assert any("not used: " in line and "is damaged" in line for line in section(Ask()))


def test_what_cannot_be_measured_or_kept_is_said(
    installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> tuple[Thresholds, list[Point]]:
        raise CommError("no second process")

    monkeypatch.setattr(measure, "measure", fail)
    assert next(section(Ask(measure=True))) == "not measured: no second process"
    monkeypatch.setattr(measure, "measure", lambda: (Thresholds(), [Point(1, 1.0, 1.0)]))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert next(section(Ask(measure=True))).startswith("measured, but it could not be kept: ")


def test_measuring_on_a_busy_machine_is_said(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure", lambda: (Thresholds(), [Point(1, 1.0, 1.0)]))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (4.01, 0.0, 0.0))
    assert next(section(Ask(measure=True))) == "the load is 4.0 on 4 cores: measure again when the machine is idle"
    monkeypatch.setattr("os.getloadavg", lambda: (4.0, 9.0, 9.0))
    assert "load" not in next(section(Ask(measure=True)))


def test_a_cluster_shows_each_kind_of_node_and_what_lies_between(installed: None) -> None:
    def ask(function: Callable[[], Any]) -> dict[str, Any]:
        mine = function()
        return {"n1": mine, "n2": mine, "n3": {**mine, "available": ["tcp", "shm"], "missing": {}, "identity": "x"}}

    lines = list(section(Ask(on_each_node=ask)))
    assert sum("pairs with accelerators" in line for line in lines) == 3
    assert "on n1, n2:" in lines and "on n3:" in lines and "between n1, n2 and n3:" in lines
    at = lines.index("on n3:")
    assert lines[0] == "cluster: 3 nodes on 2 machines"
    assert lines[at + 1] == "  transports: shm, tcp"
    assert not any("two nodes" in line for line in lines[at : lines.index("between n1, n2 and n3:")])
    assert lines[lines.index("between n1, n2 and n3:") + 1] == "  processes of two nodes  tcp"


def test_accelerators_of_other_nodes_are_shown_though_this_one_has_none(installed: None) -> None:
    def ask(function: Callable[[], Any]) -> dict[str, Any]:
        mine = function()
        full = {**mine, "available": sorted(ALL), "missing": {}, "no_cuda": ""}
        return {"head": mine, "g1": full, "g2": full}

    lines = list(section(Ask(on_each_node=ask)))
    here, between = lines.index("on g1, g2:"), lines.index("between g1, g2 and head:")
    words = [" ".join(line.split()) for line in lines]
    assert "accelerators of two nodes nccl" in words[here:between]
    assert "accelerator to host, two nodes tcp by a copy to host memory" in words[between:]
    assert sum("pairs with accelerators are not shown" in line for line in lines) == 1
