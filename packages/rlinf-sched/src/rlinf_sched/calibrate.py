"""What a step costs beside its stages: seconds of every portion taken, of every item put, and of the step itself.

Taken from a profile: a rank that is fed from outside never lacks input, so what it waits is what its gets and puts
cost (others may put a whole portion with one message); what then remains of steps in which all stages took everything
in turn is the step's own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlinf_sched.calm import lower_median
from rlinf_sched.costmodel import FormulaCost
from rlinf_sched.fit import solve
from rlinf_sched.predict import predict
from rlinf_sched.problem import Problem
from rlinf_sched.profile import Profile, ProfileSample

ROUND_TRIP = 3e-4
"""Seconds of a message to the hub and back that a take is given at least: the waits of few steps do not show less."""
LOCK = 2.0
"""A portion costs a rank two messages to the hub and back: for its items and for its devices."""


@dataclass(frozen=True)
class Overhead:
    """Seconds: of a ``take``, of a ``put``, of a ``step``."""

    take: float = 0.0
    put: float = 0.0
    step: float = 0.0


def overhead(profile: Profile, loops: Sequence[tuple[str, str]] = ()) -> Overhead:
    """What the profile says of the runtime's own time; zeros where it says nothing. ``loops``: stages that feed each
    other, whose turns cannot be added up."""
    take, put, once = _messages(profile)
    rest = [] if loops else [seconds - spent for seconds, spent in _in_turn(profile, take, put)]
    # The step's own does not depend on the devices, while all that disturbs only makes steps longer.
    return Overhead(take, put, max(once, min(rest)) if rest else once)


def _messages(profile: Profile) -> tuple[float, float, float]:
    """Seconds of a take, of an item put, and what a fed rank waits once for its step to begin."""
    fed: defaultdict[int, defaultdict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in profile.samples:
        if sample.waits > 0 and sample.ranks:
            fed[sample.devices][_takes(sample), sample.puts].append(sample.waits)
    slopes, base = [], []
    for settings in fed.values():
        waits = {key: lower_median(some) for key, some in sorted(settings.items())}
        least, most = min(waits), max(waits)
        base.append((*least, waits[least]))
        if most[0] > least[0]:
            slopes.append((waits[most] - waits[least]) / (most[0] - least[0]))
    if not base:
        return 0.0, 0.0, 0.0
    takes, puts, seconds = (np.array(column, dtype=float) for column in zip(*base, strict=True))
    if not slopes:
        columns = np.column_stack([takes, puts]) if puts.any() else takes[:, None]
        found = solve(columns, seconds)
        return float(found[0]), float(found[1]) if len(found) > 1 else 0.0, 0.0
    take = min(max(lower_median(slopes), ROUND_TRIP), float((seconds / takes).min()))
    left = np.maximum(seconds - take * takes, 1e-9)
    if not puts.any():
        return take, 0.0, float(left.min())
    if len(set(puts)) == 1:
        return take, float((left / puts).min()), 0.0
    put, once = solve(np.column_stack([puts, np.ones(len(puts))]), left)
    return take, float(put), float(once)


def _takes(sample: ProfileSample) -> float:
    return max((math.ceil(k / sample.each) if sample.each else 1 for k in sample.taken if k), default=1)


def _in_turn(profile: Profile, take: float, put: float) -> list[tuple[float, float]]:
    """(mean seconds of a step, mean seconds of its stages and their takes and puts), of the settings in which all
    stages took everything."""
    whole: defaultdict[int, list[float]] = defaultdict(list)
    for step in profile.steps:
        if not step.portion:
            whole[step.devices].append(step.seconds)
    on_devices: defaultdict[tuple[int, str], list[ProfileSample]] = defaultdict(list)
    order = sorted({n for n in whole})
    cpu: defaultdict[str, list[ProfileSample]] = defaultdict(list)
    for sample in profile.samples:
        if sample.each == 0 and sample.devices:
            on_devices[sample.devices, sample.stage].append(sample)
        elif sample.each == 0:
            cpu[sample.stage].append(sample)
    found = []
    for n in order:
        stages: list[Sequence[ProfileSample]] = [
            samples for (devices, _), samples in on_devices.items() if devices == n
        ]
        stages += cpu.values()
        spent = sum(
            float(
                np.mean(
                    [
                        s.seconds + s.switch_seconds + LOCK * take * _takes(s) + put * s.puts * (s.waits > 0)
                        for s in samples
                    ]
                )
            )
            for samples in stages
        )
        found.append((float(np.mean(whole[n])), spent))
    return found


def calibrated(problem: Problem, profile: Profile) -> Problem:
    """The problem with the runtime's own time in the costs that come from the profile, and in its step."""
    found = overhead(profile, [cycle.members for cycle in problem.graph.cycles])
    home = {name for cycle in problem.graph.cycles for name in cycle.members}
    puts: defaultdict[str, list[float]] = defaultdict(list)
    for sample in profile.samples:
        if sample.waits > 0 and sample.puts and sample.taken and max(sample.taken):
            puts[sample.stage].append(sample.puts / max(sample.taken))
    costs = dict(problem.costs)
    for name, cost in problem.costs.items():
        if isinstance(cost, FormulaCost) and cost.measured and name not in home:
            stage = problem.graph.stages[name]
            each = float(np.mean(puts[name])) if puts[name] else 0.0
            lock = LOCK if stage.device else 1.0
            costs[name] = replace(cost, take=lock * found.take, put=found.put * each * stage.per_item)
    return replace(problem, costs=costs, overhead=problem.overhead or found.step, hop=_hop(problem, profile))


