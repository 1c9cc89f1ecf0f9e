"""Host memory through gloo: for two ends that share neither memory nor a stream worth using."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf_comm.errors import CommError
from rlinf_comm.transports.base import Buffer, BufferSpec
from rlinf_comm.transports.groups import GroupTransport

if TYPE_CHECKING:
    import torch

LOCALHOST = "127.0.0.1"


def gloo_group(store: Any, rank: int, size: int, timeout: float, address: str) -> Any:
    """A gloo group over a store of its own, whose sockets are bound to ``address``.

    Without an address gloo takes the one that the machine's name resolves to, which other nodes often cannot reach.
    """
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave parts of it out
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def flat_tensor(buffer: memoryview) -> torch.Tensor:
    """The buffer's memory as a tensor of bytes, nothing copied. Nobody may write to a read-only buffer through it."""
    import numpy as np
    import torch

    array = np.frombuffer(buffer, np.uint8)
    if not array.flags.writeable:
        # torch has no read-only tensors and warns; this one is only ever read.
        array = np.asarray(_Memory(array))
    return torch.from_numpy(array)


class _Memory:
    """An array's memory under another name; keeps the array alive."""

    def __init__(self, array: Any) -> None:
        self._array = array
        pointer = array.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": array.shape, "data": (pointer, False)}


class GlooTransport(GroupTransport):
    """Sends and receives host buffers as bytes, whatever they hold. Empty buffers do not travel."""

    name: ClassVar[str] = "gloo"

    @classmethod
    def unavailable(cls) -> str:
        torch = sys.modules.get("torch")
        if torch is not None and not torch.distributed.is_available():
            return "this build of torch has no torch.distributed"
        if torch is not None and not torch.distributed.is_gloo_available():
            return "this build of torch has no gloo"
        return ""

    def make_group(self, store: Any, rank: int, timeout: float) -> Any:
        return gloo_group(store, rank, 2, timeout, self._own_address())

    def _own_address(self) -> str:
        """Of this node as the peer reaches it: where the control stream ends. A unix socket means one node."""
        sock = getattr(self.link.stream, "sock", None)
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return LOCALHOST
        return str(sock.getsockname()[0])

    def to_send(self, buffer: Buffer) -> torch.Tensor:
        if not isinstance(buffer, memoryview):
            raise CommError(f"gloo moves host memory only, not a tensor on {buffer.device}")
        return flat_tensor(buffer)

    def inbox(self, spec: BufferSpec) -> tuple[torch.Tensor, Buffer]:
        import torch

        box = torch.empty(spec.nbytes, dtype=torch.uint8)
        return box, box.numpy().data.cast("B")

    def finish(self, works: Sequence[Any], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for work in works:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
