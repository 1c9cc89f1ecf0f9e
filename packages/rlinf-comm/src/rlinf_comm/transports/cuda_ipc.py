"""Device memory by handle: two processes of one node, of which the receiver sees the sender's device.

The sender packs the tensors of a message into one block of its device (a copy, so that it may change them as soon as
it has sent them) and offers the block's handle with an event that says when the copy is done. The receiver maps the
block, waits for the event on its stream, copies out, and unmaps it; then the sender is told (``release``) and lets the
block go.
Nothing is mapped while nothing is moved, so that the allocator of either side may give memory back at any time.

CUDA cannot export memory of *expandable segments*: with that allocator setting the transport is not available, by name.

``CudaCalls`` is all that touches CUDA; the rest is plain accounting.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf_comm.devices import cuda_missing, visible_devices
from rlinf_comm.errors import CommError, NoRoom
from rlinf_comm.transports.base import Buffer, BufferSpec, Link, Transport
from rlinf_core.cli.machine import bad_allocator

if TYPE_CHECKING:
    import torch

ALIGN = 512
"""What CUDA's own allocations are aligned to (bytes)."""
HANDLE_BYTES = 64
UUID_BYTES = 64
LIMIT_BYTES = 1 << 30
"""Most device memory that messages under way may take at one sender and connection."""
_TICKET = struct.Struct(f"<{UUID_BYTES}sQ{HANDLE_BYTES}sQQ{HANDLE_BYTES}s")
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True, slots=True)
class Ticket:
    """A block as another process finds it: device, the allocation's handle, where in it, how long, and the event."""

    device: str
    serial: int
    handle: bytes
    offset: int
    nbytes: int
    event: bytes

    def pack(self) -> bytes:
        return _TICKET.pack(self.device.encode(), self.serial, self.handle, self.offset, self.nbytes, self.event)

    @classmethod
    def unpack(cls, data: bytes) -> Ticket:
        if len(data) != _TICKET.size:
            raise CommError(f"{len(data)} bytes are no ticket of cuda_ipc")
        device, serial, handle, offset, nbytes, event = _TICKET.unpack(data)
        return cls(device.rstrip(b"\0").decode("ascii", "replace"), serial, handle, offset, nbytes, event)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(offset of each buffer in one block, the block's bytes); each begins aligned."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGN) * ALIGN
    return offsets, end


class CudaIpcTransport(Transport):
    """``calls`` stands in for CUDA in tests."""

    name: ClassVar[str] = "cuda_ipc"
    needs_release: ClassVar[bool] = True

    @classmethod
    def unavailable(cls) -> str:
        if setting := bad_allocator(os.environ):
            return f"{setting}: memory of expandable segments cannot be shared with other processes"
        return cuda_missing()

    def __init__(self, link: Link, calls: CudaCalls | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        super().__init__(link)
        self._calls = calls or CudaCalls()
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Any, Any, int]] = {}
        """Serial to (block, event, bytes), until the receiver has told that it has copied."""
        self._serial = 0

    @property
    def bytes_held(self) -> int:
        with self._lock:
            return sum(size for _, _, size in self._held.values())

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        tensors: list[torch.Tensor] = []
        for buffer in buffers:
            if isinstance(buffer, memoryview):
                raise CommError("cuda_ipc moves tensors of an accelerator only, not host memory")
            tensors.append(buffer)
        index, device = self._calls.device_of(tensors)
        offsets, total = layout([t.numel() * t.element_size() for t in tensors])
        if self.bytes_held + total > self._limit:
            raise NoRoom(f"{self.bytes_held} bytes of {device} are under way to {self.link.peer_name} already")
        block, event = self._calls.pack(tensors, offsets, total, index)
        handle, offset = self._calls.export(block, index) if total else (bytes(HANDLE_BYTES), 0)
        with self._lock:
            self._serial += 1
            ticket = Ticket(device, self._serial, handle, offset, total, self._calls.event_handle(event))
            self._held[self._serial] = (block, event, total)
        return ticket.pack()

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        found = Ticket.unpack(ticket)
        offsets, total = layout([spec.nbytes for spec in specs])
        if total != found.nbytes:
            raise CommError(f"the ticket is for {found.nbytes} bytes, the frame for {total}")
        if found.device not in self.link.me.devices:
            raise CommError(f"{self.link.my_name} does not see the device {found.device} of {self.link.peer_name}")
        index = self.link.me.devices.index(found.device)
        boxes = self._calls.boxes(specs)
        if total:
            base = self._calls.open(found.handle, index)
            try:
                self._calls.unpack(base + found.offset, offsets, boxes, found.event, index)
            finally:
                self._calls.close(base, index)
        return list(boxes)

    def release(self, ticket: bytes) -> None:
        with self._lock:
            self._held.pop(Ticket.unpack(ticket).serial, None)

    def close(self, lost: bool) -> None:
        with self._lock:
            self._held.clear()


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * HANDLE_BYTES)]


