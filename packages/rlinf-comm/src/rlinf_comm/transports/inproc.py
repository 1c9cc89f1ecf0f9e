"""Between two communicators of one process: the receiver is handed a copy of the buffers.

A copy, because a sender may change its tensors once ``send`` has returned, as it may with every other transport.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import ClassVar

from rlinf_comm.errors import CommError
from rlinf_comm.stream import empty
from rlinf_comm.transports.base import Buffer, BufferSpec, Link, Transport

_lock = threading.Lock()
_numbers = itertools.count()
_handed: dict[bytes, tuple[str, list[Buffer]]] = {}
"""Ticket -> the connection it belongs to, and the buffers."""


class InprocTransport(Transport):
    name: ClassVar[str] = "inproc"

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._key = link.key

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        copies: list[Buffer] = []
        for buffer in buffers:
            if isinstance(buffer, memoryview):
                copy = empty(buffer.nbytes)
                copy[:] = buffer
                copies.append(copy)
            else:
                copies.append(buffer.clone())
        ticket = next(_numbers).to_bytes(8, "little")
        with _lock:
            _handed[ticket] = (self._key, copies)
        return ticket

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        with _lock:
            found = _handed.pop(ticket, None)
        if found is None:
            raise CommError(f"{self.link.peer_name} has taken back what it handed over", peer=self.link.peer_name)
        return found[1]

    def release(self, ticket: bytes) -> None:
        with _lock:
            _handed.pop(ticket, None)

    def close(self, lost: bool) -> None:
        if lost:
            with _lock:
                for ticket in [t for t, (key, _) in _handed.items() if key == self._key]:
                    del _handed[ticket]
