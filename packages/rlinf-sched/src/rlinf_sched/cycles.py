"""A cycle as one stage: simulator and policy on a split of the devices, with k sub-batches, or in turn.

One round takes a + s + h for k = 1, else max(k·max(a(b/k), s(b/k)), a(b/k) + s(b/k) + h): while one sub-batch is
stepped the next is inferred. h is what the two hops of a round take, from either stage to the other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlinf_sched.costmodel import APART, IN_TURN, Cost, Floats, Memory, SplitCost
from rlinf_sched.graph import Cycle, Graph, GraphError, Stage
from rlinf_sched.problem import Problem
from rlinf_sched.units import counted

SUB_BATCHES = (1, 2, 3, 4, 8)


def round_seconds(a: Floats | float, s: Floats | float, k: int, hops: Floats | float = 0.0) -> Floats:
    """One round with k sub-batches, of which one takes ``a`` in the first stage, ``s`` in the second and ``hops`` on
    its way between them."""
    one, two = np.asarray(a, dtype=float), np.asarray(s, dtype=float)
    total: Floats = one + two + np.asarray(hops, dtype=float)
    return total if k == 1 else np.maximum(k * np.maximum(one, two), total)


def collapse(problem: Problem) -> Problem:
    """The problem with each cycle as one stage that is planned on its own; the same one when there is none."""
    if not problem.graph.cycles:
        return problem
    stages: dict[str, Stage] = {}
    costs: dict[str, Cost] = {}
    home = {name: cycle for cycle in problem.graph.cycles for name in cycle.members}
    for name, stage in problem.graph.stages.items():
        if name not in home:
            stages[name], costs[name] = stage, problem.costs[name]
        elif home[name].name not in stages:
            cycle = home[name]
            stages[cycle.name], costs[cycle.name] = _as_stage(problem, cycle)
    renamed = {name: cycle.name for name, cycle in home.items()}
    edges = {(renamed.get(a, a), renamed.get(b, b)): None for a, b in problem.graph.edges}
    inputs = {renamed.get(name, name): None for name in problem.graph.inputs}
    graph = Graph(stages, tuple(e for e in edges if e[0] != e[1]), (), tuple(inputs), problem.graph.flow)
    return replace(problem, graph=graph, costs=costs)


def _as_stage(problem: Problem, cycle: Cycle) -> tuple[Stage, Cost]:
    one, two = (problem.graph.stages[name] for name in cycle.members)
    first, second = problem.costs[one.name], problem.costs[two.name]
    strict = max((one, two), key=lambda stage: ("item", "group", "batch").index(stage.barrier))
    sizes = [c for c in problem.sizes() if strict.takes(c, problem.items)]
    table = {}
    for size in sizes:
        for option in (APART, IN_TURN) if cycle.collocate else (APART,):
            row = _table(problem, cycle, size, option)
            if np.isfinite(row[0]).any():
                table[size, option] = row
    usable = np.any([np.isfinite(row[0]) for row in table.values()], axis=0) if table else np.zeros(1, dtype=bool)
    counts = tuple(int(n) for n in np.flatnonzero(usable))
    if not counts:
        raise GraphError(
            f"the cycle of {one.name!r} and {two.name!r} fits on no split of {counted(problem.devices, 'device')}: "
            "their counts or their memory do not go together"
        )
    together = sum if cycle.collocate else max
    cost = SplitCost(
        memory=Memory(remainder=together([first.memory.remainder, second.memory.remainder])),
        load=together([first.load, second.load]),
        offload=together([first.offload, second.offload]),
        reload_each=together([first.reload_each, second.reload_each]),
        error=max(first.error, second.error),
        table=table,
        paired=one.device and two.device,
    )
    device = one.device or two.device
    stage = Stage(
        cycle.name,
        barrier=strict.barrier,
        group=strict.group,
        device=device,
        counts=tuple(n for n in counts if n) if device else None,
        swappable=one.swappable and two.swappable,
    )
    return stage, cost


def _table(
    problem: Problem, cycle: Cycle, portion: int, option: int
) -> tuple[Floats, Floats, Floats, tuple[tuple[int, int, int], ...]]:
    """By device count 0 … N: seconds, bytes held, bytes at work, and how it is split (no count above what is needed
    is used: more devices never make it slower)."""
    size = problem.devices + 1
    best, held, peak = np.full(size, np.inf), np.zeros(size), np.zeros(size)
    how = [(0, 0, 0)] * size

    def offer(n: int, seconds: float, keep: float, work: float, split: tuple[int, int, int]) -> None:
        if seconds < best[n] and max(keep, work) <= problem.device_bytes:
            best[n], held[n], peak[n], how[n] = seconds, keep, work, split

    one, two = (problem.graph.stages[name] for name in cycle.members)
    accepted = [stage.accepted(problem.devices) for stage in (one, two)]
    if option == IN_TURN:
        (ta, ka, wa), (tb, kb, wb) = (_columns(problem, stage, portion) for stage in (one, two))
        for n in sorted(set(accepted[0]) & set(accepted[1])):
            i, j = accepted[0].index(n), accepted[1].index(n)
            keep = float(ka[i] + kb[j])
            work = float(keep + max(wa[i] - ka[i], wb[j] - kb[j]))
            way = _way(problem, one, n) + _way(problem, two, n)
            offer(n, float(cycle.rounds * (ta[i] + tb[j] + way)), keep, work, (n, n, 0))
    else:
        for k in (k for k in SUB_BATCHES if portion % k == 0):
            (ta, ka, wa), (tb, kb, wb) = (_columns(problem, stage, portion // k) for stage in (one, two))
            counts_b = np.array(accepted[1])
            back = np.array([_way(problem, two, n) for n in accepted[1]])
            for i, na in enumerate(accepted[0]):
                room = counts_b <= problem.devices - na
                both = _way(problem, one, na) + back[room]
                total = cycle.rounds * round_seconds(ta[i], tb[room], k, both)
                for j in np.flatnonzero(total < best[na + counts_b[room]]):
                    nb = int(counts_b[j])
                    offer(na + nb, float(total[j]), max(ka[i], kb[j]), max(wa[i], wb[j]), (na, nb, k))
    for n in range(1, size):
        if best[n - 1] <= best[n]:
            best[n], held[n], peak[n], how[n] = best[n - 1], held[n - 1], peak[n - 1], how[n - 1]
    return best, held, peak, tuple(how)


def _way(problem: Problem, stage: Stage, devices: int) -> float:
    """Seconds of a hop from this stage."""
    return problem.hops((stage.ranks or devices // stage.multiple) if stage.device else stage.ranks or 1)


def _columns(problem: Problem, stage: Stage, portion: int) -> tuple[Floats, Floats, Floats]:
    """Seconds, bytes held and bytes at work by accepted count, with the fastest option that fits."""
    cost = problem.costs[stage.name]
    counts = problem.evaluated(stage, stage.accepted(problem.devices))
    held = cost.resident(counts) if stage.device else np.zeros(len(counts))
    seconds, peak = np.full(len(counts), np.inf), held.copy()
    for option in cost.options(portion):
        time = cost.seconds(counts, portion, option)
        work = held + cost.working(counts, portion, option) if stage.device else held
        better = (time < seconds) & (work <= problem.device_bytes)
        seconds[better], peak[better] = time[better], work[better]
    return seconds, held, peak
