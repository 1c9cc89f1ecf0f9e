"""Plan trees and what they cost.

``share``: both sides on the same devices, in turn. ``pipe``: on separate devices, items passing in portions.
``parallel``: on separate devices, nothing passing between them. ``price`` is the reference: the search, the
explanations and the exported plans use its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rlinf_sched.costmodel import SplitCost
from rlinf_sched.problem import Problem


@dataclass(frozen=True, slots=True)
class Leaf:
    """``portion``: items at once. ``option``: micro-batch or slots (0: no choice). ``apart``: a cycle whose two stages
    have devices of their own."""

    stage: str
    devices: int
    portion: int
    option: int = 0
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """``swap_first``, ``swap_then``: that side is offloaded while the other works."""

    first: Node
    then: Node
    swap_first: bool = False
    swap_then: bool = False


@dataclass(frozen=True, slots=True)
class Pipe:
    up: Node
    down: Node
    portion: int


@dataclass(frozen=True, slots=True)
class Parallel:
    a: Node
    b: Node


Node: TypeAlias = Leaf | Share | Pipe | Parallel


@dataclass(frozen=True, slots=True)
class Price:
    """``latency`` of one portion through an empty tree and ``period`` between portions, seconds; ``switch``: seconds to
    load and offload all of it; bytes per device: ``keep`` idle, ``remainder`` offloaded, ``peak`` at work, ``host``
    what it has in host memory."""

    latency: float
    period: float
    switch: float = 0.0
    keep: float = 0.0
    remainder: float = 0.0
    peak: float = 0.0
    host: float = 0.0


def sides(node: Share | Pipe | Parallel) -> tuple[Node, Node]:
    """Both children in the order of the flow."""
    if isinstance(node, Share):
        return node.first, node.then
    return (node.up, node.down) if isinstance(node, Pipe) else (node.a, node.b)


def leaves(node: Node) -> Iterator[Leaf]:
    """The leaves from left to right."""
    if isinstance(node, Leaf):
        yield node
    else:
        for side in sides(node):
            yield from leaves(side)


def devices(node: Node) -> int:
    """How many devices the tree uses."""
    if isinstance(node, Leaf):
        return node.devices
    one, other = (devices(side) for side in sides(node))
    return max(one, other) if isinstance(node, Share) else one + other


def family(node: Node) -> str:
    """``single``, ``temporal`` (only share), ``spatial`` (no share) or ``hybrid``. What joins a CPU stage does not
    count, as it takes no device."""
    kinds = set()
    stack = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, Leaf):
            if top.apart:
                kinds.add("spatial")
            continue
        stack.extend(sides(top))
        if isinstance(top, Share):
            kinds.add("temporal")
        elif all(devices(side) for side in sides(top)):
            kinds.add("spatial")
    return "hybrid" if len(kinds) == 2 else kinds.pop() if kinds else "single"


def price(node: Node, portion: int, problem: Problem) -> Price:
    """What one portion costs in this tree."""
    if isinstance(node, Leaf):
        return leaf_price(node, problem)
    if isinstance(node, Share):
        first, then = price(node.first, portion, problem), price(node.then, portion, problem)
        total = first.latency + then.latency
        total += first.switch * node.swap_first + then.switch * node.swap_then
        idle_first = first.remainder if node.swap_first else first.keep
        idle_then = then.remainder if node.swap_then else then.keep
        return Price(
            total,
            total,
            first.switch * (not node.swap_first) + then.switch * (not node.swap_then),
            idle_first + idle_then,
            first.remainder + then.remainder,
            max(first.peak + idle_then, then.peak + idle_first),
            first.host + then.host + (first.keep - idle_first) + (then.keep - idle_then),
        )
    if isinstance(node, Parallel):
        one, other = price(node.a, portion, problem), price(node.b, portion, problem)
        latency, period = max(one.latency, other.latency), max(one.period, other.period)
    else:
        streams = isinstance(node.up, Leaf) and node.up.portion != node.portion
        one = price(node.up, portion if streams else node.portion, problem)
        other = price(node.down, node.portion, problem)
        q = portion // node.portion
        if streams:
            assert isinstance(node.up, Leaf)
            released = release(node.up, q, problem)
            left = np.arange(q - 1, -1, -1)
            latency = float((released + left * other.period).max()) + other.latency
            period = max(one.period, q * other.period)
        else:
            slowest = max(one.period, other.period)
            latency, period = one.latency + other.latency + (q - 1) * slowest, q * slowest
    return Price(
        latency,
        period,
        max(one.switch, other.switch),
        max(one.keep, other.keep),
        max(one.remainder, other.remainder),
        max(one.peak, other.peak),
        max(one.host, other.host),
    )


def leaf_price(leaf: Leaf, problem: Problem) -> Price:
    """The price of one stage."""
    stage, cost = problem.graph.stages[leaf.stage], problem.costs[leaf.stage]
    counts = problem.evaluated(stage, (leaf.devices,))
    seconds = float(cost.seconds(counts, leaf.portion, leaf.option)[0])
    if not stage.device:
        return Price(seconds, seconds)
    keep = float(cost.resident(counts, leaf.option)[0])
    peak = keep + float(cost.working(counts, leaf.portion, leaf.option)[0])
    if not stage.swappable:
        return Price(seconds, seconds, 0.0, keep, keep, peak)
    return Price(seconds, seconds, float(cost.reload(counts)[0]), keep, min(cost.memory.remainder, keep), peak)


def release(leaf: Leaf, parts: int, problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When each of ``parts`` equal parts of a streaming leaf's portion is out."""
    stage = problem.graph.stages[leaf.stage]
    counts = problem.evaluated(stage, (leaf.devices,))
    return problem.costs[leaf.stage].release(int(counts[0]), leaf.portion, parts, leaf.option)


def fits(node: Node, problem: Problem) -> bool:
    """Whether the whole step fits into device and host memory."""
    found = price(node, problem.items, problem)
    return found.peak <= problem.device_bytes and found.host <= problem.host_bytes


def switches(node: Node, portion: int, items: int) -> int:
    """Loads in one step: each swapped side of a share, at every entry."""
    if isinstance(node, Leaf):
        return 0
    inner = node.portion if isinstance(node, Pipe) else portion
    mine = (node.swap_first + node.swap_then) * (items // portion) if isinstance(node, Share) else 0
    return mine + sum(switches(side, inner, items) for side in sides(node))


def describe(node: Node, problem: Problem | None = None) -> str:
    """One line: ``share(gen@8, pipe[16](ref@4, train@4))``; ``~`` marks a swapped side."""
    if isinstance(node, Leaf):
        option = f"/{node.option}" if node.option else ""
        extra = ""
        cost = None if problem is None else problem.costs.get(node.stage)
        if isinstance(cost, SplitCost):
            a, b, k = cost.table[node.portion, node.option][3][node.devices]
            option = ""
            extra = f"[{a}+{b}, {k} sub-batches]" if k else f"[{a}, in turn]"
        return f"{node.stage}@{node.devices}{option}{extra}"
    one, other = (describe(side, problem) for side in sides(node))
    if isinstance(node, Share):
        return f"share({'~' * node.swap_first}{one}, {'~' * node.swap_then}{other})"
    if isinstance(node, Pipe):
        return f"pipe[{node.portion}]({one}, {other})"
    return f"parallel({one}, {other})"
