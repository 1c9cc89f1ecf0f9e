"""Which transport takes a group of buffers: ``selection`` applied to what a connection knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_comm import transports
from rlinf_comm.selection import SEVERAL, Choice, Other, Summary, Thresholds, select
from rlinf_comm.transports.base import Buffer, BufferSpec, Place


class Router:
    """Of one connection. Choices for host memory are remembered: they only depend on which thresholds a size passes."""

    def __init__(self, source: Place, target: Place, table: Thresholds, others: Sequence[Other] | None = None) -> None:
        """``others``: the transports that are not built in (None: those of this process)."""
        self._source = source
        self._target = target
        self._table = table
        self._others = transports.others() if others is None else tuple(others)
        self._asks = any(other.name in source.capabilities & target.capabilities for other in self._others)
        self._known: dict[Any, str] = {}

    def choose(self, buffers: Sequence[Buffer], without: frozenset[str]) -> tuple[str, list[Buffer]]:
        """The transport's name, and the buffers as it takes them (in host memory where it cannot take others).

        ``without``: transports that had no room. Raises NoRoute.
        """
        size = sum(b.nbytes for b in buffers)
        devices = {self._device(b) for b in buffers}
        if devices == {""}:
            return self._host(size, without), list(buffers)
        source = devices.pop() if len(devices) == 1 else SEVERAL
        target = self._target.devices[0] if self._target.devices else ""
        summary = Summary(device_bytes=size, source_device=source, target_device=target)
        choice = self._select(summary, without)
        return choice.name, [to_host(b) for b in buffers] if choice.staged else list(buffers)

    def _select(self, summary: Summary, without: frozenset[str]) -> Choice:
        return select(self._source, self._target, summary, self._table, without, self._others)

    def _host(self, size: int, without: frozenset[str]) -> str:
        if self._asks:  # their answer may depend on the very size
            return self._select(Summary(host_bytes=size), without).name
        table = self._table
        key = (size < table.shm_from, table.gloo_from is not None and size >= table.gloo_from, without)
        name = self._known.get(key)
        if name is None:
            summary = Summary(host_bytes=size)
            name = self._known[key] = self._select(summary, without).name
        return name

    def _device(self, buffer: Buffer) -> str:
        if isinstance(buffer, memoryview):
            return ""
        index = buffer.device.index or 0
        known = self._source.devices
        return known[index] if index < len(known) else str(buffer.device)


def to_host(buffer: Buffer) -> memoryview:
    """The bytes of a buffer in host memory."""
    if isinstance(buffer, memoryview):
        return buffer
    import torch

    flat = buffer.detach().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().data if flat.numel() else memoryview(b"")


def from_host(buffer: Buffer, spec: BufferSpec) -> Buffer:
    """A device tensor whose bytes came through host memory, as a tensor there: the receiver moves it where it likes."""
    if not isinstance(buffer, memoryview):
        return buffer
    import torch

    dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(spec.shape)
