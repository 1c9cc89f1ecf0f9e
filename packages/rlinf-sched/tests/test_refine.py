"""Portions after the search: a small one where the CPU would otherwise work alone, none without need, within bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rlinf_sched import FormulaCost, Graph, Memory, Problem, Stage, explain, plan, predict, to_plan
from rlinf_sched.export import plan_data
from rlinf_sched.moves import with_portions
from rlinf_sched.planread import leaf_bodies, read_plan
from rlinf_sched.refine import beyond, effort, refined

CHAIN = Graph(
    {"gen": Stage("gen"), "score": Stage("score", device=False, ranks=1), "train": Stage("train", collective=True)},
    (("gen", "score"), ("score", "train")),
)
STREAM = tuple((k + 1) / 16 for k in range(16))


def problem(score: float = 0.05, take: float = 0.0, **rest: Any) -> Problem:
    """A generator whose items leave as they are made, a stage on the CPU, and a trainer that works better on more."""
    costs = {
        "gen": FormulaCost(spread=0.4, curve=STREAM, measured=True),
        "score": FormulaCost(spread=score, take=take, measured=True),
        "train": FormulaCost(fixed=2.0, spread=0.3, measured=True),
    }
    return Problem(CHAIN, costs, 4, 64, **rest)


TREE = {
    "share": {
        "first": {"leaf": {"stage": "gen", "devices": "0-3", "resident": True}},
        "then": {"leaf": {"stage": "train", "devices": "0-3", "resident": True}},
    }
}


def test_the_cpu_takes_little_at_once_while_others_work() -> None:
    data: dict[str, Any] = {"devices": 4, "cpu": {"score": 1}, "tree": TREE}
    found = refined(problem(), data, alone=16, draws=0, room=30_000)
    assert found is not None
    assert found["cpu_portion"]["score"] <= 8
    assert all(body.get("portion") is None for body in leaf_bodies(found["tree"]))  # training in parts costs 2 s each
    # By hand: generator 6.4 s, the scores of the last items, training 2 + 4.8 s.
    assert predict(problem(), data).seconds == pytest.approx(6.4 + 3.2 + 6.8)
    assert predict(problem(), found).seconds == pytest.approx(6.4 + 6.8, rel=0.05)


def test_portions_that_cost_something_stay_larger() -> None:
    data: dict[str, Any] = {"devices": 4, "cpu": {"score": 1}, "tree": TREE}
    cheap = refined(problem(), data, alone=16, draws=0, room=30_000)
    dear = refined(problem(take=0.5), data, alone=16, draws=0, room=30_000)
    assert cheap is not None
    assert dear is not None
    assert dear["cpu_portion"]["score"] > cheap["cpu_portion"]["score"]


def test_what_is_best_already_stays() -> None:
    # Scores take no time: nothing is gained by any other portion.
    assert refined(problem(1e-9), {"tree": TREE, "cpu": {"score": 1}}, alone=16, draws=0, room=30_000) is None


def test_a_run_that_is_dear_to_follow_is_left_out() -> None:
    data: dict[str, Any] = {"devices": 4, "cpu": {"score": 1}, "tree": TREE}
    room = 6 * effort(problem(), predict(problem(), data)) - 1
    assert refined(problem(), data, alone=16, draws=0, room=room) is None
    assert refined(problem(), data, alone=16, draws=0, room=room + 1) is not None


def test_no_portion_on_devices_grows_where_memory_counts() -> None:
    small = {
        "share": {"first": {"leaf": {**TREE["share"]["first"]["leaf"], "portion": 2}}, "then": TREE["share"]["then"]}
    }
    data: dict[str, Any] = {"devices": 4, "cpu": {"score": 1}, "cpu_portion": {"score": 2}, "tree": small}
    free = problem()
    costs = free.costs | {"gen": FormulaCost(fixed=1.0, spread=0.4, measured=True, memory=Memory(item=1.0))}
    for room, grows in ((math.inf, True), (100.0, False)):
        found = refined(replace(free, costs=costs, device_bytes=room), data, alone=16, draws=0, room=60_000)
        leaf = leaf_bodies((found or data)["tree"])[0]
        assert (leaf.get("portion", 16) > 2) == grows


def test_the_plan_carries_the_portions_and_says_so() -> None:
    # Training may begin before the last score; no tree has a share whose second side takes less than the whole.
    whole = problem(score=0.15)
    found = plan(whole)
    tree = plan_data(found.problem, found.original, found.best.tree)
    data = to_plan(found)
    assert data["predicted"]["step"] == pytest.approx(predict(whole, data).seconds, rel=1e-5)
    assert found.best.changes
    assert data["predicted"]["step"] < 0.99 * predict(whole, tree).seconds
    for candidate in found.families.values():
        assert bool(candidate.changes) == (candidate.data is not None)
        if candidate.changes:
            assert candidate.changes in explain(found).text()


def test_without_a_profile_nothing_is_refined() -> None:
    free = problem()
    costs = {name: replace(cost, measured=False) for name, cost in free.costs.items() if isinstance(cost, FormulaCost)}
    assert all(candidate.data is None for candidate in plan(replace(free, costs=costs)).families.values())


def test_portions_far_below_the_profiled_ones_are_doubted() -> None:
    free = problem()
    costs = free.costs | {"gen": FormulaCost(spread=0.4, measured=True, points=((4.0, 64.0, 0.0), (4.0, 16.0, 0.0)))}
    whole = replace(free, costs=costs)
    for own, doubted in ((16, False), (4, False), (2, False), (1, True)):  # of each of four ranks
        leaf = {"leaf": {"stage": "gen", "devices": "0-3", "portion": own}}
        tree = {"share": {"first": leaf, "then": TREE["share"]["then"]}}
        assert beyond(whole, {"devices": 4, "cpu": {"score": 1}, "tree": tree}) == doubted


def test_all_at_once_under_a_pipe_is_said() -> None:
    """A stage that says nothing has the portion of the pipe above it."""
    pipe = {"up": TREE["share"]["first"], "down": {"leaf": {"stage": "train", "devices": "0-3"}}, "portion": 8}
    data: dict[str, Any] = {"devices": 4, "cpu": {"score": 1}, "cpu_portion": {"score": 4}, "tree": {"pipe": pipe}}
    changed = with_portions(problem(), data, {"score": 64, "train": 64})
    stages = read_plan(changed, problem()).stages
    assert (stages["score"].portion, stages["train"].portion) == (64, 64)
    assert data["cpu_portion"] == {"score": 4}
