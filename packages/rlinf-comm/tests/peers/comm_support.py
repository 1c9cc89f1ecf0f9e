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

PROBE = 4096
"""More than what the slot takes that peers try to open when they connect."""
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
        self._said = threading.Condition()
        self._lines: list[str] = []
        self._silent = False
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self._lines.append(line.strip())
                self._said.notify_all()
        with self._said:
            self._silent = True
            self._said.notify_all()

    def expect(self, start: str, timeout: float = 60.0) -> str:
        """A line that begins with ``start``, said already or within ``timeout`` seconds."""

        def found() -> str | None:
            return next((line for line in self._lines if line.startswith(start)), None)

        with self._said:
            self._said.wait_for(lambda: found() or self._silent, timeout)
            line = found()
            assert line is not None, f"the process did not say {start!r}, but {self._lines}"
            self._lines.remove(line)
            return line

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
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # there was something left to say to a process that is gone
        self._listener.join(20)
        self.process.stdout.close()


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
