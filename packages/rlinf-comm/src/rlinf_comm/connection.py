"""One established connection: frames on its stream, the window, and the transports that it uses.

Writing is under ``write_lock``. Reading is for the thread that holds the *token* (``reading``, guarded by the peer's
condition): whoever waits for something takes it if it is free, so that a frame is read by the thread that wants it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf_comm import frames, slots
from rlinf_comm.codec import CodecError
from rlinf_comm.devices import wait_for
from rlinf_comm.errors import CommError, CommTimeout, FrameError, NoRoom, PeerLost
from rlinf_comm.frames import HEADER, INLINE, Arrived, Packet, Part
from rlinf_comm.routing import Router, from_host
from rlinf_comm.stream import Ended, Stream, empty
from rlinf_comm.transports.base import Buffer, Link, Transport

if TYPE_CHECKING:
    from rlinf_comm.handshake import Hello
    from rlinf_comm.peerstate import PeerState


class LeftBehind(CommError):
    """The connection was given up before a frame could be written to it."""


class Unsendable(CommError):
    """``cause`` keeps this message from being sent; nothing of it was written."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


log = logging.getLogger("rlinf.comm")

SMALL_BYTES = 8 << 10
"""A host buffer up to this size goes inline in the frame."""
INLINE_BYTES = 64 << 10
"""Most that goes inline in one frame."""
SLACK_BYTES = 8 << 20
"""Consumed bytes are given back to the sender in lots of this size (or an eighth of the window)."""
PER_MESSAGE = 1 << 10
"""What a message counts beyond its bytes: its objects take memory too."""
HELP_AFTER_S = 0.02
"""A writer that is blocked for this long has the I/O thread read the other connections meanwhile: peers that all write
to each other in a ring must not wait for one another."""
_PAD = memoryview(bytes(frames.INLINE_ALIGN))
_SCRATCH_BYTES = 1 << 20


def large(buffers: Sequence[Buffer]) -> tuple[list[int], list[int]]:
    """Places of the buffers that do not go inline: those in host memory and those on devices."""
    host: list[int] = []
    device: list[int] = []
    taken = 0
    for i, buffer in enumerate(buffers):
        if not isinstance(buffer, memoryview):
            device.append(i)
        elif buffer.nbytes <= SMALL_BYTES and taken + buffer.nbytes <= INLINE_BYTES:
            taken += buffer.nbytes
        else:
            host.append(i)
    return host, device


