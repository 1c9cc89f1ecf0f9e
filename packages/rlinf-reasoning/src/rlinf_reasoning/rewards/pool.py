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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rlinf_core.errors import ConfigError, RLinfError

CHILD = Path(__file__).with_name("_child.py")


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

    def __init__(self, target: str, memory_mb: int) -> None:
        ours, theirs = socket.socketpair()
        self.lifeline, lifeline = socket.socketpair()
        try:
            fds = (theirs.fileno(), lifeline.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the caller's to handle; and the kill reaches its children
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        finally:
            theirs.close()
            lifeline.close()
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.connection.send((target, sys.path, memory_mb << 20))
        self.ready = False
        self.item: int | None = None
        self.deadline = 0.0

    def end(self) -> None:
        """Kill the process and what it started, and reap it."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.lifeline.close()

    def exit_text(self) -> str:
        code = self.process.wait()
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


class RewardPool:
    """A fixed number of processes that all run one reward function.

    Args:
        target: ``"module:function"``, importable in a fresh process with the caller's ``sys.path``; called as
            ``function(text, answer, fields) -> float``. A class is instantiated without arguments first.
        processes: how many.
        timeout_s: limit of one item. A process that passes it is killed and replaced.
        memory_mb: address-space limit of one process, 0 for none.
        start_timeout_s: limit for importing the function.

    Processes start with the first ``score`` (or ``start``). ``close`` leaves none; neither does the death of
    the caller, however it dies.
    """

    def __init__(
        self,
        target: str,
        *,
        processes: int = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if ":" not in target:
            raise ConfigError(f"reward.function: {target!r} is not of the form 'module:function'")
        self.target = target
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
                for process in self._processes:
                    if process.ready and process.item is None and queue:
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
            if process.process.poll() is not None:  # killed from outside between two calls: no item's fault
                process.end()
                self._processes[place] = self._new()
                self.replaced += 1
        while len(self._processes) < self._count:
            self._processes.append(self._new())

    def _new(self) -> _Process:
        process = _Process(self.target, self._memory_mb)
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
        by_connection = {p.connection: p for p in busy}
        for connection in wait(list(by_connection), timeout=max(0.0, left)):
            process = by_connection[connection]  # type: ignore[index]
            try:
                answer = process.connection.recv()
            except (EOFError, ConnectionResetError):
                self._lost(process, f"its process {process.exit_text()}", scores)
                continue
            if process.ready:
                assert process.item is not None
                scores[process.item] = Score(*answer)
                process.item = None
            elif answer[0] == "ready":
                process.ready = True
            else:
                self._fail(f"reward function {self.target!r} cannot be loaded:\n{answer[1].rstrip()}")
        now = time.monotonic()
        for process in busy:
            waited_for = process in self._processes and (process.item is not None or not process.ready)
            if waited_for and now >= process.deadline:
                self._lost(process, f"took longer than {self.timeout_s:g} s (reward.timeout_s)", scores)

    def _lost(self, process: _Process, reason: str, scores: dict[int, Score]) -> None:
        process.end()
        if not process.ready:
            self._fail(f"a process for reward function {self.target!r} did not get ready: {reason}")
        assert process.item is not None
        scores[process.item] = Score(None, reason)
        self._processes[self._processes.index(process)] = self._new()
        self.replaced += 1

    def _fail(self, message: str) -> None:
        for process in self._processes:
            process.end()
        self._processes = []
        raise ConfigError(message)