def _hop(problem: Problem, profile: Profile) -> tuple[float, float]:
    """Seconds of the runtime for each of the two hops of a round of a cycle, and more of it for each further rank
    (they all ask the same hub), from steps in which all stages took everything in turn: what those took more than the
    stages' own times make."""
    rounds = sum(cycle.rounds for cycle in problem.graph.cycles)
    whole: defaultdict[int, list[float]] = defaultdict(list)
    for step in profile.steps:
        if not step.portion:
            whole[step.devices].append(step.seconds)
    found = []
    for n, seconds in whole.items() if rounds else ():
        data = _everything_in_turn(problem, n)
        if data is not None:
            rest = (float(np.median(seconds)) - predict(problem, data).seconds) / (2 * rounds)
            found.append((float(n - 1), max(rest, 0.0)))
    if not found:
        return 0.0, 0.0
    more, rests = (np.array(column) for column in zip(*found, strict=True))
    slope, first = np.polyfit(more, rests, 1) if len(more) > 1 else (0.0, rests[0])
    if slope < 0:
        return float(np.mean(rests)), 0.0
    if first < 0:  # more with every rank, and nothing for one alone
        return 0.0, float(more @ rests / (more @ more))
    return float(first), float(slope)


def _everything_in_turn(problem: Problem, devices: int) -> dict[str, Any] | None:
    """The plan of the short runs; None where a stage does not accept the devices."""
    stages = problem.graph.stages
    cycles = {name: cycle.members for cycle in problem.graph.cycles for name in cycle.members}
    tree: dict[str, Any] | None = None
    for part in reversed(problem.graph.components()):
        leaves = []
        for name in cycles.get(part[0], part):
            counts = [n for n in stages[name].accepted(devices) if n]
            if stages[name].device and not counts:
                return None
            if stages[name].device:
                ranks = stages[name].ranks or counts[-1] // stages[name].multiple
                leaves.append({"leaf": {"stage": name, "devices": f"0-{counts[-1] - 1}:0-{ranks - 1}"}})
        if leaves:
            node = leaves[0] if len(leaves) == 1 else {"cycle": {"a": leaves[0], "b": leaves[1]}}
            tree = node if tree is None else {"share": {"first": node, "then": tree}}
    return {"devices": devices, "cpu": {n: s.ranks or 1 for n, s in stages.items() if not s.device}, "tree": tree}
