"""What the communicator's tests share: other processes, and waiting for a condition."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PEER = Path(__file__).parent / "comm_peer.py"


class Other:
    """A process that runs a role of ``comm_peer``."""

    def __init__(self, role: str, folder: Path, name: str, *arguments: object) -> None:
        command = [sys.executable, str(PEER), role, str(folder), name, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )
        self.pid = self.process.pid
        self._passed: list[str] = []

    def expect(self, start: str, timeout: float = 60.0) -> str:
        """A line that begins with ``start``, said already or within ``timeout`` seconds."""
        assert self.process.stdout is not None
        for line in self._passed:
            if line.startswith(start):
                self._passed.remove(line)
                return line.strip()
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith(start):
                    return line.strip()
                self._passed.append(line)
        finally:
            timer.cancel()
        raise AssertionError(f"the process ended with {self.process.wait()} and did not say {start!r}")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # it had something left to say to a process that is gone


@contextmanager
def other(role: str, folder: Path, name: str, *arguments: object) -> Iterator[Other]:
    process = Other(role, folder, name, *arguments)
    try:
        yield process
    finally:
        process.close()


def until(condition: Callable[[], bool], timeout: float = 20.0, what: str = "the condition") -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come about within {timeout:g} s")
        threading.Event().wait(0.01)


def sockets_and_segments() -> dict[str, int]:
    """What this process has open: file descriptors by kind, mappings of shared memory, threads."""
    counts = {"fds": 0, "segments": 0, "threads": threading.active_count()}
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # of the listing itself
        counts["fds"] += 1
        counts["segments"] += "rlinf-arena" in link
    counts["segments"] += Path("/proc/self/maps").read_text().count("rlinf-arena")
    return counts
