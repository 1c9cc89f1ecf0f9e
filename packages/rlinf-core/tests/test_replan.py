"""A plan that changes between two steps: portions and turns, refused where anything would move."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import toy_workers as toys

from rlinf_core.errors import PlanError
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


def test_what_would_move_something_is_refused(tmp_path: Path) -> None:
    says = Says()
    made, applied, _, plan = replanning(says, tmp_path)
    data = plan.to_dict()
    data["tree"]["pipe"]["up"]["leaf"]["devices"], data["tree"]["pipe"]["down"]["leaf"]["devices"] = "1", "0"
    says.answers = [(data, "swap"), ({**plan.to_dict(), "order": ["adder", "maker"]}, "turn round")]
    with pytest.raises(PlanError, match="plan after step 5: 'maker' would be placed"):
        made.step_done("train", 5, {}, 1.0)
    with pytest.raises(PlanError, match="'maker' makes what 'adder' takes, so it must come before it"):
        made.step_done("train", 6, {}, 1.0)
    assert not applied
