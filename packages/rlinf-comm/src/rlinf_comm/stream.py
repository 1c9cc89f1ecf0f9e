"""The control stream of two processes: one socket, read and written in pieces that survive a timeout.

Nothing is joined or copied into a frame: what is written are lists of buffers (``sendmsg``), and what is large is read
straight to where it belongs. A write that stops in the middle of a frame leaves a debt, which the next write
pays first; a read that stops goes on with what it has. Reading and writing are independent of each other, but each
is for one thread at a time; the connection sees to that.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rlinf_comm.errors import CommTimeout, PeerLost

RECEIVE_BYTES = 128 << 10
SPIN_S = 0.0001
BUSY_S = 0.001
"""A reader that finds nothing looks on for so long, if something has come within the last ``BUSY_S``."""
JOINED_BYTES = 16 << 10
"""Pieces of no more than this together are joined: that costs less than to hand each to the kernel."""
MAX_PIECES = 512
"""Buffers of one ``sendmsg`` (the system takes at most 1,024)."""
SLICE_S = 2.0
"""A wait on a TCP stream looks this often whether the other node still answers."""
SILENT_S = 15.0
"""A node that has not answered our repeated packets for this long is lost."""
BUFFER_BYTES = 4 << 20
"""Asked of the system for a stream's own buffers on one machine (it may give less)."""
_ZEROS = memoryview(bytes(1 << 20))
_BROKEN = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.EBADF})


def empty(nbytes: int) -> memoryview:
    """Writable memory that is not cleared first."""
    return np.empty(nbytes, np.uint8).data


class Ended(Exception):
    """The peer wrote no more. ``clean``: not in the middle of something."""

    def __init__(self, clean: bool) -> None:
        super().__init__("end of stream" if clean else "end of stream in the middle of a message")
        self.clean = clean


