"""A discrete-event run of a plan tree.

Every stage is a server that takes portions as they become available; a share is a lock that one side holds at a time.
Two rules for the lock: ``tree`` gives it to each side once for every portion, as the planner prices it; ``lock`` is the
runtime's: a holder keeps the devices while it has input, except where a pipe takes what comes out of the share.
Times are those of the costs; with a seed, streaming stages
draw their lengths and ``spread`` gives the others a relative deviation (log-normal).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlinf_sched import streaming
from rlinf_sched.costmodel import StreamCost
from rlinf_sched.graph import SchedError
from rlinf_sched.problem import Problem
from rlinf_sched.tree import Leaf, Node, Parallel, Pipe, Share, devices, leaf_price, price, release, sides


@dataclass(frozen=True, slots=True)
class Bar:
    """``stage`` at work (or ``what`` = ``switch``) from ``start`` to ``end`` on devices ``first`` … ``last``."""

    stage: str
    what: str
    start: float
    end: float
    first: int
    last: int
    portion: int


@dataclass(frozen=True, slots=True)
class Run:
    """``seconds`` of the step; by stage ``busy`` seconds; ``switching`` seconds in all; ``device_seconds`` at work."""

    seconds: float
    busy: Mapping[str, float]
    switching: float
    bars: tuple[Bar, ...]
    used: int

    def idle(self, total: int) -> float:
        """Share of the device-seconds in which nothing is computed, of ``total`` devices."""
        work = sum(
            (bar.end - bar.start) * (bar.last - bar.first + 1)
            for bar in self.bars
            if bar.what == "work" and bar.last >= bar.first
        )
        return max(0.0, 1 - work / (self.seconds * total)) if self.seconds > 0 else 0.0


@dataclass
class _Node:
    tree: Node
    portion: int
    first: int
    children: list[_Node] = field(default_factory=list)
    allowed: int = 0  # portions that it may start
    done: int = 0  # portions that are through
    started: int = 0
    holder: int = 1  # of a share: the side that is loaded; the step before ended with the second
    target: int = -1  # of a share: the side that is being loaded
    parts: int = 1  # of a streaming leaf: releases for one portion
    feeds: bool = False  # of a share: what comes out of it goes on through a pipe
    busy: bool = False


def simulate(
    tree: Node,
    problem: Problem,
    *,
    rule: str = "tree",
    capacity: int | None = None,
    seed: int | None = None,
    spread: Mapping[str, float] | None = None,
) -> Run:
    """Run one step of the plan in steady state (the step before has left the last stages loaded).

    ``capacity``: portions that a pipe's upstream may be ahead of its downstream, at least 2 (None: no limit).
    """
    if rule not in ("tree", "lock"):
        raise SchedError(f"rule {rule!r} is not one of tree, lock")
    if capacity is not None and capacity < 2:
        raise SchedError(f"capacity {capacity} is below 2: one portion at work and one waiting")
    return _Simulation(tree, problem, rule, capacity, seed, spread or {}).run()


class _Simulation:
    def __init__(
        self,
        tree: Node,
        problem: Problem,
        rule: str,
        capacity: int | None,
        seed: int | None,
        spread: Mapping[str, float],
    ) -> None:
        self.problem = problem
        self.rule = rule
        self.capacity = capacity
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.spread = spread
        self.clock = 0.0
        self.events: list[tuple[float, int, str, _Node, int]] = []
        self.number = 0
        self.bars: list[Bar] = []
        self.busy: dict[str, float] = {}
        self.switching = 0.0
        self.root = self._node(tree, problem.items, 0)
        self.root.allowed = 1

    def run(self) -> Run:
        self._settle(self.root)
        while self.events:
            self.clock, _, what, node, value = heapq.heappop(self.events)
            if what == "out":
                node.done += 1
            elif what == "free":
                node.busy = False
            else:
                node.holder, node.target = value, -1
            self._settle(self.root)
        assert self.root.done == 1, "every plan tree comes to its end"
        return Run(self.clock, self.busy, self.switching, tuple(self.bars), devices(self.root.tree))

    def _node(self, tree: Node, portion: int, first: int, feeds: bool = False) -> _Node:
        node = _Node(tree, portion, first, feeds=feeds)
        if isinstance(tree, Leaf):
            return node
        one, other = sides(tree)
        shift = 0 if isinstance(tree, Share) else devices(one)
        inner = tree.portion if isinstance(tree, Pipe) else portion
        streams = isinstance(tree, Pipe) and isinstance(one, Leaf) and one.portion != inner
        node.children = [
            self._node(one, portion if streams else inner, first, feeds or isinstance(tree, Pipe)),
            self._node(other, inner, first + shift, feeds),
        ]
        if streams:
            node.children[0].parts = portion // inner
        return node

    # ------------------------------------------------------------------ who may start

    def _settle(self, node: _Node) -> None:
        """Pass on what is allowed, start what can start, collect what is done; until nothing changes."""
        if isinstance(node.tree, Leaf):
            if not node.busy and node.started < node.allowed:
                self._start(node)
            return
        before: tuple[int, ...] | None = None
        while before != (state := self._state(node)):
            before = state
            self._allow(node)
            for child in node.children:
                self._settle(child)
            one, other = node.children
            if isinstance(node.tree, Pipe):
                node.done = other.done // (node.portion // node.tree.portion)
            elif isinstance(node.tree, Parallel):
                node.done = min(one.done, other.done)
            else:
                node.done = other.done

    def _state(self, node: _Node) -> tuple[int, ...]:
        one, other = node.children
        return one.done, other.done, one.allowed, other.allowed, node.holder, node.target, node.allowed

    def _allow(self, node: _Node) -> None:
        one, other = node.children
        if isinstance(node.tree, Parallel):
            one.allowed = other.allowed = node.allowed
        elif isinstance(node.tree, Pipe):
            q = node.portion // node.tree.portion
            one.allowed = node.allowed if one.parts > 1 else node.allowed * q
            if self.capacity is not None and one.parts == 1:
                one.allowed = min(one.allowed, other.done + self.capacity)
            other.allowed = one.done
        else:
            self._lock(node)

    def _lock(self, node: _Node) -> None:
        one, other = node.children
        if node.target >= 0:
            return
        waiting = (node.allowed > one.done, one.done > other.done)  # each side has input, or is at work on it
        if self.rule == "tree" or node.feeds:
            side = 0 if one.done == other.done else 1
            limits = (other.done + 1, one.done)
        else:
            side = node.holder if waiting[node.holder] else 1 - node.holder
            limits = (node.allowed, one.done)
        if not waiting[side]:
            return
        if node.holder != side:
            assert isinstance(node.tree, Share)
            swapped = node.tree.swap_first if side == 0 else node.tree.swap_then
            cost = price(node.children[side].tree, node.portion, self.problem).switch if swapped else 0.0
            node.target = side
            if cost > 0:
                self._switch(node, side, cost)
                return
            node.holder, node.target = side, -1
        node.children[side].allowed = min(limits[side], node.allowed)

    def _switch(self, node: _Node, side: int, cost: float) -> None:
        child = node.children[side]
        self.switching += cost
        last = child.first + devices(child.tree) - 1
        name = "+".join(_names(child.tree))
        self.bars.append(Bar(name, "switch", self.clock, self.clock + cost, child.first, last, child.done))
        self._event(self.clock + cost, "loaded", node, side)

    # ------------------------------------------------------------------ work

    def _start(self, node: _Node) -> None:
        leaf = node.tree
        assert isinstance(leaf, Leaf)
        node.busy = True
        outs = self._outs(leaf, node.parts)
        end = self.clock + outs[-1]
        for out in outs:
            self._event(self.clock + out, "out", node, 0)
        self._event(end, "free", node, 0)
        self.busy[leaf.stage] = self.busy.get(leaf.stage, 0.0) + outs[-1]
        last = node.first + leaf.devices - 1
        self.bars.append(Bar(leaf.stage, "work", self.clock, end, node.first, last, node.started))
        node.started += 1

    def _outs(self, leaf: Leaf, parts: int) -> list[float]:
        cost = self.problem.costs[leaf.stage]
        if self.rng is not None and isinstance(cost, StreamCost):
            return self._drawn(cost, leaf, parts)
        outs = release(leaf, parts, self.problem) if parts > 1 else [leaf_price(leaf, self.problem).latency]
        factor = 1.0
        deviation = self.spread.get(leaf.stage, 0.0)
        if self.rng is not None and deviation:
            sigma = math.sqrt(math.log1p(deviation**2))
            factor = float(self.rng.lognormal(-(sigma**2) / 2, sigma))
        return [float(out) * factor for out in outs]

    def _drawn(self, cost: StreamCost, leaf: Leaf, parts: int) -> list[float]:
        """Lengths drawn from their distribution, whole groups dealt to the replicas in turn."""
        assert self.rng is not None
        stage = self.problem.graph.stages[leaf.stage]
        replicas = max(1, int(self.problem.evaluated(stage, (leaf.devices,))[0]) // cost.replica)
        pooled = streaming.drawn(
            cost.lengths, leaf.portion, replicas, cost.group, leaf.option or 1, cost.alpha, cost.beta, self.rng
        )
        return [cost.fixed + float(x) for x in streaming.at_parts(pooled, parts)]

    def _event(self, when: float, what: str, node: _Node, value: int) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, what, node, value))


def _names(node: Node) -> list[str]:
    return [node.stage] if isinstance(node, Leaf) else [name for side in sides(node) for name in _names(side)]
