"""Context switching of an engine: its state leaves the device and comes back bit-equal, in the same tensors.

``DeviceStore`` is the one interface of all engines. What moves are *storages*, each once, so tied weights, views of one
buffer and whatever refers to a tensor (an optimizer, a graph of modules) need no care and stay valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from rlinf_core.errors import RLinfError
from rlinf_engines.slot_memory import SlotMemory

# A power of two: the allocator of pinned memory rounds up to one.
HOST_BLOCK = 64 << 20


class Mover(Protocol):
    """Takes storages off a device and brings them back."""

    def move_out(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """All or nothing: on an error everything is loaded as before."""

    def move_back(self) -> None:
        """Bring back what ``move_out`` took. After an error it can be called again."""

    def close(self) -> None:
        """Give the host memory back."""


class DeviceStore:
    """The device memory of one engine.

    ``tensors`` yields what is to move at the time of a call: parameters, buffers, gradients, optimizer state (see
    ``state_tensors``), in any order, as often as it likes; tensors elsewhere than on ``device`` stay where they are.
    Host memory is kept from one switch to the next, so it is needed in full beside the device's. ``threads`` copy on a
    CPU slot.

    While offloaded, tensors have no contents. The engine asks ``check`` before it touches any; tensors that it has
    given away must not be used either.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        tensors: Callable[[], Iterable[torch.Tensor]],
        threads: int = 1,
        mover: Mover | None = None,
    ) -> None:
        self.name = name
        self.loaded = True
        self._device = device
        self._tensors = tensors
        self._mover = mover or _mover(name, device, threads)

    def check(self, what: str) -> None:
        """Raise ``RLinfError`` if the engine is offloaded and cannot do ``what``."""
        if not self.loaded:
            raise RLinfError(
                f"{self.name}: {what} while offloaded; call onload() first (a worker: inside `with self.on_device()`)"
            )

    def offload(self) -> None:
        """Move everything to host memory and give the device memory back; nothing to do when offloaded.

        When host memory is short this raises ``RLinfError`` with the bytes needed and left, and all stays loaded.
        """
        if self.loaded:
            self._mover.move_out(distinct_storages(self._tensors(), self._device))
            self.loaded = False

    def onload(self) -> None:
        """Bring everything back; nothing to do when loaded. Out of device memory is an ``RLinfError``, and all stays
        in host memory then."""
        if not self.loaded:
            self._mover.move_back()
            self.loaded = True

    def close(self) -> None:
        """Give the host memory back. What is offloaded at that time is lost."""
        self._mover.close()


def state_tensors(model: Any, optimizer: Any = None) -> Iterator[torch.Tensor]:
    """Parameters, their gradients and all buffers of a module, and the state of an optimizer."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    if optimizer is not None:
        yield from _nested(list(optimizer.state.values()))


def distinct_storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages with contents behind ``tensors`` on the kind of ``device``, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        if tensor.layout is not torch.strided:
            raise RLinfError(f"a tensor of layout {tensor.layout} cannot be offloaded; only dense ones can")
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


class BlockMemory:
    """Moves storages between the memory of an accelerator and blocks of host memory, pinned if possible.

    A storage is resized to nothing, which frees its block in the allocator, and back; what views it stays valid.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self._pin = device.type != "cpu"
        self._held: list[tuple[torch.UntypedStorage, int]] = []

    def move_out(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage in storages:
            if not storage.resizable():
                raise RLinfError(
                    f"{self._name}: cannot be offloaded and stays loaded: a block of {storage.nbytes()} bytes belongs "
                    "to another process or library"
                )
        held = [(storage, storage.nbytes()) for storage in storages]
        self._reserve(sum(size for _, size in held))
        self._synchronize()
        for own, host in self._pieces(held):
            host.copy_(own, non_blocking=True)
        self._synchronize()
        self._held = held
        for storage, _ in held:
            storage.resize_(0)
        self._give_back()

    def move_back(self) -> None:
        try:
            for storage, size in self._held:
                storage.resize_(size)
        except RuntimeError as error:
            for storage, _ in self._held:
                storage.resize_(0)
            self._give_back()
            need = sum(size for _, size in self._held)
            raise RLinfError(
                f"{self._name}: loading needs {need} bytes of {self._device}, which are not free: {error}"
            ) from error
        for own, host in self._pieces(self._held):
            own.copy_(host, non_blocking=True)
        self._synchronize()
        self._held = []

    def close(self) -> None:
        self._held, self._blocks = [], []

    def _reserve(self, nbytes: int) -> None:
        missing = nbytes - sum(block.numel() for block in self._blocks)
        while missing > 0:
            # A small engine needs no whole block.
            size = min(HOST_BLOCK, 1 << (missing - 1).bit_length())
            self._blocks.append(self._host_block(size, missing))
            missing -= size

    def _host_block(self, size: int, missing: int) -> torch.Tensor:
        if self._pin:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # no more may be pinned; pageable memory is slower and does
                self._pin = False
        try:
            return torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise RLinfError(
                f"{self._name}: cannot be offloaded and stays loaded: {missing} more bytes of host memory are needed: "
                f"{error}"
            ) from error

    def _pieces(self, held: Iterable[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes of a storage, bytes of a host block) that belong together."""
        blocks = iter(self._blocks)
        free = torch.empty(0, dtype=torch.uint8)
        for storage, _ in held:
            own = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while own.numel():
                if not free.numel():
                    free = next(blocks)
                size = min(own.numel(), free.numel())
                yield own[:size], free[:size]
                own, free = own[size:], free[size:]

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def _give_back(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()


class _InPlace:
    """A CPU without Linux's means: state is where it is, and only its use while offloaded is refused."""

    def move_out(self, storages: Sequence[torch.UntypedStorage]) -> None:
        pass

    def move_back(self) -> None:
        pass

    def close(self) -> None:
        pass


def _mover(name: str, device: torch.device, threads: int) -> Mover:
    if device.type != "cpu":
        return BlockMemory(name, device)
    return SlotMemory(name, threads) if sys.platform == "linux" else _InPlace()


def _nested(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _nested(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _nested(part)
