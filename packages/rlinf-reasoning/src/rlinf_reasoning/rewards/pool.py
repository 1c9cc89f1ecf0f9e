"""Scores items in processes that can be killed, so that no item can hang, crash or poison the rest.

Needs no signal and no main thread in the caller: it works from any thread and from any worker process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rlinf_core.errors import ConfigError, RLinfError

CHILD = Path(__file__).with_name("_child.py")
MARK = "RLINF_REWARD_PROCESS"
"""Environment variable by which everything that a process of the pool has started is found again."""


@dataclass(frozen=True, slots=True)
class RewardItem:
    """What a reward function is called with."""

    text: str
    answer: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Score:
    """``value`` is ``None`` when the item could not be scored; ``error`` then says why."""

    value: float | None
    error: str = ""


class _Process:
    """One child with its connection and its lifeline (closing the lifeline ends the child)."""

    def __init__(self, target: str, options: Mapping[str, Any], memory_mb: int) -> None:
        ours, theirs = socket.socketpair()
        self.lifeline, lifeline = socket.socketpair()
        self._mark = uuid.uuid4().hex
        try:
            fds = (theirs.fileno(), lifeline.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the caller's to handle; and the kill reaches its children
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark},
            )
        finally:
            theirs.close()
            lifeline.close()
        # Tells of the end of the process itself, where the connection would also wait for what it has forked.
        self.exit_fd = os.pidfd_open(self.process.pid)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.connection.send((target, dict(options), sys.path, memory_mb << 20))
        self.ready = False
        self.mute = False
        """Its end of the connection is closed: only its exit can be waited for."""
        self.item: int | None = None
        self.deadline = 0.0

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


class RewardPool:
    """A fixed number of processes that all run one reward function.

    Args:
        target: ``"module:function"``, importable in a fresh process with the caller's ``sys.path``; called as
            ``function(text, answer, fields) -> float``. A class is instantiated first, with ``options``.
        processes: how many.
        timeout_s: limit of one item. A process that passes it is killed and replaced.
        memory_mb: address-space limit of one process, 0 for none.
        start_timeout_s: limit for importing the function.
        options: keyword arguments of the class.

    Processes start with the first ``score`` (or ``start``). ``close`` leaves none, nor what they have started,
    not even in a session of its own. The death of the caller, however it dies, ends them and what they have
    started in their process group; a daemon that a function has put into another session outlives it then.
    """

    def __init__(
        self,
        target: str,
        *,
        processes: int = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 0,
        start_timeout_s: float = 120.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if ":" not in target:
            raise ConfigError(f"reward.function: {target!r} is not of the form 'module:function'")
        self.target = target
        self._options = dict(options or {})
        self.timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._start_timeout_s = start_timeout_s
        self._count = processes
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._closed = False
        self.replaced = 0

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and wait until the function is loaded in each.

        Raises:
            ConfigError: the function cannot be imported; carries the traceback of the import.
        """
        with self._lock:
            self._launch()
            while waiting := [p for p in self._processes if not p.ready]:
                self._wait(waiting, deque(), {})

    def pids(self) -> list[int]:
        """Process ids of the living processes."""
        return [p.process.pid for p in self._processes]

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score every item, in order. Never raises for what an item does.

        Raises:
            ConfigError: the reward function cannot be loaded.
            RLinfError: the pool is closed, or a process could not be started.
        """
        with self._lock:
            self._launch()
            queue = deque(range(len(items)))
            scores: dict[int, Score] = {}
            while len(scores) < len(items):
                for place, process in enumerate(self._processes):
                    if not process.ready or process.item is not None or not queue:
                        continue
                    if process.exited():  # after its last answer: not the next item's fault
                        self._replace(place)
                    else:
                        self._assign(process, queue, items)
                self._wait(self._processes, queue, scores)
            return [scores[i] for i in range(len(items))]

    def close(self) -> None:
        """End all processes. May be called twice."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.end()
            self._processes = []

    def _launch(self) -> None:
        if self._closed:
            raise RLinfError("the reward pool is closed")
        for place, process in enumerate(self._processes):
            if process.exited():  # killed from outside between two calls: no item's fault
                self._replace(place)
        while len(self._processes) < self._count:
            self._processes.append(self._new())

    def _replace(self, place: int) -> None:
        self._processes[place].end()
        self._processes[place] = self._new()
        self.replaced += 1

    def _new(self) -> _Process:
        process = _Process(self.target, self._options, self._memory_mb)
        process.deadline = time.monotonic() + self._start_timeout_s
        return process

    def _assign(self, process: _Process, queue: deque[int], items: Sequence[RewardItem]) -> None:
        index = queue.popleft()
        item = items[index]
        process.item = index
        process.deadline = time.monotonic() + self.timeout_s
        # A process that died while idle is noticed by the wait that follows.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.connection.send((item.text, item.answer, dict(item.fields)))

    def _wait(self, processes: Sequence[_Process], queue: deque[int], scores: dict[int, Score]) -> None:
        """Wait for the next answer, end or deadline among ``processes`` and deal with it."""
        busy = [p for p in processes if p.item is not None or not p.ready]
        left = min(p.deadline for p in busy) - time.monotonic()
        handles: list[Any] = [p.exit_fd for p in busy]
        handles += [p.connection for p in busy if not p.mute]
        found = set(wait(handles, timeout=max(0.0, left)))
        for process in busy:
            if process.connection in found:
                self._hear(process, scores)
        for process in busy:
            waiting = process.item is not None or not process.ready
            if process.exit_fd in found and waiting and process in self._processes:
                self._lost(process, "", scores)
        now = time.monotonic()
        for process in busy:
            waited_for = process in self._processes and (process.item is not None or not process.ready)
            if waited_for and now >= process.deadline:
                self._lost(process, f"took longer than {self.timeout_s:g} s (reward.timeout_s)", scores)

    def _hear(self, process: _Process, scores: dict[int, Score]) -> None:
        """Take one message of a process."""
        try:
            answer = process.connection.recv()
        except (EOFError, OSError):
            process.mute = True
            return
        if process.ready:
            assert process.item is not None
            scores[process.item] = Score(*answer)
            process.item = None
        elif answer[0] == "ready":
            process.ready = True
        else:
            self._fail(f"reward function {self.target!r} cannot be loaded:\n{answer[1].rstrip()}")

    def _lost(self, process: _Process, reason: str, scores: dict[int, Score]) -> None:
        """Deal with a process that has ended (no ``reason``) or must end."""
        process.end()
        reason = reason or f"its process {process.exit_text()}"
        if not process.ready:
            self._fail(f"a process for reward function {self.target!r} did not get ready: {reason}")
        assert process.item is not None
        scores[process.item] = Score(None, reason)
        self._replace(self._processes.index(process))

    def _fail(self, message: str) -> None:
        for process in self._processes:
            process.end()
        self._processes = []
        raise ConfigError(message)
