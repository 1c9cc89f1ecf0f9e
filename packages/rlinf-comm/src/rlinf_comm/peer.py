"""All that one process knows of one other: the connection to it, what has come from it, and the order of operations.

Whoever waits for something of the peer reads its stream itself if nobody does (see ``connection``). What comes in
is put where it belongs, and others that wait are woken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf_comm import frames
from rlinf_comm.connection import PER_MESSAGE, Connection, LeftBehind
from rlinf_comm.errors import CommTimeout, FrameError, PeerClosed, PeerLost, RemoteError
from rlinf_comm.frames import Arrived, Packet
from rlinf_comm.stream import SLICE_S, Ended
from rlinf_comm.work import Lane

if TYPE_CHECKING:
    from rlinf_comm.endpoint import Endpoint
    from rlinf_comm.transports.base import Place

T = TypeVar("T")
GLANCE_S = 0.01
"""A sender looks this often for what has come (failures, credit), beside its waits."""
RETRY_S = 0.05


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


class Peer:
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
        self.collective: deque[Arrived] = deque()
        """Messages of broadcasts: not for ``recv``."""
        self.failures: deque[RemoteError] = deque()
        """Of messages that nobody waited for."""
        self.answers: dict[tuple[int, int], str] = {}
        """(kind, number) -> the text of a failure, or "" for good."""
        self.expected: set[int] = set()
        """Messages whose answer somebody waits for."""
        self.flushes: list[tuple[int, int]] = []
        """(messages to be consumed first, number) of FLUSH frames that are not answered."""
        self.closed_after = 0
        """How many messages the peer had consumed when it closed."""
        self.sent = 0
        self.arrived = 0
        self.consumed = 0
        self.flush_numbers = 0
        self.waiters = 0
        self.active = 0
        """Operations that are going on."""
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
        self, ready: Callable[[], T | None], deadline: float, what: str, *, over: Connection | None = None
    ) -> T | None:
        """What ``ready`` answers (it is called with ``cond`` held) when that is true; reads the stream meanwhile.

        Returns None when the connection ``over`` is given and has ended in good order. Raises CommTimeout, PeerLost.
        """
        with self.cond:
            self.active += 1
            try:
                return self._wait(ready, deadline, what, over)
            finally:
                self.active -= 1

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
            self.arrived += 1
            (self.collective if found.flags & frames.COLLECTIVE else self.inbox).append(found)
            return
        kind, number, text = found
        if kind == frames.CREDIT:
            conn.in_flight -= number
        elif kind in (frames.ACK, frames.FLUSHED):
            self.answers[kind, number] = ""
        elif kind == frames.FAIL:
            self._failed_there(number, text.decode(errors="replace"))
        elif kind == frames.FLUSH:
            upto = int.from_bytes(text, "little")
            if self.consumed >= upto:
                conn.control(frames.header(frames.FLUSHED, number))
            else:
                self.flushes.append((upto, number))
        elif kind == frames.RELEASE:
            conn.released(text)
        elif kind == frames.LEAVE:
            conn.leaving = conn.gave_up = True
            self.endpoint.io.attend(conn)
        elif kind == frames.BYE:
            conn.leaving = conn.bye = True
            self.closed_after = number
            self.endpoint.io.attend(conn)

    def _failed_there(self, seq: int, text: str) -> None:
        if seq in self.expected:
            self.answers[frames.ACK, seq] = text or "it failed"
        else:
            self.failures.append(self.remote_error(text))

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
        self.uid = uid
        self.lost = None
        self.sent = self.arrived = self.consumed = self.closed_after = 0
        self.answers.clear()
        self.expected.clear()
        self.failures.clear()
        self.flushes.clear()

    # Sending

    def send(self, packet: Packet, deadline: float, *, confirm: bool, what: str) -> None:
        """One message, after those before it. Raises CommTimeout: it will not be delivered (with ``confirm``: unless it
        was only the answer that did not come)."""
        begun = time.monotonic()
        if confirm:
            packet.flags |= frames.CONFIRM
        if not self.send_lock.acquire(timeout=max(0.0, deadline - begun)):
            raise self.timed_out(f"earlier messages to {self.name} have not gone", time.monotonic() - begun)
        try:
            self.raise_failure()
            seq = self._send(packet, deadline, what, begun)
        finally:
            self.send_lock.release()
        if confirm:
            self.await_answer(frames.ACK, seq, deadline, f"{self.name} has not confirmed {what}")

    def _send(self, packet: Packet, deadline: float, what: str, begun: float) -> int:
        nbytes = packet.nbytes + PER_MESSAGE
        while True:
            conn = self.connected(deadline)
            if not conn.has_room(nbytes):
                ready = lambda: conn.leaving or conn.has_room(nbytes)  # noqa: B023, E731
                held = f"{self.name} has not consumed what it was sent ({conn.in_flight} bytes are on their way)"
                if not self.wait(ready, deadline, held, over=conn) or conn.leaving:
                    continue
            else:
                self._glance(conn)
            seq = self.sent + 1
            if packet.flags & frames.CONFIRM:
                self.expected.add(seq)
            try:
                conn.transmit(packet, seq, deadline)
                break
            except CommTimeout:
                self.expected.discard(seq)
                raise self.timed_out(f"{what} has not been taken by {self.name}", time.monotonic() - begun) from None
            except LeftBehind:
                continue
            except PeerLost as error:
                self._find_end(conn, error)
        with self.cond:
            self.sent = seq
            conn.in_flight += nbytes
        self.used = time.monotonic()
        self.stats.sent += 1
        self.stats.sent_bytes += nbytes - PER_MESSAGE
        return seq

    def _glance(self, conn: Connection) -> None:
        """Now and then, look at what has come."""
        now = time.monotonic()
        if now - self.glanced > GLANCE_S:
            self.glanced = now
            if self.take_token(conn):
                self.read_available(conn)
                self.check()

    def _find_end(self, conn: Connection, error: PeerLost) -> None:
        """Writing failed. What it means is said at the end of what the peer has written. Raises PeerLost."""
        if self.take_token(conn):
            self.read_available(conn)
        with self.cond:
            if not conn.eof and self.lost is None:
                self._ended(conn, error)
            self.check()
        raise error

    def raise_failure(self) -> None:
        """Raise what the peer has said of an earlier message that nobody waited for."""
        if self.failures:
            try:
                raise self.failures.popleft()
            except IndexError:
                return  # another thread had it

    def await_answer(self, kind: int, number: int, deadline: float, what: str) -> None:
        key = (kind, number)
        try:
            self.wait(lambda: key in self.answers, deadline, what)
            text = self.answers.pop(key)
        finally:
            if kind == frames.ACK:
                self.expected.discard(number)
        if text:
            raise self.remote_error(text)

    def flush(self, deadline: float) -> None:
        """Return when the peer has consumed all that was sent. Raises RemoteError for one that it could not decode."""
        self.raise_failure()
        upto = self.sent
        if not upto:
            self.check()
            return
        try:
            conn = self.connected(deadline)
            with self.cond:
                self.flush_numbers += 1
                number = self.flush_numbers
            conn.control(frames.header(frames.FLUSH, number, upto.to_bytes(8, "little")))
            self.await_answer(frames.FLUSHED, number, deadline, f"{self.name} has not consumed what it was sent")
        except PeerClosed:
            if self.closed_after < upto:
                raise
        self.raise_failure()

    # Receiving

    def receive(self, deadline: float, *, collective: bool = False) -> Arrived:
        """The next message, not decoded yet. ``consumed`` must be called for it."""
        box = self.collective if collective else self.inbox
        if not box and self.conn is None and not self.stats.connections:
            self.connected(deadline)

        def ready() -> Arrived | RemoteError | None:
            if box:
                return box.popleft()
            return self.failures.popleft() if self.failures else None

        found = self.wait(ready, deadline, f"nothing has come from {self.name}")
        if isinstance(found, RemoteError):
            raise found
        assert isinstance(found, Arrived)
        self.used = time.monotonic()
        return found

    def receive_keyed(self, key: bytes, kind: bytes, deadline: float) -> Arrived:
        """The message of a broadcast: ``key`` is a group's mark (8 bytes) and number. What is left of the group's
        earlier ones, which failed, is thrown away."""
        if not self.collective and self.conn is None and not self.stats.connections:
            self.connected(deadline)
        stale: list[Arrived] = []

        def ready() -> Arrived | None:
            for message in list(self.collective):
                if message.meta[:16] == key and message.meta[16:] == kind:
                    self.collective.remove(message)
                    return message
                if message.meta[:8] == key[:8] and _number(message.meta) < _number(key):
                    self.collective.remove(message)
                    stale.append(message)
            return None

        try:
            found = self.wait(ready, deadline, f"nothing of the broadcast has come from {self.name}")
        finally:
            for message in stale:
                self.consumed_one(message)
        assert found is not None
        return found

    def consumed_one(self, message: Arrived, error: str = "") -> None:
        """A message has been decoded, or (``error``) could not be."""
        controls = []
        conn = message.connection
        with self.cond:
            self.consumed += 1
            self.stats.received += 1
            self.stats.received_bytes += message.nbytes - PER_MESSAGE
            conn.to_return += message.nbytes
            if conn.to_return >= conn.return_from and conn is self.conn:
                controls.append(frames.header(frames.CREDIT, conn.to_return))
                conn.to_return = 0
            current = self.conn
            if error and not message.flags & frames.FAILED:
                controls.append(frames.header(frames.FAIL, message.seq, error.encode()))
            elif message.flags & frames.CONFIRM:
                controls.append(frames.header(frames.ACK, message.seq))
            if self.flushes:
                for upto, number in [f for f in self.flushes if f[0] <= self.consumed]:
                    self.flushes.remove((upto, number))
                    controls.append(frames.header(frames.FLUSHED, number))
        if not controls:
            return
        if current is not None and not current.leaving:
            current.control(b"".join(controls))
        elif self.lost is None and not self.endpoint.closed:
            answers = [c for c in controls if c[3] != frames.CREDIT]
            if answers:
                self.send_lane.submit("answer", lambda: self._answer_later(answers))

    def _answer_later(self, answers: list[bytes]) -> None:
        """The connection that a message came on is gone: its answer needs another."""
        self.connected(time.monotonic() + self.endpoint.timeout).control(b"".join(answers))

    # Giving a connection up

    def leave(self) -> bool:
        """Give up the connection if it is idle; the peer is told and keeps what it has been sent."""
        if not self.send_lock.acquire(blocking=False):
            return False
        try:
            with self.cond:
                conn = self.conn
                idle = not self.active and not self.inbox and not self.expected and not self.flushes
                if conn is None or conn.leaving or not idle:
                    return False
                conn.leaving = conn.gave_up = True
            conn.say_goodbye(frames.LEAVE)
            return True
        finally:
            self.send_lock.release()

    def say_bye(self) -> None:
        """This communicator is closed: the peer is told, and operations on it end."""
        self.send_lane.close()
        self.recv_lane.close()
        with self.cond:
            conn = self.conn
            self.cond.notify_all()
            if conn is None or conn.eof:
                return
            conn.leaving = conn.gave_up = True
        conn.say_goodbye(frames.BYE, self.consumed)

    def await_end(self, deadline: float) -> None:
        """Wait until the peer has taken all that it was sent and has closed its end too, then close."""
        with self.cond:
            self.cond.wait_for(lambda: self.conn is None, max(0.0, deadline - time.monotonic()))
            conn = self.conn
            if conn is None:
                return
            conn.eof = True
            conn.gave_up = False
            conn.lost = True
        self.endpoint.io.finish(conn)
        with self.cond:
            self.cond.wait_for(lambda: self.conn is None, 2.0)


def _number(key: bytes) -> int:
    return int.from_bytes(key[8:16], "little")
