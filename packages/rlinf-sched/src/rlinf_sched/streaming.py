"""Generation as a streaming stage: slots, decoding steps, lengths; its total and its release curve.

A replica decodes up to ``slots`` samples at once; one decoding step takes ``alpha + beta * active`` seconds; a free
slot is filled at once with the next sample. The first groups finish long before the last one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def decode(lengths: Sequence[float] | Floats, slots: int, alpha: float, beta: float) -> Floats:
    """Finish time of each sample (seconds from the start) on one replica, samples taken in the given order."""
    finish = np.zeros(len(lengths))
    queue = [(float(length), index) for index, length in enumerate(lengths[:slots])]
    heapq.heapify(queue)
    waiting = len(queue)
    steps = clock = 0.0
    while queue:
        end, index = heapq.heappop(queue)
        clock += (end - steps) * (alpha + beta * (len(queue) + 1))
        steps = end
        finish[index] = clock
        if waiting < len(lengths):
            heapq.heappush(queue, (steps + float(lengths[waiting]), waiting))
            waiting += 1
    return finish


def group_ends(finish: Floats, group: int) -> Floats:
    """Sorted times at which whole groups of consecutive samples are complete (a remainder joins the last one)."""
    count = max(1, len(finish) // group)
    cuts = np.arange(count) * group
    return np.sort(np.maximum.reduceat(finish, cuts))


@lru_cache(maxsize=4096)
def representative(lengths: tuple[float, ...], count: int, of: int, seed: int = 0) -> tuple[float, ...]:
    """Lengths of the replica that finishes last: ``count`` quantiles in a fixed random order, the largest of them
    being the one expected among all ``of`` samples. ``lengths`` are sorted and stand for the distribution."""
    at = (np.arange(count) + 0.5) / count
    at[-1] = 1 - 0.5 / max(of, 1)
    grid = (np.arange(len(lengths)) + 0.5) / len(lengths)
    drawn = np.interp(at, grid, lengths)
    return tuple(float(x) for x in np.random.default_rng([seed, count]).permutation(drawn))


@lru_cache(maxsize=4096)
def curve(
    lengths: tuple[float, ...], count: int, of: int, group: int, slots: int, alpha: float, beta: float
) -> tuple[float, ...]:
    """Times at which complete groups leave the critical replica (``count`` of the ``of`` samples in all), rising."""
    finish = decode(representative(lengths, count, of), slots, alpha, beta)
    return tuple(float(x) for x in group_ends(finish, group))


def at_parts(ends: Sequence[float] | Floats, parts: int) -> Floats:
    """r_0 … r_{parts-1}: when 1/parts, 2/parts, … of the groups are complete."""
    index = np.ceil((np.arange(parts) + 1) / parts * len(ends) - 1e-9).astype(int) - 1
    found: Floats = np.asarray(ends, dtype=float)[np.clip(index, 0, len(ends) - 1)]
    return found


def drawn(
    lengths: Sequence[float],
    count: int,
    replicas: int,
    group: int,
    slots: int,
    alpha: float,
    beta: float,
    rng: np.random.Generator,
) -> Floats:
    """When whole groups leave, rising: ``count`` lengths drawn from their distribution, groups dealt to the replicas in
    turn."""
    grid = (np.arange(len(lengths)) + 0.5) / len(lengths)
    found = np.interp(rng.random(count), grid, lengths)
    groups = np.arange(count) // group
    ends = []
    for replica in range(min(replicas, int(groups[-1]) + 1)):
        finish = decode(found[groups % replicas == replica], slots, alpha, beta)
        ends.append(group_ends(finish, group))
    return np.sort(np.concatenate(ends))


def weibull(shape: float, scale: float, clip: float, points: int = 256) -> tuple[float, ...]:
    """Sorted quantiles of a clipped Weibull distribution."""
    at = (np.arange(points) + 0.5) / points
    return tuple(float(x) for x in np.minimum(scale * (-np.log1p(-at)) ** (1 / shape), clip))
