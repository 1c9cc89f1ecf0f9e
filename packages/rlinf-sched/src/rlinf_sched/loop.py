"""Two stages that feed each other, round by round: sub-batches of one are worked on while others are with the other.

The first one owns the sub-batches: each belongs to one of its ranks. The second one takes them as they come, with any
rank. On the same devices they exclude each other, and neither is offloaded in between.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf_sched.costmodel import Cost
from rlinf_sched.cycles import round_seconds
from rlinf_sched.graph import Cycle, Stage
from rlinf_sched.planread import Placed


@dataclass(frozen=True)
class Side:
    """``ranks``: devices of each; seconds of one rank come from ``cost`` on ``count`` devices, on which ``replicas``
    ranks take as much each."""

    ranks: tuple[frozenset[int], ...]
    cost: Cost
    count: int
    replicas: int

    def seconds(self, items: float, rng: np.random.Generator | None) -> float:
        found = float(self.cost.alone(np.array([self.count]), items * self.replicas, self.cost.options(1)[-1])[0])
        scatter = self.cost.scatter(items)
        if rng is None or not scatter:
            return found
        sigma = math.sqrt(math.log1p(scatter**2))
        return found * float(rng.lognormal(-(sigma**2) / 2, sigma))


@dataclass(frozen=True)
class Loop:
    """``each``: items of a sub-batch of one rank of ``owner`` (0: all that it has). ``by_rank``: the costs are of
    ranks, as measured; otherwise of whole stages, of which one sub-batch is worked on at a time."""

    owner: Side
    other: Side
    rounds: int
    items: int
    each: int
    by_rank: bool

    @classmethod
    def of(cls, cycle: Cycle, sides: Sequence[tuple[Placed, Stage, Cost]], items: int) -> Loop:
        made = []
        for placed, stage, cost in sides:
            lone = not stage.collective
            ranks = tuple(frozenset(p) for p in placed.processes) if lone else (placed.devices,)
            count = len(placed.devices) if stage.device else len(placed.processes)
            made.append(Side(ranks, cost, count, len(placed.processes) if lone else 1))
        by_rank = all(cost.measured for _, _, cost in sides)
        return cls(made[0], made[1], cycle.rounds, items, sides[0][0].portion or 0, by_rank)


def loop_seconds(loop: Loop, rng: np.random.Generator | None = None) -> float:
    """Seconds until every sub-batch has been through all rounds."""
    owner, other = loop.owner, loop.other
    own = loop.items / len(owner.ranks)
    parts = max(1, math.ceil(own / loop.each - 1e-9)) if loop.each else 1
    size = own / parts
    shared = any(a & b for a in owner.ranks for b in other.ranks)
    if not loop.by_rank:
        one, two = (side.seconds(loop.items / parts / side.replicas, rng) for side in (owner, other))
        together = parts * (one + two) if shared else float(round_seconds(one, two, parts))
        return loop.rounds * together
    free = [True] * len(other.ranks)
    working: list[bool] = [False] * len(owner.ranks)
    held: dict[int, int] = {}
    asked: deque[tuple[int, int]] = deque((rank, loop.rounds) for _ in range(parts) for rank in range(len(owner.ranks)))
    mine: list[deque[int]] = [deque() for _ in owner.ranks]
    events: list[tuple[float, int, str, int, int, int]] = []
    number, clock = 0, 0.0

    def open_to(devices: frozenset[int]) -> bool:
        return not shared or not any(held.get(d) for d in devices)

    def hold(devices: frozenset[int], change: int) -> None:
        if shared:
            for d in devices:
                held[d] = held.get(d, 0) + change

    while True:
        for rank, queue in enumerate(mine):
            if queue and not working[rank] and open_to(owner.ranks[rank]):
                left = queue.popleft()
                working[rank] = True
                hold(owner.ranks[rank], 1)
                number += 1
                heapq.heappush(events, (clock + owner.seconds(size, rng), number, "owner", rank, rank, left))
        for server, devices in enumerate(other.ranks):
            if asked and free[server] and open_to(devices):
                rank, left = asked.popleft()
                free[server] = False
                hold(devices, 1)
                number += 1
                heapq.heappush(events, (clock + other.seconds(size, rng), number, "other", server, rank, left))
        if not events:
            return clock
        clock, _, what, server, rank, left = heapq.heappop(events)
        if what == "other":
            free[server] = True
            hold(other.ranks[server], -1)
            mine[rank].append(left)
        else:
            working[rank] = False
            hold(owner.ranks[rank], -1)
            if left > 1:
                asked.append((rank, left - 1))
