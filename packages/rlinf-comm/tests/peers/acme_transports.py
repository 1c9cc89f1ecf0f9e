"""Transports as other packages would bring them: a good one, and some that are broken each in its own way."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from rlinf_comm.errors import NoRoom
from rlinf_comm.selection import Summary
from rlinf_comm.transports.base import Buffer, BufferSpec, Place, Transport


class FileTransport(Transport):
    """Through a file in the folder for temporary files, for large messages of one machine."""

    name = "acme_file"
    prefer = True
    room = True

    @classmethod
    def suits(cls, source: Place, target: Place, summary: Summary) -> bool:
        return source.node == target.node and summary.total >= 1 << 20

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        if not self.room:
            raise NoRoom("the disk is full")
        handle, path = tempfile.mkstemp(prefix="acme-")
        with os.fdopen(handle, "wb") as file:
            for buffer in buffers:
                file.write(buffer)  # type: ignore[arg-type]  # host memory alone is given to it
        return path.encode()

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        found: list[Buffer] = []
        with open(ticket, "rb") as file:
            for spec in specs:
                found.append(memoryview(bytearray(file.read(spec.nbytes))))
        os.unlink(ticket)
        return found

    def release(self, ticket: bytes) -> None:
        os.unlink(ticket)


class LastTransport(FileTransport):
    """Takes what nobody else does."""

    name = "acme_last"
    prefer = False


class UnsureTransport(FileTransport):
    name = "acme_unsure"

    @classmethod
    def suits(cls, source: Place, target: Place, summary: Summary) -> bool:
        raise LookupError("I have no table")


class Unfinished(Transport):
    """Without ``pull``."""

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        return b""


class NoTransport:
    """Has nothing of a transport."""


class Sulky(FileTransport):
    @classmethod
    def unavailable(cls) -> str:
        raise OSError("not today")
