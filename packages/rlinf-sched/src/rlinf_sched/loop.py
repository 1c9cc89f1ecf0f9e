"""Two stages that feed each other, round by round: sub-batches of one are worked on while others are with the other.

The first one owns the sub-batches: each belongs to one of its ranks. The second one takes them as they come, each with
the rank that has waited longest. On the same devices they exclude each other, and neither is offloaded in between.
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
from rlinf_sched.problem import Problem


@dataclass(frozen=True)
class Side:
    """``ranks``: devices of each; seconds of one rank come from ``cost`` on ``count`` devices, on which ``replicas``
    ranks take as much each. ``hop``: seconds until what it gives is with the other side."""

    ranks: tuple[frozenset[int], ...]
    cost: Cost
    count: int
    replicas: int
    hop: float = 0.0

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
    def of(cls, cycle: Cycle, sides: Sequence[tuple[Placed, Stage, Cost]], problem: Problem) -> Loop:
        made = []
        for placed, stage, cost in sides:
            lone = not stage.collective
            ranks = tuple(frozenset(p) for p in placed.processes) if lone else (placed.devices,)
            count = len(placed.devices) if stage.device else len(placed.processes)
            hop = problem.hops(len(placed.processes))
            made.append(Side(ranks, cost, count, len(placed.processes) if lone else 1, hop))
        by_rank = all(cost.measured for _, _, cost in sides)
        return cls(made[0], made[1], cycle.rounds, problem.items, sides[0][0].portion or 0, by_rank)


def loop_seconds(loop: Loop, rng: np.random.Generator | None = None) -> float:
    """Seconds until every sub-batch has been through all rounds."""
    owner, other = loop.owner, loop.other
    own = loop.items / len(owner.ranks)
    parts = max(1, math.ceil(own / loop.each - 1e-9)) if loop.each else 1
    size = own / parts
    shared = any(a & b for a in owner.ranks for b in other.ranks)
    if not loop.by_rank:
        one, two = (side.seconds(loop.items / parts / side.replicas, rng) for side in (owner, other))
        way = owner.hop + other.hop
        together = parts * (one + two) + way if shared else float(round_seconds(one, two, parts, way))
        return loop.rounds * together
    idle = deque(range(len(other.ranks)))
    taken: dict[int, tuple[int, int]] = {}
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

    def later(seconds: float, what: str, server: int, rank: int, left: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (clock + seconds, number, what, server, rank, left))

    while True:
        for rank, queue in enumerate(mine):
            if queue and not working[rank] and open_to(owner.ranks[rank]):
                left = queue.popleft()
                working[rank] = True
                hold(owner.ranks[rank], 1)
                later(owner.seconds(size, rng), "owner", rank, rank, left)
        while asked and idle:  # whether or not its devices are free
            taken[idle.popleft()] = asked.popleft()
        for server, (rank, left) in list(taken.items()):
            devices = other.ranks[server]
            if open_to(devices):
                del taken[server]
                hold(devices, 1)
                later(other.seconds(size, rng), "other", server, rank, left)
        if not events:
            return clock
        clock, _, what, server, rank, left = heapq.heappop(events)
        if what == "other":
            idle.append(server)
            hold(other.ranks[server], -1)
            later(other.hop, "answer", server, rank, left)
        elif what == "answer":
            mine[rank].append(left)
        elif what == "owner":
            working[rank] = False
            hold(owner.ranks[rank], -1)
            if left > 1:
                later(owner.hop, "question", server, rank, left - 1)
        else:
            asked.append((rank, left))
