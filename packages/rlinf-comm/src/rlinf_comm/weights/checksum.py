"""Checksums of buckets, on request: they find bytes that changed on the way, not a hostile peer."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlinf_comm.weights.errors import MismatchError

KINDS = ("none", "crc32", "xxh3")
"""``crc32`` is Python's own; ``xxh3`` needs the package ``xxhash`` on both sides and is three times as fast."""


def check_kind(kind: str) -> None:
    """Raise ``MismatchError`` when this process cannot compute such checksums."""
    if kind not in KINDS:
        raise MismatchError(f"checksum {kind!r} is unknown; there are {', '.join(KINDS)}")
    if kind == "xxh3" and importlib.util.find_spec("xxhash") is None:
        raise MismatchError(
            "checksum 'xxh3': the package xxhash is not installed here (rlinf-comm[checksum]); 'crc32' needs nothing"
        )


def checksum(kind: str, pieces: Sequence[torch.Tensor]) -> int:
    """Over the bytes of contiguous tensors, one after the other. Those on a device are copied to the host for it."""
    if kind == "none":
        return 0
    if kind == "crc32":
        value = 0
        for piece in pieces:
            value = zlib.crc32(_bytes(piece), value)
        return value
    return _xxh3(pieces)


def _xxh3(pieces: Sequence[torch.Tensor]) -> int:
    import xxhash

    new: Callable[[], Any] = xxhash.xxh3_64
    digest = new()
    for piece in pieces:
        digest.update(_bytes(piece))
    return int(digest.intdigest())


def _bytes(piece: torch.Tensor) -> Any:
    if not piece.numel():
        return memoryview(b"")
    # Not reshape: a tensor of one element may have any stride, and keeps it.
    flat = torch.as_strided(piece.cpu().contiguous(), (piece.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
