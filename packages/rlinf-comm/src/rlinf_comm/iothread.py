"""The one thread of a communicator: it accepts connections, sees their ends, and helps where nobody else can.

Who receives reads for himself, without this thread. It reads a connection when nobody has for a moment (so that what
comes is taken in, up to the window, and questions are answered), at the connection's end, and while a writer of this
process is blocked.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlinf_comm import forks, handshake
from rlinf_comm.errors import AuthenticationFailed
from rlinf_comm.handshake import Acceptor
from rlinf_comm.work import no_thread

if TYPE_CHECKING:
    from rlinf_comm.connection import Connection
    from rlinf_comm.endpoint import Endpoint

log = logging.getLogger("rlinf.comm")

MAX_STRANGERS = 128
"""Connections that have not proved themselves; one more, and the oldest of them is closed."""
QUIET_S = 0.05
"""A connection that nobody has read for this long is read here when something comes."""
PAUSE_S = 0.1
"""Nothing is accepted for so long when there is no file descriptor left for it."""
_HANGUP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | select.EPOLLONESHOT


class _Stranger:
    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock = sock
        self.side = Acceptor(secret)
        self.deadline = time.monotonic() + handshake.AUTH_TIMEOUT_S
        self.welcome = False


class IoThread:
    def __init__(self, endpoint: Endpoint, listeners: list[socket.socket]) -> None:
        self._endpoint = endpoint
        self._listeners = {sock.fileno(): sock for sock in listeners}
        self._epoll = forks.make_epoll()
        self._wake_out, self._wake_in = forks.make_pipe()
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._awake = False
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, _Stranger] = {}
        self._helping = 0
        self._watched: dict[Connection, int] = {}
        """Connections that somebody has read lately -> how often, at the last look."""
        self._look_at = 0.0
        self._paused_until = 0.0
        self._spare = forks.make_descriptor(lambda: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        self._stop = False
        for fd in self._listeners:
            self._epoll.register(fd, select.EPOLLIN)
        self._epoll.register(self._wake_out, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"rlinf-comm-{endpoint.name}", daemon=True)

    def start(self) -> None:
        """Raises ResourceLimit."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise no_thread("the thread of a communicator's connections cannot start") from error

    def stop(self, timeout: float) -> None:
        self._stop = True
        if self._thread.ident is None:  # it could not be started
            self._close()
            return
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # From any thread

    def soon(self, job: Callable[[], None]) -> None:
        """Run ``job`` on this thread; it must not wait."""
        with self._lock:
            self._jobs.append(job)
        self._wake()

    def add(self, conn: Connection) -> None:
        """See the end of a new connection."""
        self.soon(lambda: self._add(conn))

    def attend(self, conn: Connection) -> None:
        """Read the connection from now on."""
        conn.attended = True
        self.soon(lambda: self._attend(conn, select.EPOLLIN))

    def watch(self, conn: Connection) -> None:
        """Somebody reads the connection now and then: look when that has stopped."""
        conn.watched = True  # here too: one job is enough
        self.soon(lambda: self._watch(conn))

    def want(self, conn: Connection) -> None:
        """Write what is owed on the connection when it can be written."""
        self.soon(lambda: self._arm(conn))

    def finish(self, conn: Connection) -> None:
        """Nothing more comes on the connection: close it when nobody writes to it any more."""
        if not conn.gave_up:
            try:
                conn.stream.sock.shutdown(socket.SHUT_RDWR)  # wakes a blocked writer
            except OSError:
                pass  # it is closed already
        self.soon(conn.finish)

    def forget(self, conn: Connection) -> None:
        """Before the connection's socket is closed."""
        fd = conn.stream.sock.fileno()
        with self._lock:
            if self._connections.get(fd) is conn:
                del self._connections[fd]
                self._epoll.unregister(fd)

    @contextmanager
    def helping(self) -> Iterator[None]:
        """Read all connections while the body waits."""
        with self._lock:
            self._helping += 1
        self.soon(self._arm_all)
        try:
            yield
        finally:
            with self._lock:
                self._helping -= 1

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # it is awake, or over

    # On the thread

    def _run(self) -> None:
        while not self._stop:
            try:
                for fd, events in self._epoll.poll(self._next_s()):
                    self._handle(fd, events)
                self._run_jobs()
                self._look_at_clock()
            except Exception:  # one connection's fault must not stop the others
                if self._endpoint.forked:
                    return
                log.exception("%s: the communicator's thread met a fault", self._endpoint.name)
        self._close()

    def _next_s(self) -> float:
        now = time.monotonic()
        times = [s.deadline for s in self._strangers.values()]
        if self._paused_until:
            times.append(self._paused_until)
        if self._watched:
            times.append(self._look_at)
        return max(0.0, min(times) - now) if times else -1

    def _handle(self, fd: int, events: int) -> None:
        if fd == self._wake_out.fileno():
            try:
                self._wake_out.recv(4096)
            except BlockingIOError:
                pass  # somebody has read it
        elif fd in self._listeners:
            self._accept(self._listeners[fd])
        elif fd in self._strangers:
            self._hear(fd)
        else:
            with self._lock:
                conn = self._connections.get(fd)
            if conn is not None:
                self._attend(conn, events)

    def _run_jobs(self) -> None:
        while self._jobs:
            with self._lock:
                job = self._jobs.popleft()
            job()

    def _watch(self, conn: Connection) -> None:
        conn.quiet = False
        conn.watched = True
        if not self._watched:
            self._look_at = time.monotonic() + QUIET_S
        self._watched[conn] = conn.turns

    def _look_at_readers(self) -> None:
        for conn, turns in list(self._watched.items()):
            if conn.turns != turns:
                self._watched[conn] = conn.turns
            else:
                del self._watched[conn]
                conn.watched = False
                if not conn.reading:  # else its reader has it watched again when it is done
                    conn.quiet = True
                    self._arm(conn)
                    self._read_rest(conn)

    def _read_rest(self, conn: Connection) -> None:
        """What has been taken from the socket already, and not looked at, gives no event."""
        if conn.stream.buffered not in (0, conn.looked_at):
            self._attend(conn, select.EPOLLIN)
            conn.looked_at = conn.stream.buffered  # the beginning of a frame may stay for long

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._watched and now >= self._look_at:
            self._look_at = now + QUIET_S
            self._look_at_readers()
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            for fd in self._listeners:
                self._epoll.modify(fd, select.EPOLLIN)
        for fd, stranger in list(self._strangers.items()):
            if now >= stranger.deadline:
                self._refuse(fd, "did not prove itself in time")

    # Connections

    def _add(self, conn: Connection) -> None:
        fd = conn.stream.sock.fileno()
        if fd < 0 or conn.over:
            return
        with self._lock:
            self._connections[fd] = conn
            self._epoll.register(fd, self._mask(conn))
        self._watch(conn)

    def _mask(self, conn: Connection) -> int:
        mask = _HANGUP
        if conn.attended or conn.quiet or self._helping:
            mask |= select.EPOLLIN
        if conn.owes:
            mask |= select.EPOLLOUT
        return mask

    def _arm(self, conn: Connection) -> None:
        with self._lock:
            fd = conn.stream.sock.fileno()
            if fd >= 0 and self._connections.get(fd) is conn:
                self._epoll.modify(fd, self._mask(conn))

    def _arm_all(self) -> None:
        for conn in list(self._connections.values()):
            self._arm(conn)
            self._read_rest(conn)

    def _attend(self, conn: Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            conn.flush_controls()
        if events & ~select.EPOLLOUT:
            if events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                conn.hangup = True
            if not conn.peer.take_token(conn):
                if conn.attended or conn.hangup:
                    conn.hangup = True  # whoever reads it now hands it back afterwards
                return
            conn.hangup = False
            conn.peer.read_available(conn, unasked=True)
        if not conn.eof:
            self._arm(conn)

    # Strangers

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock = forks.make(lambda: listener.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._turn_away(listener, error)
                    return
                raise
            sock.setblocking(False)
            while len(self._strangers) >= MAX_STRANGERS:
                self._refuse(next(iter(self._strangers)), "made place for a newer one")
            stranger = self._strangers[sock.fileno()] = _Stranger(sock, self._endpoint.secret)
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            self._say(sock.fileno(), stranger.side.greeting)

    def _turn_away(self, listener: socket.socket, error: OSError) -> None:
        """No file descriptor is left: tell one who waits, by means of the one that is kept for this."""
        log.warning("%s cannot accept a connection: %s", self._endpoint.name, error.strerror)
        try:
            forks.close_descriptor(self._spare)
            sock = listener.accept()[0]
            try:
                sock.send(handshake.NO_FILES_NOTICE)
            finally:
                sock.close()
        except OSError:
            pass  # another thread took it; who waits is told the next time
        finally:
            try:
                self._spare = forks.make_descriptor(lambda: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                self._spare = -1
        self._paused_until = time.monotonic() + PAUSE_S
        for fd in self._listeners:
            self._epoll.modify(fd, 0)

    def _hear(self, fd: int) -> None:
        stranger = self._strangers[fd]
        try:
            data = stranger.sock.recv(1 if stranger.welcome else stranger.side.rest())
        except BlockingIOError:
            return
        except OSError as error:
            return self._refuse(fd, error.strerror or "")
        if not data:
            return self._refuse(fd, "")
        hello = stranger.side.hello
        if stranger.welcome and hello is not None:
            del self._strangers[fd]
            self._epoll.unregister(fd)
            return self._endpoint.establish(stranger.sock, hello, data == handshake.READY_APART)
        try:
            answer = stranger.side.receive(data)
        except AuthenticationFailed as error:
            self._say(fd, handshake.WRONG)
            return self._refuse(fd, str(error))
        if answer and not self._say(fd, answer):
            return None
        hello = stranger.side.hello
        if hello is not None:
            stranger.welcome, answer = self._endpoint.admit(hello)
            if self._say(fd, answer) and not stranger.welcome:
                self._refuse(fd, "")
        return None

    def _say(self, fd: int, data: bytes) -> bool:
        """Send what always fits the socket's buffer; who has filled that is no peer."""
        try:
            if self._strangers[fd].sock.send(data) == len(data):
                return True
        except OSError:
            pass  # gone, which is dealt with in the same way
        self._refuse(fd, "")
        return False

    def _refuse(self, fd: int, why: str) -> None:
        stranger = self._strangers.pop(fd, None)
        if stranger is None:
            return
        self._epoll.unregister(fd)
        stranger.sock.close()
        if stranger.welcome and stranger.side.hello is not None:
            self._endpoint.turn_away(stranger.side.hello)
        if why:
            log.warning("%s refused a connection: %s", self._endpoint.name, why)

    def _close(self) -> None:
        self._run_jobs()
        for fd in list(self._strangers):
            self._refuse(fd, "")
        for sock in self._listeners.values():
            sock.close()
        if self._spare >= 0:
            forks.close_descriptor(self._spare)
        self._wake_in.close()
        self._wake_out.close()
        forks.close_epoll(self._epoll)
