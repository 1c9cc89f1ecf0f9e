"""Operations on one peer: messages out and in, in order, and the end of a connection or of all."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlinf_comm import frames
from rlinf_comm.connection import PER_MESSAGE, Connection, LeftBehind, Unsendable
from rlinf_comm.errors import CommTimeout, PeerClosed, PeerLost, RemoteError
from rlinf_comm.frames import Arrived, Packet
from rlinf_comm.mailbox import Mailbox
from rlinf_comm.peerstate import PeerState, PeerStats

__all__ = ["Peer", "PeerStats"]

GLANCE_S = 0.01
"""A sender looks this often for what has come (failures, credit), beside its waits."""


class Peer(PeerState):
    """See ``peerstate`` for what ``cond`` guards."""

    # Sending

    def send(self, packet: Packet, deadline: float, *, confirm: bool, what: str, apart: bool = False) -> None:
        """One message, after those before it. Raises CommTimeout: it will not be delivered (with ``confirm``: unless it
        was only the answer that did not come). ``apart``: the failure of an earlier one is left to who sent that."""
        begun = time.monotonic()
        if confirm:
            packet.flags |= frames.CONFIRM
        if not self.send_lock.acquire(timeout=max(0.0, deadline - begun)):
            raise self.timed_out(f"earlier messages to {self.name} have not gone", time.monotonic() - begun)
        try:
            if not apart:
                self.raise_failure()
            seq, uid = self._send(packet, deadline, what, begun)
        finally:
            self.send_lock.release()
        if confirm:
            self.await_answer(frames.ACK, seq, uid, deadline, f"{self.name} has not confirmed {what}")

    def _send(self, packet: Packet, deadline: float, what: str, begun: float) -> tuple[int, str]:
        """Its number, and the process that it went to."""
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
                self.expected.discard(seq)
                continue
            except Unsendable:
                self.expected.discard(seq)
                raise
            except PeerLost as error:
                self._find_end(conn, error)
        with self.cond:
            if conn.uid == self.uid:
                self.sent = seq
            conn.in_flight += nbytes
        self.used = time.monotonic()
        self.stats.sent += 1
        self.stats.sent_bytes += nbytes - PER_MESSAGE
        return seq, conn.uid

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

    def await_answer(self, kind: int, number: int, uid: str, deadline: float, what: str) -> None:
        """``uid``: of the process that is to answer; one that has come in its place counts anew."""
        key = (kind, number)

        def ready() -> bool:
            if self.uid != uid:
                me = self.endpoint.name
                raise PeerLost(f"{me} has lost {self.name}, which has begun again meanwhile", me=me, peer=self.name)
            return key in self.answers

        try:
            self.wait(ready, deadline, what)
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
            self.await_answer(
                frames.FLUSHED, number, conn.uid, deadline, f"{self.name} has not consumed what it was sent"
            )
        except PeerClosed:
            if self.closed_after < upto:
                raise
        self.raise_failure()

    # Receiving

    def receive(self, deadline: float) -> Arrived:
        """The next message, not decoded yet. ``consumed_one`` must be called for it."""
        box = self.inbox
        if not box and self.conn is None and not self.stats.connections:
            self.connected(deadline)

        def ready() -> Arrived | RemoteError | None:
            if box:
                self.unfinished += 1
                return box.popleft()
            return self.failures.popleft() if self.failures else None

        found = self.wait(ready, deadline, f"nothing has come from {self.name}", idle=True)
        if isinstance(found, RemoteError):
            raise found
        assert isinstance(found, Arrived)
        self.used = time.monotonic()
        return found

    def receive_collective(self, take: Callable[[Mailbox], Arrived | None], deadline: float) -> Arrived:
        """The message of a broadcast that ``take`` takes (it is called with ``cond`` held)."""
        if self.collective:
            self._catch_up()  # with what is there already there may be the news that it is of no use any more
        elif self.conn is None and not self.stats.connections:
            self.connected(deadline)

        def ready() -> Arrived | None:
            message = take(self.collective)
            self.unfinished += message is not None
            return message

        found = self.wait(ready, deadline, f"nothing of the broadcast has come from {self.name}")
        assert found is not None
        return found

    def _catch_up(self) -> None:
        """Take in what lies in the socket; who reads it just now is waited for shortly."""
        conn = self.conn
        if conn is None:
            return
        with self.cond:
            self.waiters += 1
            self.cond.wait_for(lambda: not conn.reading, GLANCE_S)
            self.waiters -= 1
        if self.take_token(conn):
            self.read_available(conn)

    def consumed_one(self, message: Arrived, error: str = "") -> None:
        """A message has been decoded, or (``error``) could not be."""
        try:
            self._consumed(message, error)
        finally:
            with self.cond:  # only now may the connection be given up
                self.unfinished -= 1

    def _consumed(self, message: Arrived, error: str) -> None:
        conn = message.connection
        credit = b""
        answers: list[bytes] = []
        with self.cond:
            self.stats.received += 1
            self.stats.received_bytes += message.nbytes - PER_MESSAGE
            if message.flags & frames.COLLECTIVE:
                return  # it was told on arrival
            credit = self.give_back(conn, message.nbytes)
            if conn.uid == self.uid:  # else its sender has ended, and who has its name now has sent others
                self.consumed += 1
                self.decoded += 1
                if error and not message.flags & frames.FAILED:
                    answers.append(frames.header(frames.FAIL, message.seq, error.encode()))
                elif message.flags & frames.CONFIRM:
                    answers.append(frames.header(frames.ACK, message.seq))
                for flush in [f for f in self.flushes if f[0] <= self.decoded]:
                    self.flushes.remove(flush)
                    answers.append(frames.header(frames.FLUSHED, flush[1]))
            current = self.conn
        if current is not None and not current.leaving:
            if credit or answers:
                current.control(b"".join([credit, *answers]))
        elif answers:
            self.answer_later(answers)

    # Giving a connection up

    def leave(self) -> bool:
        """Give up the connection if it is idle; the peer is told and keeps what it has been sent."""
        if not self.send_lock.acquire(blocking=False):
            return False
        try:
            with self.cond:
                conn = self.conn
                busy = self.active > self.idle or self.unfinished or self.inbox or self.expected or self.flushes
                if conn is None or conn.leaving or busy or conn.receiving:
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
