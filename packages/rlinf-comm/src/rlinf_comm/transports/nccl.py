"""Device memory from one accelerator to another through NCCL: within a node or between nodes.

The same groups of two as gloo's. A tensor is sent when the stream on which ``offer`` was called has made it; the
receiver gets it when it is there, so that any of its streams may read it. NCCL's own error handling would end the
process when a peer dies; here it is switched off for these groups, and a watcher with a deadline stands in for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf_comm.devices import cuda_missing
from rlinf_comm.errors import CommError
from rlinf_comm.transports.base import Buffer, BufferSpec, Link
from rlinf_comm.transports.cuda_ipc import empty_like
from rlinf_comm.transports.groups import GroupTransport

if TYPE_CHECKING:
    import torch

_QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Read by torch when a group is made. As they are by default, a peer's death would end this process, too."""
_making = threading.Lock()
LOOK_EVERY_S = (0.00002, 0.002)
"""How often a running move is looked at: at first, and at most."""


class NcclTransport(GroupTransport):
    """Device tensors only; the host part of a message goes another way."""

    name: ClassVar[str] = "nccl"

    @classmethod
    def unavailable(cls) -> str:
        torch = sys.modules.get("torch")
        if reason := cuda_missing():
            return reason
        if torch is not None and not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            return "this build of torch has no NCCL"
        return ""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._ready: Any = None

    def make_group(self, store: Any, rank: int, timeout: float) -> Any:
        import torch
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(timeout, self.link.timeout))
        with _making:
            before = {name: os.environ.get(name) for name in _QUIET}
            os.environ.update(_QUIET)
            try:
                with torch.cuda.device(0):
                    return dist.ProcessGroupNCCL(store, rank, 2, options)
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        import torch

        device = next((b.device for b in buffers if not isinstance(b, memoryview)), None)
        if device is not None:
            self._ready = torch.cuda.current_stream(device).record_event()
        return super().offer(buffers)

    def push(self, buffers: Sequence[Buffer]) -> None:
        import torch

        devices = {b.device for b in buffers if not isinstance(b, memoryview)}
        if len(devices) != 1:
            raise CommError(f"the tensors of one message are on {len(devices)} devices")
        with torch.cuda.device(devices.pop()):
            torch.cuda.current_stream().wait_event(self._ready)
            super().push(buffers)

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        import torch

        with torch.cuda.device(0):
            return super().pull(ticket, specs)

    def to_send(self, buffer: Buffer) -> torch.Tensor:
        import torch

        if isinstance(buffer, memoryview):
            raise CommError("nccl moves tensors of an accelerator only, not host memory")
        return buffer.detach().reshape(-1).view(torch.uint8)

    def inbox(self, spec: BufferSpec) -> tuple[torch.Tensor, Buffer]:
        import torch

        box = empty_like(spec, "cuda:0")
        return box.reshape(-1).view(torch.uint8), box

    def finish(self, works: Sequence[Any], timeout: float) -> None:
        """Looks instead of waiting in NCCL, which has no deadline of its own."""
        deadline = time.monotonic() + timeout
        pause, longest = LOOK_EVERY_S
        for work in works:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(works)} tensors are not all moved after {timeout:g} s")
                time.sleep(pause)
                pause = min(pause * 2, longest)
            if (failure := work.exception()) is not None:
                raise RuntimeError(str(failure))
