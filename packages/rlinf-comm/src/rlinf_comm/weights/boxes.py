"""Geometry of parts of a tensor: boxes of half-open ranges, one range for each dimension.

A scalar's only box is ``()``, with one element. A box with an empty range holds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

Range = tuple[int, int]
Box = tuple[Range, ...]
Shape = tuple[int, ...]


def whole(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def extents(box: Box) -> Shape:
    return tuple(high - low for low, high in box)


def volume(box: Box) -> int:
    count = 1
    for low, high in box:
        count *= max(0, high - low)
    return count


def numel(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def row_major(shape: Shape) -> Shape:
    """Strides (elements) of a dense tensor, the last dimension fastest."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(box: Box, strides: Shape) -> bool:
    """Whether a box that lies in memory with these strides is one run without gaps, row by row."""
    sizes = extents(box)
    wanted = row_major(sizes)
    return all(size <= 1 or have == want for size, have, want in zip(sizes, strides, wanted, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, or ``None`` when there is none."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """``a`` without ``b``, as disjoint boxes (two for each dimension at most)."""
    common = intersect(a, b)
    if common is None:
        return [a] if volume(a) else []
    rest: list[Box] = []
    left = list(a)
    for dim, (low, high) in enumerate(common):
        for part in ((a[dim][0], low), (high, a[dim][1])):
            if part[0] < part[1]:
                rest.append((*left[:dim], part, *left[dim + 1 :]))
        left[dim] = (low, high)
    return rest


def offset_in(box: Box, part: Box, strides: Shape) -> int:
    """Elements from the first one of ``box`` to the first one of ``part``."""
    return sum((p[0] - b[0]) * step for b, p, step in zip(box, part, strides, strict=True))


def flat_range(shape: Shape, low: int, high: int) -> Iterator[Box]:
    """The boxes, in order, that elements ``low`` to ``high`` of the flattened tensor are made of.

    Each is one run of the flattened tensor; there are at most ``2 * len(shape) - 1`` of them.
    """
    if low >= high:
        return
    if not shape:
        yield ()
        return
    if len(shape) == 1:
        yield ((low, high),)
        return
    row = numel(shape[1:])
    first, first_rest = divmod(low, row)
    last, last_rest = divmod(high, row)
    if first == last:
        yield from (((first, first + 1), *box) for box in flat_range(shape[1:], first_rest, last_rest))
        return
    if first_rest:
        yield from (((first, first + 1), *box) for box in flat_range(shape[1:], first_rest, row))
        first += 1
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    if last_rest:
        yield from (((last, last + 1), *box) for box in flat_range(shape[1:], 0, last_rest))


def pieces(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into parts of at most ``most`` elements, along the leading dimensions first, in order."""
    if volume(box) <= most:
        yield box
        return
    for dim, (low, high) in enumerate(box):
        if high - low == 1:
            continue
        inner = volume(box[dim + 1 :])
        rows = max(1, most // inner)
        for start in range(low, high, rows):
            part = (*box[:dim], (start, min(start + rows, high)), *box[dim + 1 :])
            yield from pieces(part, most)
        return


def show(box: Box) -> str:
    """``[0:4, 8:16]``."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


def chunk(size: int, parts: int) -> list[Range]:
    """As ``torch.chunk``: equal parts of the size rounded up; the last ones may be shorter or empty."""
    step = -(-size // parts) if size else 0
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


def balanced(size: int, parts: int) -> list[Range]:
    """Sizes that differ by one at most, the larger ones first."""
    base, more = divmod(size, parts)
    ends = [i * base + min(i, more) for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


def ranges_of(size: int, parts: int, rule: str) -> Sequence[Range]:
    return chunk(size, parts) if rule == "chunk" else balanced(size, parts)
