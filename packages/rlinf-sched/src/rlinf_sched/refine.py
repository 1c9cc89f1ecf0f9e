"""Other portions for a plan that was found: a descent, stage by stage, by what the runtime would take.

A tree says one portion for all of a pipe. A plan file says it by stage, and what it brings shows only rank by rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlinf_sched.costmodel import FormulaCost
from rlinf_sched.moves import key_of, with_portions
from rlinf_sched.planread import read_plan
from rlinf_sched.predict import predict
from rlinf_sched.problem import Problem
from rlinf_sched.runtime import ALONE, NUMBERS
from rlinf_sched.simulator import Run

SCREEN = 4
"""Draws over which portions are compared."""
TRIES = 6
"""Other portions that must be looked at to begin."""
CLEAR = 0.005
"""Relative gain that another portion must bring."""


def effort(problem: Problem, run: Run) -> int:
    """What following the run once takes: sections, what enters the step, by stage, and turns in cycles. A thousand are
    some 7 ms."""
    turns = sum(cycle.rounds for cycle in problem.graph.cycles) * min(problem.devices, ALONE)
    return len(run.bars) + min(problem.items, NUMBERS) * len(problem.graph.stages) + 4 * turns


def beyond(problem: Problem, data: Mapping[str, Any]) -> bool:
    """Whether a stage on devices takes less than half of the smallest portion that it was profiled with."""
    for name, placed in read_plan(data, problem).stages.items():
        stage, cost = problem.graph.stages[name], problem.costs[name]
        if not stage.device or not isinstance(cost, FormulaCost) or placed.portion is None:
            continue
        portion = placed.portion * (1 if stage.collective else len(placed.processes)) / stage.per_item
        if portion < min((c for _, c, _ in cost.points), default=0.0) / 2:
            return True
    return False


def refined(problem: Problem, data: Mapping[str, Any], *, alone: int, draws: int, room: int) -> dict[str, Any] | None:
    """The plan with the portions that are predicted to take least; None: with those that it has, or where not even
    ``TRIES`` others could be looked at within ``room`` (see ``effort``). ``draws``: over how many at most times are
    compared. Members of cycles keep their sub-batches, and where memory may not suffice no portion on devices grows."""
    first = predict(problem, data, seeds=min(draws, 1), alone=alone)
    possible = room // (TRIES * effort(problem, first))
    if not possible:
        return None
    draws = min(draws, possible)
    best, present, rest = math.inf, dict(data), room
    seen: set[str] = set()
    found: dict[str, Any] | None = None

    def better(candidate: dict[str, Any]) -> bool:
        nonlocal best, rest
        key = key_of(candidate)
        if key in seen or rest < 0:
            return False
        seen.add(key)
        run = predict(problem, candidate, seeds=draws, alone=alone)
        rest -= max(draws, 1) * effort(problem, run)
        if run.seconds >= best * (1 - CLEAR):
            return False
        best = run.seconds
        return True

    better(present)
    moved = True
    while moved and rest > 0:
        moved = False
        for name in _movable(problem):
            for size in _sizes(problem, present, name):
                candidate = with_portions(problem, present, {name: size})
                if better(candidate):
                    found, moved = candidate, True
        present = found or present
    return found


def _movable(problem: Problem) -> list[str]:
    """Stages whose portions may change, those on the CPU first: theirs cost least."""
    looped = {name for cycle in problem.graph.cycles for name in cycle.members}
    stages = problem.graph.stages
    names = [name for name in stages if name not in looped and stages[name].barrier != "batch"]
    return sorted(names, key=lambda name: stages[name].device)


def _sizes(problem: Problem, data: Mapping[str, Any], name: str) -> list[int]:
    stage = problem.graph.stages[name]
    sizes = [size for size in problem.sizes() if stage.takes(size, problem.items)]
    if not stage.device or math.isinf(problem.device_bytes):
        return sizes
    placed = read_plan(data, problem).stages[name]
    ranks = 1 if stage.collective else len(placed.processes)
    most = problem.items if placed.portion is None else placed.portion * ranks / stage.per_item
    return [size for size in sizes if size <= most]
