"""Every plan tree, one by one, priced by a timeline: what the planner is checked against.

Nothing is shared with the search: trees are enumerated explicitly, without bounds or fronts, and a tree is priced by
when each portion would be through each stage, not by the formulas for latency and period. (Only a parallel node uses
two numbers, both read off a timeline, since that is what the planner promises.) For tiny problems only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np

from rlinf_sched.problem import Problem
from rlinf_sched.tree import Leaf, Node, Parallel, Pipe, Share, family

_LONG = 12


def every_tree(problem: Problem) -> Iterator[Node]:
    """All plan trees of the problem, without regard to memory."""
    every = _Every(problem)
    for count in range(problem.devices + 1):
        yield from every.trees(frozenset(problem.graph.stages), count, problem.items)


def brute_force(problem: Problem) -> dict[str, float]:
    """Seconds of the best plan of each family that fits, by family name."""
    best: dict[str, float] = {}
    for tree in every_tree(problem):
        seconds = through(tree, [0.0], problem.items, problem)[0]
        kind = family(tree)
        if seconds < best.get(kind, float("inf")) and _fits(tree, problem):
            best[kind] = seconds
    return best


class _Every:
    """Enumerates; what was enumerated for a part, a device count and a portion is kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kept: dict[tuple[frozenset[str], int, int], list[Node]] = {}
        # Where memory has no limit, a swap only adds time.
        self.swaps = (0, 1, 2, 3) if math.isfinite(problem.device_bytes) else (0,)

    def trees(self, part: frozenset[str], count: int, portion: int) -> list[Node]:
        """Trees that use exactly ``count`` devices."""
        key = part, count, portion
        if key not in self.kept:
            self.kept[key] = list(self._leaves(*key) if len(part) == 1 else self._joined(*key))
        return self.kept[key]

    def _leaves(self, part: frozenset[str], count: int, portion: int) -> Iterator[Node]:
        (name,) = part
        stage = self.problem.graph.stages[name]
        if count in stage.accepted(self.problem.devices) and stage.takes(portion, self.problem.items):
            for option in self.problem.costs[name].options(portion):
                yield Leaf(name, count, portion, option)

    def _joined(self, part: frozenset[str], count: int, portion: int) -> Iterator[Node]:
        edges = self.problem.graph.edges
        for up in _subsets(part):
            down = part - up
            if any(a in down and b in up for a, b in edges):
                continue
            joined = any(a in up and b in down for a, b in edges)
            if not joined and min(part) not in up:
                continue
            for mine in range(count + 1):
                if joined:
                    yield from self._pipes(up, down, mine, count - mine, portion)
                else:
                    pairs = product(self.trees(up, mine, portion), self.trees(down, count - mine, portion))
                    yield from (Parallel(one, other) for one, other in pairs)
            for a, b in product(range(1, count + 1), repeat=2):
                if max(a, b) == count:
                    for one, other in product(self.trees(up, a, portion), self.trees(down, b, portion)):
                        for swap in self.swaps:
                            yield Share(one, other, swap in (1, 3), swap in (2, 3))

    def _pipes(self, up: frozenset[str], down: frozenset[str], a: int, b: int, portion: int) -> Iterator[Node]:
        for inner in self.problem.sizes():
            if inner > portion or portion % inner:
                continue
            before = list(self.trees(up, a, inner))
            if inner != portion and len(up) == 1 and self.problem.costs[next(iter(up))].streams:
                before += self.trees(up, a, portion)
            yield from (Pipe(one, other, inner) for one, other in product(before, self.trees(down, b, inner)))


def _subsets(part: frozenset[str]) -> Iterator[frozenset[str]]:
    names = sorted(part)
    for bits in range(1, 2 ** len(names) - 1):
        yield frozenset(name for i, name in enumerate(names) if bits >> i & 1)


# ------------------------------------------------------------------ the timeline


