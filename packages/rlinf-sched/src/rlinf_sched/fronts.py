"""Latency-period-memory fronts over device counts, as arrays, and which of their points can matter.

A front holds points (n devices, latency L, period P and, where memory binds, five sizes). A point is worth keeping
when no other one needs at most as much of everything. Everything here is vectorised: a front has thousands of points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SLACK = 1 + 1e-12


@dataclass
class Envelope:
    """For each n: best latency and best period of the points with at most n devices, and which points those are."""

    latency: Floats
    latency_at: Ints
    period: Floats
    period_at: Ints


@dataclass
class Front:
    """``memory`` rows: switch seconds, bytes kept, remainder, peak, host. ``block``, ``i``, ``j``, ``flag``: where the
    point came from. Sorted by ``n``."""

    n: Ints
    latency: Floats
    period: Floats
    memory: Floats
    block: Ints
    i: Ints
    j: Ints
    flag: Ints
    size: int

    def __len__(self) -> int:
        return len(self.n)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Front:
        """The points at ``index``."""
        return Front(
            self.n[index],
            self.latency[index],
            self.period[index],
            self.memory[:, index],
            self.block[index],
            self.i[index],
            self.j[index],
            self.flag[index],
            self.size,
        )

    @cached_property
    def start(self) -> Ints:
        """``start[n]``: index of the first point with at least n devices (n to size + 1)."""
        return np.searchsorted(self.n, np.arange(self.size + 2)).astype(np.int64)

    @cached_property
    def envelope(self) -> Envelope:
        """Best by device count, at every n from 0 to ``size``."""
        at_latency = running_argmin(self.latency, self.period)
        at_period = running_argmin(self.period, self.latency)
        last = self.start[1:] - 1  # the last point with at most n devices
        there = last >= 0
        latency, period = np.full(len(last), np.inf), np.full(len(last), np.inf)
        latency[there] = self.latency[at_latency[last[there]]]
        period[there] = self.period[at_period[last[there]]]
        where_l, where_p = np.zeros(len(last), dtype=np.int64), np.zeros(len(last), dtype=np.int64)
        where_l[there], where_p[there] = at_latency[last[there]], at_period[last[there]]
        return Envelope(latency, where_l, period, where_p)

    def falling(self, values: Floats) -> Floats:
        """Least of ``values`` (one for each point) over the points with at most n devices, for n from 0 to size."""
        low = np.minimum.accumulate(values) if len(values) else values
        last = self.start[1:] - 1
        return np.where(last >= 0, low[np.maximum(last, 0)], np.inf)


def running_argmin(values: Floats, tie: Floats) -> Ints:
    """Index of the least so far (ties: the lesser ``tie``)."""
    rank = np.empty(len(values), dtype=np.int64)
    rank[np.lexsort((tie, values))] = np.arange(len(values))
    low = np.minimum.accumulate(rank)
    position = np.empty(len(values), dtype=np.int64)
    position[rank] = np.arange(len(values))
    found: Ints = position[low]
    return found


def merge(fronts: list[Front]) -> Front:
    """All points of several fronts, sorted by devices."""
    whole = Front(
        np.concatenate([front.n for front in fronts]),
        np.concatenate([front.latency for front in fronts]),
        np.concatenate([front.period for front in fronts]),
        np.concatenate([front.memory for front in fronts], axis=1),
        np.concatenate([front.block for front in fronts]),
        np.concatenate([front.i for front in fronts]),
        np.concatenate([front.j for front in fronts]),
        np.concatenate([front.flag for front in fronts]),
        fronts[0].size,
    )
    return whole.take(np.argsort(whole.n, kind="stable"))


def pareto(front: Front, binding: bool, cap: int | None = None) -> tuple[Front, bool]:
    """The points that no other one dominates (where memory does not bind, a few dominated ones may stay), and whether
    the cap on points for one device count cut any."""
    if len(front) == 0:
        return front, False
    front = front.take(np.lexsort((front.period, front.latency, front.n)))
    keep = _falls(front)
    if not binding:
        front = front.take(keep)
        front = front.take(_beyond_smaller(front))
        return front, False
    return _pareto_memory(front, cap)


def _falls(front: Front) -> NDArray[np.bool_]:
    """Within one n, latency rising: whether the period is below all before it."""
    rank = np.unique(front.period, return_inverse=True)[1].reshape(-1)
    segment = np.cumsum(np.diff(front.n, prepend=front.n[0]) > 0)
    value = rank - segment * (len(rank) + 1)
    before = np.minimum.accumulate(value)
    keep = np.ones(len(value), dtype=bool)
    keep[1:] = (value[1:] < before[:-1]) | (segment[1:] > segment[:-1])
    return keep


def _beyond_smaller(front: Front) -> NDArray[np.bool_]:
    """Not dominated by the best-latency or the best-period point among fewer devices."""
    env = front.envelope
    before = np.maximum(front.n - 1, 0)
    some = front.start[front.n] > 0
    by_latency, by_period = env.latency_at[before], env.period_at[before]
    worse = np.zeros(len(front), dtype=bool)
    for other in (by_latency, by_period):
        worse |= (front.latency[other] <= front.latency) & (front.period[other] <= front.period)
    good: NDArray[np.bool_] = ~(some & worse)
    return good


def _pareto_memory(front: Front, cap: int | None) -> tuple[Front, bool]:
    columns = np.vstack([front.n.astype(float), front.latency, front.period, front.memory])
    alive = np.arange(len(front))
    kept: list[int] = []
    used: dict[int, int] = {}
    cut = False
    while len(alive):
        head = int(alive[0])
        n = int(front.n[head])
        used[n] = used.get(n, 0) + 1
        if cap is not None and used[n] > cap:
            cut = True
            alive = alive[front.n[alive] != n]
            continue
        kept.append(head)
        rest = alive[1:]
        worse = np.all(columns[:, rest] >= columns[:, [head]], axis=0)
        alive = rest[~worse]
    return front.take(np.array(kept, dtype=np.intp)), cut


def ragged(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """(which, value) for every value in first[k] … last[k]-1, for every k."""
    count = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(first)), count)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return which, first[which] + offset


def crossing(up: Floats, down: Floats, targets: Ints, least_up: int, least_down: int) -> Ints:
    """For each target n the fewest devices x for the upstream at which up[x] <= down[n - x]; both fall with devices."""
    low, high = np.full(len(targets), least_up), targets - least_down
    while np.any(low < high):
        middle = (low + high) // 2
        reached = up[middle] <= down[targets - middle]
        high = np.where(reached & (low < high), middle, high)
        low = np.where(~reached & (low < high), middle + 1, low)
    return low
