"""Sharing out work of unequal length. Pure functions of the lengths: every rank that knows them gets the same answer.

Indices refer to the given sequence of weights. Ties go to the smaller index, so results do not depend on hashing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from rlinf_algos.errors import AlgorithmError

Parts = list[list[int]]


def karmarkar_karp(weights: Sequence[float], parts: int, *, equal_size: bool = False) -> Parts:
    """Split into ``parts`` with sums as equal as the largest-differencing method makes them.

    Karmarkar and Karp (1982), k-way: the two partial solutions with the largest spread are merged, the heaviest part
    of one with the lightest of the other, until one is left. A solution holds only its parts that are not empty,
    which keeps early merges small.

    Args:
        weights: numbers of at least 0.
        parts: at least 1.
        equal_size: every part gets the same number of items (their number must be a multiple of ``parts``).

    Returns:
        ``parts`` sorted lists of indices, ordered by their first index, empty ones last.
    """
    values = _weights(weights, parts)
    n = len(values)
    if equal_size and n % parts:
        raise AlgorithmError(f"equal_size needs a multiple of {parts} items, got {n}")
    order = sorted(range(n), key=lambda i: (-values[i], i))
    if not n:
        return [[] for _ in range(parts)]
    # A solution: ascending list of (sum, serial, items); serial breaks ties. Spread counts empty parts as 0.
    heap: list[tuple[float, int, list[tuple[float, int, list[int]]]]] = []
    step = parts if equal_size else 1
    for serial, start in enumerate(range(0, n, step)):
        solution = [(values[i], i, [i]) for i in reversed(order[start : start + step])]
        heap.append((_spread(solution, parts), serial, solution))
    heapify(heap)
    while len(heap) > 1:
        _, _, a = heappop(heap)
        _, tag, b = heap[0]
        if len(a) < len(b):
            a, b = b, a
        merged = _merge(a, b, parts)
        heapreplace(heap, (_spread(merged, parts), tag, merged))
    result = [sorted(items) for _, _, items in heap[0][2]]
    result.sort()
    return result + [[] for _ in range(parts - len(result))]


def _spread(solution: list[tuple[float, int, list[int]]], parts: int) -> float:
    """Negative spread, for a heap that gives the smallest first."""
    low = solution[0][0] if len(solution) == parts else 0.0
    return low - solution[-1][0]


def _merge(
    a: list[tuple[float, int, list[int]]], b: list[tuple[float, int, list[int]]], parts: int
) -> list[tuple[float, int, list[int]]]:
    """Heaviest with lightest. ``a`` has at least as many parts as ``b`` and is used up."""
    free = parts - len(a)
    if len(b) == 1 and free:
        insort(a, b[0])
        return a
    # b's lightest parts meet a's heaviest; with free places in a, b's heaviest stay alone.
    joined = min(len(b), max(len(b) - free, 0))
    merged = list(b[joined:])
    top = len(a)
    for i in range(joined):
        # a's lightest takes b's heaviest among the joined.
        weight, tag, items = a[i]
        other = b[joined - 1 - i]
        merged.append((weight + other[0], min(tag, other[1]), items + other[2]))
    merged.extend(a[joined:top])
    merged.sort()
    return merged


def first_fit_decreasing(weights: Sequence[float], capacity: float) -> Parts:
    """Pack into as few bins of ``capacity`` as first-fit decreasing needs (at most 11/9 of the optimum, and 2/3 of
    one).

    Johnson (1973). The first bin that fits is found by a tree over the bins' room: n log n in all.

    Returns:
        Bins as sorted lists of indices, in the order they were opened.

    Raises:
        AlgorithmError: an item exceeds the capacity, by name.
    """
    values = _weights(weights, 1)
    if not capacity > 0:
        raise AlgorithmError(f"capacity must be above 0, got {capacity}")
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if order and values[order[0]] > capacity:
        raise AlgorithmError(f"item {order[0]} weighs {values[order[0]]:g}, more than the capacity {capacity:g}")
    leaves = 1
    while leaves < len(values):
        leaves *= 2
    room = [capacity] * (2 * leaves)
    bins: Parts = []
    for i in order:
        w = values[i]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < w:
                node += 1
        place = node - leaves
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        room[node] -= w
        node //= 2
        while node:
            left, right = room[2 * node], room[2 * node + 1]
            room[node] = left if left > right else right
            node //= 2
    return [sorted(b) for b in bins]


def micro_batches(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[Parts]:
    """Micro-batches of at most ``max_tokens`` for every rank, the same number on each.

    Items go to ranks by Karmarkar-Karp, then into micro-batches by first-fit decreasing; ranks that need fewer than
    the largest number split their fullest ones further, and have empty ones where they run out of items (collectives
    stay in step).

    Returns:
        ``result[rank][k]``: sorted indices into ``lengths``.
    """
    if ranks < 1:
        raise AlgorithmError(f"ranks must be at least 1, got {ranks}")
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise AlgorithmError(f"lengths[{i}] is {length}, more than max_tokens ({max_tokens})")
    shares = karmarkar_karp(lengths, ranks)
    packed = []
    for share in shares:
        bins = first_fit_decreasing([lengths[i] for i in share], max_tokens)
        packed.append([[share[j] for j in b] for b in bins])
    count = max((len(p) for p in packed), default=0)
    return [_even(p, count, lengths) for p in packed]


def _even(bins: Parts, count: int, lengths: Sequence[int]) -> Parts:
    """Split the heaviest bins that can be split until there are ``count``; fill up with empty ones."""
    heap = [(-sum(lengths[i] for i in b), n, b) for n, b in enumerate(bins)]
    heapify(heap)
    done: Parts = []
    serial = len(bins)
    while heap and len(heap) + len(done) < count:
        _, _, largest = heappop(heap)
        if len(largest) == 1:
            done.append(largest)
            continue
        for half in karmarkar_karp([lengths[i] for i in largest], 2):
            part = [largest[j] for j in half]
            if part:
                heappush(heap, (-sum(lengths[i] for i in part), serial, part))
                serial += 1
    result = sorted([*done, *(b for _, _, b in heap)])
    return result + [[] for _ in range(count - len(result))]


def imbalance(weights: Sequence[float], parts: Parts) -> float:
    """Heaviest part over the mean part; 1 is perfect (also when everything weighs nothing)."""
    sums = [sum(weights[i] for i in part) for part in parts]
    mean = sum(sums) / len(sums) if sums else 0.0
    return max(sums) / mean if mean else 1.0


def _weights(weights: Sequence[float], parts: int) -> list[float]:
    if parts < 1:
        raise AlgorithmError(f"parts must be at least 1, got {parts}")
    values = list(weights)
    for i, w in enumerate(values):
        if not 0 <= w < float("inf"):
            raise AlgorithmError(f"weights[{i}] is {w}: weights must be finite numbers of at least 0")
    return values
