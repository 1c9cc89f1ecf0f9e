"""What a stage costs: E(stage, devices, portion, option), its memory and its switches.

An *option* is what free memory buys: the micro-batch of a stage that works in steps, the slots of one that streams.
Arrays over device counts go in and out, because a search asks for all counts at once. For a CPU stage ``devices`` is
its number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rlinf_sched import streaming
from rlinf_sched.graph import SchedError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EARLY = 0.9
"""A stage streams when half of a portion has left before this part of its time."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device: ``resident`` when loaded (divided by the replicas when ``sharded``), ``item`` more for
    each item of a micro-batch or slot, ``work`` more at any work, ``remainder`` that stays after an offload."""

    resident: float = 0.0
    sharded: bool = False
    item: float = 0.0
    remainder: float = 0.0
    work: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What all costs have. ``load`` and ``offload`` are seconds, ``reload_each`` further ones of both together that
    are divided by the replicas. ``error``: relative error on held-out points. ``curve``: measured release: the
    fraction of the seconds after which 1/k, 2/k, … k/k of a portion have left (empty: all at the end); ``curves``: the
    same by how many items a replica had at once. ``measured``: it
    comes from a profile, so it is known what a rank takes, and not only what the stage does."""

    memory: Memory = Memory()
    load: float = 0.0
    offload: float = 0.0
    reload_each: float = 0.0
    replica: int = 1
    error: float = 0.0
    curve: tuple[float, ...] = ()
    curves: tuple[tuple[float, tuple[float, ...]], ...] = ()
    measured: bool = False

    @property
    def streams(self) -> bool:
        """Whether what follows may begin well before the stage ends: half has left before ``EARLY`` of its time."""
        return bool(self.curve) and float(self.released(np.array([0.5]))[0]) < EARLY

    def released(self, parts: Floats, share: float | None = None) -> Floats:
        """Fraction of the seconds after which these parts (0 … 1) of a portion have left; ``share``: items of a replica
        (None: as many as it may be)."""
        curve = self.curve
        if share is not None and self.curves:
            curve = min(self.curves, key=lambda pair: abs(math.log(max(pair[0], 1e-9) / max(share, 1e-9))))[1]
        if not curve:
            return np.ones(len(parts))
        known = np.array([max(0.0, 2 * curve[0] - curve[min(1, len(curve) - 1)]), *curve])
        found: Floats = np.interp(parts, np.arange(len(known)) / len(curve), known)
        return found

    def reload(self, devices: Ints) -> Floats:
        """Seconds to load and to offload once, together."""
        return self.load + self.offload + self.reload_each / np.maximum(devices // self.replica, 1)

    def alone(self, devices: Ints, portion: float, option: int) -> Floats:
        """Expected seconds of one rank with its part of a portion; ``seconds`` is of the slowest of all ranks."""
        return self.seconds(devices, portion, option)

    def scatter(self, items: float) -> float:
        """Relative deviation of a rank's seconds with so many items."""
        return 0.0

    def options(self, portion: int) -> tuple[int, ...]:
        """Micro-batches or slots to choose from; ``(0,)`` when there is no choice."""
        return (0,)

    def seconds(self, devices: Ints, portion: float, option: int) -> Floats:
        """Time of one portion on each of these device counts (infinite: impossible)."""
        raise NotImplementedError

    def release(self, devices: int, portion: int, parts: int, option: int) -> Floats:
        """When 1/parts, 2/parts, … of a portion have left. Only what streams releases before the end."""
        found: Floats = self.release_table(np.array([devices]), portion, parts, option)[0]
        return found

    def release_table(self, devices: Ints, portion: int, parts: int, option: int) -> Floats:
        """``release`` for many device counts: one row each."""
        fractions = self.released((np.arange(parts) + 1) / parts) if self.streams else np.ones(parts)
        found: Floats = self.seconds(devices, portion, option)[:, None] * fractions
        return found

    def resident(self, devices: Ints, option: int = 0) -> Floats:
        """Bytes per device while loaded and idle."""
        whole = np.full(len(devices), float(self.memory.resident))
        return whole / np.maximum(devices // self.replica, 1) if self.memory.sharded else whole

    def working(self, devices: Ints, portion: int, option: int) -> Floats:
        """Bytes per device that work adds to ``resident``."""
        each = np.ceil(portion / np.maximum(devices // self.replica, 1))
        return self.memory.work + self.memory.item * (np.minimum(each, option) if option else each)


@dataclass(frozen=True, kw_only=True)
class FormulaCost(Cost):
    """fixed + serial·c + spread·x**bend + step·steps + log·log2(replicas) + linear·(replicas − 1)
    + power·x·replicas**(1 − exponent), with x = c / replicas; where the stage works in micro-batches,
    steps = ceil(c / (replicas·micro)) and x = steps·micro: a staircase.

    What a fit adds: ``stair``: steps = ceil(x / stair) although nothing can be chosen. ``grain``: the smallest part of
    an item that a replica takes (x is a multiple of it, and so is c / replicas unless ranks ``share`` a portion; 0:
    any). ``points``: (devices, portion, log of a factor) of the
    measured points, interpolated between them. ``noise``: relative deviation of one item where ranks do not wait for
    each other; the slowest of them is what counts (``whole``: items of the step, over which ranks that share portions
    are compared). ``take`` and ``put``: seconds of the runtime for a portion, and for an item of a
    replica."""

    fixed: float = 0.0
    serial: float = 0.0
    spread: float = 0.0
    step: float = 0.0
    log: float = 0.0
    power: float = 0.0
    exponent: float = 1.0
    linear: float = 0.0
    bend: float = 1.0
    share: bool = False
    whole: float = 0.0
    micro: tuple[int, ...] = ()
    stair: float = 0.0
    grain: float = 0.0
    points: tuple[tuple[float, float, float], ...] = ()
    noise: float = 0.0
    take: float = 0.0
    put: float = 0.0

    def options(self, portion: int) -> tuple[int, ...]:
        return self.micro or (0,)

    def seconds(self, devices: Ints, portion: float, option: int) -> Floats:
        found = self._work(devices, portion, option)
        share = self._share(devices, portion)
        if self.noise:
            replicas = np.maximum(devices // self.replica, 1)
            # Who shares portions and is late with one may be early with the next: the whole step counts.
            items = self.whole / replicas if self.share and self.whole else share
            found = found * slowest(replicas, self.noise / np.sqrt(items))
        return np.asarray(found + self.take + self.put * share, dtype=float)

    def alone(self, devices: Ints, portion: float, option: int) -> Floats:
        rest = self.take + self.put * self._share(devices, portion)
        return np.asarray(self._work(devices, portion, option) + rest, dtype=float)

    def scatter(self, items: float) -> float:
        return self.noise / math.sqrt(max(items, 1e-9))

    def _share(self, devices: Ints, portion: float) -> Floats:
        share = portion / np.maximum(devices // self.replica, 1).astype(float)
        return np.ceil(share / self.grain - 1e-9) * self.grain if self.grain else share

    def _work(self, devices: Ints, portion: float, option: int) -> Floats:
        replicas = np.maximum(devices // self.replica, 1).astype(float)
        share = given = self._share(devices, portion)
        whole = np.full(len(replicas), float(portion)) if self.share else share * replicas
        if option:
            steps = np.ceil(share / option - 1e-9)
            share = steps * option
        else:
            steps = np.ceil(share / self.stair - 1e-9) if self.stair else np.zeros(len(replicas))
        found = self.fixed + self.serial * whole + self.step * steps
        found = found + self.spread * (share if self.bend == 1 else share**self.bend)
        found = found + self.log * np.log2(replicas) + self.linear * (replicas - 1)
        if self.power:
            found = found + self.power * given * replicas ** (1 - self.exponent)
        result: Floats = found * np.exp(between(self.points, replicas, portion)) if self.points else found
        return result


def between(points: tuple[tuple[float, float, float], ...], devices: Floats, portion: float) -> Floats:
    """Values at (devices, portion) from those of ``points``, weighted by the inverse square of their distances in
    octaves: exact at the points, nothing far away."""
    known = np.log2(np.array([(max(n, 1.0), c) for n, c, _ in points]))
    values = np.array([value for _, _, value in points])
    n = np.log2(np.maximum(devices, 1.0))[:, None]
    distance = (known[:, 0] - n) ** 2 + (known[:, 1] - math.log2(portion)) ** 2
    weights = 1 / np.maximum(distance, 1e-12)
    found: Floats = (weights @ values) / weights.sum(axis=1) * np.exp(-distance.min(axis=1) / 2)
    return found


def slowest(ranks: Ints, deviation: Floats) -> Floats:
    """Expected largest of so many log-normal numbers with mean 1 and these relative deviations."""
    at, quantiles = _extremes()
    sigma = np.sqrt(np.log1p(np.asarray(deviation, dtype=float) ** 2))
    here = np.clip(np.log2(np.maximum(ranks, 1)), 0, at[-1])
    low = np.minimum(here.astype(int), len(at) - 2)
    part = (here - low)[:, None]
    z = quantiles[low] * (1 - part) + quantiles[low + 1] * part
    found: Floats = np.exp(sigma[:, None] * z).mean(axis=1) / np.exp(sigma[:, None] * quantiles[0]).mean(axis=1)
    return found


@lru_cache(maxsize=1)
def _extremes() -> tuple[Floats, Floats]:
    """Quantiles of the largest of 1, 2, 4, … 8,192 standard normal numbers, a row each."""
    at = np.arange(14)
    parts = (np.arange(64) + 0.5) / 64
    normal = NormalDist()
    rows = [[normal.inv_cdf(float(u) ** (1 / 2.0**k)) for u in parts] for k in at]
    return at.astype(float), np.array(rows)


@dataclass(frozen=True, kw_only=True)
class TableCost(Cost):
    """Measured or given times: ``points[(devices, portion)]`` seconds. Exact at its points; between device counts
    along a power law, between portions along a line, beyond the outermost two along the same."""

    points: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def seconds(self, devices: Ints, portion: float, option: int) -> Floats:
        counts = sorted({n for n, _ in self.points})
        exact = [self._at(n, portion) for n in counts]
        if len(counts) == 1:
            return np.full(len(devices), exact[0])
        result = np.interp(devices, counts, exact)
        here = np.log(np.maximum(devices, 1))
        x, y = np.log(np.maximum(counts, 1)), np.log(np.maximum(exact, 1e-12))
        upper = np.clip(np.searchsorted(counts, devices), 1, len(counts) - 1)
        slope = (y[upper] - y[upper - 1]) / np.maximum(x[upper] - x[upper - 1], 1e-12)
        between = ~np.isin(devices, counts)
        result[between] = np.exp(y[upper] + slope * (here - x[upper]))[between]
        return result

    def _at(self, devices: int, portion: float) -> float:
        given = self.points.get((devices, int(portion))) if portion == int(portion) else None
        if given is not None:
            return given
        known = sorted((c, s) for (n, c), s in self.points.items() if n == devices)
        if len(known) == 1:
            return known[0][1] * portion / known[0][0]
        upper = next((i for i, (c, _) in enumerate(known) if c >= portion and i), len(known) - 1)
        (c0, s0), (c1, s1) = known[upper - 1], known[upper]
        return max(s0 + (s1 - s0) * (portion - c0) / (c1 - c0), 0.0)


@dataclass(frozen=True, kw_only=True)
class StreamCost(Cost):
    """A generator. ``lengths``: sorted decoding steps that stand for their distribution. ``slots``: what to choose
    from. A decoding step takes ``alpha + beta·active``; ``fixed`` comes before the first."""

    lengths: tuple[float, ...] = ()
    slots: tuple[int, ...] = (1,)
    alpha: float = 0.0
    beta: float = 0.0
    fixed: float = 0.0
    group: int = 1

    @property
    def streams(self) -> bool:
        return True

    def options(self, portion: int) -> tuple[int, ...]:
        return self.slots

    def seconds(self, devices: Ints, portion: float, option: int) -> Floats:
        each = np.ceil(portion / np.maximum(devices // self.replica, 1)).astype(int)
        found = {int(count): self._curve(int(count), math.ceil(portion), option)[-1] for count in np.unique(each)}
        return np.array([self.fixed + found[int(count)] for count in each])

    def release(self, devices: int, portion: int, parts: int, option: int) -> Floats:
        count = int(np.ceil(portion / max(devices // self.replica, 1)))
        return self.fixed + streaming.at_parts(self._curve(count, portion, option), parts)

    def release_table(self, devices: Ints, portion: int, parts: int, option: int) -> Floats:
        """``release`` for many device counts: one row each."""
        each, back = np.unique(
            np.ceil(portion / np.maximum(devices // self.replica, 1)).astype(int), return_inverse=True
        )
        rows = [streaming.at_parts(self._curve(int(count), portion, option), parts) for count in each]
        return self.fixed + np.array(rows)[back]

    def _curve(self, count: int, portion: int, slots: int) -> tuple[float, ...]:
        if not self.lengths:
            raise SchedError("a streaming stage needs the lengths of its samples")
        return streaming.curve(self.lengths, count, portion, self.group, slots, self.alpha, self.beta)


APART, IN_TURN = 1, 2


@dataclass(frozen=True, kw_only=True)
class SplitCost(Cost):
    """A cycle's times from its own search (``cycles.collapse``). Options: ``APART`` on a split of the devices,
    ``IN_TURN`` on the same ones. ``table[(portion, option)]``: seconds, bytes held and bytes at work by device count,
    and the split: (devices of the first, of the second, sub-batches). ``paired``: both members are on devices."""

    table: Mapping[tuple[int, int], tuple[Floats, Floats, Floats, tuple[tuple[int, int, int], ...]]] = field(
        default_factory=dict
    )
    paired: bool = True

    def options(self, portion: int) -> tuple[int, ...]:
        return tuple(option for size, option in self.table if size == portion)

    def seconds(self, devices: Ints, portion: float, option: int) -> Floats:
        found: Floats = self.table[int(portion), option][0][devices]
        return found

    def resident(self, devices: Ints, option: int = 0) -> Floats:
        held = [row[1][devices] for (_, kind), row in self.table.items() if option in (0, kind)]
        found: Floats = np.max(held, axis=0)
        return found

    def working(self, devices: Ints, portion: int, option: int) -> Floats:
        return np.maximum(self.table[portion, option][2][devices] - self.resident(devices, option), 0.0)
