"""One process of the reward pool, seen from the pool: started, watched, ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlinf_reasoning.rewards._child import Cell

CHILD = Path(__file__).with_name("_child.py")
MARK = "RLINF_REWARD_PROCESS"
"""Environment variable by which everything that a process of the pool has started is found again."""


class RewardProcess:
    """One child with its connection and its lifeline (closing the lifeline ends the child)."""

    def __init__(self, target: str, options: Mapping[str, Any], memory_mb: int) -> None:
        ours, theirs = socket.socketpair()
        self.lifeline, lifeline = socket.socketpair()
        self._mark = uuid.uuid4().hex
        shared = os.memfd_create("rlinf-reward")
        try:
            os.ftruncate(shared, Cell.SIZE)
            self.cell = Cell(shared)
            fds = (theirs.fileno(), lifeline.fileno(), shared)
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the caller's to handle; and the kill reaches its children
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark},
            )
        finally:
            os.close(shared)
            theirs.close()
            lifeline.close()
        # Tells of the end of the process itself, where the connection would also wait for what it has forked.
        self.exit_fd = os.pidfd_open(self.process.pid)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.connection.send((target, dict(options), sys.path, memory_mb << 20))
        self.ready = False
        self.mute = False
        """Its end of the connection is closed: only its exit can be waited for."""
        self.items: list[int] = []
        """What it scores now, in this order."""
        self.since = time.monotonic()
        """When it was started, or was last given items."""

    @property
    def waited_for(self) -> bool:
        return bool(self.items) or not self.ready

    def at(self) -> tuple[int, float]:
        """The place in ``items`` that it is at, and since when."""
        place, began = self.cell.read()
        return max(0, place), max(self.since, began)

    def exited(self) -> bool:
        """Whether it has ended. It is not reaped, so that its id, and its group's, cannot mean another one yet."""
        if self.process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> None:
        """Kill the process and what it has started, and reap it. May be called twice."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            rounds = 0
            while _kill_marked(self._mark) and rounds < 10:  # again: one may have forked meanwhile
                rounds += 1
            self.process.wait()
            os.close(self.exit_fd)
        self.connection.close()
        self.lifeline.close()

    def exit_text(self) -> str:
        """How it ended, once ``end`` has reaped it."""
        code = self.process.wait()
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


def _kill_marked(mark: str) -> int:
    """Kill all processes that carry the mark, also those in sessions of their own; how many there were."""
    wanted = f"{MARK}={mark}".encode()
    killed = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        # The descriptor is opened before the check: the id cannot pass to another process in between.
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(int(entry))
            try:
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    killed += 1
            finally:
                os.close(fd)
    return killed