def through(node: Node, arrivals: list[float], portion: int, problem: Problem) -> list[float]:
    """When each portion that arrives at these times is through."""
    if isinstance(node, Leaf):
        return _one_by_one(arrivals, _seconds(node, problem))
    if isinstance(node, Share):
        ends: list[float] = []
        for arrival in arrivals:
            start = max(arrival, ends[-1]) if ends else arrival
            start += _reload(node.first, problem) if node.swap_first else 0.0
            (middle,) = through(node.first, [start], portion, problem)
            middle += _reload(node.then, problem) if node.swap_then else 0.0
            ends += through(node.then, [middle], portion, problem)
        return ends
    if isinstance(node, Parallel):
        runs = [through(side, [0.0] * _LONG, portion, problem) for side in (node.a, node.b)]
        latency = max(run[0] for run in runs)
        period = max(run[-1] - run[-2] for run in runs)
        ends = []
        for arrival in arrivals:
            ends.append(max(arrival + latency, ends[-1] + period if ends else 0.0))
        return ends
    parts = portion // node.portion
    if isinstance(node.up, Leaf) and node.up.portion == portion and parts > 1:
        stage = problem.graph.stages[node.up.stage]
        count = node.up.devices if stage.device else stage.ranks or 1
        outs = problem.costs[node.up.stage].release(count, portion, parts, node.up.option)
        starts = [end - float(outs[-1]) for end in _one_by_one(arrivals, float(outs[-1]))]
        fine = [start + float(out) for start in starts for out in outs]
    else:
        fine = through(node.up, [arrival for arrival in arrivals for _ in range(parts)], node.portion, problem)
    return through(node.down, fine, node.portion, problem)[parts - 1 :: parts]


def _one_by_one(arrivals: list[float], seconds: float) -> list[float]:
    ends: list[float] = []
    for arrival in arrivals:
        ends.append(max(arrival, ends[-1] if ends else arrival) + seconds)
    return ends


def _seconds(leaf: Leaf, problem: Problem) -> float:
    stage = problem.graph.stages[leaf.stage]
    count = leaf.devices if stage.device else stage.ranks or 1
    return float(problem.costs[leaf.stage].seconds(np.array([count]), leaf.portion, leaf.option)[0])


# ------------------------------------------------------------------ switches and memory, by lists of stages


def _reload(node: Node, problem: Problem) -> float:
    """Load and offload what an inner share has not swapped already; devices side by side do it at the same time."""
    if isinstance(node, Leaf):
        stage, cost = problem.graph.stages[node.stage], problem.costs[node.stage]
        return float(cost.reload(np.array([node.devices]))[0]) if stage.device and stage.swappable else 0.0
    if isinstance(node, Share):
        return (0.0 if node.swap_first else _reload(node.first, problem)) + (
            0.0 if node.swap_then else _reload(node.then, problem)
        )
    one, other = (node.up, node.down) if isinstance(node, Pipe) else (node.a, node.b)
    return max(_reload(one, problem), _reload(other, problem))


def _bytes(node: Node, problem: Problem, state: str) -> float:
    """Bytes on the fullest device when the part is ``work``-ing, ``idle`` or ``out``; ``host``: in host memory."""
    if isinstance(node, Leaf):
        stage, cost = problem.graph.stages[node.stage], problem.costs[node.stage]
        if not stage.device or state == "host":
            return 0.0
        count = np.array([node.devices])
        held = float(cost.resident(count)[0])
        if state == "work":
            return held + float(cost.working(count, node.portion, node.option)[0])
        return min(cost.memory.remainder, held) if state == "out" and stage.swappable else held
    if isinstance(node, Share):
        idle_first = _bytes(node.first, problem, "out" if node.swap_first else "idle")
        idle_then = _bytes(node.then, problem, "out" if node.swap_then else "idle")
        if state == "work":
            return max(
                _bytes(node.first, problem, "work") + idle_then,
                _bytes(node.then, problem, "work") + idle_first,
            )
        if state == "idle":
            return idle_first + idle_then
        if state == "host":
            saved = [
                _bytes(side, problem, "idle") - _bytes(side, problem, "out")
                for side, swap in ((node.first, node.swap_first), (node.then, node.swap_then))
                if swap
            ]
            return sum(saved) + _bytes(node.first, problem, "host") + _bytes(node.then, problem, "host")
    one, other = (
        (node.first, node.then)
        if isinstance(node, Share)
        else ((node.up, node.down) if isinstance(node, Pipe) else (node.a, node.b))
    )
    both = _bytes(one, problem, state), _bytes(other, problem, state)
    return sum(both) if isinstance(node, Share) else max(both)


def _fits(tree: Node, problem: Problem) -> bool:
    peak = _bytes(tree, problem, "work")
    return peak <= problem.device_bytes and _bytes(tree, problem, "host") <= problem.host_bytes
