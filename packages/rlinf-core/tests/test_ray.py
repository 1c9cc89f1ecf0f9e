"""The same flows on real Ray processes: results, deaths, reservations. All tests share one small local Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import toy_workers as toys
from driving import drive, our_workers

from rlinf_core.cli.machine import find_raylets
from rlinf_core.cluster import SLOT, connect
from rlinf_core.errors import PlacementError, WorkerError

pytestmark = pytest.mark.ray
SMALL = {"num_steps": 3, "prompts": 5, "group_size": 4}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=0,
        resources={SLOT + str(i): 1.0 for i in range(2)},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


def run(tmp_path: Path, cfg: Any = SMALL, **options: Any) -> Any:
    return drive(toys.program, cfg, tmp_path, debug=False, **options)


def test_the_doctor_sees_that_our_ray_is_in_use() -> None:
    mine = f"in use by process {os.getpid()}"
    assert mine in [raylet.used_by for raylet in find_raylets()]


@pytest.mark.parametrize(("plan", "portion"), [("temporal", None), ("spatial", 2)])
def test_values_are_right_on_real_processes(tmp_path: Path, plan: str, portion: int | None) -> None:
    kept = run(tmp_path, plan=plan, devices=2, portion=portion)
    assert [m["total"] for m in kept.metrics] == toys.expected(3, 5, 4)
    assert not psutil.wait_procs(our_workers(tmp_path), timeout=10)[1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("make:kill", r"maker\[0\] died while working in make of train/\d: its process ended"),
        ("double:_exit", r"doubler\[0\] died while working in double of train/\d: its process"),
        ("setup:kill", r"maker\[0\] died while working in setup: its process ended"),
        ("setup_doubler:raise", r"doubler\[0\] failed in setup: RuntimeError: as asked"),
        ("add:raise", r"adder\[0\] failed in add of train/0: RuntimeError: as asked"),
    ],
)
def test_a_death_is_named_within_seconds_and_leaves_no_process(tmp_path: Path, fault: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        run(tmp_path, {**SMALL, "fault": fault}, devices=2)
    assert time.monotonic() - start < 45
    assert not psutil.wait_procs(our_workers(tmp_path), timeout=10)[1]


def test_an_idle_rank_that_is_killed_from_outside_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"victim\[0\] died while idle"):
        drive(lambda f, c: idle_program(f, c, tmp_path), {}, tmp_path, debug=False, devices=2)


def idle_program(flow: Any, cfg: Any, place: Path) -> None:
    killer = flow.group("killer", toys.Idler, {"place": str(place)})
    victim = flow.group("victim", toys.Idler, {"place": str(place)})
    for step in flow.steps(1, name="first"):
        victim.write_pid()
        step.join()
    for step in flow.steps(1, name="second"):
        killer.kill_victim()
        killer.linger()
        step.join()


def test_ranks_are_pinned_and_threads_are_set_before_torch(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        idler = flow.group("idler", toys.Machine, None)
        for step in flow.steps(1):
            step.report(idler.describe())
            step.join()

    metrics = drive(program, None, tmp_path, debug=False, devices=2).metrics[0]
    cores = len(os.sched_getaffinity(0))
    assert metrics["cores"] == max(1, cores // 2) or cores < 2
    assert metrics["threads"] == metrics["omp"] == max(1, cores // 2)
    assert metrics["main_thread"] == 1


def test_a_second_run_names_the_one_that_holds_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_core.cluster.RESERVE_TIMEOUT_S", 6.0)  # what others gave back takes a while
    settings = SimpleNamespace(address=None, virtual_devices=2, debug=False)
    with connect(settings, "first") as first:
        first.reserve((0,))
        with connect(settings, "second") as second:
            with pytest.raises(PlacementError, match=r"held by run 'first' \(rlinf_slot_0\)"):
                second.reserve((0, 1))
            second.reserve((1,))
    with connect(settings, "third") as third:
        third.reserve((0, 1))


def test_a_death_is_noticed_though_a_fork_holds_the_sockets(tmp_path: Path) -> None:
    """Last in this file: Ray itself counts the process as alive until the fork has gone."""
    with pytest.raises(WorkerError, match=r"doubler\[0\] died while working in double of train/\d: its "):
        run(tmp_path, {**SMALL, "fault": "double:forkdie"}, devices=2)
