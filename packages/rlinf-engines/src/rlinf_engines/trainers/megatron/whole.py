"""Whole Hugging Face tensors on rank 0 from all ranks' shards, a layer at a time; and shards from whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_engines.trainers.megatron.config import Shape
from rlinf_engines.trainers.megatron.convert import Piece, from_shards, numel, shard_shape, to_shard
from rlinf_engines.trainers.megatron.layout import Layout


def gather_whole(
    stages: Sequence[Sequence[Piece]], shape: Shape, layout: Layout, own: Callable[[int], Tensor], like: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under their Hugging Face names, tied ones once, in the model's order; on rank 0 only.

    Collective over the first replica: every rank runs it to its end, the others are given nothing. ``stages`` are the
    pieces of each stage, ``own`` gives this rank's tensor of its stage's n-th piece, ``like`` is one of their format
    and device. Memory: the pieces of one layer.
    """
    if layout.replica_index:
        return
    for stage, pieces in enumerate(stages):
        start = 0
        for block in _blocks(pieces):
            mine = layout.stage == stage
            first, start = start, start + len(block)
            if block[0].copy:
                continue
            flat = torch.cat([own(first + i).reshape(-1) for i in range(len(block))]) if mine else None
            if layout.rank:
                if flat is not None:
                    dist.send(flat, 0)
                continue
            size = sum(numel(piece, shape, layout.tp) for piece in block)
            shards = []
            for part in range(layout.tp):
                source = layout.rank_of(stage, part)
                if source == 0:
                    assert flat is not None
                    shards.append(flat)
                else:
                    buffer = torch.empty(size, dtype=like.dtype, device=like.device)
                    dist.recv(buffer, source)
                    shards.append(buffer)
            yield from _unpack(block, shape, layout.tp, shards)


def place_whole(
    pieces: Sequence[Piece], shape: Shape, layout: Layout, whole: Mapping[str, Tensor], own: Callable[[int], Tensor]
) -> None:
    """Set this rank's tensors (``own`` as in ``gather_whole``) from whole ones."""
    with torch.no_grad():
        for index, piece in enumerate(pieces):
            shard = to_shard(piece, shape, [whole[name] for name in piece.sources], layout.part, layout.tp)
            own(index).copy_(shard)


def _blocks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that travel together: those of one layer, others alone."""
    block: list[Piece] = []
    key = ""
    for piece in pieces:
        here = ".".join(piece.name.split(".")[:3]) if piece.name.startswith("decoder.layers.") else piece.name
        if block and here != key:
            yield block
            block = []
        block.append(piece)
        key = here
    if block:
        yield block


def _unpack(block: Sequence[Piece], shape: Shape, tp: int, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    sizes = [numel(piece, shape, tp) for piece in block]
    split = [shard.split(sizes) for shard in shards]
    for index, piece in enumerate(block):
        parts = [chunks[index].view(shard_shape(piece, shape, tp)) for chunks in split]
        yield from zip(piece.sources, from_shards(piece, shape, parts), strict=True)
