"""``max_staleness``: steps overlap, weights arrive between samples, and nothing is older than it may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Kept, drive

from rlinf_core import In, Out, Worker, task
from rlinf_core.errors import TraceError, WorkerError


class Drawer(Worker):
    begun: Any = None  # step index -> event

    def setup(self) -> None:
        self.version = 0

    @task
    def draw(self, numbers: In[int], out: Out[tuple[int, int]]) -> dict[str, float]:
        Drawer.begun[self.step_index].set()
        first = self.version
        for n in numbers:
            with self.on_device():
                out.put((n, self.version))
        return {"version/first": first, "version/last": self.version}

    def install_weights(self, version: int, weights: Any) -> None:
        assert float(dict(weights)["w"]) == version
        self.version = version


class Learner(Worker):
    overlapping = False

    def setup(self) -> None:
        self.updates = 0

    @task
    def learn(self, drawn: In[tuple[int, int]]) -> dict[str, float]:
        oldest = min(version for _, version in drawn)
        if Learner.overlapping and self.step_index < 3:
            # Ends only once the next step is being drawn.
            assert Drawer.begun[self.step_index + 1].wait(20), "the next step did not begin meanwhile"
        with self.on_device():
            self.updates += 1
        return {"staleness": self.updates - 1 - oldest}

    def weights(self) -> Any:
        return [("w", torch.tensor(float(self.updates)))]


def program_of(staleness: int, steps: int = 4, save: bool = False) -> Any:
    def program(flow: Any, cfg: Any) -> None:
        drawer, learner = flow.group("drawer", Drawer), flow.group("learner", Learner)
        for step in flow.steps(steps, max_staleness=staleness):
            numbers, drawn = step.channels("numbers", "drawn")
            step.feed(numbers, range(5))
            step.report(drawer.draw(numbers, drawn))
            step.report(learner.learn(drawn))
            learner.publish_weights(to=drawer)
            step.join()
            if save:
                with flow.checkpoint(step.index + 1):
                    pass

    return program


@pytest.fixture(autouse=True)
def events() -> None:
    Drawer.begun = [threading.Event() for _ in range(8)]
    Learner.overlapping = False


@pytest.mark.parametrize("plan", ["temporal", "spatial"])
def test_without_staleness_every_step_uses_the_newest_weights(tmp_path: Path, plan: str) -> None:
    kept = drive(program_of(0), None, tmp_path, plan=plan, devices=1 if plan == "temporal" else 2)
    assert [m["staleness"] for m in kept.metrics] == [0, 0, 0, 0]


@pytest.mark.parametrize("staleness", [1, 2])
def test_steps_overlap_and_the_bound_holds(tmp_path: Path, staleness: int) -> None:
    Learner.overlapping = True
    kept = drive(program_of(staleness), None, tmp_path, plan="spatial", devices=2)
    assert len(kept.metrics) == 4
    assert all(0 <= m["staleness"] <= staleness for m in kept.metrics)


def test_on_shared_devices_it_runs_too(tmp_path: Path) -> None:
    kept = drive(program_of(1), None, tmp_path, plan="temporal", devices=1)
    assert all(0 <= m["staleness"] <= 1 for m in kept.metrics) and len(kept.metrics) == 4


def test_more_staleness_than_steps_and_bad_values(tmp_path: Path) -> None:
    assert len(drive(program_of(5, steps=2), None, tmp_path, plan="spatial", devices=2).metrics) == 2
    for wrong in (-1, 1.5, True):
        with pytest.raises(TraceError, match="max_staleness"):
            drive(program_of(wrong), None, tmp_path)  # type: ignore[arg-type]


def test_a_checkpoint_comes_after_the_metrics_of_the_steps_that_it_counts(tmp_path: Path) -> None:
    kept, known = Kept(), {}

    @contextmanager
    def saving(steps_done: int, state: Any) -> Iterator[Path]:
        yield tmp_path
        known[state().steps_done] = len(kept.metrics)

    drive(program_of(2, save=True), None, tmp_path, plan="spatial", devices=2, kept=kept, saving=saving)
    assert known == {1: 1, 2: 2, 3: 3, 4: 4} and len(kept.metrics) == 4


def test_a_failure_in_an_open_step_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Drawer, version: int, weights: Any) -> None:
        raise RuntimeError("cannot install")

    monkeypatch.setattr(Drawer, "install_weights", refuse)
    with pytest.raises(WorkerError, match=r"failed in receive_weights of train/0: RuntimeError: cannot install"):
        drive(program_of(1), None, tmp_path, plan="spatial", devices=2)
