"""Which rank holds which part of which parameter, and where in its own memory. Plain data, pure functions.

A *place* is a tensor that a rank really has, contiguous, under a name of its own (usually the parameter's; a fused
``qkv_proj`` is one place with parts of three parameters; a flat ZeRO partition one place with parts of many). A *part*
says that a box of a parameter lies in a place from an element on, with strides. Ranks may hold the same elements
(replicas); together they hold all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlinf_comm.weights.boxes import (
    Box,
    Shape,
    dense,
    extents,
    flat_range,
    intersect,
    numel,
    row_major,
    show,
    subtract,
    volume,
    whole,
)
from rlinf_comm.weights.errors import LayoutError

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor's shape and dtype (torch's name without ``torch.``)."""

    shape: Shape
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return numel(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """``box`` of ``parameter`` lies in ``place`` from element ``offset`` on, with ``strides`` (elements)."""

    parameter: str
    box: Box
    place: str
    offset: int
    strides: Shape


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds."""

    places: Mapping[str, Spec] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A model over ranks. ``aliases``: tied name -> the parameter that stands for it.

    The constructor checks everything and raises ``LayoutError``.
    """

    parameters: Mapping[str, Spec]
    ranks: tuple[RankLayout, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def owner(self, name: str) -> str:
        return self.aliases.get(name, name)

    @cached_property
    def holders(self) -> Mapping[str, tuple[tuple[int, Part], ...]]:
        """Parameter -> (rank, part) of all that is held of it, empty parts left out."""
        found: dict[str, list[tuple[int, Part]]] = {name: [] for name in self.parameters}
        for rank, held in enumerate(self.ranks):
            for part in held.parts:
                if volume(part.box):
                    found[part.parameter].append((rank, part))
        return {name: tuple(entries) for name, entries in found.items()}

    @cached_property
    def data(self) -> bytes:
        """As JSON; ranks that are alike are written once."""
        distinct: list[Any] = []
        index: list[int] = []
        known: dict[int, int] = {}
        for held in self.ranks:
            if id(held) not in known:
                entry = [
                    {name: [list(spec.shape), spec.dtype] for name, spec in held.places.items()},
                    [[p.parameter, p.box, p.place, p.offset, p.strides] for p in held.parts],
                ]
                if entry not in distinct:
                    distinct.append(entry)
                known[id(held)] = distinct.index(entry)
            index.append(known[id(held)])
        parameters = {name: [list(spec.shape), spec.dtype] for name, spec in self.parameters.items()}
        whole_data = {"parameters": parameters, "aliases": dict(self.aliases), "distinct": distinct, "ranks": index}
        return json.dumps(whole_data, separators=(",", ":")).encode()

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self.data, digest_size=12).hexdigest()

    @classmethod
    def from_data(cls, data: bytes) -> Layout:
        """Inverse of ``data``. Raises ``LayoutError`` when it is none."""
        try:
            tree = json.loads(data)
            distinct = [
                RankLayout(
                    {name: Spec(tuple(shape), dtype) for name, (shape, dtype) in places.items()},
                    tuple(
                        Part(name, tuple((low, high) for low, high in box), place, offset, tuple(strides))
                        for name, box, place, offset, strides in parts
                    ),
                )
                for places, parts in tree["distinct"]
            ]
            parameters = {name: Spec(tuple(shape), dtype) for name, (shape, dtype) in tree["parameters"].items()}
            ranks = tuple(distinct[i] for i in tree["ranks"])
            aliases = dict(tree["aliases"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise LayoutError(f"this is not the data of a layout: {error}") from error
        return cls(parameters, ranks, aliases)


def _check(layout: Layout) -> None:
    for name, spec in layout.parameters.items():
        _check_spec(f"parameter {name!r}", spec)
    for name, owner in layout.aliases.items():
        if name in layout.parameters:
            raise LayoutError(f"{name!r} is a parameter and tied to {owner!r}: it can be one of the two")
        if owner not in layout.parameters:
            raise LayoutError(f"{name!r} is tied to {owner!r}, which is no parameter")
    if not layout.ranks:
        raise LayoutError("a layout needs at least one rank")
    checked: set[int] = set()
    for rank, held in enumerate(layout.ranks):
        if id(held) not in checked:
            checked.add(id(held))
            _check_rank(layout, rank, held)
    _check_cover(layout)


def _check_spec(what: str, spec: Spec) -> None:
    if spec.dtype not in ITEM_BYTES:
        raise LayoutError(f"{what}: dtype {spec.dtype!r} is unknown")
    if any(size < 0 for size in spec.shape):
        raise LayoutError(f"{what}: shape {spec.shape} has a negative size")


def _check_rank(layout: Layout, rank: int, held: RankLayout) -> None:
    for name, own in held.places.items():
        _check_spec(f"rank {rank}: place {name!r}", own)
    local: dict[str, list[tuple[Box, Part]]] = {}
    for part in held.parts:
        what = f"rank {rank}: {part.parameter!r}{show(part.box)}"
        if part.parameter not in layout.parameters:
            tied = f" (it is tied to {layout.aliases[part.parameter]!r})" if part.parameter in layout.aliases else ""
            raise LayoutError(f"{what}: there is no such parameter{tied}")
        if part.place not in held.places:
            raise LayoutError(f"{what}: the rank has no place {part.place!r}")
        spec, place = layout.parameters[part.parameter], held.places[part.place]
        if place.dtype != spec.dtype:
            raise LayoutError(f"{what}: place {part.place!r} is {place.dtype}, the parameter {spec.dtype}")
        if len(part.box) != len(spec.shape) or len(part.strides) != len(spec.shape):
            raise LayoutError(f"{what}: the parameter has {len(spec.shape)} dimensions")
        if any(not 0 <= low <= high <= size for (low, high), size in zip(part.box, spec.shape, strict=True)):
            raise LayoutError(f"{what}: outside the parameter's shape {spec.shape}")
        if volume(part.box):
            local.setdefault(part.place, []).extend((box, part) for box in _local_boxes(what, part, place))
    for place_name, entries in local.items():
        _check_disjoint(rank, place_name, entries)


def _local_boxes(what: str, part: Part, place: Spec) -> list[Box]:
    """Where the part lies, in coordinates of the place: one box, or those that a run of elements is made of."""
    size = numel(place.shape)
    end = part.offset + sum((n - 1) * step for n, step in zip(extents(part.box), part.strides, strict=True)) + 1
    if part.offset < 0 or end > size or any(step < 0 for step in part.strides):
        raise LayoutError(f"{what}: elements {part.offset} to {end} of {part.place!r}, which has {size}")
    if dense(part.box, part.strides):
        return list(flat_range(place.shape, part.offset, part.offset + volume(part.box)))
    steps = row_major(place.shape)
    corner, rest = [], part.offset
    for size, step in zip(place.shape, steps, strict=True):
        corner.append(min(rest // step, size - 1))
        rest -= corner[-1] * step
    box = [(at, at + 1) for at in corner]
    dims = list(range(len(steps)))
    for count, stride in zip(extents(part.box), part.strides, strict=True):
        if count == 1:
            continue
        dim = next((d for d in dims if steps[d] == stride and place.shape[d] > 1), None)
        if dim is None or box[dim][0] + count > place.shape[dim]:
            raise LayoutError(f"{what}: strides {part.strides} are not those of a box of {part.place!r} {place.shape}")
        dims.remove(dim)
        box[dim] = (box[dim][0], box[dim][0] + count)
    return [tuple(box)]


def _check_disjoint(rank: int, place: str, entries: Sequence[tuple[Box, Part]]) -> None:
    ordered = sorted(entries, key=lambda entry: entry[0])
    open_ones: list[tuple[Box, Part]] = []
    for box, part in ordered:
        # Sorted by the first range: what ended before this one begins is out of the way of all that follow.
        open_ones = [entry for entry in open_ones if not box or entry[0][0][1] > box[0][0]]
        for other_box, other in open_ones:
            if intersect(box, other_box) is not None:
                raise LayoutError(
                    f"rank {rank}: {part.parameter!r}{show(part.box)} and {other.parameter!r}{show(other.box)} lie in "
                    f"the same elements of {place!r}"
                )
        open_ones.append((box, part))


def _check_cover(layout: Layout) -> None:
    for name, entries in layout.holders.items():
        missing = uncovered(layout.parameters[name].shape, {part.box for _, part in entries})
        if missing:
            raise LayoutError(f"no rank holds {name!r}{show(missing[0])} (shape {layout.parameters[name].shape})")


def uncovered(shape: Shape, boxes: Iterable[Box]) -> list[Box]:
    """What of a tensor none of the boxes holds."""
    left = [whole(shape)] if numel(shape) else []
    for box in sorted(boxes):
        if not left:
            break
        left = [rest for part in left for rest in subtract(part, box)]
    return left
