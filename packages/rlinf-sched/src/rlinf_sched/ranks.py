"""The state of a plan that is carried out: what has come to a stage, its ranks, and what a take costs one of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlinf_sched import streaming
from rlinf_sched.costmodel import Cost, StreamCost
from rlinf_sched.graph import Stage

Floats = NDArray[np.float64]
PARTS = 16
"""Releases of one portion at most."""


@dataclass
class StageState:
    """A stage, or a cycle as one. Items are its own; what enters a step has numbers, in their order: ``many`` of them,
    of which each is ``per`` items here. ``every``: portions are multiples of this. ``ordered``: it is given whole
    numbers in their order, as collective stages with groups are, and at least ``least``: a group for every
    rank."""

    names: tuple[str, ...]
    many: int
    per: float
    every: int
    portion: int | None
    batch: bool
    ordered: bool
    least: int
    work: Callable[[int], tuple[float, list[tuple[float, float]]]]
    shuffles: bool
    load: float
    offload: float
    after: list[StageState] = field(default_factory=list)
    before: list[StageState] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    idle: deque[Server] = field(default_factory=deque)
    lacking: list[int] = field(default_factory=list)  # by number: upstreams that have not delivered it
    rest: list[float] = field(default_factory=list)  # by number: items that have not left
    queue: deque[list[float]] = field(default_factory=deque)  # [number, items] that are here
    here: int = 0  # numbers that have come
    first: int = 0  # of an ordered stage: the first number that has not
    taken: int = 0
    fair: int = 0
    running: int = 0
    done: bool = False

    @property
    def name(self) -> str:
        return "+".join(self.names)

    def begin(self) -> None:
        """Nothing has come; everything has where nothing feeds it."""
        self.lacking = [len(self.before)] * self.many
        self.rest = [self.per] * self.many
        if not self.before:
            self.queue.extend([float(k), self.per] for k in range(self.many))
            self.here = self.many

    def arrive(self, number: int) -> None:
        """One of the upstreams has delivered this number."""
        self.lacking[number] -= 1
        if self.lacking[number]:
            return
        if not self.ordered:
            self.queue.append([float(number), self.per])
            self.here += 1
            return
        while self.first < self.many and not self.lacking[self.first]:
            self.queue.append([float(self.first), self.per])
            self.first += 1
            self.here += 1

    def ended(self) -> bool:
        return all(stage.done for stage in self.before)

    def left(self) -> int:
        """Items that are here and not taken."""
        return math.floor(self.here * self.per + 1e-6) - self.taken

    def next(self) -> int:
        """Items that a rank would get now; 0: it has to wait."""
        left = self.left()
        if left <= 0:
            return 0
        if self.portion is None or self.batch:
            if not self.ended():
                return 0
            if self.batch or len(self.servers) == 1:
                return left
            self.fair = self.fair or max(1, -(-left // len(self.servers)))
            return min(self.fair, left)
        need = max(-(-self.portion // self.every) * self.every, self.least)
        if left < need and not self.ended():
            return 0
        return min(left, need)

    def take(self, count: int) -> list[list[float]]:
        """Take so many items out of the queue: [number, items]."""
        self.taken += count
        found: list[list[float]] = []
        need = float(count)
        while need > 1e-9 and self.queue:
            head = self.queue[0]
            amount = min(need, head[1])
            found.append([head[0], amount])
            need -= amount
            head[1] -= amount
            if head[1] <= 1e-9:
                self.queue.popleft()
        return found


@dataclass(eq=False)
class Server:
    """A replica in the device lock, or a rank of a CPU stage. ``state``: out, holding, offloading."""

    stage: StageState
    devices: frozenset[int]
    order: int
    resident: bool = False
    rivals: list[Server] = field(default_factory=list)
    beside: list[Server] = field(default_factory=list)
    takers: list[Server] = field(default_factory=list)  # to which it gives way after each portion
    state: str = "out"
    inside: bool = False
    more: bool = False
    waiting: int = 0  # number of its request, 0: none
    items: int = 0
    held: list[list[float]] = field(default_factory=list)
    portions: int = 0
    total: float = 0.0

    @property
    def busy(self) -> bool:
        return self.inside or self.more

    @property
    def place(self) -> tuple[int, int]:
        return self.order, self.waiting


class Work:
    """Seconds of one take of a stage, and when which part of it has left."""

    def __init__(
        self,
        stage: Stage,
        cost: Cost,
        devices: int,
        ranks: int,
        lone: bool,
        option: int,
        items: int,
        rng: np.random.Generator | None,
    ) -> None:
        self.stage, self.cost, self.option, self.rng, self.lone = stage, cost, option, rng, lone
        self.counts = np.array([devices])
        self.ranks = ranks
        self.scale = ranks / stage.per_item  # what all ranks take when each takes one item
        self.kept: dict[int, tuple[float, list[tuple[float, float]]]] = {}

    def __call__(self, count: int) -> tuple[float, list[tuple[float, float]]]:
        if self.rng is not None and isinstance(self.cost, StreamCost):
            return self._drawn(self.cost, count)
        if count not in self.kept:
            self.kept[count] = self._expected(count)
        seconds, outs = self.kept[count]
        scatter = self.cost.scatter(count / self.stage.per_item)
        if self.rng is None or not scatter:
            return seconds, outs
        sigma = math.sqrt(math.log1p(scatter**2))
        factor = float(self.rng.lognormal(-(sigma**2) / 2, sigma))
        return seconds * factor, [(when * factor, part) for when, part in outs]

    def _expected(self, count: int) -> tuple[float, list[tuple[float, float]]]:
        portion = count * self.scale
        # The slowest of the ranks shows only when their times are drawn, or when they are not followed one by one.
        each = self.cost.alone if self.lone and self.rng is not None else self.cost.seconds
        seconds = float(each(self.counts, portion, self.option)[0])
        if self.cost.streams and not self.cost.curve:
            return seconds, parts_of(self.cost.release(int(self.counts[0]), math.ceil(portion), PARTS, self.option))
        if not self.cost.curve:
            return seconds, [(seconds, 1.0)]
        parts = min(PARTS, count)
        share = count / self.stage.per_item / (1 if self.lone else self.ranks)
        return seconds, parts_of(seconds * self.cost.released((np.arange(parts) + 1) / parts, share))

    def _drawn(self, cost: StreamCost, count: int) -> tuple[float, list[tuple[float, float]]]:
        """Lengths drawn from their distribution, whole groups dealt to the replicas in turn."""
        assert self.rng is not None
        many = max(1, round(count / self.stage.per_item))
        replicas = max(1, int(self.counts[0]) // cost.replica // self.ranks)
        outs = streaming.drawn(
            cost.lengths, many, replicas, cost.group, self.option or 1, cost.alpha, cost.beta, self.rng
        )
        outs = cost.fixed + streaming.at_parts(outs, min(PARTS, len(outs)))
        return float(outs[-1]), parts_of(outs)


def parts_of(outs: Floats) -> list[tuple[float, float]]:
    """(when, part of the portion) of equal parts; those at the same time are one."""
    found: list[tuple[float, float]] = []
    for when in outs:
        if found and found[-1][0] == when:
            found[-1] = (float(when), found[-1][1] + 1 / len(outs))
        else:
            found.append((float(when), 1 / len(outs)))
    return found
