"""The form of what travels on a control stream.

    header | skeleton | meta | table | inline buffers | [bytes of stream transports] | end mark

The table says how large each buffer is and which transport moves it. Only messages (kind DATA) have an end mark: 1, or
0 when the sender gave up in the middle and the receiver must act as if nothing had come.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlinf_comm.codec import CodecError
from rlinf_comm.errors import FrameError
from rlinf_comm.stream import empty
from rlinf_comm.transports.base import Buffer, BufferSpec

if TYPE_CHECKING:
    from rlinf_comm.connection import Connection

DATA, CREDIT, ACK, FAIL, FLUSH, FLUSHED, LEAVE, BYE, RELEASE = range(1, 10)
"""DATA a message; CREDIT bytes consumed; ACK, FAIL one message was decoded or not; FLUSH, FLUSHED ask and say that all
so far were; LEAVE this connection is given up (idle), the two go on; BYE the sender is closed; RELEASE what
a ticket names is not used any more (the transport's name, a zero byte, the ticket)."""
CONFIRM, COLLECTIVE, FAILED = 1, 2, 4
"""Flags of DATA: the sender waits for ACK; part of a broadcast; the sender failed (the skeleton is its text)."""
MAGIC = 0xC317
HEADER = struct.Struct("<HBBQIIII")
"""Magic, kind, flags, sequence number, and the bytes of skeleton, meta, table and inline buffers."""
MAX_PART = 1 << 30
"""Bytes of one of these four. Buffers that do not go inline have no limit."""
INLINE = 255
INLINE_ALIGN = 16
"""Buffers inline begin at multiples of this."""
WHOLE, ABORTED = b"\x01", b"\x00"
_TABLE = struct.Struct("<IIB")
_ENTRY = struct.Struct("<QB")
_PART = struct.Struct("<BI")


@dataclass(slots=True)
class Packet:
    """A message on its way out."""

    skeleton: bytes
    buffers: list[Buffer] = field(default_factory=list)
    meta: bytes = b""
    meta_buffers: int = 0
    """How many of the buffers, at the end, belong to ``meta``."""
    flags: int = 0
    tickets: dict[str, bytes] | None = None
    """Of buffers that are reachable already (a broadcast's slot): transport -> ticket."""
    work: tuple[tuple[Any, Any], ...] = ()
    """What the streams of accelerators still do on the buffers (``devices.work_on``)."""

    @property
    def nbytes(self) -> int:
        return len(self.skeleton) + len(self.meta) + sum(b.nbytes for b in self.buffers)


@dataclass(slots=True)
class Part:
    """Buffers of one message that one transport moves."""

    name: str
    ticket: bytes
    specs: list[BufferSpec] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Their places among the buffers of the message."""


@dataclass(slots=True)
class Arrived:
    """A message that has come in and is not consumed yet."""

    connection: Connection
    seq: int
    flags: int
    skeleton: bytes
    meta: bytes
    meta_buffers: int
    buffers: list[Any]
    parts: list[Part]
    pulled: int = 0
    nbytes: int = 0
    error: BaseException | None = None


def check_size(packet: Packet) -> None:
    """Raises CodecError for a message that the other end would not read."""
    parts = {
        "object": len(packet.skeleton),
        "meta data": len(packet.meta),
        "list of buffers": _ENTRY.size * len(packet.buffers),
    }
    for what, size in parts.items():
        if size > MAX_PART:
            raise CodecError(
                f"a message's {what} takes {size} bytes beside its tensors and arrays; {MAX_PART} is the most that "
                "one message can have: send it in parts"
            )


def padded(size: int) -> int:
    """What an inline buffer takes."""
    return -(-size // INLINE_ALIGN) * INLINE_ALIGN


def header(kind: int, seq: int = 0, text: bytes = b"", flags: int = 0) -> bytes:
    """A whole frame of any kind but DATA."""
    return HEADER.pack(MAGIC, kind, flags, seq, len(text), 0, 0, 0) + text


def device_rows(buffers: Sequence[Buffer]) -> list[list[Any]]:
    """What the receiver has to know of those that are tensors: place, dtype, shape and device."""
    return [
        [i, str(b.dtype).removeprefix("torch."), list(b.shape), str(b.device)]
        for i, b in enumerate(buffers)
        if not isinstance(b, memoryview)
    ]


def pack_table(
    buffers: Sequence[Buffer], where: Sequence[int], parts: Sequence[Part], meta_buffers: int, devices: list[list[Any]]
) -> bytes:
    """``where``: for each buffer the part that moves it, or INLINE. ``devices``: see ``device_rows``."""
    if not buffers:
        return b""
    pieces = [_TABLE.pack(len(buffers), meta_buffers, len(parts))]
    pieces += [_ENTRY.pack(b.nbytes, w) for b, w in zip(buffers, where, strict=True)]
    for part in parts:
        name = part.name.encode()
        pieces += [_PART.pack(len(name), len(part.ticket)), name, part.ticket]
    if devices:
        pieces.append(json.dumps(devices).encode())
    return b"".join(pieces)


def unpack_table(table: bytes, inline: memoryview) -> tuple[list[Any], list[Part], int, int]:
    """The buffers (those inline filled in, as private copies), the parts, how many belong to the meta data, and the
    bytes of all."""
    if not table:
        return [], [], 0, 0
    try:
        return _unpack_table(table, inline)
    except (struct.error, IndexError, ValueError, TypeError) as error:
        raise FrameError(f"the table of a message is malformed: {error}") from error


def _unpack_table(table: bytes, inline: memoryview) -> tuple[list[Any], list[Part], int, int]:
    count, meta_buffers, n_parts = _TABLE.unpack_from(table)
    at = _TABLE.size
    if count * _ENTRY.size > len(table) or meta_buffers > count:
        raise FrameError(f"a message cannot have {count} buffers in a table of {len(table)} bytes")
    entries = list(_ENTRY.iter_unpack(table[at : at + count * _ENTRY.size]))
    at += count * _ENTRY.size
    parts = []
    for _ in range(n_parts):
        name_length, ticket_length = _PART.unpack_from(table, at)
        at += _PART.size
        name = table[at : at + name_length].decode()
        at += name_length
        parts.append(Part(name, table[at : at + ticket_length]))
        at += ticket_length
    devices = {row[0]: row[1:] for row in json.loads(table[at:])} if at < len(table) else {}
    buffers: list[Any] = [None] * count
    taken = total = 0
    private: memoryview | None = None
    for i, (size, where) in enumerate(entries):
        total += size
        if where == INLINE:
            if private is None:
                private = empty(len(inline))
                private[:] = inline
            buffers[i] = private[taken : taken + size]
            taken += padded(size)
            continue
        dtype, shape, device = devices.get(i, ("", (), ""))
        parts[where].specs.append(BufferSpec(size, dtype, tuple(shape), device))
        parts[where].places.append(i)
    if taken != len(inline):
        raise FrameError(f"{len(inline)} bytes came inline, the table names {taken}")
    return buffers, parts, meta_buffers, total