class Stream:
    """See above. ``blocked`` and ``starved`` are called when the socket takes or has nothing; they return when it might
    and raise CommTimeout at the deadline that they are given (``time.monotonic()`` seconds; None: none)."""

    def __init__(self, sock: socket.socket, me: str, peer: str) -> None:
        self.sock = sock
        self.me = me
        self.peer = peer
        self.is_tcp = sock.family != socket.AF_UNIX
        self.write_deadline: float | None = None
        self.read_deadline: float | None = None
        self.written = 0
        self.blocked: Callable[[float | None], None] = self.wait_writable
        self.starved: Callable[[float | None], None] = self.wait_readable
        self._first: deque[memoryview] = deque()
        """Must go before anything else: the rest of what was begun."""
        self._buffer = empty(RECEIVE_BYTES)
        self._start = 0
        self._end = 0
        self._heard = 0.0
        """When something last came."""
        self._unread: list[memoryview] | None = None
        """What is left of a ``read_into`` that stopped at its deadline."""
        self._read_poll = select.poll()
        self._read_poll.register(sock, select.POLLIN)
        self._write_poll = select.poll()
        self._write_poll.register(sock, select.POLLOUT)
        sock.setblocking(False)
        _tune(sock, self.is_tcp)

    # Writing

    def write(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write all of the buffers (flat, one byte an item), after what is owed."""
        if self._first:
            self.settle()
        total = 0
        for buffer in buffers:
            total += len(buffer)
        if total > JOINED_BYTES:
            self._write([b for b in buffers if len(b)])
        elif total:
            self._write([b"".join(buffers)])

    def settle(self) -> None:
        """Write what is owed."""
        while not self.write_now(b""):
            self.blocked(self.write_deadline)

    def owe(self, head: Sequence[memoryview | bytes], zeros: int, tail: bytes) -> None:
        """``head``, ``zeros`` bytes of nothing and ``tail`` are written before anything else."""
        self._first.extend(memoryview(part) for part in head if len(part))
        while zeros:
            piece = _ZEROS[: min(zeros, len(_ZEROS))]
            self._first.append(piece)
            zeros -= len(piece)
        self._first.append(memoryview(tail))

    def write_now(self, data: bytes) -> bool:
        """Write what the socket takes at once of what is owed and of ``data``; the rest of ``data`` is then owed.
        Returns whether everything went."""
        if data:
            self._first.append(memoryview(data))
        while self._first:
            part = self._first[0]
            sent = self._send([part])
            if sent == len(part):
                self._first.popleft()
            elif sent:
                self._first[0] = part[sent:]
            else:
                return False
        return True

    def owe_nothing(self) -> None:
        """The stream is broken: nothing can be written any more."""
        self._first.clear()

    @property
    def owes(self) -> bool:
        return bool(self._first)

    def _write(self, parts: list[memoryview | bytes]) -> None:
        at = 0
        while at < len(parts):
            sent = self._send(parts[at : at + MAX_PIECES] if at or len(parts) > MAX_PIECES else parts)
            if not sent:
                self.blocked(self.write_deadline)
                continue
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = memoryview(parts[at])[sent:]

    def _send(self, parts: Sequence[memoryview | bytes]) -> int:
        try:
            sent = self.sock.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.lost(error) from error
        self.written += sent
        return sent

    # Reading

    def need(self, size: int) -> memoryview:
        """The next ``size`` bytes, which stay to be read: a timeout loses nothing. Raises Ended."""
        while self._end - self._start < size:
            if not self.fill(size) and not self._spun(size):
                self.starved(self.read_deadline)
        return self._buffer[self._start : self._start + size]

    def _spun(self, size: int) -> bool:
        """In busy traffic, look again for a moment: to fall asleep and to be woken costs more than that."""
        now = time.perf_counter()
        if now - self._heard > BUSY_S:
            return False
        until = now + SPIN_S
        while time.perf_counter() < until:
            if self.fill(size):
                return True
        return False

    def skip(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0

    @property
    def buffered(self) -> int:
        return self._end - self._start

    def fill(self, size: int = 1) -> bool:
        """Read what is there, up to a buffer that can hold ``size`` bytes; False: nothing is there yet."""
        held = self._end - self._start
        if self._start + size > len(self._buffer) or self._end == len(self._buffer):
            target = self._buffer if size <= len(self._buffer) else empty(size)
            target[:held] = self._buffer[self._start : self._end]
            self._buffer, self._start, self._end = target, 0, held
        try:
            got = self.sock.recv_into(self._buffer[self._end :])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ECONNRESET:
                raise Ended(clean=False) from error
            raise self.lost(error) from error
        if not got:
            raise Ended(clean=not held)
        self._end += got
        self._heard = time.perf_counter()
        if held == 0 and self._start == 0 and len(self._buffer) > RECEIVE_BYTES and self._end <= RECEIVE_BYTES:
            small = empty(RECEIVE_BYTES)  # one long frame must not hold its memory for ever
            small[: self._end] = self._buffer[: self._end]
            self._buffer = small
        return True

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill all of the buffers. After CommTimeout a call with the same buffers goes on where it stopped."""
        left = [b for b in buffers if len(b)] if self._unread is None else self._unread
        self._unread = left
        while left:
            if self._end > self._start:
                got = min(self._end - self._start, len(left[0]))
                left[0][:got] = self._buffer[self._start : self._start + got]
                self.skip(got)
            else:
                try:
                    got = self.sock.recvmsg_into(left[:MAX_PIECES])[0]
                except BlockingIOError:
                    self.starved(self.read_deadline)
                    continue
                except OSError as error:
                    raise self.lost(error) from error
                if not got:
                    raise Ended(clean=False)
            at = 0
            while at < len(left) and got >= len(left[at]):
                got -= len(left[at])
                at += 1
            del left[:at]
            if got:
                left[0] = left[0][got:]
        self._unread = None

    # Waiting

    def wait_readable(self, deadline: float | None) -> None:
        self._wait(self._read_poll, deadline)

    def wait_writable(self, deadline: float | None) -> None:
        self._wait(self._write_poll, deadline)

    def wait_either(self, deadline: float | None) -> None:
        """Return when the socket takes or has something (for the thread that writes)."""
        self._write_poll.modify(self.sock, select.POLLOUT | select.POLLIN)
        try:
            self._wait(self._write_poll, deadline)
        finally:
            self._write_poll.modify(self.sock, select.POLLOUT)

    def wait_read_and_flush(self, deadline: float | None) -> None:
        """Return when the socket has or takes something (for the thread that reads, while something is owed)."""
        self._read_poll.modify(self.sock, select.POLLOUT | select.POLLIN)
        try:
            self._wait(self._read_poll, deadline)
        finally:
            self._read_poll.modify(self.sock, select.POLLIN)

    def _wait(self, poll: select.poll, deadline: float | None) -> None:
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise CommTimeout("", me=self.me, peer=self.peer)
            slice_s = SLICE_S if left is None else min(left, SLICE_S)
            try:
                if poll.poll(slice_s * 1000 + 1):
                    return
            except OSError as error:
                raise self.lost(error) from error
            if self.is_tcp and self._silent():
                raise PeerLost(
                    f"{self.me}: the node of {self.peer} has not answered for {SILENT_S:g} s",
                    me=self.me,
                    peer=self.peer,
                )

    def _silent(self) -> bool:
        """Whether our packets are repeated and unanswered. A process that is stopped or slow does not look like that:
        its kernel answers. (TCP_USER_TIMEOUT cannot tell the two apart: it also ends a connection whose peer only
        does not read.)"""
        if not sys.platform.startswith("linux"):
            return False
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        except OSError:
            return False  # what is wrong with it the next read or write says
        retransmits, probes = info[2], info[3]
        last_ack_ms = struct.unpack_from("<I", info, 56)[0]
        return max(retransmits, probes) >= 2 and last_ack_ms >= SILENT_S * 1000

    def lost(self, error: OSError) -> PeerLost:
        why = "its connection is closed" if error.errno in _BROKEN else f"{error.strerror or error}"
        return PeerLost(f"{self.me} has lost {self.peer}: {why}", me=self.me, peer=self.peer)

    def close(self) -> None:
        self.sock.close()


def _tune(sock: socket.socket, is_tcp: bool) -> None:
    if not is_tcp:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
