"""One process's view of another: its connection, and what has come in on it.

Whoever waits for something of the peer reads its stream itself if nobody does (see ``connection``). What comes in
is put where it belongs, and others that wait are woken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf_comm import frames, slots
from rlinf_comm.connection import Connection
from rlinf_comm.errors import CommTimeout, FrameError, PeerClosed, PeerLost, RemoteError, ResourceLimit
from rlinf_comm.frames import Arrived
from rlinf_comm.mailbox import Mailbox
from rlinf_comm.stream import SLICE_S, Ended
from rlinf_comm.work import Lane

if TYPE_CHECKING:
    from rlinf_comm.endpoint import Endpoint
    from rlinf_comm.transports.base import Place

T = TypeVar("T")
RETRY_S = 0.05
log = logging.getLogger("rlinf.comm")


@dataclass
class PeerStats:
    """Counts since the start. ``transports``: how many groups of buffers each has moved for messages sent (what went
    inline is not in there). ``fallbacks``: how often one had no room and the next was taken."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    fallbacks: int = 0
    connections: int = 0
    transports: dict[str, int] = field(default_factory=dict)


class PeerState:
    """``cond`` guards everything that changes, and the fields of the connection that say so."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.endpoint = endpoint
        self.name = name
        self.cond = threading.Condition(threading.Lock())
        self.conn: Connection | None = None
        self.uid = ""
        self.place: Place | None = None
        self.lost: PeerLost | None = None
        self.dialing = False
        self.accepting = False
        """The peer was welcome and has not said that it is ready."""
        self.inbox: deque[Arrived] = deque()
        self.collective = Mailbox()
        """Messages of broadcasts: not for ``recv``."""
        self.failures: deque[RemoteError] = deque()
        """Of messages that nobody waited for."""
        self.answers: dict[tuple[int, int], str] = {}
        """(kind, number) -> the text of a failure, or "" for good."""
        self.expected: set[int] = set()
        """Messages whose answer somebody waits for."""
        self.flushes: list[tuple[int, int]] = []
        """(messages to be decoded first, number) of FLUSH frames that are not answered."""
        self.closed_after = 0
        """How many messages the peer had consumed when it closed."""
        self.sent = 0
        self.arrived = 0
        self.decoded = 0
        """Of those that have arrived; both without broadcasts, which report by themselves."""
        self.consumed = 0
        self.flush_numbers = 0
        self.waiters = 0
        self.active = 0
        """Operations that are going on."""
        self.idle = 0
        """How many of them wait for a message, which needs no connection before it comes."""
        self.unfinished = 0
        """Messages that somebody has taken and not consumed yet."""
        self.used = time.monotonic()
        self.glanced = 0.0
        self.send_lock = threading.Lock()
        self.stats = PeerStats()
        self.send_lane = Lane(f"rlinf-send-{name}")
        self.recv_lane = Lane(f"rlinf-recv-{name}")

    # Waiting

    def check(self) -> None:
        """Raise when nothing can be expected of the peer any more."""
        self.endpoint.check()
        if self.lost is not None:
            raise type(self.lost)(*self.lost.args, me=self.lost.me, peer=self.lost.peer)

    def timed_out(self, what: str, seconds: float) -> CommTimeout:
        me = self.endpoint.name
        text = f"{me} has waited {seconds:.3g} s: {what}"
        return CommTimeout(text, me=me, peer=self.name, what=what, seconds=seconds)

    def wait(
        self,
        ready: Callable[[], T | None],
        deadline: float,
        what: str,
        *,
        over: Connection | None = None,
        idle: bool = False,
    ) -> T | None:
        """What ``ready`` answers (it is called with ``cond`` held) when that is true; reads the stream meanwhile.

        Returns None when the connection ``over`` is given and has ended in good order. ``idle``: the connection may be
        given up meanwhile. Raises CommTimeout, PeerLost.
        """
        with self.cond:
            self.active += 1
            self.idle += idle
            try:
                return self._wait(ready, deadline, what, over)
            finally:
                self.active -= 1
                self.idle -= idle

    def _wait(self, ready: Callable[[], T | None], deadline: float, what: str, over: Connection | None) -> T | None:
        begun = 0.0
        while True:
            value = ready()
            if value:
                return value
            self.check()
            begun = begun or time.monotonic()
            conn = self.conn
            if over is not None and conn is not over:
                return None
            left = deadline - time.monotonic()
            if left <= 0 and (conn is None or conn.reading or conn.eof):
                raise self.timed_out(what, time.monotonic() - begun)
            if conn is None or conn.reading or conn.eof:
                self.waiters += 1
                woken = self.cond.wait(min(left, SLICE_S))
                self.waiters -= 1
                if not woken and self.conn is None:
                    self._probe()
                continue
            conn.reading = True
            try:
                self._read_one(conn, deadline)
            except CommTimeout:
                value = ready()
                if value:
                    return value
                raise self.timed_out(what, time.monotonic() - begun) from None
            finally:
                self._free_token(conn)

    def _probe(self) -> None:
        """No connection, because it was idle. Whether the peer is still there is seen at its listener."""
        self.cond.release()
        try:
            gone = self.endpoint.is_gone(self)
        finally:
            self.cond.acquire()
        if gone and self.conn is None and self.lost is None:
            self._set_lost(PeerLost, f"nobody answers at the address of {self.name} any more: its process has ended")

    def _read_one(self, conn: Connection, deadline: float) -> bool:
        """With ``cond`` and the token: read one frame and put it where it belongs. False at the end of the stream.
        Raises CommTimeout."""
        self.cond.release()
        found: Any = None
        fault: Exception | None = None
        try:
            found = conn.read_frame(deadline)
        except (Ended, PeerLost, FrameError) as error:
            fault = error
        finally:
            self.cond.acquire()
        if fault is not None:
            self._ended(conn, fault)
            return False
        if found is not None:
            self._dispatch(conn, found)
        return True

    def take_token(self, conn: Connection) -> bool:
        """The right to read the connection, if nobody has it."""
        with self.cond:
            if conn.reading or conn.eof:
                return False
            conn.reading = True
            return True

    def give_token(self, conn: Connection) -> None:
        with self.cond:
            self._free_token(conn)

    def _free_token(self, conn: Connection, *, unasked: bool = False) -> None:
        conn.reading = False
        if not unasked:
            conn.turns += 1
            if not conn.watched and not conn.eof:
                self.endpoint.io.watch(conn)
        if self.waiters:
            self.cond.notify_all()
        if conn.hangup and not conn.eof:
            self.endpoint.io.attend(conn)

    def read_available(self, conn: Connection, *, unasked: bool = False) -> None:
        """With the token, which this gives back: read what is there and do not wait. ``unasked``: by the I/O thread."""
        with self.cond:
            try:
                while not conn.eof and self._read_one(conn, 0.0):
                    pass
            except CommTimeout:
                pass  # that was all
            finally:
                self._free_token(conn, unasked=unasked)

    # What comes in (with ``cond``)

    def _dispatch(self, conn: Connection, found: tuple[int, int, bytes] | Arrived) -> None:
        if isinstance(found, Arrived):
            if found.flags & frames.COLLECTIVE:
                self._file(conn, found)
            else:
                self.arrived += 1
                self.inbox.append(found)
            return
        kind, number, text = found
        if kind == frames.CREDIT:
            conn.in_flight -= number
        elif kind in (frames.ACK, frames.FLUSHED):
            self.answers[kind, number] = ""
        elif kind == frames.FAIL:
            self._failed_there(number, text.decode(errors="replace"))
        elif kind == frames.FLUSH:
            if self.decoded >= self.arrived:  # all that was sent before it has arrived before it
                answer = frames.header(frames.FLUSHED, number)
                if not conn.leaving:
                    conn.control(answer)
                else:
                    self.answer_later([answer])
            else:
                self.flushes.append((self.arrived, number))
        elif kind == frames.RELEASE:
            conn.released(text)
        elif kind == frames.LEAVE:
            conn.leaving = conn.gave_up = True
            self.endpoint.io.attend(conn)
        elif kind == frames.BYE:
            conn.leaving = conn.bye = True
            self.closed_after = number
            self.endpoint.io.attend(conn)

    def _file(self, conn: Connection, message: Arrived) -> None:
        """A broadcast's message counts as consumed at once: nobody may come for it, and no other waits for that."""
        self.consumed += 1
        try:
            self.collective.add(message, time.monotonic())
        except FrameError as error:
            log.warning("%s: a message of %s was thrown away: %s", self.endpoint.name, self.name, error)
        credit = self.give_back(conn, message.nbytes)
        if credit and not conn.leaving:
            conn.control(credit)

    def give_back(self, conn: Connection, nbytes: int) -> bytes:
        """With ``cond``: the sender may send so many more bytes. What to tell it, if that is worth a frame."""
        conn.to_return += nbytes
        if conn.to_return < conn.return_from or conn is not self.conn:
            return b""
        credit = frames.header(frames.CREDIT, conn.to_return)
        conn.to_return = 0
        return credit

    def _failed_there(self, seq: int, text: str) -> None:
        if seq in self.expected:
            self.answers[frames.ACK, seq] = text or "it failed"
        else:
            self.failures.append(self.remote_error(text))

    def answer_later(self, answers: list[bytes]) -> None:
        """The connection that a message came on is gone: its answer needs another, to the same process."""
        if self.lost is not None or self.endpoint.closed:
            return
        uid = self.uid

        def answer() -> None:
            conn = self.connected(time.monotonic() + self.endpoint.timeout)
            if conn.uid == uid:
                conn.control(b"".join(answers))

        try:
            self.send_lane.submit("answer", answer)
        except ResourceLimit as error:
            log.warning("%s cannot answer %s: %s", self.endpoint.name, self.name, error)

    def remote_error(self, text: str) -> RemoteError:
        me = self.endpoint.name
        return RemoteError(f"{self.name} failed on a message with {me}: {text}", me=me, peer=self.name, text=text)

    def _ended(self, conn: Connection, fault: Exception) -> None:
        """The stream has ended, in whatever way."""
        conn.eof = conn.leaving = True
        me = self.endpoint.name
        clean = isinstance(fault, Ended) and fault.clean
        lost = True
        if conn.bye:
            lost = False
            self._set_lost(PeerClosed, f"{self.name} has closed its communicator; {me} can expect nothing more of it")
        elif conn.gave_up and clean:
            lost = False
        elif isinstance(fault, (PeerLost, FrameError)):
            self._set_lost(PeerLost, str(fault))
        else:
            cut = "" if clean else " in the middle of a message"
            self._set_lost(PeerLost, f"{me} has lost {self.name}: its process has ended or its node is gone{cut}")
        conn.lost = lost
        self.endpoint.io.finish(conn)
        self.cond.notify_all()

    def _set_lost(self, cls: type[PeerLost], text: str) -> None:
        if self.lost is None and not self.endpoint.closed:
            self.lost = cls(text, me=self.endpoint.name, peer=self.name)

    def gone(self, conn: Connection) -> None:
        """The connection is closed, down to the socket."""
        self.endpoint.ended(conn)
        with self.cond:
            if self.conn is conn:
                self.conn = None
            self.cond.notify_all()

    # Connecting

    def connected(self, deadline: float) -> Connection:
        """The connection, made if there is none. Raises CommTimeout, PeerLost, AuthenticationFailed, ResourceLimit."""
        conn = self.conn
        if conn is not None and not conn.leaving:
            return conn
        begun = time.monotonic()
        while True:
            with self.cond:
                self.check()
                conn = self.conn
                if conn is not None and not conn.leaving:
                    return conn
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.timed_out(f"{self.name} has not connected", time.monotonic() - begun)
                if conn is not None or self.dialing or self.accepting:
                    self.waiters += 1
                    self.cond.wait(min(left, SLICE_S))
                    self.waiters -= 1
                    continue
                self.dialing = True
            try:
                again = self.endpoint.dial(self, deadline)
            finally:
                with self.cond:
                    self.dialing = False
                    self.cond.notify_all()
            if again:
                with self.cond:
                    if self.conn is None:
                        self.waiters += 1
                        self.cond.wait(min(RETRY_S, max(0.0, deadline - time.monotonic())))
                        self.waiters -= 1

    def adopt(self, conn: Connection) -> None:
        """With ``cond``: a connection is made."""
        self.conn = conn
        self.place = conn.place
        self.stats.connections += 1
        self.used = time.monotonic()
        self.cond.notify_all()

    def reborn(self, uid: str) -> None:
        """With ``cond``: who comes under this name is another process than before."""
        if self.place is not None and self.place.node == self.endpoint.place.node:
            slots.mapped.forget(self.place.pid)
        self.uid = uid
        self.lost = None
        self.sent = self.arrived = self.decoded = self.consumed = self.closed_after = 0
        self.collective.begin_again()
        self.answers.clear()
        self.expected.clear()
        self.failures.clear()
        self.flushes.clear()
