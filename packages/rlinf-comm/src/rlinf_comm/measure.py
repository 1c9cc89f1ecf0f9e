"""Measure the thresholds of the selection on this machine.

Messages of growing size go to a second process, by turns on the control stream and through shared memory. The size from
which shared memory is faster comes out, in a second or two. ``rlinf doctor --measure`` calls it and keeps the result.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from rlinf_comm import slots
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.errors import CommError
from rlinf_comm.selection import Thresholds
from rlinf_comm.thresholds import Point, crossing

SIZES = tuple(1 << power for power in range(14, 23))
"""Bytes per message, 16 KiB to 4 MiB (what is smaller goes in the frame itself)."""
ROUNDS = 30
BURST = 4
LIMIT_S = 30.0
"""A wait that takes longer fails the measurement: the second process does not answer."""
ANSWERER = "answerer"


def measure(sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> tuple[Thresholds, list[Point]]:
    """Measure on this machine, with a second process. Raises CommError where it cannot be done."""
    if reason := slots.unavailable():
        raise CommError(f"shared memory cannot be measured: {reason}")
    secret = os.urandom(32)
    with (
        tempfile.TemporaryDirectory(prefix="rlinf-measure-") as folder,
        subprocess.Popen([sys.executable, "-c", _CHILD, folder], stdin=subprocess.PIPE) as child,
    ):
        try:
            assert child.stdin is not None
            child.stdin.write(secret)
            child.stdin.close()
            directory = FileDirectory(folder)
            with ExitStack() as stack:
                ends = {
                    way: stack.enter_context(_end(way, secret, directory, Thresholds(start)))
                    for way, start in (("stream", max(sizes) + 1), ("shm", 0))
                }
                points = [_point(ends, size, rounds) for size in sizes]
                for end in ends.values():
                    end.send(None, ANSWERER)
            child.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise CommError("the measuring process does not end") from error
        finally:
            child.kill()
    table = Thresholds(crossing(points), None, f"measured {time.strftime('%Y-%m-%d')}")
    return table, points


_CHILD = "import sys; from rlinf_comm.measure import answer; answer(sys.stdin.buffer.read(), sys.argv[1])"


def _end(name: str, secret: bytes, directory: FileDirectory, table: Thresholds) -> Communicator:
    ways = frozenset({"tcp", "shm"})
    return Communicator(name, secret, directory, timeout=LIMIT_S, thresholds=table, capabilities=ways)


def _point(ends: Mapping[str, Communicator], size: int, rounds: int) -> Point:
    payload = np.zeros(size, np.uint8)
    took: dict[str, list[float]] = {name: [] for name in ends}
    for _ in range(rounds):  # by turns, so that both see the same load
        for name, end in ends.items():
            took[name].append(_burst(end, payload))
    stream, shm = (statistics.median(took[name]) * 1e6 for name in ("stream", "shm"))
    return Point(size, stream, shm)


def _burst(end: Communicator, payload: np.ndarray[Any, Any]) -> float:
    """Seconds per message of a few that follow each other, the last of them answered."""
    start = time.perf_counter()
    for left in range(BURST, 0, -1):
        end.send(payload, ANSWERER, meta=left)
    end.recv(ANSWERER)
    return (time.perf_counter() - start) / BURST


def answer(secret: bytes, folder: str) -> None:
    """The second process of a measurement."""

    def serve(end: Communicator, name: str) -> None:
        while (message := end.recv_message(name)).obj is not None:
            if message.meta == 1:
                end.send(True, name)

    with _end(ANSWERER, secret, FileDirectory(folder), Thresholds()) as end, ThreadPoolExecutor(2) as pool:
        for served in [pool.submit(serve, end, name) for name in ("stream", "shm")]:
            served.result()
