"""A cycle of two stages, then a third: on devices apart, on the same ones in turn, the whole set swapped out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cyclic_workers as toys
import pytest
from driving import Kept, drive

from rlinf_core.errors import TraceError
from rlinf_core.flow import trace
from rlinf_core.placement import ClusterInfo
from rlinf_core.plan import Cycle, FlatPlan, Leaf, Share, flatten, make_plan

CFG: dict[str, Any] = {"num_steps": 2, "envs": 8, "rounds": 3}


def planned(spec: str, devices: int, tmp_path: Path) -> FlatPlan:
    graph, _ = trace(toys.program, CFG, seed=0, run_dir=tmp_path)
    return flatten(make_plan(spec, graph, ClusterInfo.virtual(devices)), graph, ClusterInfo.virtual(devices))


def test_the_modes_join_what_feeds_each_other(tmp_path: Path) -> None:
    graph, _ = trace(toys.program, CFG, seed=0, run_dir=tmp_path)
    assert graph.phases["train"].cyclic() == {"observations", "actions"}
    temporal = make_plan("temporal", graph, ClusterInfo.virtual(2))
    assert isinstance(temporal.tree, Share) and isinstance(temporal.tree.first, Cycle)
    assert temporal.tree.then == Leaf("trainer", "0-1")
    flat = planned("temporal", 2, tmp_path)
    assert flat.groups["simulator"].together == flat.groups["policy"].together == "simulator+policy"
    assert flat.groups["trainer"].together == ""


@pytest.mark.parametrize(("plan", "devices"), [("temporal", 1), ("temporal", 2), ("spatial", 3), ("spatial", 6)])
@pytest.mark.parametrize("portion", [None, 1, 3])
def test_every_plan_computes_the_same(tmp_path: Path, plan: str, devices: int, portion: int | None) -> None:
    found = drive(toys.program, CFG, tmp_path, plan=plan, devices=devices, portion=portion)
    assert [m["total"] for m in found.metrics] == toys.expected(CFG)


def test_members_of_a_cycle_stay_loaded_while_the_other_works(tmp_path: Path) -> None:
    found = drive(toys.program, CFG, tmp_path, plan="temporal", devices=1)
    for metrics in found.metrics:
        assert metrics["onloads"] == 1, "one load per step, though simulator and policy alternate"


class Watching(Kept):
    """What the ranks of each task took, by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, list[dict[str, tuple[int, float]]]] = {}

    def spans(self, state: Any, results: Any) -> None:
        told = [{name: (items, weight) for name, items, weight in r.times.taken} for r in results]
        self.taken[state.task] = sorted(told, key=str)


def test_a_call_says_what_it_took_from_which_channel(tmp_path: Path) -> None:
    found = Watching()
    drive(toys.program, CFG, tmp_path, plan="spatial", devices=3, portion=5, kept=found)
    # Eight environments in sub-batches of 5 and 3; three rounds.
    assert found.taken["rollout"] == [{"envs": (8, 8.0), "actions": (6, 24.0)}]
    assert found.taken["act"] == [{"observations": (6, 24.0)}]
    assert found.taken["train"] == [{"episodes": (8, 8.0)}]


def test_a_cycle_needs_its_end(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"@task\(ends=True\)"):
        trace(toys.endless, CFG, seed=0, run_dir=tmp_path)


def test_a_cycle_node_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        """
        name: mine
        tree:
          share:
            first:
              cycle:
                a: {leaf: {stage: simulator, devices: "0-1", portion: 2}}
                b: {leaf: {stage: policy, devices: "2"}}
                portion: 2
            then: {leaf: {stage: trainer, devices: "0-2"}}
        """
    )
    found = drive(toys.program, CFG, tmp_path, plan=str(path), devices=3)
    assert [m["total"] for m in found.metrics] == toys.expected(CFG)
    assert found.metrics[0]["sub_batches"] == 4, "eight environments over two ranks, two at once"


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        (
            "cycle: {a: {leaf: {stage: simulator, devices: '0'}}, b: {leaf: {stage: trainer, devices: '1'}}}",
            "'simulator' and 'trainer' do not feed each other; use pipe or share",
        ),
        (
            "share: {first: {leaf: {stage: simulator, devices: '0'}}, then: {leaf: {stage: policy, devices: '0'}}}",
            "feed each other, so they cannot be offloaded in turn; use cycle",
        ),
    ],
)
def test_a_wrong_cycle_is_refused(tmp_path: Path, tree: str, fault: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"name: mine\ntree:\n  {tree}\n")
    with pytest.raises(Exception, match="faults|plan mine") as caught:
        planned(str(path), 2, tmp_path)
    assert fault in str(caught.value)
