"""One process of the reward pool: loads a function, scores bundles of items. Started by path, imports little.

It must end with its parent even when the function never returns to Python (a huge integer power holds the interpreter
lock, so no thread runs). Hence the operating system does it: the socket to the parent is put in asynchronous mode,
and the signal of the peer's end (SIGIO, whose default action is to terminate) needs no cooperation. It goes to the
process group, hence also to what the function has forked. A parent-death signal would not do: it follows the *thread*
that started the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import math
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any


class Cell:
    """Which item of its bundle a process is at, and since when (``time.monotonic``, one clock for all processes).

    In memory that the pool has too, so that it can be read of a process that answers no more. The time is written
    first: whoever reads in between takes an item for younger than it is, never for older.
    """

    SIZE = 16

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self.SIZE)

    def begin(self, place: int) -> None:
        struct.pack_into("<d", self._memory, 8, time.monotonic())
        struct.pack_into("<q", self._memory, 0, place)

    def read(self) -> tuple[int, float]:
        return struct.unpack_from("<q", self._memory, 0)[0], struct.unpack_from("<d", self._memory, 8)[0]


def end_with_parent(lifeline: socket.socket) -> None:
    """Terminate this process when the other end of ``lifeline`` is closed, whatever the process is doing."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    descriptor = lifeline.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before the flag was set: no signal will come
        os._exit(0)


def resolve(target: str, options: dict[str, Any] | None = None) -> Any:
    """``module:function`` (dots allowed after the colon) -> the callable; a class is called with ``options`` first."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if isinstance(found, type):
        found = found(**(options or {}))
    if not callable(found):
        raise TypeError(f"{target} is a {type(found).__name__}, not a function")
    return found


def safe_text(value: Any, convert: Any = str, limit: int = 2000) -> str:
    """``convert(value)``, cut, whatever the value's own method does."""
    try:
        text = str(convert(value))
    except BaseException as error:
        return f"(its text cannot be made: {type(error).__name__})"
    return text if len(text) <= limit else f"{text[:limit]}…"


def describe(error: BaseException) -> str:
    """What was raised, and where."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {safe_text(error)}".rstrip(": ")
    return f"raised {text} ({os.path.basename(where.filename)}:{where.lineno})"


LARGEST = 3.4e38
"""A reward is no larger: trainers count in float32, and sums of larger ones overflow."""


def score(function: Any, item: tuple[str, str, dict[str, Any]]) -> tuple[float | None, str]:
    """Call the function; a raise or a value that is not a finite number becomes (None, reason).

    Nothing that it raises ends the process: not ``SystemExit``, and not a fault of the value's own methods.
    """
    try:
        value = function(*item)
    except BaseException as error:
        return None, describe(error)
    return as_reward(value)


def as_reward(value: Any) -> tuple[float | None, str]:
    """(the number, "") of what a reward function returned, or (None, why it is none)."""
    if isinstance(value, str | bytes):  # float() reads numbers in it, such as an answer that was given back by mistake
        return None, f"returned a {type(value).__name__}, not a number: {safe_text(value, repr, 200)}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None, f"returned a {type(value).__name__}, not a number: {safe_text(value, repr, 200)}"
    except BaseException as error:
        return None, f"returned a {type(value).__name__} whose conversion to a number {describe(error)}"
    problem = refused(number)
    return (None, f"returned {problem}") if problem else (number, "")


def refused(number: float) -> str:
    """Why a number cannot be a reward, to follow "returned "; empty where it can."""
    if not math.isfinite(number):
        return f"{number}, not a finite number"
    if abs(number) > LARGEST:
        return f"{number:g}, beyond the largest number that float32 has ({LARGEST:g})"
    return ""


def main(work_fd: int, lifeline_fd: int, cell_fd: int) -> None:
    from multiprocessing.connection import Connection

    own = os.getpid()
    for fd in (work_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    cell = Cell(cell_fd)
    os.close(cell_fd)
    lifeline = socket.socket(fileno=lifeline_fd)
    end_with_parent(lifeline)
    os.dup2(2, 1)  # what the function prints must not look like results
    connection: Connection[Any, Any] = Connection(work_fd)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        target, options, path, memory_bytes = connection.recv()
        if memory_bytes:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        sys.path[:] = path
        try:
            function = resolve(target, options)
        except BaseException:
            connection.send(("unloadable", traceback.format_exc()))
            return
        connection.send(("ready", ""))
        while True:
            results = []
            for place, item in enumerate(connection.recv()):
                cell.begin(place)
                results.append(score(function, item))
                if os.getpid() != own:  # the function has forked, and the fork came back: the answer is not its to give
                    os._exit(0)
            connection.send(results)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
