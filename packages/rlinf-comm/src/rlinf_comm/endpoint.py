"""One process's end of all its connections: listeners, dialing, who is admitted, and what is closed when there are
too many."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_comm import arena, forks, handshake, slots, transports
from rlinf_comm.connection import Connection
from rlinf_comm.errors import AuthenticationFailed, CommClosed, CommError, PeerLost, ResourceLimit
from rlinf_comm.handshake import Hello, Initiator
from rlinf_comm.iothread import IoThread
from rlinf_comm.peer import Peer
from rlinf_comm.peerstate import PeerState
from rlinf_comm.selection import Thresholds
from rlinf_comm.stream import Stream
from rlinf_comm.transports.base import Place, Transport

if TYPE_CHECKING:
    from rlinf_comm.directory import Directory

LINGER_S = 5.0
"""``close`` waits up to this long for peers to take what they were sent."""
STALE_S = 1.0
"""An address where nobody answers may be that of an earlier process of this name: so long a newer one is waited for."""
NAMED = 8
"""Peers that are named in an error at most."""
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_NOBODY = (errno.ECONNREFUSED, errno.ENOENT, errno.ECONNRESET)


@dataclass(frozen=True, slots=True)
class Record:
    """What a communicator publishes of itself."""

    uid: str
    place: Place
    unix: str
    host: str
    port: int

    def pack(self) -> bytes:
        place = self.place
        return json.dumps(
            [
                self.uid,
                place.node,
                place.pid,
                sorted(place.capabilities),
                list(place.devices),
                self.unix,
                self.host,
                self.port,
            ]
        ).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        uid, node, pid, capabilities, devices, unix, host, port = json.loads(data)
        return cls(uid, Place(node, pid, frozenset(capabilities), tuple(devices)), unix, host, port)


class Endpoint(forks.Forked):
    def __init__(
        self,
        name: str,
        secret: bytes,
        directory: Directory,
        *,
        host: str,
        timeout: float,
        window_bytes: int,
        max_connections: int,
        devices: tuple[str, ...],
        shm_limit_bytes: int | None,
        thresholds: Thresholds,
        capabilities: frozenset[str] | None,
    ) -> None:
        self.name = name
        self.secret = secret
        self.directory = directory
        self.timeout = timeout
        self.window_bytes = window_bytes
        self.max_connections = max_connections
        self.thresholds = thresholds
        self.uid = os.urandom(8).hex()
        self.closed = False
        self.arena = arena.Arena(shm_limit_bytes)
        self.shared: dict[str, Any] = {"arena": self.arena, "uid": self.uid, "pids": set()}
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._open = 0
        self._broadcasts: dict[bytes, int] = {}
        self._probe_slot: arena.Slot | None = None
        listeners: list[socket.socket] = []
        try:
            usable = transports.usable() if capabilities is None else capabilities
            self.place = Place(slots.node_id().hex(), os.getpid(), usable, devices)
            self._record = self._listen(host, listeners)
            self.io = IoThread(self, listeners)
            self.io.start()
            forks.watch(self)
            directory.publish(key_of(name), self._record.pack())
        except BaseException as error:
            if hasattr(self, "io"):
                self.close()
            self.arena.close()
            for listener in listeners:
                listener.close()
            if isinstance(error, OSError):
                raise self.resource_error(error, f"{name} cannot listen on {host}") from error
            raise

    def _listen(self, host: str, listeners: list[socket.socket]) -> Record:
        tcp = forks.make(lambda: socket.create_server((host, 0), backlog=1024, family=_family(host)))
        tcp.setblocking(False)
        listeners.append(tcp)
        path = ""
        if hasattr(socket, "AF_UNIX") and os.path.isdir("/proc/self"):
            path = f"rlinf-comm-{os.urandom(8).hex()}"
            unix = forks.make(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listeners.append(unix)
            unix.bind(f"\0{path}")
            unix.listen(1024)
            unix.setblocking(False)
        return Record(self.uid, self.place, path, host, tcp.getsockname()[1])

    def check(self) -> None:
        if self.forked:
            raise CommError(f"{self.name} is of the parent process: a child needs a communicator of its own")
        if self.closed:
            raise CommClosed(f"{self.name} is closed", me=self.name)

    def peer(self, name: str) -> Peer:
        found = self._peers.get(name)
        if found is None:
            if name == self.name:
                raise CommError(f"{name} cannot send to itself", me=name, peer=name)
            with self._lock:
                found = self._peers.setdefault(name, Peer(self, name))
        return found

    def peers(self) -> list[Peer]:
        with self._lock:
            return list(self._peers.values())

    def place_of(self, name: str, deadline: float) -> Place:
        """Where a member of the run is (this end included)."""
        if name == self.name:
            return self.place
        peer = self.peer(name)
        if peer.place is None:
            peer.place = self._lookup(peer, deadline).place
        return peer.place

    def next_broadcast(self, group: bytes) -> int:
        """The number of the next broadcast of a group from here."""
        with self._lock:
            self._broadcasts[group] = self._broadcasts.get(group, 0) + 1
            return self._broadcasts[group]

    def transport_class(self, name: str) -> type[Transport]:
        return transports.load(name)

    def resource_error(self, error: OSError, what: str) -> CommError:
        """An OSError in words; for exhausted file descriptors with the limit."""
        if error.errno in _NO_FILES:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            where = "the machine" if error.errno == errno.ENFILE else "this process"
            return ResourceLimit(
                f"{what}: {where} has no file descriptor left (limit {soft}, at most {hard}: raise it with ulimit -n; "
                "RLIMIT_NOFILE)",
                me=self.name,
            )
        return CommError(f"{what}: {error.strerror or error}", me=self.name)

    # Dialing

    def dial(self, peer: PeerState, deadline: float) -> bool:
        """Try once to connect to ``peer``. True: not yet, try again. Raises what cannot be helped by trying again."""
        record = self._lookup(peer, deadline)
        with peer.cond:
            if peer.conn is not None:
                return False
        begun = time.monotonic()
        if not self._make_room(deadline):
            holders = [p.name for p in self.peers() if p.conn is not None]
            more = ", …" if len(holders) > NAMED else ""
            raise peer.timed_out(
                f"all {self.max_connections} connections of {self.name} (max_connections) are in use, "
                f"by {', '.join(holders[:NAMED]) or 'peers that are just connecting'}{more}",
                time.monotonic() - begun,
            )
        hello = Hello(
            self.name, peer.name, self.uid, os.urandom(8).hex(), self.place, self.window_bytes, self._probe(None)
        )
        limit = min(deadline, time.monotonic() + handshake.AUTH_TIMEOUT_S)
        kept = False
        try:
            try:
                sock = self._reach(peer, record, limit)
            except TimeoutError:
                return True  # it may be stopped, or very busy: whether it is too late the caller knows
            if sock is None:
                return self._wait_for_newer(peer, record, deadline)
            try:
                sock.setblocking(False)
                stream = Stream(sock, self.name, peer.name)
                side = Initiator(self.secret, hello)
                verdict = self._introduce(stream, side, limit)
                if verdict == handshake.WELCOME and side.hello is not None:
                    kept = self._take(peer, stream, hello, side.hello)
                    return not kept
            finally:
                if not kept:
                    sock.close()
            return self._turned_down(peer, verdict, side.reason)
        finally:
            if not kept:
                self._give_room()

    def _lookup(self, peer: PeerState, deadline: float) -> Record:
        begun = time.monotonic()
        try:
            return Record.unpack(self.directory.lookup(key_of(peer.name), max(0.0, deadline - begun)))
        except TimeoutError as error:
            what = f"{peer.name} has not appeared in the directory"
            raise peer.timed_out(what, time.monotonic() - begun) from error
        except OSError as error:
            raise self.resource_error(error, f"{self.name} cannot connect to {peer.name}") from error

    def _reach(self, peer: PeerState, record: Record, deadline: float) -> socket.socket | None:
        """A socket that is connected to the peer's listener; None when nobody listens there. Raises TimeoutError."""
        ways: list[tuple[int, Any]] = [(_family(record.host), (record.host, record.port))]
        if record.unix and record.place.node == self.place.node:
            ways.insert(0, (socket.AF_UNIX, f"\0{record.unix}"))
        for family, address in ways:
            try:
                sock = forks.make(lambda family=family: socket.socket(family, socket.SOCK_STREAM))  # type: ignore[misc]
            except OSError as error:
                raise self.resource_error(error, f"{self.name} cannot connect to {peer.name}") from error
            try:
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                sock.connect(address)
                return sock
            except TimeoutError:
                sock.close()
                raise
            except OSError as error:
                sock.close()
                if error.errno == errno.EAGAIN:  # of a unix socket: too many wait there to be accepted
                    raise TimeoutError from error
                if error.errno not in _NOBODY:
                    raise PeerLost(
                        f"{self.name} cannot reach {peer.name} at {address}: {error.strerror}",
                        me=self.name,
                        peer=peer.name,
                    ) from error
        return None

    def is_gone(self, peer: PeerState) -> bool:
        """Whether nobody listens at the address that the peer has published."""
        try:
            record = Record.unpack(self.directory.lookup(key_of(peer.name), 0.0))
            sock = self._reach(peer, record, time.monotonic() + handshake.AUTH_TIMEOUT_S)
        except (TimeoutError, ResourceLimit):
            return False  # nothing is known, which is no reason to call it gone
        except PeerLost:
            return True
        if sock is not None:
            sock.close()
        return sock is None

    def _wait_for_newer(self, peer: PeerState, record: Record, deadline: float) -> bool:
        until = min(deadline, time.monotonic() + STALE_S)
        while time.monotonic() < until:
            if self._lookup(peer, deadline).uid != record.uid:
                return True
            with peer.cond:
                if peer.conn is not None:
                    return False
                peer.cond.wait(0.05)
        text = f"{self.name} finds nobody at the address of {peer.name}: its process has ended"
        raise PeerLost(text, me=self.name, peer=peer.name)

    def _introduce(self, stream: Stream, side: Initiator, deadline: float) -> int:
        """The connecting side of the handshake; what the other end decided (BUSY: it has not)."""
        sock = stream.sock
        while side.verdict is None:
            try:
                data = sock.recv(side.rest())
            except BlockingIOError:
                try:
                    stream.wait_readable(deadline)
                except TimeoutError:
                    return handshake.BUSY
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                return handshake.BUSY
            try:
                answer = side.receive(data)
            except AuthenticationFailed as error:
                raise AuthenticationFailed(str(error), me=self.name, peer=stream.peer) from None
            if answer:
                sock.send(answer)
        return side.verdict

    def _turned_down(self, peer: PeerState, verdict: int, reason: str) -> bool:
        if verdict in (handshake.BUSY, handshake.YIELD):
            return True
        if verdict == handshake.NO_FILES:
            text = (
                f"{peer.name} cannot accept {self.name}: its process has no file descriptor left (RLIMIT_NOFILE there)"
            )
            raise ResourceLimit(text, me=self.name, peer=peer.name)
        raise PeerLost(f"{peer.name} refuses {self.name}: {reason}", me=self.name, peer=peer.name)

    def _take(self, peer: PeerState, stream: Stream, mine: Hello, theirs: Hello) -> bool:
        with peer.cond:
            if peer.conn is not None or self.closed:
                return False
            try:
                stream.sock.send(handshake.READY if self._opens(theirs) else handshake.READY_APART)
            except OSError:
                return False
            if peer.uid != theirs.uid:
                peer.reborn(theirs.uid)
            conn = Connection(peer, stream, mine, theirs, apart=theirs.apart)
            peer.adopt(conn)
        self.io.add(conn)
        return True

    # Admitting

    def admit(self, hello: Hello) -> tuple[bool, bytes]:
        """On the I/O thread: somebody who knows the secret wants to connect. Whether it may, and the answer. A welcome
        is followed by ``establish`` or ``turn_away``."""
        verdict, reason = self._judge(hello)
        if verdict == handshake.WELCOME:
            peer = self.peer(hello.name)
            with peer.cond:
                verdict, reason = self._judge_peer(peer, hello)
                if verdict == handshake.WELCOME:
                    peer.accepting = True
                    return True, self._introduction(hello).pack(verdict)
        return False, handshake.said(verdict, reason.encode())

    def _introduction(self, hello: Hello) -> Hello:
        apart = not self._opens(hello)
        return Hello(
            self.name, hello.name, self.uid, hello.key, self.place, self.window_bytes, self._probe(hello), apart
        )

    def _probe(self, theirs: Hello | None) -> bytes:
        """The slot that a peer tries to open; none where there is no use for it."""
        if "shm" not in self.place.capabilities or (theirs is not None and theirs.place.node != self.place.node):
            return b""
        with self._lock:
            if self._probe_slot is None:
                self._probe_slot = self.arena.put([memoryview(b"rlinf")])
            return b"" if self._probe_slot is None else self._probe_slot.ref

    def _opens(self, theirs: Hello) -> bool:
        """Whether this end can open the memory of the other."""
        if not theirs.probe:  # it has none of its own just now, or no use for it
            return theirs.place.node == self.place.node and _may_open(theirs.place.pid)
        try:
            return bytes(slots.open_slot(theirs.probe)[0]) == b"rlinf"
        except (slots.SlotGone, OSError):
            return False
        finally:
            slots.mapped.forget(theirs.place.pid)  # there may never be a message that goes this way

    def establish(self, sock: socket.socket, hello: Hello, apart: bool) -> None:
        """Who was welcome is ready."""
        peer = self.peer(hello.name)
        with peer.cond:
            peer.accepting = False
            if peer.uid != hello.uid:
                peer.reborn(hello.uid)
            stream = Stream(sock, self.name, peer.name)
            mine = Hello(self.name, hello.name, self.uid, hello.key, self.place, self.window_bytes)
            conn = Connection(peer, stream, mine, hello, apart=apart)
            peer.adopt(conn)
        self.io.add(conn)
        if self.closed:
            peer.say_bye()

    def turn_away(self, hello: Hello) -> None:
        """Who was welcome has not come."""
        peer = self.peer(hello.name)
        with peer.cond:
            peer.accepting = False
            peer.cond.notify_all()
        self._give_room()

    def _judge(self, hello: Hello) -> tuple[int, str]:
        if self.closed:
            return handshake.REFUSED, f"{self.name} is closed"
        if hello.to != self.name or hello.name == self.name:
            return handshake.REFUSED, f"this is {self.name}, not {hello.to}"
        return handshake.WELCOME, ""

    def _judge_peer(self, peer: PeerState, hello: Hello) -> tuple[int, str]:
        """With the peer's condition. Both ends follow one rule when they connect at once: the connection that the one
        with the smaller name makes stays."""
        conn = peer.conn
        if conn is not None:
            if peer.uid != hello.uid:
                conn.hangup = True
            self.io.attend(conn)  # its end is near: the other side has let go of it
            return handshake.BUSY, ""
        if peer.dialing and self.name < hello.name:
            return handshake.YIELD, ""
        if peer.accepting or not self._take_room():
            return handshake.BUSY, ""
        return handshake.WELCOME, ""

    # The number of connections

    def _take_room(self) -> bool:
        with self._lock:
            if self._open < self.max_connections:
                self._open += 1
                return True
        self.io.soon(self._evict)
        return False

    def _give_room(self) -> None:
        with self._lock:
            self._open -= 1
            self._room.notify_all()

    def ended(self, conn: Connection) -> None:
        self._give_room()

    def _make_room(self, deadline: float) -> bool:
        while not self._take_room():
            with self._lock:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._open >= self.max_connections:
                    self._room.wait(min(left, 0.05))
        return True

    def _evict(self) -> None:
        """Give up the connection that has been idle for longest."""
        peers = [p for p in self.peers() if p.conn is not None]
        if any(p.conn is not None and p.conn.leaving for p in peers):
            return  # there will be room in a moment
        for peer in sorted(peers, key=lambda p: p.used):
            if peer.leave():
                return

    # The end

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self.forked:
            return
        peers = self.peers()
        try:
            for peer in peers:
                peer.say_bye()
            deadline = time.monotonic() + min(LINGER_S, self.timeout)
            for peer in peers:
                peer.await_end(deadline)
                peer.send_lane.join(1.0)
                peer.recv_lane.join(1.0)
        finally:
            self.io.stop(5.0)
            for peer in peers:  # what nobody received must not wait for the garbage collector to give its memory back
                peer.inbox.clear()
                peer.collective.clear()
            self._probe_slot = None
            self.arena.close()
            # A message that was being read as its connection ended may have mapped it again; and weights may have been
            # looked at by way of a reference that came in a message.
            for pid in self.shared["pids"]:
                slots.mapped.forget(pid)


def _may_open(pid: int) -> bool:
    """Whether the descriptors of a process can be opened here, as those of its shared memory would be."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return pid == os.getpid()
    return True


def key_of(name: str) -> str:
    return f"rlinf-comm/{name}"


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
