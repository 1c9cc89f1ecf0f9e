"""A rank's own tensors against its layout: checked before anything moves, then looked at piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rlinf_comm.weights.boxes import Box, Shape, dense, extents, numel
from rlinf_comm.weights.copying import copy_all
from rlinf_comm.weights.errors import LayoutError, MismatchError
from rlinf_comm.weights.plan import Bucket, Landing, Move

if TYPE_CHECKING:
    from rlinf_comm.weights.layout import Layout

Tensors = Mapping[str, torch.Tensor]


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise LayoutError(f"torch has no dtype {name!r}")
    return found


def check_tensors(layout: Layout, rank: int, tensors: Tensors) -> None:
    """Raise ``LayoutError`` naming place and rank when the tensors are not what the layout says."""
    if not 0 <= rank < len(layout.ranks):
        raise LayoutError(f"rank {rank}: the layout has {len(layout.ranks)} ranks")
    places = layout.ranks[rank].places
    for name, spec in places.items():
        if name not in tensors:
            raise LayoutError(f"rank {rank}: tensor {name!r} {spec.shape} of the layout is not there")
        tensor, dtype = tensors[name], str(tensors[name].dtype).removeprefix("torch.")
        if tuple(tensor.shape) != spec.shape:
            raise LayoutError(f"rank {rank}: {name!r} has shape {tuple(tensor.shape)}, the layout says {spec.shape}")
        if dtype != spec.dtype:
            raise LayoutError(f"rank {rank}: {name!r} is {dtype}, the layout says {spec.dtype}")
        if not tensor.is_contiguous():
            raise LayoutError(f"rank {rank}: {name!r} is not contiguous (strides {tuple(tensor.stride())})")
    for name in tensors:
        if name not in places:
            raise LayoutError(f"rank {rank}: tensor {name!r} is not in the layout")


def piece_of(tensor: torch.Tensor, box: Box, offset: int, strides: Shape) -> torch.Tensor:
    """The part of a contiguous tensor in which a box lies, as a view."""
    return tensor.detach().as_strided(extents(box), strides, tensor.storage_offset() + offset)


class Packed:
    """A bucket's pieces at their source: views of the rank's tensors, each with the format in which it is sent."""

    def __init__(self, bucket: Bucket, tensors: Tensors) -> None:
        self.bucket = bucket
        self._pieces = [
            (piece_of(tensors[move.place], move.box, move.offset, move.strides), dtype_of(move.wire))
            for move in bucket.moves
        ]

    @property
    def device(self) -> torch.device:
        """The accelerator that has a piece, if any."""
        devices = [piece.device for piece, _ in self._pieces]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def write(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Copy all pieces to their places in ``out`` (bytes), converting on the way; returns the copies."""
        copies = cut(self.bucket, out)
        copy_all((copy, piece) for (piece, _), copy in zip(self._pieces, copies, strict=True))
        return copies

    def tensors(self) -> list[torch.Tensor]:
        """The pieces as tensors of their own; what is contiguous and needs no conversion is not copied."""
        return [piece.to(dtype).contiguous() for piece, dtype in self._pieces]


def cut(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The pieces of a packed bucket as views of it."""
    if buffer.numel() < bucket.nbytes or buffer.dtype != torch.uint8:
        raise MismatchError(f"a bucket of {bucket.nbytes} bytes came as {buffer.numel()} elements of {buffer.dtype}")
    return [
        buffer[move.start : move.start + move.nbytes].view(dtype_of(move.wire)).view(extents(move.box))
        for move in bucket.moves
    ]


def check_pieces(bucket: Bucket, pieces: Sequence[torch.Tensor]) -> None:
    """Raise ``MismatchError`` when what came is not what the bucket should hold."""
    if len(pieces) != len(bucket.moves):
        raise MismatchError(
            f"bucket {bucket.index} of rank {bucket.source}: {len(pieces)} of {len(bucket.moves)} pieces"
        )
    for move, piece in zip(bucket.moves, pieces, strict=True):
        if tuple(piece.shape) != extents(move.box) or piece.dtype != dtype_of(move.wire):
            raise MismatchError(
                f"bucket {bucket.index} of rank {bucket.source}: {move.parameter!r} came as {tuple(piece.shape)} "
                f"{piece.dtype}, {extents(move.box)} {move.wire} was expected"
            )


class Staging:
    """One version on its way into a rank: what has come, as the tensors of its places.

    A place that came as one piece in its own format is that piece, not copied. Other places are put together in memory
    that is used again for later versions (pages that are touched for the first time cost more than the copy).
    """

    def __init__(self, layout: Layout, rank: int, memory: dict[str, torch.Tensor]) -> None:
        self._places = layout.ranks[rank].places
        self._rank = rank
        self._memory = memory
        self._direct: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()  # buckets of several sources come at the same time

    def add(self, bucket: Bucket, pieces: Sequence[torch.Tensor]) -> None:
        pairs = []
        for landing, move, piece in _landings(self._rank, bucket, pieces):
            if self._is_whole(landing, move):
                self._direct[landing.place] = piece.view(self._places[landing.place].shape)
            else:
                block = self._block(landing.place, piece.device)
                pairs.append((piece_of(block, move.box, landing.offset, landing.strides), piece))
        copy_all(pairs)

    def clear(self) -> None:
        self._direct.clear()

    def finish(self) -> list[tuple[str, torch.Tensor]]:
        """Every place of the rank; elements that no parameter lies in are 0."""
        return [(name, self._direct[name] if name in self._direct else self._block(name)) for name in self._places]

    def _is_whole(self, landing: Landing, move: Move) -> bool:
        place = self._places[landing.place]
        return move.wire == place.dtype and _fills(landing, move, place.shape)

    def _block(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Memory to put a place together in, on the device where its first piece is."""
        with self._lock:
            if name not in self._memory:
                spec = self._places[name]
                self._memory[name] = torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=device)
            return self._memory[name]


class Pieces:
    """As ``Staging``, for a rank whose own tensors are filled in the end: the pieces are kept as they came, and each is
    copied once, to where it belongs."""

    def __init__(self, rank: int, own: Tensors) -> None:
        self._rank = rank
        self._own = own
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, bucket: Bucket, pieces: Sequence[torch.Tensor]) -> None:
        for landing, move, piece in _landings(self._rank, bucket, pieces):
            own = piece_of(self._own[landing.place], move.box, landing.offset, landing.strides)
            self._pairs.append((own, piece))

    def clear(self) -> None:
        self._pairs.clear()

    def copy(self) -> None:
        copy_all(self._pairs)


def _landings(rank: int, bucket: Bucket, pieces: Sequence[torch.Tensor]) -> list[tuple[Landing, Move, torch.Tensor]]:
    return [
        (landing, move, piece)
        for move, piece in zip(bucket.moves, pieces, strict=True)
        for landing in move.landings
        if landing.rank == rank
    ]


def _fills(landing: Landing, move: Move, shape: Shape) -> bool:
    """Whether the move is all of a place of this shape, in its order."""
    whole = numel(extents(move.box)) == numel(shape)
    return whole and landing.offset == 0 and dense(move.box, landing.strides)


Install = Callable[[int, list[tuple[str, torch.Tensor]]], None]
"""Called once with a version and all of a rank's places."""
