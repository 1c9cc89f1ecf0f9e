"""One connection of the hub: authentication, whole messages out of chunks, and a bounded queue of what goes out."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Protocol, cast

from rlinf_core.hub import codec, wire
from rlinf_core.hub.messages import Hello

BACKLOG_BYTES = 64 << 20
"""More than this waiting for one member holds up those that send to it."""


class Hub(Protocol):
    """Whom a connection reports to. All calls are made on the hub's thread."""

    def opened(self, connection: Connection) -> None: ...

    def greeted(self, connection: Connection, hello: Hello) -> bool: ...

    def received(self, connection: Connection, message: Any) -> None: ...

    def unreadable(self, connection: Connection, error: Exception) -> None: ...

    def flush(self, sender: Connection | None = None) -> None: ...

    def ended(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """First the proof that the peer knows the secret, then its ``Hello``, each in ``AUTH_TIMEOUT_S``; then messages.

    All messages of a chunk are handed on in their order before what they cause is sent. Nothing is unpickled before the
    proof, and no more than a digest and one chunk is kept until then.
    """

    def __init__(self, hub: Hub, secret: bytes) -> None:
        self.member = ""
        self._hub = hub
        self._secret = secret
        self._nonce = os.urandom(wire.NONCE_BYTES)
        self._proof: bytearray | None = bytearray()
        """What has come of the answer to the nonce; ``None`` once that was right."""
        self._frames = wire.Frames()
        self._timer: asyncio.TimerHandle | None = None
        self._queue: list[bytes] = []
        self._written = 0
        self.full = False
        """Whether more than ``BACKLOG_BYTES`` are waiting for the member."""
        self._held_up: set[Connection] = set()
        """Those that are not read until this one has taken what waits for it."""
        self._waits_for: set[Connection] = set()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=BACKLOG_BYTES, low=BACKLOG_BYTES // 4)
        self._hub.opened(self)
        self._transport.write(self._nonce)
        self._await()

    def data_received(self, data: bytes) -> None:
        if self._proof is not None:
            data = self._check(self._proof, data)
        try:
            for body in self._frames.feed(data):
                if self._transport.is_closing():
                    return
                message = self._read(body)
                if message is not None:
                    self._take(message)
        except wire.FrameError as error:
            self._refuse(error)
        finally:
            self._hub.flush(self)

    def eof_received(self) -> None:
        self._hub.ended(self)  # at once, and not only when what is still to be written has been taken
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._let_go()  # a broken connection ends without ``close``
        for other in self._waits_for:
            other._held_up.discard(self)
        self._hub.closed(self)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._let_go()

    # Coming in

    def _check(self, proof: bytearray, data: bytes) -> bytes:
        """Add to the proof and look at it once it is whole; returns what came after it."""
        missing = wire.DIGEST_BYTES - len(proof)
        proof += data[:missing]
        if len(proof) < wire.DIGEST_BYTES:
            return b""
        if not wire.proves(bytes(proof), self._secret, self._nonce):
            self.close()
            return b""
        self._proof = None
        self._transport.write(wire.WELCOME)
        self._await()
        return data[missing:]

    def _read(self, body: bytes) -> Any:
        try:
            return codec.unpack(body)
        except Exception as error:  # keys of users are unpickled in there: whatever they raise has one meaning
            self._refuse(error)
            return None

    def _refuse(self, error: Exception) -> None:
        """What the member sent cannot be read, so nothing more of it can."""
        self._hub.unreadable(self, error)
        self._hub.ended(self)
        self.close()

    def _take(self, message: Any) -> None:
        if self.member:
            self._hub.received(self, message)
            return
        self._stop_timer()
        if not isinstance(message, Hello):
            self.close()
            return
        self.member = message.member
        if not self._hub.greeted(self, message):
            self.member = ""
            self.close()

    def _await(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(wire.AUTH_TIMEOUT_S, self.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Going out

    def queue(self, frame: bytes) -> int:
        """Add a frame to what ``flush`` sends; returns how many that are."""
        self._queue.append(frame)
        return len(self._queue)

    def flush(self) -> None:
        if self._queue and not self._transport.is_closing():
            data = self._queue[0] if len(self._queue) == 1 else b"".join(self._queue)
            self._written += len(data)
            self._transport.write(data)
        self._queue.clear()

    def backlog(self) -> int:
        """Bytes that the member has not taken yet."""
        return self._transport.get_write_buffer_size()

    def taken(self) -> int:
        """Bytes that it has taken so far."""
        return self._written - self.backlog()

    def hold_up(self, sender: Connection) -> None:
        """Read nothing more from ``sender`` until this connection has taken most of what waits for it, or is over."""
        if self._transport.is_closing():
            return
        self._held_up.add(sender)
        sender._waits_for.add(self)
        sender._transport.pause_reading()

    def _let_go(self) -> None:
        for sender in self._held_up:
            sender._waits_for.discard(self)
            if not sender._waits_for:
                sender._transport.resume_reading()
        self._held_up.clear()

    def close(self) -> None:
        """Close once everything is written; nobody waits for that."""
        self._stop_timer()
        self._let_go()
        self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()
