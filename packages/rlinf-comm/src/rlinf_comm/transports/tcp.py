"""On the control stream itself, right behind the frame: works between any two ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlinf_comm.stream import empty
from rlinf_comm.transports.base import Buffer, BufferSpec, Link, Transport


class TcpTransport(Transport):
    name: ClassVar[str] = "tcp"
    on_stream: ClassVar[bool] = True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._half: list[memoryview] | None = None
        """Buffers that are being filled: a timeout stops in the middle, and the next call goes on."""

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        return b""

    def push(self, buffers: Sequence[Buffer]) -> None:
        self.link.stream.write([b for b in buffers if isinstance(b, memoryview)])

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        if self._half is None:
            self._half = [empty(spec.nbytes) for spec in specs]
        self.link.stream.read_into(self._half)
        filled, self._half = self._half, None
        return list(filled)