class _Raw:
    """Device memory that torch did not allocate, as other libraries describe it to torch."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 2,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (pointer, False),
        }


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class CudaCalls:
    """CUDA as this transport uses it. Each call sets the device that it works on: threads of any kind come here."""

    def device_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, str]:
        """(index, UUID) of the one device that the tensors are on."""
        found = {t.device for t in tensors}
        if len(found) != 1:
            raise CommError(f"the tensors of one message are on {len(found)} devices")
        device = found.pop()
        if device.type != "cuda":
            raise CommError(f"cuda_ipc cannot move a tensor on {device}")
        index = device.index or 0
        return index, visible_devices()[index]

    def pack(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], total: int, index: int) -> tuple[Any, Any]:
        """(a block with the tensors' bytes, an event that is reached when they are there), on the current stream."""
        import torch

        with torch.cuda.device(index):
            block = torch.empty(total, dtype=torch.uint8, device=f"cuda:{index}")
            for tensor, offset in zip(tensors, offsets, strict=True):
                raw = tensor.detach().reshape(-1).view(torch.uint8)
                block[offset : offset + raw.numel()].copy_(raw)
            event = torch.cuda.Event(interprocess=True)
            event.record()
        return block, event

    def event_handle(self, event: Any) -> bytes:
        return bytes(event.ipc_handle())

    def export(self, block: Any, index: int) -> tuple[bytes, int]:
        """(handle of the allocation that the block is part of, the block's offset in it)."""
        import torch

        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        pointer = ctypes.c_uint64(block.data_ptr())
        with torch.cuda.device(index):
            self._check(_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer), "find")
            self._check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), base), "export")
        return bytes(handle.data), block.data_ptr() - base.value

    def open(self, handle: bytes, index: int) -> int:
        import torch

        pointer = ctypes.c_uint64()
        with torch.cuda.device(index):
            torch.cuda.current_stream().query()  # the thread needs the device's context before the driver is called
            given = _Handle.from_buffer_copy(handle)
            code = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
            self._check(code, "map")
        return pointer.value

    def close(self, base: int, index: int) -> None:
        import torch

        with torch.cuda.device(index):
            self._check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(base)), "unmap")

    def boxes(self, specs: Sequence[BufferSpec]) -> list[torch.Tensor]:
        """Room for what comes, on this process's first device."""
        return [empty_like(spec, "cuda:0") for spec in specs]

    def unpack(
        self, pointer: int, offsets: Sequence[int], boxes: Sequence[torch.Tensor], event: bytes, index: int
    ) -> None:
        """Copy the block's parts into the boxes once the sender's event is reached; back when that is done."""
        import torch

        with torch.cuda.device(index):
            torch.cuda.Event.from_ipc_handle(index, event).wait()
            for box, offset in zip(boxes, offsets, strict=True):
                nbytes = box.numel() * box.element_size()
                if nbytes:
                    raw = torch.as_tensor(_Raw(pointer + offset, nbytes), device=f"cuda:{index}")
                    box.reshape(-1).view(torch.uint8).copy_(raw)
            # The receiver reads on a stream of its own choice, and the sender uses the block again.
            torch.cuda.current_stream().synchronize()

    @staticmethod
    def _check(code: int, doing: str) -> None:
        if code:
            name = ctypes.c_char_p()
            _driver().cuGetErrorName(code, ctypes.byref(name))
            said = (name.value or b"?").decode()
            raise CommError(
                f"CUDA cannot {doing} memory for another process: {said} (the allocator must be torch's own, "
                "without expandable segments)"
            )


def empty_like(spec: BufferSpec, device: str) -> torch.Tensor:
    """A contiguous tensor for a buffer. Raises CommError when dtype, shape and bytes do not fit each other."""
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CommError(f"the frame asks for a tensor of dtype {spec.dtype!r}")
    if any(n < 0 for n in spec.shape) or math.prod(spec.shape) * dtype.itemsize != spec.nbytes:
        raise CommError(f"a {spec.dtype} tensor of shape {tuple(spec.shape)} does not have {spec.nbytes} bytes")
    return torch.empty(spec.shape, dtype=dtype, device=device)
