"""Layouts of the usual ways to split a model. Each takes the parameters' specs and gives a checked ``Layout``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rlinf_comm.weights.boxes import Box, extents, flat_range, numel, offset_in, ranges_of, row_major, whole
from rlinf_comm.weights.errors import LayoutError
from rlinf_comm.weights.layout import Layout, Part, RankLayout, Spec

Rule = Literal["chunk", "balanced"]
"""Uneven splits: as ``torch.chunk`` (the last parts shorter, or empty), or sizes that differ by one at most."""
Specs = Mapping[str, Spec]
NO_ALIASES: Mapping[str, str] = {}


def holding(specs: Specs, boxes: Mapping[str, Box]) -> RankLayout:
    """A rank that has one box of each parameter, as a tensor of the box's shape under the parameter's name."""
    places = {name: Spec(extents(box), specs[name].dtype) for name, box in boxes.items()}
    parts = tuple(Part(name, box, name, 0, row_major(extents(box))) for name, box in boxes.items())
    return RankLayout(places, parts)


def replicated(specs: Specs, ranks: int = 1, aliases: Mapping[str, str] = NO_ALIASES) -> Layout:
    """Every rank has every parameter whole."""
    one = holding(specs, {name: whole(spec.shape) for name, spec in specs.items()})
    return Layout(dict(specs), (one,) * ranks, dict(aliases))


def split(
    specs: Specs,
    dims: Mapping[str, int | None],
    parts: int,
    rule: Rule = "chunk",
    aliases: Mapping[str, str] = NO_ALIASES,
) -> Layout:
    """Each parameter split along its dimension of ``dims`` over ``parts`` ranks; ``None`` or not named: replicated."""
    return grid(specs, dims, parts, {}, 1, rule, aliases)


def fsdp(specs: Specs, parts: int, aliases: Mapping[str, str] = NO_ALIASES) -> Layout:
    """As FSDP2 shards: rows (dimension 0) as ``torch.chunk`` cuts them, without padding; scalars replicated."""
    return split(specs, {name: 0 if spec.shape else None for name, spec in specs.items()}, parts, "chunk", aliases)


def grid(
    specs: Specs,
    dims: Mapping[str, int | None],
    tensor_parallel: int,
    stages: Mapping[str, int | Sequence[int]],
    pipeline_parallel: int,
    rule: Rule = "balanced",
    aliases: Mapping[str, str] = NO_ALIASES,
) -> Layout:
    """Tensor times pipeline parallel: rank = stage * tensor_parallel + part.

    ``stages`` names the stage (or stages) that has a parameter; one that is not named is in all of them.
    """
    if tensor_parallel < 1 or pipeline_parallel < 1:
        raise LayoutError(f"cannot split over {tensor_parallel} x {pipeline_parallel} ranks")
    for name, dim in dims.items():
        if name not in specs:
            raise LayoutError(f"{name!r} is to be split but is no parameter")
        if dim is not None and not 0 <= dim < len(specs[name].shape):
            raise LayoutError(f"{name!r} has shape {specs[name].shape}: it cannot be split along dimension {dim}")
    where: dict[str, set[int]] = {}
    for name, stage in stages.items():
        where[name] = {stage} if isinstance(stage, int) else set(stage)
        if name not in specs or not where[name] or not where[name] <= set(range(pipeline_parallel)):
            raise LayoutError(
                f"{name!r} in stage {stage}: there are {pipeline_parallel} stages, and it must be a parameter"
            )
    ranks = []
    for stage in range(pipeline_parallel):
        mine = [name for name in specs if name not in where or stage in where[name]]
        for part in range(tensor_parallel):
            boxes: dict[str, Box] = {}
            for name in mine:
                box, dim = list(whole(specs[name].shape)), dims.get(name)
                if dim is not None:
                    box[dim] = ranges_of(specs[name].shape[dim], tensor_parallel, rule)[part]
                boxes[name] = tuple(box)
            ranks.append(holding(specs, boxes))
    return Layout(dict(specs), tuple(ranks), dict(aliases))


def flat(
    specs: Specs,
    parts: int,
    *,
    each: bool = False,
    rule: Rule = "chunk",
    place: str = "flat",
    aliases: Mapping[str, str] = NO_ALIASES,
) -> Layout:
    """As ZeRO partitions: ranges of flattened tensors, without padding.

    All parameters of a dtype one after the other, cut into ``parts`` ranges, so that a parameter may straddle ranks
    (the place is ``flat.float32``); or, with ``each``, every parameter flattened and cut by itself (its own place).
    """
    if parts < 1:
        raise LayoutError(f"cannot split over {parts} ranks")
    places: list[dict[str, Spec]] = [{} for _ in range(parts)]
    held: list[list[Part]] = [[] for _ in range(parts)]

    def deal(names: Sequence[str], place_name: str, dtype: str) -> None:
        total = sum(numel(specs[name].shape) for name in names)
        for rank, (low, high) in enumerate(ranges_of(total, parts, rule)):
            places[rank][place_name] = Spec((high - low,), dtype)
            at = 0
            for name in names:
                shape = specs[name].shape
                start, end = max(low, at), min(high, at + numel(shape))
                for box in flat_range(shape, start - at, end - at):
                    begins = at + offset_in(whole(shape), box, row_major(shape)) - low
                    held[rank].append(Part(name, box, place_name, begins, row_major(shape)))
                at += numel(shape)

    if each:
        for name, spec in specs.items():
            deal([name], name, spec.dtype)
    else:
        for dtype in dict.fromkeys(spec.dtype for spec in specs.values()):
            deal([name for name, spec in specs.items() if spec.dtype == dtype], f"{place}.{dtype}", dtype)
    ranks = tuple(RankLayout(a, tuple(b)) for a, b in zip(places, held, strict=True))
    return Layout(dict(specs), ranks, dict(aliases))


def fused(layout: Layout, places: Mapping[str, Sequence[str]]) -> Layout:
    """``layout`` with some places of each rank laid one after the other (rows) in one: ``{"qkv": ["q", "k", "v"]}``.

    For every rank the fused places must differ in their first dimension alone.
    """
    ranks = []
    for rank, held in enumerate(layout.ranks):
        specs, moved = dict(held.places), {}
        for new, names in places.items():
            mine = [name for name in names if name in specs]
            if not mine:
                continue
            found = [specs.pop(name) for name in mine]
            first = found[0]
            for name, spec in zip(mine, found, strict=True):
                if not spec.shape or spec.shape[1:] != first.shape[1:] or spec.dtype != first.dtype:
                    raise LayoutError(f"rank {rank}: {name!r} {spec} cannot be fused with {mine[0]!r} {first}")
            at = 0
            for name, spec in zip(mine, found, strict=True):
                moved[name] = (new, at)
                at += numel(spec.shape)
            specs[new] = Spec((sum(spec.shape[0] for spec in found), *first.shape[1:]), first.dtype)
        parts = tuple(
            Part(p.parameter, p.box, moved[p.place][0], p.offset + moved[p.place][1], p.strides)
            if p.place in moved
            else p
            for p in held.parts
        )
        ranks.append(RankLayout(specs, parts))
    return Layout(layout.parameters, tuple(ranks), layout.aliases)
