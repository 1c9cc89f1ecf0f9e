"""Weights kept in shared memory: what a restarted engine is given, and how another process gets them."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlinf_core.errors import RLinfError

ALIGNMENT = 64
Entry = tuple[str, str, tuple[int, ...], int]
"""Name, number format, shape, and where the tensor begins in the file."""


class HeldWeights:
    """The last weights that were installed, in a file without a name in shared memory.

    It costs the model's size once, in the engine's number format, for as long as the engine lives, and is gone with
    the processes that hold it. Other processes read it by ``path`` and ``entries``, without a copy.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.version: int | None = None  # None: nothing was ever installed, or only a part
        self.entries: list[Entry] = []
        self._dtype = dtype
        self._memory: mmap.mmap | None = None
        self._file = _file()

    @property
    def path(self) -> str:
        """Where this process and those of the same user open the file."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def take(self, version: int, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy whole weights in; what was held is replaced."""
        self.version = None
        entries: list[Entry] = []
        end = 0
        for name, tensor in weights:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            entries.append((name, str(dtype).removeprefix("torch."), tuple(tensor.shape), end))
            end += -(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self._memory is None or len(self._memory) != max(end, 1):
            self._memory = None  # tensors that still view the old one keep it
            try:
                os.ftruncate(self._file.fileno(), max(end, 1))
                self._memory = mmap.mmap(self._file.fileno(), max(end, 1))
            except OSError as error:
                raise RLinfError(
                    f"rollout: {end} bytes of shared memory to hold the weights of version {version} are not there: "
                    f"{error}; rollout.max_restarts=0 with rollout.engine_process=false holds none"
                ) from error
        for entry, (_, tensor) in zip(entries, weights, strict=True):
            _view(self._memory, entry).copy_(tensor)
        self.entries, self.version = entries, version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is held, as views."""
        assert self._memory is not None
        for entry in self.entries:
            yield entry[0], _view(self._memory, entry)

    def close(self) -> None:
        self._memory = None
        self._file.close()


def read_weights(path: str, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that ``HeldWeights`` of another process holds, as views that must not be written to."""
    with open(path, "r+b") as file:  # torch wants memory that could be written
        memory = mmap.mmap(file.fileno(), 0)
    for entry in entries:
        yield entry[0], _view(memory, entry)


def _view(memory: mmap.mmap, entry: Entry) -> torch.Tensor:
    _, name, shape, start = entry
    dtype: torch.dtype = getattr(torch, name)
    count = 1
    for size in shape:
        count *= size
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def _file() -> Any:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("rlinf-weights", os.MFD_CLOEXEC), "r+b")
    return tempfile.TemporaryFile(prefix="rlinf-weights-")
