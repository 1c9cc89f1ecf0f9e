"""Handles of asynchronous operations, and the lanes that keep their order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from rlinf_comm.errors import CommError, CommTimeout, ResourceLimit

IDLE_S = 2.0
"""A lane's thread ends after so long without work."""
FOREVER_S = threading.TIMEOUT_MAX / 2
"""The longest wait that there is (146 years): what is added to it on the way must not pass what a lock takes."""


def seconds_of(timeout: float, what: str = "timeout") -> float:
    """``timeout``, or ``FOREVER_S`` when it is longer (infinity). Raises CommError for one below 0 or that is not a
    number; ``what`` names it."""
    if not timeout >= 0:
        raise CommError(f"{what}={timeout!r}: it must be a number of seconds that is not below 0")
    return min(float(timeout), FOREVER_S)


class Work:
    """An operation that goes on by itself. May be waited for from any thread, or awaited in any event loop.

    Waiting for it or giving up a wait does not change it: it ends by itself, at its own timeout at the latest.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_started", "_value", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._lock = threading.Condition()
        self._done = False
        self._started = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        """Its result, or raises its error; CommTimeout after ``timeout`` seconds (None: it ends at its own)."""
        if timeout is not None:
            timeout = seconds_of(timeout)
        with self._lock:
            if not self._lock.wait_for(lambda: self._done, timeout):
                seconds = timeout or 0.0
                raise CommTimeout(f"{self.what} has not ended within {seconds:g} s", what=self.what, seconds=seconds)
        return self.result()

    def result(self) -> Any:
        """Its result or its error; waits for it."""
        if not self._done:
            return self.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, in the thread that ends it (at once if it has)."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not future.done():  # the awaiting task may have been cancelled
                    future.set_result(None)

            def ended() -> None:
                try:
                    loop.call_soon_threadsafe(wake)
                except RuntimeError:
                    pass  # the loop is closed: nobody waits any more

            self.add_done_callback(ended)
            yield from future.__await__()
        return self.result()

    # For the lane

    def begin(self) -> bool:
        """False when it was given up before."""
        with self._lock:
            self._started = not self._done
            return self._started

    def give_up(self, error: BaseException) -> bool:
        """End it if it has not begun."""
        with self._lock:
            if self._started or self._done:
                return False
        self.end(None, error)
        return True

    def end(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
            self._lock.notify_all()
        for callback in callbacks:
            callback()


def no_thread(what: str) -> ResourceLimit:
    """The error for a thread that could not be started."""
    text = f"{what}: the system gives this process no more threads (ulimit -u, or the container's limit of processes)"
    return ResourceLimit(text)


class Lane:
    """Operations that happen one after the other: in a thread of the lane's own, or directly in the caller's when
    nothing is queued."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Condition()
        self._jobs: deque[tuple[Work, Callable[[], Any]]] = deque()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        return self._pending > 0

    def submit(self, what: str, job: Callable[[], Any]) -> Work:
        """Raises ResourceLimit when the system gives no thread for it; nothing is queued then."""
        work = Work(what)
        with self._lock:
            self._pending += 1
            self._jobs.append((work, job))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()  # it waits for this lock
                except RuntimeError as error:
                    self._pending -= 1
                    self._jobs.pop()
                    raise no_thread(what) from error
                self._thread = thread
            self._lock.notify_all()
        return work

    def call(self, what: str, job: Callable[[], Any], deadline: float, late: Callable[[], BaseException]) -> Any:
        """Do it now, after what is queued. ``late`` makes the error when its turn has not come at the deadline."""
        if not self._pending:
            return job()
        work = self.submit(what, job)
        try:
            return work.wait(max(0.0, deadline - time.monotonic()))
        except CommTimeout:
            if not work.done() and work.give_up(late()):
                return work.result()
        return work.result()  # it has begun, and keeps to its own deadline, which has passed too

    def close(self) -> None:
        """Let the thread end; jobs in the queue still run (they find everything closed)."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def join(self, timeout: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._jobs:
                    if self._closed or not self._lock.wait(IDLE_S):
                        if self._jobs:
                            break
                        self._thread = None
                        return
                work, job = self._jobs.popleft()
            value: Any = None
            error: BaseException | None = None
            begun = work.begin()
            if begun:
                try:
                    value = job()
                except BaseException as fault:  # it belongs to whoever waits for the work
                    error = fault
            # The lane is free before the waiter goes on, so that its next operation can go the direct way.
            with self._lock:
                self._pending -= 1
            if begun:
                work.end(value, error)
            del work, job, value, error