class Connection:
    """``peer.cond`` guards what other threads look at: ``reading`` to ``over``, ``in_flight``, ``to_return``."""

    def __init__(self, peer: PeerState, stream: Stream, mine: Hello, theirs: Hello, *, apart: bool = False) -> None:
        """``apart``: the peer cannot open this end's shared memory."""
        self.peer = peer
        self.stream = stream
        self.key = mine.key
        self.uid = theirs.uid
        """Of the process at the other end: the peer's own is another when its name has passed on."""
        theirs_place = theirs.place
        if apart:
            theirs_place = replace(theirs_place, capabilities=theirs_place.capabilities - {"shm"})
        self.place = theirs_place
        self.write_lock = threading.Lock()
        self.reading = False
        self.leaving = False
        """Nothing new is sent on it: one of the two has given it up."""
        self.gave_up = False
        """One of the two has found it idle; they go on with another."""
        self.lost = False
        self.bye = False
        """The peer has said that it is closed."""
        self.eof = False
        self.over = False
        self.hangup = False
        """The I/O thread has seen its end while somebody else was reading."""
        self.attended = False
        """The I/O thread reads it."""
        self.quiet = False
        """The same, for the moment: nobody else does."""
        self.looked_at = 0
        """Bytes of a frame's beginning that the I/O thread has left in the stream's buffer."""
        self.watched = False
        """The I/O thread looks whether somebody reads it, and reads it if not."""
        self.turns = 0
        """How often somebody has read it."""
        self.in_flight = 0
        self.window = theirs.window
        self.slack = min(SLACK_BYTES, theirs.window // 8)
        self.to_return = 0
        self.return_from = min(SLACK_BYTES, mine.window // 8)
        self._controls: deque[bytes] = deque()
        self._frame: Arrived | None = None
        """A message of which a part is still to come."""
        self._finish = False
        self._last_word = False
        """After what is to be written nothing more will be."""
        self._transports: dict[str, Transport] = {}
        self._router = Router(mine.place, self.place, peer.endpoint.thresholds)
        self._full_logged = False
        endpoint = peer.endpoint
        if theirs_place.node == mine.place.node:
            endpoint.shared.setdefault("pids", set()).add(theirs_place.pid)
        self._link = Link(
            mine.place,
            self.place,
            endpoint.name,
            peer.name,
            (endpoint.name, endpoint.uid) < (peer.name, theirs.uid),
            stream,
            endpoint.directory,
            f"rlinf-comm/{self.key}",
            endpoint.timeout,
            self._remaining,
            endpoint.shared,
        )
        self._deadlines = threading.local()
        stream.blocked = self._blocked
        stream.starved = self._starved

    def _remaining(self) -> float:
        deadline = getattr(self._deadlines, "at", None)
        return self._link.timeout if deadline is None else max(0.0, deadline - time.monotonic())

    def transport(self, name: str) -> Transport:
        """Raises CommError when it is not installed here."""
        found = self._transports.get(name)
        if found is None:
            found = self._transports[name] = self.peer.endpoint.transport_class(name)(self._link)
        return found

    # Writing

    def has_room(self, nbytes: int) -> bool:
        """Whether a message fits the window; one that is larger than it goes when all else has been consumed."""
        return self.in_flight + nbytes <= self.window or self.in_flight <= self.slack

    def transmit(self, packet: Packet, seq: int, deadline: float) -> None:
        """Write one message. When it raises CommTimeout nothing of it will be delivered."""
        if not self.write_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise CommTimeout("", me=self.stream.me, peer=self.stream.peer)
        try:
            if self.leaving:
                raise LeftBehind("")
            self.stream.write_deadline = self._deadlines.at = deadline
            self._transmit(packet, seq)
        finally:
            self._deadlines.at = None
            self._release_write()

    def _transmit(self, packet: Packet, seq: int) -> None:
        stream = self.stream
        try:
            frames.check_size(packet)
        except CodecError as error:
            raise Unsendable(error) from error
        stream.settle()
        head: list[memoryview | bytes]
        if not packet.buffers:
            skeleton, meta = packet.skeleton, packet.meta
            first = HEADER.pack(frames.MAGIC, frames.DATA, packet.flags, seq, len(skeleton), len(meta), 0, 0)
            head = [first, skeleton, meta]
            inline: list[memoryview] = []
            moved: list[tuple[Transport, Part, list[Buffer]]] = []
            inline_bytes = 0
        else:
            try:
                devices = frames.device_rows(packet.buffers)
                inline, where, moved = self._route(packet)
            except (CommTimeout, PeerLost):
                raise
            except Exception as error:
                raise Unsendable(error) from error
            inline_bytes = sum(len(piece) for piece in inline)
            parts = [part for _, part, _ in moved]
            table = frames.pack_table(packet.buffers, where, parts, packet.meta_buffers, devices)
            lengths = len(packet.skeleton), len(packet.meta), len(table), inline_bytes
            first = HEADER.pack(frames.MAGIC, frames.DATA, packet.flags, seq, *lengths)
            head = [first, packet.skeleton, packet.meta, table]
        streamed = [(transport, buffers) for transport, _, buffers in moved if transport.on_stream]
        start = stream.written
        try:
            if not streamed:
                stream.write([*head, *inline, frames.WHOLE])
                for transport, _, buffers in moved:
                    transport.push(buffers)
            else:
                stream.write([*head, *inline])
                for transport, _, buffers in moved:
                    transport.push(buffers)
                stream.write([frames.WHOLE])
        except BaseException as error:
            body = inline_bytes + sum(b.nbytes for _, buffers in streamed for b in buffers)
            delivered = self._owe_rest(head, body, stream.written - start)
            if not delivered:
                self._withdraw(moved)
            elif isinstance(error, CommTimeout):
                return  # the last byte went as the time was over
            raise

    def _owe_rest(self, head: Sequence[memoryview | bytes], body: int, written: int) -> bool:
        """After a write that stopped: have the frame completed as one that does not count. True: it was complete."""
        size = sum(len(piece) for piece in head)
        if written == 0:
            return False
        if written >= size + body + 1:
            return True
        rest: list[memoryview | bytes] = []
        for piece in head:
            rest.append(memoryview(piece)[min(written, len(piece)) :])
            written -= min(written, len(piece))
        self.stream.owe(rest, body - written, frames.ABORTED)
        return False

    @staticmethod
    def _withdraw(moved: list[tuple[Transport, Part, list[Buffer]]]) -> None:
        for transport, part, _ in moved:
            transport.release(part.ticket)

    def _route(self, packet: Packet) -> tuple[list[memoryview], list[int], list[tuple[Transport, Part, list[Buffer]]]]:
        """Which buffers go inline (padded), where each goes, and what the transports move."""
        wait_for(packet.work)
        inline: list[memoryview] = []
        where = [INLINE] * len(packet.buffers)
        host, device = large(packet.buffers)
        aside = {*host, *device}
        for i, buffer in enumerate(packet.buffers):
            if i not in aside and isinstance(buffer, memoryview):
                inline.append(buffer)
                if extra := -buffer.nbytes % frames.INLINE_ALIGN:
                    inline.append(_PAD[:extra])
        moved: list[tuple[Transport, Part, list[Buffer]]] = []
        try:
            for places in (host, device):
                if places:
                    self._offer(packet, places, where, moved)
        except BaseException:
            self._withdraw(moved)
            raise
        return inline, where, moved

    def _offer(
        self,
        packet: Packet,
        places: list[int],
        where: list[int],
        moved: list[tuple[Transport, Part, list[Buffer]]],
    ) -> None:
        buffers = [packet.buffers[i] for i in places]
        stats = self.peer.stats
        without: frozenset[str] = frozenset()
        while True:
            if packet.tickets and isinstance(buffers[0], memoryview):
                name, ticket = next(iter(packet.tickets.items()))
                transport = self.transport(name)
                break
            name, buffers = self._router.choose(buffers, without)
            transport = self.transport(name)
            try:
                ticket = transport.offer(buffers)
                break
            except NoRoom as error:
                stats.fallbacks += 1
                without |= {name}
                if not self._full_logged:
                    self._full_logged = True
                    log.warning("%s to %s: %s; the message goes another way", self.stream.me, self.stream.peer, error)
        for i, buffer in zip(places, buffers, strict=True):
            packet.buffers[i] = buffer
            where[i] = len(moved)
        moved.append((transport, Part(name, ticket), buffers))
        stats.transports[name] = stats.transports.get(name, 0) + 1

    def control(self, data: bytes) -> None:
        """Send a frame of another kind than DATA, now or as soon as the socket takes it; never waits."""
        self._controls.append(data)
        self.flush_controls()

    def flush_controls(self) -> None:
        while (self._controls or self.stream.owes) and self.write_lock.acquire(blocking=False):
            done = True
            try:
                done = self._write_controls()
            finally:
                self.write_lock.release()
            if not done:
                self.peer.endpoint.io.want(self)
                return
        if self._finish:
            self.finish()

    @property
    def owes(self) -> bool:
        return bool(self._controls) or self.stream.owes

    def _write_controls(self) -> bool:
        try:
            last = self._last_word  # looked at first: the word itself is then among the controls, or has gone
            data = b"".join(self._controls.popleft() for _ in range(len(self._controls)))
            done = self.stream.write_now(data)
            if done and last:
                self.stream.sock.shutdown(socket.SHUT_WR)
            return done
        except (PeerLost, OSError):
            self._controls.clear()
            self.stream.owe_nothing()  # the reader will find the end of the stream and say what it means
            return True

    def _release_write(self) -> None:
        self.write_lock.release()
        if self._controls or self._finish:
            self.flush_controls()

    def _blocked(self, deadline: float | None) -> None:
        """The socket takes nothing. Wait, and read meanwhile: the peer may be just as blocked."""
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            raise CommTimeout("", me=self.stream.me, peer=self.stream.peer)
        soon = now + HELP_AFTER_S
        try:
            self._read_while_blocked(soon if deadline is None else min(soon, deadline))
        except CommTimeout:
            with self.peer.endpoint.io.helping():
                self._read_while_blocked(deadline)

    def _read_while_blocked(self, deadline: float | None) -> None:
        if not self.peer.take_token(self):
            self.stream.wait_writable(deadline)
            return
        try:
            self.stream.wait_either(deadline)
        except BaseException:
            self.peer.give_token(self)
            raise
        self.peer.read_available(self)

    # Reading, by the holder of the token

    @property
    def receiving(self) -> bool:
        """A part of something has come, and the rest has not."""
        return self._frame is not None or self.stream.buffered > 0

    def read_frame(self, deadline: float | None) -> tuple[int, int, bytes] | Arrived | None:
        """The next frame: (kind, number, text), or a message, or None for one that its sender gave up. After
        CommTimeout a later call goes on where this one stopped. Raises Ended, PeerLost, FrameError."""
        stream = self.stream
        stream.read_deadline = deadline
        if self._frame is None:
            fields = HEADER.unpack(stream.need(HEADER.size))
            magic, kind, flags, seq, *lengths = fields
            if magic != frames.MAGIC or not 1 <= kind <= frames.RELEASE or max(lengths) > frames.MAX_PART:
                raise FrameError(f"{stream.me}: what came from {stream.peer} is no frame")
            whole = HEADER.size + sum(lengths)
            view = stream.need(whole)
            if kind != frames.DATA:
                text = bytes(view[HEADER.size :])
                stream.skip(whole)
                return kind, seq, text
            self._frame = self._begin(flags, seq, lengths, view)
            stream.skip(whole)
        frame = self._frame
        while frame.pulled < len(frame.parts):
            self._pull(frame, frame.parts[frame.pulled])
            self._release_there(frame, frame.parts[frame.pulled])
            frame.pulled += 1
        mark = bytes(stream.need(1))
        stream.skip(1)
        self._frame = None
        return frame if mark == frames.WHOLE else None

    def _begin(self, flags: int, seq: int, lengths: list[int], view: memoryview) -> Arrived:
        skeleton, meta, table, inline = lengths
        at = HEADER.size
        text = bytes(view[at : at + skeleton])
        at += skeleton
        meta_text = bytes(view[at : at + meta]) if meta else b""
        at += meta
        buffers: list[Any] = []
        parts: list[Part] = []
        meta_buffers = total = 0
        if table:
            names = bytes(view[at : at + table])
            buffers, parts, meta_buffers, total = frames.unpack_table(names, view[at + table : at + table + inline])
        nbytes = skeleton + meta + total + PER_MESSAGE
        return Arrived(self, seq, flags, text, meta_text, meta_buffers, buffers, parts, nbytes=nbytes)

    def _pull(self, frame: Arrived, part: Part) -> None:
        transport: Transport | None = None
        try:
            if frame.error is None:
                transport = self.transport(part.name)
                buffers = transport.pull(part.ticket, part.specs)
                for i, buffer, spec in zip(part.places, buffers, part.specs, strict=True):
                    frame.buffers[i] = from_host(buffer, spec) if spec.dtype else buffer
                return
        except (CommTimeout, PeerLost, Ended) as error:
            if transport is not None and transport.on_stream:
                raise
            lost = isinstance(error, PeerLost)
            frame.error = error if lost else CommError(f"{part.name} did not bring its part of a message in time")
        except Exception as error:  # belongs to this message alone
            frame.error = error
        if part.name == "tcp" or (transport is not None and transport.on_stream):  # its bytes must go from the stream
            size = sum(spec.nbytes for spec in part.specs)
            scratch = empty(min(size, _SCRATCH_BYTES))
            pieces = [scratch] * (size // _SCRATCH_BYTES) if size >= _SCRATCH_BYTES else []
            self.stream.read_into([*pieces, scratch[: size - len(pieces) * len(scratch)]])

    def _release_there(self, frame: Arrived, part: Part) -> None:
        """The receiver has what it needs of a part, or gives it up: a slot that could not be opened is not in use."""
        transport = self._transports.get(part.name)
        if frame.error is not None or (transport is not None and transport.needs_release):
            self.control(frames.header(frames.RELEASE, text=part.name.encode() + b"\0" + part.ticket))

    def released(self, text: bytes) -> None:
        """The peer has released a ticket of ours."""
        name, _, ticket = text.partition(b"\0")
        transport = self._transports.get(name.decode(errors="replace"))
        if transport is not None:
            try:
                transport.release(ticket)
            except Exception:  # a transport's own fault is none of the connection
                log.exception("%s: releasing a ticket of %s failed", self.stream.me, transport.name)

    def _starved(self, deadline: float | None) -> None:
        stream = self.stream
        if self._controls or stream.owes:
            self.flush_controls()
            if stream.owes and not self.write_lock.locked():
                stream.wait_read_and_flush(deadline)
                self.flush_controls()
                return
        stream.wait_readable(deadline)

    # The end

    def say_goodbye(self, kind: int, number: int = 0) -> None:
        """Say LEAVE or BYE as the last word; what the peer still writes is read to the end."""
        self._controls.append(frames.header(kind, number))
        self._last_word = True
        self.flush_controls()
        self.peer.endpoint.io.attend(self)

    def finish(self) -> None:
        """Close the socket as soon as nobody writes to it."""
        self._finish = True
        if self.write_lock.acquire(blocking=False):
            try:
                self._shut()
            finally:
                self.write_lock.release()

    def _shut(self) -> None:
        with self.peer.cond:
            if self.over:
                return
            self.over = self.leaving = self.eof = True
            self._finish = False
        io = self.peer.endpoint.io
        io.forget(self)
        for transport in self._transports.values():
            try:
                transport.close(self.lost)
            except Exception:  # the others must be closed too
                log.exception("%s: closing %s to %s failed", self.stream.me, transport.name, self.stream.peer)
        if self.place.node == self._link.me.node:
            slots.mapped.forget(self.place.pid)  # mapped by whatever way: what is still looked at keeps its mapping
        self.stream.close()
        self.peer.gone(self)
