"""Scores items in processes that can be killed, so that no item can hang, crash or poison the rest.

Needs no signal and no main thread in the caller: it works from any thread and from any worker process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_reasoning.rewards.process import RewardProcess

BUNDLE_S = 0.005
"""Items of about so many seconds are sent together: when their process ends, those that were done are scored again."""
MOST_TOGETHER = 64


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
        self._item_s = BUNDLE_S
        self._memory_mb = memory_mb
        self._start_timeout_s = start_timeout_s
        self._count = processes
        self._lock = threading.Lock()
        self._processes: list[RewardProcess] = []
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
                    if process.waited_for or not queue:
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

    def _new(self) -> RewardProcess:
        return RewardProcess(self.target, self._options, self._memory_mb)

    def _assign(self, process: RewardProcess, queue: deque[int], items: Sequence[RewardItem]) -> None:
        share = -(-len(queue) // self._count)
        together = max(1, min(share, MOST_TOGETHER, int(BUNDLE_S / self._item_s)))
        process.items = [queue.popleft() for _ in range(together)]
        process.since = time.monotonic()
        process.cell.begin(-1)  # not the last bundle's place
        bundle = [(items[i].text, items[i].answer, dict(items[i].fields)) for i in process.items]
        # A process that died while idle is noticed by the wait that follows.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.connection.send(bundle)

    def _deadline(self, process: RewardProcess) -> float:
        """When it has to have answered, or be at the next item."""
        return process.at()[1] + self.timeout_s if process.ready else process.since + self._start_timeout_s

    def _wait(self, processes: Sequence[RewardProcess], queue: deque[int], scores: dict[int, Score]) -> None:
        """Wait for the next answer, end or deadline among ``processes`` and deal with it."""
        busy = [p for p in processes if p.waited_for]
        left = min(map(self._deadline, busy)) - time.monotonic()
        handles: list[Any] = [p.exit_fd for p in busy]
        handles += [p.connection for p in busy if not p.mute]
        found = set(wait(handles, timeout=max(0.0, left)))
        for process in busy:
            if process.connection in found:
                self._hear(process, scores)
        for process in busy:
            if process.exit_fd in found and process.waited_for and process in self._processes:
                self._lost(process, None, queue, scores)
        for process in busy:
            if process in self._processes and process.waited_for:
                place = process.at()[0]
                if time.monotonic() >= self._deadline(process):
                    self._lost(process, place, queue, scores)

    def _hear(self, process: RewardProcess, scores: dict[int, Score]) -> None:
        """Take one message of a process."""
        try:
            answer = process.connection.recv()
        except (EOFError, OSError):
            process.mute = True
            return
        if process.ready:
            assert len(answer) == len(process.items), "an answer for each item"
            each = (time.monotonic() - process.since) / len(answer)
            self._item_s = max(1e-6, (self._item_s + each) / 2)
            scores.update((item, Score(*one)) for item, one in zip(process.items, answer, strict=True))
            process.items = []
        elif answer[0] == "ready":
            process.ready = True
        else:
            self._fail(f"reward function {self.target!r} cannot be loaded:\n{answer[1].rstrip()}")

    def _lost(self, process: RewardProcess, late: int | None, queue: deque[int], scores: dict[int, Score]) -> None:
        """Deal with a process that has ended, or must end since it is ``late`` with the item at that place. Whatever
        else it had to score is scored by others."""
        process.end()
        limit, key = (self.timeout_s, "reward.timeout_s") if process.ready else (self._start_timeout_s, "to start")
        reason = f"its process {process.exit_text()}" if late is None else f"took longer than {limit:g} s ({key})"
        if not process.ready:
            self._fail(f"a process for reward function {self.target!r} did not get ready: {reason}")
        place = process.at()[0]  # it has ended: this changes no more
        if late in (None, place):
            scores[process.items.pop(place)] = Score(None, reason)
        queue.extendleft(reversed(process.items))
        self._item_s = BUNDLE_S  # carefully again
        self._replace(self._processes.index(process))

    def _fail(self, message: str) -> None:
        for process in self._processes:
            process.end()
        self._processes = []
        raise ConfigError(message)
