"""A member's side of the hub: one socket, one control thread, waits that can be interrupted.

The control thread reads messages, completes requests and queues calls; it never runs user code. The engine
thread (the process's main thread) takes calls, and while it waits it also serves requests that only it may
serve, such as offloading.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from rlinf_core.board.events import PutRefused
from rlinf_core.errors import Cancelled, WaitTimeout, describe
from rlinf_core.hub import codec, wire
from rlinf_core.hub.messages import Call, Cancel, Hello, Offload, Release, Stacks

GATHER_S = 0.001
"""Puts in quick succession travel together: what was put first goes after this long at the latest."""
QUICK_S = 0.001
"""A put is in quick succession when the one before it was less than this ago."""
TOGETHER = 32
"""Most items that travel together."""


PutBuilder = Callable[[tuple[str, int], tuple[Any, ...]], Any]
"""Makes the event that puts these items, from the request's number."""


class Pending:
    """A request that the hub has not answered yet."""

    __slots__ = ("callbacks", "done", "owner", "req", "value", "what")

    def __init__(self, req: tuple[str, int], what: str) -> None:
        self.req = req
        self.what = what
        self.done = False
        self.value: Any = None
        self.callbacks: list[Callable[[], None]] = []
        self.owner: object = None
        """The writer whose puts it answers."""


class _Gathered:
    """Items of one writer that travel together, as one request."""

    __slots__ = ("build", "items", "pending")

    def __init__(self, pending: Pending, build: PutBuilder, items: list[Any]) -> None:
        self.pending = pending
        self.build = build
        self.items = items


