"""The planner's search: fronts of every part of the graph, by portion, from the stages up to the whole.

F(G, N, c) is made from all down-set cuts of G, all splits of the devices and all inner portions. What cannot be in a
plan as good as the incumbent is left out: by its own period and latency over the whole step, by the longest chain of
stages beside it, and by the device-seconds that the other stages need at least. Where memory does not bind, only a
window of splits around the crossing of both sides' periods is looked at: outside of it the crossing is better in
latency and in period. Exact but for the cap on points where memory binds (``Search.cut`` says so).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from rlinf_sched.bounds import KINDS, PIPE, SHARE, Bounds
from rlinf_sched.costmodel import APART, SplitCost
from rlinf_sched.fronts import SLACK, Floats, Front, Ints, crossing, merge, pareto, ragged
from rlinf_sched.problem import Problem
from rlinf_sched.tree import Leaf, Node, Parallel, Pipe, Share

NAMES = {0: "single", SHARE: "temporal", PIPE: "spatial", SHARE | PIPE: "hybrid"}
_CHUNK = 400_000
_WIDTH = 32

Part = tuple[int, int, bool]
Block = tuple[str, tuple[Part, int], tuple[Part, int]]


class Search:
    """One search. ``counts``: device counts to consider by stage. ``upper``: seconds by kind that are known to be
    reached, times the tolerance for ties."""

    def __init__(
        self,
        problem: Problem,
        counts: Mapping[str, tuple[int, ...]],
        upper: Mapping[int, float],
        binding: bool,
        cap: int | None = None,
    ) -> None:
        self.problem = problem
        self.names = [part[0] for part in problem.graph.components()]
        self.counts = counts
        self.upper = upper
        self.binding = binding
        self.cap = cap
        self.cut = False
        self.sizes = problem.sizes()
        self.index = {size: i for i, size in enumerate(self.sizes)}
        self.full = (1 << len(self.names)) - 1
        place = {name: i for i, name in enumerate(self.names)}
        self.after = [0] * len(self.names)
        for a, b in problem.graph.edges:
            self.after[place[a]] |= 1 << place[b]
        self.blocks: list[Block] = []
        self.tables: dict[Part, dict[int, Front]] = {}
        self.leaf_fronts = [[self._leaf(i, c) for c in range(len(self.sizes))] for i in range(len(self.names))]
        self.bounds = Bounds(problem, self.names, self.after, self.leaf_fronts, upper)

    # ------------------------------------------------------------------ leaves

    def _leaf(self, stage_index: int, c: int) -> Front:
        problem, name, size = self.problem, self.names[stage_index], self.sizes[c]
        stage, cost = problem.graph.stages[name], problem.costs[name]
        accepted = self.counts[name] if stage.takes(size, problem.items) else ()
        found: list[Front] = []
        part = (1 << stage_index, c, False), 0
        block = self._block("leaf", part, part)
        for option in cost.options(size):
            if not accepted:
                break
            n = np.array(accepted, dtype=np.int64)
            asked = problem.evaluated(stage, accepted)
            seconds = cost.seconds(asked, size, option)
            memory = np.zeros((5, len(n)))
            if stage.device:
                keep = cost.resident(asked, option)
                memory[1], memory[2] = keep, np.minimum(cost.memory.remainder, keep)
                memory[3] = keep + cost.working(asked, size, option)
                if stage.swappable:
                    memory[0] = cost.reload(asked)
                else:
                    memory[2] = keep
            good = np.isfinite(seconds) & (memory[3] <= problem.device_bytes)
            if not self.binding:
                memory[:] = 0
            flag = np.full(len(n), option, dtype=np.int64)
            nothing = np.zeros(len(n), dtype=np.int64)
            whole = Front(n, seconds, seconds, memory, np.full(len(n), block), nothing, nothing, flag, problem.devices)
            found.append(whole.take(good))
        if not found:
            none = np.zeros(0, dtype=np.int64)
            empty = np.zeros(0)
            return Front(none, empty, empty, np.zeros((5, 0)), none, none, none, none, problem.devices)
        front = merge(found)
        return front if cost.streams or self._pairs_up(stage_index) else pareto(front, self.binding, None)[0]

    def _block(self, op: str, left: tuple[Part, int], right: tuple[Part, int]) -> int:
        self.blocks.append((op, left, right))
        return len(self.blocks) - 1

    # ------------------------------------------------------------------ tables

    def table(self, mask: int, c: int, upstream: bool = False) -> dict[int, Front]:
        """The fronts, by kind, of the stages in ``mask`` at portion ``sizes[c]``. ``upstream``: without the pipes that
        pass whole portions: upstream of a pipe, one nested to the right is as good."""
        single = mask & (mask - 1) == 0
        key = mask, c, upstream and not single
        if key not in self.tables:
            self.tables[key] = self._single(mask, c) if single else self._combined(*key)
        return self.tables[key]

    def _single(self, mask: int, c: int) -> dict[int, Front]:
        stage = mask.bit_length() - 1
        whole = self.leaf_fronts[stage][c]
        found = {}
        for kind in (0, PIPE):
            front = whole.take((whole.flag == APART) == (kind == PIPE)) if self._pairs_up(stage) else whole
            if kind == PIPE and not self._pairs_up(stage):
                break
            front = front.take(self.bounds.possible(mask, c, kind, front.n, front.latency, front.period))
            if len(front):
                found[kind] = front
        return found

    def _pairs_up(self, stage: int) -> bool:
        """Whether the stage is a cycle whose two stages may have devices of their own."""
        cost = self.problem.costs[self.names[stage]]
        return isinstance(cost, SplitCost) and cost.paired

    def _combined(self, mask: int, c: int, upstream: bool) -> dict[int, Front]:
        found: dict[int, list[Front]] = {kind: [] for kind in KINDS}
        for up, joined in self._cuts(mask):
            down = mask & ~up
            if joined:
                for m in range(c + upstream, len(self.sizes)):
                    if self.sizes[c] % self.sizes[m] == 0:
                        self._pipes(mask, c, m, up, down, found)
            elif up & -up == mask & -mask:  # the same cut the other way round gives the same plans
                self._parallels(mask, c, up, down, found)
            if joined or up & -up == mask & -mask:
                self._shares(mask, c, up, down, found)
        result = {}
        for kind, fronts in found.items():
            if fronts:
                front, cut = pareto(merge(fronts), self.binding, self.cap if mask != self.full else 32)
                self.cut |= cut and mask != self.full
                result[kind] = front
        return result

    def _cuts(self, mask: int) -> Iterator[tuple[int, bool]]:
        """Down-sets of ``mask``, and whether an edge leaves them into the rest."""
        up = (mask - 1) & mask
        while up:
            down = mask & ~up
            inside = [i for i in range(len(self.names)) if down >> i & 1]
            if not any(self.after[i] & up for i in inside):
                joined = any(self.after[i] & down for i in range(len(self.names)) if up >> i & 1)
                yield up, joined
            up = (up - 1) & mask

    def _kinds(self, mask: int, up: Part, down: Part, op: int) -> Iterator[tuple[int, int, int, Front, Front]]:
        for ku, one in self.table(*up).items():
            for kd, other in self.table(*down).items():
                both = len(one) and len(other) and one.n[-1] > 0 and other.n[-1] > 0
                if op == SHARE and not both:
                    continue
                if not len(one) or not len(other):
                    continue
                kind = ku | kd | (op if both else 0)
                if self.bounds.limit(mask, kind) > 0:
                    yield kind, ku, kd, one, other

    # ------------------------------------------------------------------ share

    def _shares(self, mask: int, c: int, up: int, down: int, found: dict[int, list[Front]]) -> None:
        parts = (up, c, False), (down, c, False)
        for kind, ku, kd, one, other in self._kinds(mask, *parts, SHARE):
            block = self._block("share", (parts[0], ku), (parts[1], kd))
            if not self.binding:
                n = np.union1d(one.n, other.n)
                n = n[n >= max(one.n[0], other.n[0])]
                i, j = one.envelope.latency_at[n], other.envelope.latency_at[n]
                total = one.latency[i] + other.latency[j]
                self._add(found, mask, c, kind, block, n, total, total, np.zeros((5, len(n))), i, j, 0)
                continue
            ij = np.indices((len(one), len(other))).reshape(2, -1)
            base = one.latency[ij[0]] + other.latency[ij[1]]
            times = self.problem.items / self.sizes[c]
            i, j = ij[:, base * times <= self.bounds.room(mask, c, kind)[0].max()]
            (sw1, keep1, rem1, peak1, host1), (sw2, keep2, rem2, peak2, host2) = one.memory[:, i], other.memory[:, j]
            n = np.maximum(one.n[i], other.n[j])
            for flag in range(4):
                first, then = bool(flag & 1), bool(flag & 2)
                idle1, idle2 = (rem1 if first else keep1), (rem2 if then else keep2)
                total = one.latency[i] + other.latency[j]
                total = total + sw1 * first + sw2 * then
                memory = np.vstack(
                    [
                        sw1 * (not first) + sw2 * (not then),
                        idle1 + idle2,
                        rem1 + rem2,
                        np.maximum(peak1 + idle2, peak2 + idle1),
                        host1 + host2 + (keep1 - idle1) + (keep2 - idle2),
                    ]
                )
                self._add(found, mask, c, kind, block, n, total, total, memory, i, j, flag)

    # ------------------------------------------------------------------ pipe and parallel

    def _pipes(self, mask: int, c: int, m: int, up: int, down: int, found: dict[int, list[Front]]) -> None:
        q = self.sizes[c] // self.sizes[m]
        parts = (up, m, True), (down, m, False)
        for kind, ku, kd, one, other in self._kinds(mask, *parts, PIPE):
            block = self._block("pipe", (parts[0], ku), (parts[1], kd))
            for i, j in self._pairs(mask, c, kind, one, other, q, None):
                slowest = np.maximum(one.period[i], other.period[j])
                latency = one.latency[i] + other.latency[j] + (q - 1) * slowest
                self._beside(found, mask, c, kind, block, one, other, i, j, latency, q * slowest)
        name = self.names[up.bit_length() - 1]
        if q == 1 or up & (up - 1) or not self.problem.costs[name].streams:
            return
        parts = (up, c, True), (down, m, False)
        for kind, ku, kd, one, other in self._kinds(mask, *parts, PIPE):
            block = self._block("pipe", (parts[0], ku), (parts[1], kd))
            released = self._released(name, one, c, q)
            left = np.arange(q - 1, -1, -1)
            for i, j in self._pairs(mask, c, kind, one, other, q, released):
                step = max(1, _CHUNK // q)
                worst = [
                    (released[i[k : k + step]] + left * other.period[j[k : k + step], None]).max(axis=1)
                    for k in range(0, len(i), step)
                ]
                latency = (np.concatenate(worst) if worst else np.zeros(0)) + other.latency[j]
                period = np.maximum(one.period[i], q * other.period[j])
                self._beside(found, mask, c, kind, block, one, other, i, j, latency, period)

    def _parallels(self, mask: int, c: int, up: int, down: int, found: dict[int, list[Front]]) -> None:
        parts = (up, c, False), (down, c, False)
        for kind, ku, kd, one, other in self._kinds(mask, *parts, PIPE):
            block = self._block("parallel", (parts[0], ku), (parts[1], kd))
            for i, j in self._pairs(mask, c, kind, one, other, 0, None):
                latency = np.maximum(one.latency[i], other.latency[j])
                period = np.maximum(one.period[i], other.period[j])
                self._beside(found, mask, c, kind, block, one, other, i, j, latency, period)

    def _released(self, name: str, front: Front, c: int, q: int) -> Floats:
        stage, cost = self.problem.graph.stages[name], self.problem.costs[name]
        result = np.zeros((len(front), q))
        for option in np.unique(front.flag):
            mine = front.flag == option
            asked = self.problem.evaluated(stage, tuple(int(n) for n in front.n[mine]))
            asked = np.resize(asked, int(mine.sum()))
            result[mine] = cost.release_table(asked, self.sizes[c], q, int(option))
        return result

    def _pairs(
        self, mask: int, c: int, kind: int, one: Front, other: Front, q: int, released: Floats | None
    ) -> Iterator[tuple[Ints, Ints]]:
        """Pairs of points that may matter. ``q`` 0: side by side. ``released``: the upstream streams."""
        room, alone, area = self.bounds.room(mask, c, kind)
        seconds = float(room.max())
        times = self.problem.items / self.sizes[c]
        many = max(q, 1)
        top = self.problem.devices
        if self.binding:
            bound = many * max(float(one.period.min() if released is None else 0), float(other.period.min())) * times
            if bound > seconds:
                return
            rows = max(1, _CHUNK // max(len(other), 1))
            for k in range(0, len(one), rows):
                ij = np.indices((min(rows, len(one) - k), len(other))).reshape(2, -1)
                i, j = ij[0] + k, ij[1]
                good = one.n[i] + other.n[j] <= top
                yield i[good], j[good]
            return
        least = int(one.n[0] + other.n[0])
        if least > top:
            return
        targets = np.arange(least, top + 1)
        # The period of the upstream per inner portion, so that both sides can be compared.
        up = one.envelope.period / (many if released is not None else 1)
        down = other.envelope.period
        if max(up[top], down[top]) * many * times > seconds:
            return
        if mask == self.full and q and len(one) * len(other) > _CHUNK:
            yield from self._blocks(one, other, q, released, seconds)
            return
        middle = crossing(up, down, targets, int(one.n[0]), int(other.n[0]))
        before = np.maximum(middle - 1, int(one.n[0]))
        here, there = (np.maximum(up[x], down[targets - x]) for x in (middle, before))
        middle = np.where(there < here, before, middle)
        best = np.minimum(here, there)
        possible = (best * many * times <= room[targets]) & (targets * best * many * times <= area)
        targets, middle, best = targets[possible], middle[possible], best[possible]
        i, j = one.envelope.period_at[middle], other.envelope.period_at[targets - middle]
        if q == 0:
            at_crossing = np.maximum(one.latency[i], other.latency[j])
            left, right, add_left, add_right = one.latency, other.latency, 0.0, 0.0
        elif released is None:
            at_crossing = one.latency[i] + other.latency[j] + (q - 1) * best
            left, right = one.latency + (q - 1) * one.period, other.latency + (q - 1) * other.period
            add_left, add_right = other.envelope.latency[targets - one.n[0]], one.envelope.latency[targets - other.n[0]]
        else:
            behind = np.arange(q - 1, -1, -1)
            step = max(1, _CHUNK // q)
            worst = [
                (released[i[k : k + step]] + behind * other.period[j[k : k + step], None]).max(axis=1)
                for k in range(0, len(i), step)
            ]
            at_crossing = (np.concatenate(worst) if worst else np.zeros(0)) + other.latency[j]
            left, right = one.latency, other.latency + (q - 1) * other.period
            add_left = other.envelope.latency[targets - one.n[0]]
            add_right = one.falling(released[:, 0])[targets - other.n[0]]
        threshold = np.minimum(at_crossing, np.minimum(room[targets] - (times - 1) * many * best, alone[targets]))
        threshold *= SLACK
        low = np.searchsorted(-one.falling(left), -(threshold - add_left) - 1e-15)
        high = targets - np.searchsorted(-other.falling(right), -(threshold - add_right) - 1e-15)
        low, high = np.maximum(low, one.n[0]), np.minimum(high, targets - other.n[0])
        good = low <= high
        targets, low, high = targets[good], low[good], high[good]
        first, last = one.start[low], one.start[high + 1]
        for part in _split(last - first):
            which, i = ragged(first[part], last[part])
            rest = targets[part][which] - one.n[i]
            which, j = ragged(other.start[rest], other.start[rest + 1])
            yield i[which], j

    def _blocks(
        self, one: Front, other: Front, q: int, released: Floats | None, limit: float
    ) -> Iterator[tuple[Ints, Ints]]:
        """For the whole graph, where only the least latency counts: blocks of points with similar periods, and only
        those pairs of blocks whose bound is within the limit."""
        a, b = np.argsort(one.period, kind="stable"), np.argsort(other.period, kind="stable")
        low = [[_block_min(x[order]) for x in (f.n, f.latency, f.period)] for f, order in ((one, a), (other, b))]
        (n1, l1, p1), (n2, l2, p2) = low
        if released is None:
            bound = l1[:, None] + l2 + (q - 1) * np.maximum(p1[:, None], p2)
        else:
            first = _block_min(released[a, 0])
            bound = np.maximum(l1[:, None] + l2, first[:, None] + l2 + (q - 1) * p2)
        good = (bound <= limit) & (n1[:, None] + n2 <= self.problem.devices)
        rows, columns = np.nonzero(good)
        step = max(1, _CHUNK // _WIDTH**2)
        inside = np.arange(_WIDTH)
        for k in range(0, len(rows), step):
            i = (rows[k : k + step, None] * _WIDTH + inside)[:, :, None]
            j = (columns[k : k + step, None] * _WIDTH + inside)[:, None, :]
            i, j = np.broadcast_arrays(i, j)
            there = (i < len(a)) & (j < len(b))
            i, j = a[i[there]], b[j[there]]
            there = one.n[i] + other.n[j] <= self.problem.devices
            yield i[there], j[there]

    def _beside(
        self,
        found: dict[int, list[Front]],
        mask: int,
        c: int,
        kind: int,
        block: int,
        one: Front,
        other: Front,
        i: Ints,
        j: Ints,
        latency: Floats,
        period: Floats,
    ) -> None:
        memory = np.maximum(one.memory[:, i], other.memory[:, j]) if self.binding else np.zeros((5, len(i)))
        self._add(found, mask, c, kind, block, one.n[i] + other.n[j], latency, period, memory, i, j, 0)

    def _add(
        self,
        found: dict[int, list[Front]],
        mask: int,
        c: int,
        kind: int,
        block: int,
        n: Ints,
        latency: Floats,
        period: Floats,
        memory: Floats,
        i: Ints,
        j: Ints,
        flag: int,
    ) -> None:
        good = self.bounds.possible(mask, c, kind, n, latency, period)
        if self.binding:
            good &= (memory[3] <= self.problem.device_bytes) & (memory[4] <= self.problem.host_bytes)
        index = np.flatnonzero(good)
        if not len(index):
            return
        full = np.full(len(index), block, dtype=np.int64)
        flags = np.full(len(index), flag, dtype=np.int64)
        front = Front(
            n[index].astype(np.int64),
            latency[index],
            period[index],
            memory[:, index],
            full,
            i[index].astype(np.int64),
            j[index].astype(np.int64),
            flags,
            self.problem.devices,
        )
        if mask == self.full:
            front = front.take(np.argsort(front.latency, kind="stable")[:64])
            found[kind].append(front.take(np.argsort(front.n, kind="stable")))
        else:
            found[kind].append(pareto(front, self.binding, self.cap)[0])

    # ------------------------------------------------------------------ the answer

    def run(self, most: int = 24) -> dict[int, list[tuple[float, Node]]]:
        """By kind: the best plans, the best first."""
        result = {}
        for kind, front in self.table(self.full, 0).items():
            order = np.argsort(front.latency, kind="stable")[:most]
            result[kind] = [(float(front.latency[k]), self._tree((self.full, 0, False), kind, int(k))) for k in order]
        return result

    def _tree(self, part: Part, kind: int, index: int) -> Node:
        mask, c, _ = part
        front = self.table(*part)[kind]
        op, left, right = self.blocks[int(front.block[index])]
        if op == "leaf":
            stage, flag = mask.bit_length() - 1, int(front.flag[index])
            apart = self._pairs_up(stage) and flag == APART
            return Leaf(self.names[stage], int(front.n[index]), self.sizes[c], flag, apart)
        one, other = self._tree(*left, int(front.i[index])), self._tree(*right, int(front.j[index]))
        if op == "share":
            flag = int(front.flag[index])
            return Share(one, other, bool(flag & 1), bool(flag & 2))
        return Pipe(one, other, self.sizes[right[0][1]]) if op == "pipe" else Parallel(one, other)


def _split(counts: Ints) -> Iterator[slice]:
    """Slices of the targets with about ``_CHUNK`` pairs each."""
    edges = np.cumsum(counts) // _CHUNK
    starts = [0, *(np.flatnonzero(np.diff(edges)) + 1).tolist(), len(counts)]
    for a, b in pairwise(starts):
        if a < b:
            yield slice(a, b)


def _block_min(values: Floats | Ints) -> Floats:
    """Least value of every ``_WIDTH`` neighbours."""
    return np.minimum.reduceat(values.astype(float), np.arange(0, len(values), _WIDTH))
