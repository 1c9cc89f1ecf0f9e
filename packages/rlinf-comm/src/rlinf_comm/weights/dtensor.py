"""The layout of a model whose parameters are DTensors (FSDP2, tensor parallel, both)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlinf_comm.weights.boxes import Box, chunk, whole
from rlinf_comm.weights.builders import NO_ALIASES, holding
from rlinf_comm.weights.errors import LayoutError
from rlinf_comm.weights.layout import Layout, Spec

if TYPE_CHECKING:
    import torch


def spec_of(tensor: torch.Tensor) -> Spec:
    """Global shape and dtype."""
    return Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def from_dtensors(tensors: Mapping[str, torch.Tensor], ranks: int, aliases: Mapping[str, str] = NO_ALIASES) -> Layout:
    """The layout over all ``ranks`` of the trainer, from what any one of them has; no communication.

    A place is the local tensor (``to_local()``) under the parameter's name. Plain tensors are taken as replicated.
    Shards are cut as ``torch.chunk`` does, which is what DTensor does; sums that are not reduced yet (``Partial``) are
    refused.
    """
    from torch.distributed.tensor import DTensor

    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    boxes: list[dict[str, Box]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            for held in boxes:
                held[name] = whole(specs[name].shape)
            continue
        mesh = tensor.device_mesh.mesh
        names = list(mesh.size())
        for coordinate in _coordinates(names):
            rank = int(mesh[coordinate])
            if not 0 <= rank < ranks:
                raise LayoutError(f"{name!r} lies on rank {rank}, but there are {ranks} ranks")
            boxes[rank][name] = _shard(name, whole(specs[name].shape), names, coordinate, tensor.placements)
    return Layout(specs, tuple(holding(specs, held) for held in boxes), dict(aliases))


def _coordinates(sizes: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*head, i) for head in found for i in range(size)]
    return found


def _shard(name: str, box: Box, sizes: list[int], coordinate: tuple[int, ...], placements: Any) -> Box:
    """The box of the rank at ``coordinate`` of the mesh.

    FSDP over tensor parallel shards one dimension twice with the mesh in the other order: its strided shard says how
    often the dimension is cut before, and so comes after the cuts of the mesh dimensions to its right.
    """
    from torch.distributed.tensor import Shard

    cuts: list[tuple[bool, int]] = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", None)
        if factor is not None:
            later = 1
            for other in range(axis + 1, len(sizes)):
                if getattr(placements[other], "dim", None) == placement.dim:
                    later *= sizes[other]
            if later != factor:
                raise LayoutError(f"{name!r}: {placement} on mesh {tuple(sizes)} is not understood")
            cuts.append((True, axis))
        elif isinstance(placement, Shard):
            cuts.append((False, axis))
        else:
            raise LayoutError(f"{name!r} is {placement}: only sharded and replicated tensors can be sent")
    ranges = list(box)
    plain, strided = [axis for late, axis in cuts if not late], [axis for late, axis in cuts if late]
    for axis in [*plain, *reversed(strided)]:
        dim = placements[axis].dim
        low, high = ranges[dim]
        start, end = chunk(high - low, sizes[axis])[coordinate[axis]]
        ranges[dim] = (low + start, low + end)
    return tuple(ranges)