class HubClient:
    """Connection of ``hello.member`` to the hub at ``address``.

    ``on_message`` gets what the control thread does not handle itself (used by the driver), ``on_lost`` is
    called once when the hub is gone.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        hello: Hello,
        *,
        on_message: Callable[[Any], None] | None = None,
        on_release: Callable[[tuple[int, ...]], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.member = hello.member
        self._socket = wire.connect(address, secret, timeout)
        self._send_lock = threading.Lock()
        self._held: list[bytes] = []
        """Frames that go along with the next message."""
        self._gathered: _Gathered | None = None
        self._last_put = 0.0
        self._gathering = threading.Event()
        self._gatherer: threading.Thread | None = None
        self._condition = threading.Condition()
        self._ids = itertools.count()
        self._pending: dict[tuple[str, int], Pending] = {}
        self._calls: deque[Call] = deque()
        self._side_calls: deque[Call] = deque()
        self._aside = False
        self._offload_wanted = False
        self._offload_callbacks: list[Callable[[], None]] = []
        self._closed = False
        self._on_message = on_message
        self._on_release = on_release
        self._on_lost = on_lost
        self.engine_thread = threading.current_thread()
        self.serve_offload: Callable[[], None] | None = None
        self.serve_side_call: Callable[[Call], None] | None = None
        self.cancelled: str | None = None
        os.register_at_fork(after_in_child=partial(_close_in_child, weakref.ref(self)))
        self.send(hello)
        self._thread = threading.Thread(target=self._read, name=f"rlinf-control-{self.member}", daemon=True)
        self._thread.start()

    # Sending

    def send(self, *messages: Any) -> None:
        frames = [codec.pack(m) for m in messages]
        with self._send_lock:
            self._write(frames)

    def _write(self, frames: list[bytes]) -> None:
        """Send what is held back and then ``frames``; with the send lock."""
        before = self._held
        if self._gathered is not None:
            gathered, self._gathered = self._gathered, None
            try:
                before.append(codec.pack(gathered.build(gathered.pending.req, tuple(gathered.items))))
            except Exception as error:  # the writer is told of it, not whoever comes to send this
                self._refuse(gathered.pending, describe(error))
        if before:
            frames = before + frames
            self._held = []
        try:
            self._socket.sendall(frames[0] if len(frames) == 1 else b"".join(frames))
        except OSError as error:
            raise Cancelled(f"{self.member}: the hub is gone ({error})") from error

    def _refuse(self, pending: Pending, reason: str) -> None:
        with self._condition:
            self._pending.pop(pending.req, None)
            pending.value, pending.done = PutRefused(pending.req, reason), True
            self._condition.notify_all()

    def send_along(self, message: Any) -> None:
        """Send a message that nobody waits for together with the next one, or when this process begins to wait."""
        frame = codec.pack(message)
        with self._send_lock:
            self._held.append(frame)

    def _send_held(self) -> None:
        """Before a wait: what was to go along with the next message goes now."""
        if (self._held or self._gathered) and self.cancelled is None:
            with self._send_lock:
                if self._held or self._gathered:
                    self._write([])

    def put_ahead(self, writer: object, items: tuple[Any, ...], build: PutBuilder, what: str) -> Pending:
        """Put items without waiting for the answer. Those that follow each other quickly go as one request, whose
        ``Pending`` each of them gets; the order with all other messages is kept."""
        self.check()
        with self._send_lock:
            now = time.monotonic()
            quick, self._last_put = now - self._last_put < QUICK_S, now
            gathered = self._gathered
            if gathered is not None and gathered.pending.owner is writer:
                gathered.items.extend(items)
                if len(gathered.items) >= TOGETHER:
                    self._write([])
                return gathered.pending
            pending = Pending((self.member, -next(self._ids) - 1), what)
            pending.owner = writer
            with self._condition:
                self._pending[pending.req] = pending
            if not quick:
                self._write([codec.pack(build(pending.req, items))])
                return pending
            if gathered is not None:
                self._write([])
            self._gathered = _Gathered(pending, build, list(items))
            self._gathering.set()
            if self._gatherer is None:
                self._gatherer = threading.Thread(target=self._gather, name="rlinf-gather", daemon=True)
                self._gatherer.start()
            return pending

    def _gather(self) -> None:
        """Send what was gathered once its time is over, should nothing else have sent it."""
        while not self._closed and self.cancelled is None:
            if not self._gathering.wait(1.0):
                continue
            self._gathering.clear()
            time.sleep(GATHER_S)
            try:
                self._send_held()
            except Cancelled:
                return  # the control thread sees the same end

    def request(self, build: Callable[[tuple[str, int]], Any], what: str, *, ahead: bool = False) -> Pending:
        """Send the event that ``build(req)`` makes; ``what`` says in words what is waited for. ``ahead``: the engine
        thread goes on without the answer, and says ``Blocked`` if it comes to wait for it."""
        self.check()
        number = next(self._ids)
        if ahead or not self.on_engine_thread():
            number = -number - 1  # the engine thread may be at work meanwhile: the hub does not count this as its wait
        pending = Pending((self.member, number), what)
        with self._condition:
            self._pending[pending.req] = pending
        self.send(build(pending.req))
        return pending

    def on_engine_thread(self) -> bool:
        return threading.current_thread() is self.engine_thread

    def forget(self, pending: Pending) -> None:
        with self._condition:
            self._pending.pop(pending.req, None)

    def on_done(self, pending: Pending, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the control thread when the request is answered or the run is stopped."""
        self._send_held()  # an asynchronous wait begins
        with self._condition:
            if not pending.done and self.cancelled is None:
                pending.callbacks.append(callback)
                return
        callback()

    def check(self) -> None:
        """Raise ``Cancelled`` when the run is being stopped."""
        if self.cancelled is not None:
            raise Cancelled(self.cancelled)

    # Waiting

    def wait(self, pending: Pending, timeout: float | None = None, *, aside: bool = False) -> Any:
        """Value of a request. On the engine thread it serves offload requests meanwhile, and calls that may be run
        ``aside`` if the caller allows it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        engine = self.on_engine_thread()
        aside = aside and not self._aside
        if not pending.done:
            self._send_held()
        while True:
            with self._condition:
                while not pending.done:
                    self.check()
                    if engine and (self._offload_wanted or (aside and self._side_calls)):
                        break
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if remaining is not None and remaining <= 0:
                        raise WaitTimeout(f"{self.member}: {pending.what} did not come within {timeout:g} s")
                    self._condition.wait(remaining)
                else:
                    return pending.value
            self.offload_if_wanted()
            if aside:
                self.serve_side_calls()

    def next_call(self) -> Call:
        """Next call for the engine thread; blocks, serving offload requests."""
        self._send_held()
        while True:
            with self._condition:
                while not (self._calls or self._side_calls or self._offload_wanted):
                    self.check()
                    self._condition.wait()
                self.check()
                if not self._offload_wanted and not self._side_calls:
                    return self._calls.popleft()
            self.offload_if_wanted()
            self.serve_side_calls()

    def serve(self, *, aside: bool) -> None:
        """What a wait on the engine thread would serve, without one."""
        if self._offload_wanted:
            self.offload_if_wanted()
        if aside and self._side_calls:
            self.serve_side_calls()

    def await_cancel(self, seconds: float) -> bool:
        """Whether the run is being stopped, or is within ``seconds``."""
        with self._condition:
            return self._condition.wait_for(lambda: self.cancelled is not None, seconds)

    def serve_side_calls(self) -> None:
        """Run the calls that are to be run at a safe point (engine thread), one after the other in their order."""
        while self.serve_side_call is not None and not self._aside:
            with self._condition:
                if not self._side_calls:
                    return
                call = self._side_calls.popleft()
            self._aside = True  # what this call waits for must not let the next one overtake it
            try:
                self.serve_side_call(call)
            finally:
                self._aside = False

    def on_offload(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the control thread whenever an offload is wanted (for asynchronous waits)."""
        with self._condition:
            self._offload_callbacks.append(callback)
            wanted = self._offload_wanted
        if wanted:
            callback()

    def off_offload(self, callback: Callable[[], None]) -> None:
        with self._condition:
            self._offload_callbacks.remove(callback)

    def offload_if_wanted(self) -> None:
        """Serve a waiting offload request now. The lock asks only a replica that is outside its sections or waits at a
        safe point of one, and grants nothing more before it has been answered."""
        with self._condition:
            wanted, self._offload_wanted = self._offload_wanted, False
        if wanted and self.serve_offload is not None:
            self.serve_offload()

    # Control thread

    def _read(self) -> None:
        reason = "the hub is gone (connection closed by the peer)"
        frames = wire.Frames()
        try:
            while True:
                try:
                    data = self._socket.recv(wire.RECEIVE_BYTES)
                except OSError as error:
                    reason = f"the hub is gone ({error})"
                    return
                if not data:
                    return
                for body in frames.feed(data):
                    self._dispatch(codec.unpack(body))
        except Exception as error:  # a fault in here must end the waits of this process, not leave them hanging
            reason = f"its control thread failed: {describe(error)}"
        finally:
            with self._condition:
                if self.cancelled is None:
                    self.cancelled = f"{self.member}: {reason}"
                self._condition.notify_all()
            self._run_callbacks_of_all()
            if self._on_lost is not None and not self._closed:
                self._on_lost()

    def _dispatch(self, message: Any) -> None:
        if isinstance(message, Call):
            with self._condition:
                (self._side_calls if message.kind == "aside" else self._calls).append(message)
                self._condition.notify_all()
        elif isinstance(message, Release):
            if self._on_release is not None:
                self._on_release(message.keys)
        elif isinstance(message, Offload):
            with self._condition:
                self._offload_wanted = True
                self._condition.notify_all()
                wakers = list(self._offload_callbacks)
            for waker in wakers:
                waker()
        elif isinstance(message, Cancel):
            with self._condition:
                self.cancelled = message.cause
                self._condition.notify_all()
            self._run_callbacks_of_all()
        elif isinstance(message, Stacks):
            self.send(Stacks(self.member, self._engine_stack()))
        elif getattr(message, "req", None) in self._pending:
            with self._condition:
                pending = self._pending.pop(message.req)
                pending.value = message
                pending.done = True
                self._condition.notify_all()
            for callback in pending.callbacks:
                callback()
        elif self._on_message is not None:
            self._on_message(message)

    def _run_callbacks_of_all(self) -> None:
        with self._condition:
            callbacks = [c for p in self._pending.values() for c in p.callbacks]
        for callback in callbacks:
            callback()

    def _engine_stack(self) -> str:
        frame = sys._current_frames().get(self.engine_thread.ident or -1)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-6:])

    def close(self) -> None:
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already closed by the hub
        self._socket.close()


def _close_in_child(reference: weakref.ref[HubClient]) -> None:
    """A forked child must not keep the connection open: its end is how the hub sees that this process has died."""
    client = reference()
    if client is not None:
        client._socket.close()
