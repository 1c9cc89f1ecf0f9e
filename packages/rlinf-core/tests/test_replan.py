"""A plan that changes between two steps: portions and turns, refused where anything would move."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import toy_workers as toys

from rlinf_core import runner
from rlinf_core.config import Config, compose_full
from rlinf_core.flow import trace
from rlinf_core.placement import ClusterInfo
from rlinf_core.plan import FlatPlan, Plan, flatten, make_plan
from rlinf_core.replan import Answer, Replanning

CFG: dict[str, Any] = {"num_steps": 1, "prompts": 4, "group_size": 2}
TWO = ClusterInfo.virtual(2)


class Says:
    """A replanner that answers what it is given."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.told: list[tuple[int, float]] = []

    def step(self, index: int, stages: Mapping[str, float], seconds: float) -> Answer:
        self.told.append((index, seconds))
        return self.answers.pop(0) if self.answers else None


def replanning(says: Says, tmp_path: Path) -> tuple[Replanning, list[tuple[Plan, FlatPlan]], list[str], Plan]:
    graph, _ = trace(toys.program, CFG, seed=0, run_dir=tmp_path)
    plan = make_plan("spatial", graph, TWO)
    applied: list[tuple[Plan, FlatPlan]] = []
    notes: list[str] = []
    made = Replanning(
        says, "train", graph, TWO, plan, flatten(plan, graph, TWO), lambda p, f: applied.append((p, f)), notes.append
    )
    return made, applied, notes, plan


def with_portion(plan: Plan, portion: int) -> dict[str, Any]:
    data = plan.to_dict()
    data["tree"]["pipe"]["up"]["leaf"]["portion"] = portion
    return data


def test_portions_and_turns_are_taken_over(tmp_path: Path) -> None:
    says = Says()
    made, applied, notes, plan = replanning(says, tmp_path)
    assert not made.step_done("train", 0, {"maker": 1.0}, 2.0)
    says.answers = [({**with_portion(plan, 3), "order": ["maker", "adder"]}, "maker is slow")]
    assert made.step_done("train", 1, {"maker": 3.0}, 4.0)
    assert made.changes == 1 and says.told == [(0, 2.0), (1, 4.0)]
    ((_, flat),) = applied
    assert flat.portion_for("train", "prompts", "maker") == 3
    assert notes == ["plan changed after step 1: maker is slow"]


def test_other_phases_are_not_asked(tmp_path: Path) -> None:
    says = Says("never")
    made, applied, notes, _ = replanning(says, tmp_path)
    assert not made.step_done("eval", 0, {}, 1.0)
    assert not says.told and not applied and not notes


def test_a_note_changes_nothing(tmp_path: Path) -> None:
    made, applied, notes, _ = replanning(Says("four devices would be faster"), tmp_path)
    assert not made.step_done("train", 0, {}, 1.0)
    assert notes == ["plan: four devices would be faster"] and not applied


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda plan: swapped(plan), "plan after step 5: 'maker' would be placed"),
        (lambda plan: {**plan.to_dict(), "order": ["adder", "maker"]}, "'maker' makes what 'adder' takes"),
        (lambda plan: {"tree": None}, "device stage 'maker' has no leaf"),
    ],
)
def test_what_cannot_be_taken_over_is_said_and_the_run_goes_on(tmp_path: Path, change: Any, why: str) -> None:
    says = Says()
    made, applied, notes, plan = replanning(says, tmp_path)
    says.answers = [(change(plan), "better")]
    assert not made.step_done("train", 5, {}, 1.0)
    assert not applied and made.changes == 0
    assert len(notes) == 1 and notes[0].startswith("the plan stays as it is from here on: ") and why in notes[0]
    assert not made.step_done("train", 6, {}, 1.0)
    assert len(says.told) == 1, "it is not asked again"


def swapped(plan: Plan) -> dict[str, Any]:
    data = plan.to_dict()
    data["tree"]["pipe"]["up"]["leaf"]["devices"], data["tree"]["pipe"]["down"]["leaf"]["devices"] = "1", "0"
    return data


RECIPE = """
from __future__ import annotations
from dataclasses import dataclass
from rlinf_core import In, Out, Worker, recipe, task

@dataclass
class Keys:
    num_steps: int = 4

class Maker(Worker):
    @task
    def make(self, numbers: In[int], out: Out[int]) -> dict[str, float]:
        portions = 0
        for portion in numbers.batches():
            portions += 1
            with self.on_device():
                out.put_many([2 * n for n in portion])
        return {"portions": portions}

class Adder(Worker):
    @task
    def add(self, numbers: In[int]) -> dict[str, float]:
        total = 0
        for portion in numbers.batches():
            with self.on_device():
                total += sum(portion)
        return {"total": total}

@recipe(schema=Keys)
def program(flow, cfg):
    maker, adder = flow.group("maker", Maker, cfg), flow.group("adder", Adder, cfg)
    for step in flow.steps(cfg.num_steps):
        numbers, made = step.channels("numbers", "made")
        step.feed(numbers, list(range(8)))
        step.report(maker.make(numbers, made))
        step.report(adder.add(made))
        step.join()
"""


def test_a_run_goes_on_with_other_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``plan=auto`` with a scheduler that changes its mind after the second step: processes stay, portions change."""
    (tmp_path / "changing.py").write_text(RECIPE)
    leaf = {name: {"leaf": {"stage": name, "devices": "0", "portion": 4}} for name in ("maker", "adder")}
    data: dict[str, Any] = {"name": "first", "tree": {"share": {"first": leaf["maker"], "then": leaf["adder"]}}}

    class Changing(Says):
        def step(self, index: int, stages: Mapping[str, float], seconds: float) -> Answer:
            super().step(index, stages, seconds)
            assert set(stages) == {"maker", "adder"}
            if index != 1:
                return None
            leaf["maker"]["leaf"]["portion"] = 1
            return data | {"name": "second"}, "because"

    says = Changing()

    def schedule(cfg: Any, recipe: str, out: Path) -> tuple[Path, Changing]:
        (out / "plan.yaml").write_text(Plan.from_dict(data).to_yaml())
        return out / "plan.yaml", says

    class OneScheduler:
        def __init__(self, group: str) -> None:
            assert group == "rlinf.schedulers"

        def load(self, name: str) -> Any:
            return schedule

    monkeypatch.setattr(runner, "Registry", OneScheduler)
    options = ["cluster.debug=true", "cluster.virtual_devices=1", f"run_dir={tmp_path / 'runs'}"]
    composed = compose_full(str(tmp_path / "changing.py"), [*options, "loggers=[jsonl]"])
    auto = Config({**composed.config.to_dict(), "plan": "auto"})  # no scheduler need be installed here
    assert runner.run(auto, composed.name) == 0
    (run,) = (tmp_path / "runs" / "changing").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["portions"] for row in rows] == [2, 2, 8, 8]
    assert [row["total"] for row in rows] == [56] * 4
    assert [index for index, _ in says.told] == [0, 1, 2, 3]
    assert "name: first" in (run / "plan.yaml").read_text() and "name: second" in (run / "plan-1.yaml").read_text()
    assert json.loads((run / "summary.json").read_text())["plan_changes"] == 1
