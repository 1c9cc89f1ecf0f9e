"""What a stage costs: E(stage, devices, portion, option), its memory and its switches.

An *option* is what free memory buys: the micro-batch of a stage that works in steps, the slots of one that streams.
Arrays over device counts go in and out, because a search asks for all counts at once. For a CPU stage ``devices`` is
its number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlinf_sched import streaming
from rlinf_sched.graph import SchedError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device: ``resident`` when loaded (divided by the replicas when ``sharded``), ``item`` more for
    each item of a micro-batch or slot, ``remainder`` that stays after an offload."""

    resident: float = 0.0
    sharded: bool = False
    item: float = 0.0
    remainder: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What all costs have. ``load`` and ``offload`` are seconds. ``error``: relative error on held-out points."""

    memory: Memory = Memory()
    load: float = 0.0
    offload: float = 0.0
    replica: int = 1
    error: float = 0.0
    streams = False

    def options(self, portion: int) -> tuple[int, ...]:
        """Micro-batches or slots to choose from; ``(0,)`` when there is no choice."""
        return (0,)

    def seconds(self, devices: Ints, portion: int, option: int) -> Floats:
        """Time of one portion on each of these device counts (infinite: impossible)."""
        raise NotImplementedError

    def release(self, devices: int, portion: int, parts: int, option: int) -> Floats:
        """When 1/parts, 2/parts, … of a portion have left. Only what streams releases before the end."""
        return np.full(parts, float(self.seconds(np.array([devices]), portion, option)[0]))

    def release_table(self, devices: Ints, portion: int, parts: int, option: int) -> Floats:
        """``release`` for many device counts: one row each."""
        return np.array([self.release(int(n), portion, parts, option) for n in devices])

    def resident(self, devices: Ints, option: int = 0) -> Floats:
        """Bytes per device while loaded and idle."""
        whole = np.full(len(devices), float(self.memory.resident))
        return whole / np.maximum(devices // self.replica, 1) if self.memory.sharded else whole

    def working(self, devices: Ints, portion: int, option: int) -> Floats:
        """Bytes per device that work adds to ``resident``."""
        each = np.ceil(portion / np.maximum(devices // self.replica, 1))
        return self.memory.item * (np.minimum(each, option) if option else each)


@dataclass(frozen=True, kw_only=True)
class FormulaCost(Cost):
    """fixed + serial·c + spread·x + step·steps + log·log2(replicas), with x = c / replicas; where the stage works in
    micro-batches, steps = ceil(c / (replicas·micro)) and x = steps·micro: a staircase."""

    fixed: float = 0.0
    serial: float = 0.0
    spread: float = 0.0
    step: float = 0.0
    log: float = 0.0
    micro: tuple[int, ...] = ()

    def options(self, portion: int) -> tuple[int, ...]:
        return self.micro or (0,)

    def seconds(self, devices: Ints, portion: int, option: int) -> Floats:
        replicas = np.maximum(devices // self.replica, 1).astype(float)
        if option:
            steps = np.ceil(portion / (replicas * option))
            shared = steps * option
        else:
            steps = np.zeros(len(replicas))
            shared = portion / replicas
        rest = self.spread * shared + self.step * steps + self.log * np.log2(replicas)
        return np.asarray(self.fixed + self.serial * portion + rest, dtype=float)


@dataclass(frozen=True, kw_only=True)
class TableCost(Cost):
    """Measured or given times: ``points[(devices, portion)]`` seconds. Exact at its points; between device counts
    along a power law, between portions along a line, beyond the outermost two along the same."""

    points: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def seconds(self, devices: Ints, portion: int, option: int) -> Floats:
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

    def _at(self, devices: int, portion: int) -> float:
        if (devices, portion) in self.points:
            return self.points[devices, portion]
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
    streams = True

    def options(self, portion: int) -> tuple[int, ...]:
        return self.slots

    def seconds(self, devices: Ints, portion: int, option: int) -> Floats:
        each = np.ceil(portion / np.maximum(devices // self.replica, 1)).astype(int)
        found = {int(count): self._curve(int(count), portion, option)[-1] for count in np.unique(each)}
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

    def seconds(self, devices: Ints, portion: int, option: int) -> Floats:
        found: Floats = self.table[portion, option][0][devices]
        return found

    def resident(self, devices: Ints, option: int = 0) -> Floats:
        held = [row[1][devices] for (_, kind), row in self.table.items() if option in (0, kind)]
        found: Floats = np.max(held, axis=0)
        return found

    def working(self, devices: Ints, portion: int, option: int) -> Floats:
        return np.maximum(self.table[portion, option][2][devices] - self.resident(devices, option), 0.0)
