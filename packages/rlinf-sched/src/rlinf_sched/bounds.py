"""What a part of a plan may cost at most, given a plan that is known already.

A part is given up when its own period and latency over the whole step, the longest chain of stages beside it, or the
device-seconds that the other stages need at least, leave no room for anything better than the incumbent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlinf_sched.fronts import SLACK, Floats, Front, Ints
from rlinf_sched.problem import Problem

SHARE, PIPE = 1, 2
KINDS = (0, SHARE, PIPE, SHARE | PIPE)


class Bounds:
    """``after[i]``: bits of the stages that read what stage i makes. ``upper``: seconds by kind."""

    def __init__(
        self,
        problem: Problem,
        names: list[str],
        after: list[int],
        leaf_fronts: list[list[Front]],
        upper: Mapping[int, float],
    ) -> None:
        self.problem, self.names, self.after = problem, names, after
        self.leaf_fronts, self.upper = leaf_fronts, upper
        self.sizes = problem.sizes()
        self.full = (1 << len(names)) - 1
        # Of each stage, whatever the plan: least device-seconds; by devices least latency, least seconds for all.
        size = self.problem.devices + 1
        self.area = [math.inf] * len(self.names)
        self.least = [np.full(size, np.inf) for _ in self.names]
        self.rate = [np.full(size, np.inf) for _ in self.names]
        for i, by_size in enumerate(self.leaf_fronts):
            for c, front in enumerate(by_size):
                if len(front):
                    times = self.problem.items / self.sizes[c]
                    self.area[i] = min(self.area[i], float((front.n * front.latency).min()) * times)
                    best = front.falling(front.latency)
                    self.least[i] = np.minimum(self.least[i], best)
                    self.rate[i] = np.minimum(self.rate[i], best * times)
            if self.problem.costs[self.names[i]].streams:
                self.least[i] = np.zeros(size)  # only its first release is sure to come before what follows
        self._others: dict[int, tuple[Floats, Floats, float]] = {}
        self._rooms: dict[tuple[int, int, int], tuple[Floats, Floats, float]] = {}

    def beside(self, mask: int) -> tuple[Floats, Floats, float]:
        """By the devices that the stages outside of ``mask`` have: latency of their longest chain through ``mask``,
        seconds of the slowest for all items; and their device-seconds."""
        if mask not in self._others:
            many = range(len(self.names))
            outside = [i for i in many if not mask >> i & 1]
            zero = np.zeros(self.problem.devices + 1)
            up: dict[int, Floats] = {}
            down: dict[int, Floats] = {}
            for i in reversed(outside):  # names are in topological order
                nexts = [j for j in many if self.after[i] >> j & 1]
                if any(mask >> j & 1 or j in up for j in nexts):
                    up[i] = self.least[i] + np.max([zero, *(up[j] for j in nexts if j in up)], axis=0)
            for i in outside:
                before = [j for j in many if self.after[j] >> i & 1]
                if any(mask >> j & 1 or j in down for j in before):
                    down[i] = self.least[i] + np.max([zero, *(down[j] for j in before if j in down)], axis=0)
            chain = np.max([zero, *up.values()], axis=0) + np.max([zero, *down.values()], axis=0)
            rate = np.max([zero, *(self.rate[i] for i in outside)], axis=0)
            self._others[mask] = chain, rate, sum(self.area[i] for i in outside)
        return self._others[mask]

    def limit(self, mask: int, kind: int) -> float:
        """Seconds of the step that a plan with this part may take at most."""
        return max(self._finals(mask, kind).values())

    def _finals(self, mask: int, kind: int) -> dict[int, float]:
        finals = [kind] if mask == self.full else [final for final in KINDS if final & kind == kind]
        unknown = -math.inf if self.upper else math.inf  # a family without any plan so far is left out
        return {final: self.upper.get(final, unknown) for final in finals}

    def room(self, mask: int, c: int, kind: int) -> tuple[Floats, Floats, float]:
        """What a part may take at most to be in a plan within the limit: by its devices, the seconds of its latency
        and all further periods, and of its latency alone; and its device-seconds."""
        key = mask, c, kind
        if key not in self._rooms:
            chain, rate, area = self.beside(mask)
            most, many = self.problem.devices, self.problem.items // self.sizes[c]
            outside = [i for i in range(len(self.names)) if not mask >> i & 1]
            # One stage is left and this is no whole step: it has the other devices, and passes the same portions.
            last = len(outside) == 1 and c > 0
            seconds, alone, areas = np.full(most + 1, -np.inf), np.full(most + 1, -np.inf), -math.inf
            for final, limit in self._finals(mask, kind).items():
                if limit == math.inf:  # nothing is known yet, so nothing is left out
                    seconds = alone = np.full(most + 1, np.inf)
                    areas = math.inf
                    break
                areas = max(areas, most * limit - area)
                if final in (0, PIPE) or last:  # the others have devices of their own: chain[::-1][n] is for most - n
                    free = np.where(rate[::-1] <= limit * SLACK, limit - chain[::-1], -np.inf)
                    single = free
                    if last and not self.problem.costs[self.names[outside[0]]].streams:
                        front = self.leaf_fronts[outside[0]][c]
                        slow = front.falling(front.latency)[::-1] if len(front) else np.full(most + 1, np.inf)
                        joined = bool(self.after[outside[0]] & mask) or any(
                            self.after[i] >> outside[0] & 1 for i in range(len(self.names)) if mask >> i & 1
                        )
                        if joined:
                            single = np.minimum(free, limit - many * slow)
                            free = np.minimum(free, limit - slow)
                else:
                    free = single = np.full(most + 1, limit - float(chain[-1]))
                seconds, alone = np.maximum(seconds, free), np.maximum(alone, single)
            self._rooms[key] = seconds * SLACK, alone * SLACK, areas * SLACK
        return self._rooms[key]

    def possible(self, mask: int, c: int, kind: int, n: Ints, latency: Floats, period: Floats) -> NDArray[np.bool_]:
        """Which points may be part of a plan within the limit."""
        seconds, alone, area = self.room(mask, c, kind)
        times = self.problem.items / self.sizes[c]
        good = (latency + (times - 1) * period <= seconds[n]) & (n * period * times <= area)
        return good & (latency <= alone[n])
