"""Contenders as the measuring process sees them, and two processes for those that need no more than that."""

from __future__ import annotations

import contextlib
import multiprocessing
from dataclasses import dataclass
from typing import Any, ClassVar

from ways.cases import CASES, Case
from ways.side import Side, serve

READY_S = 120.0


@dataclass(frozen=True)
class Sample:
    """``count`` items within ``seconds``, from the first ``send`` to the last ``recv``; ``cpu``: processor seconds of
    both processes."""

    count: int
    seconds: float
    cpu: float


class Contender:
    """A way for items from one process to another."""

    name: ClassVar[str]
    kind: ClassVar[str] = "peer"
    """``ours``, ``peer``, ``limit`` or ``reference``."""
    most_bytes: ClassVar[int] = 1 << 30
    """Of one measurement; less for those that keep everything under way in memory."""
    round_trips: ClassVar[bool] = True

    def start(self) -> None:
        """Everything that is not measured: processes, connections."""

    def throughput(self, case: Case, count: int) -> Sample:
        raise NotImplementedError

    def pingpong(self, case: Case, count: int) -> list[float]:
        """Seconds of each of ``count`` round trips, one after the other."""
        raise NotImplementedError

    def stop(self) -> None:
        """Take down what ``start`` made."""

    def __enter__(self) -> Contender:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Broken(RuntimeError):
    """A process of a contender failed or fell silent."""


class Pair(Contender):
    """Two spawned processes that run ``side``."""

    side: ClassVar[type[Side]]

    def shared(self, context: Any, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        """What producer and consumer are given; ``stack`` undoes it in this process once both have started."""
        return None, None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends: list[Any] = []
        self.processes: list[Any] = []
        self.stack = contextlib.ExitStack()
        for producer, shared in zip((True, False), self.shared(context, self.stack), strict=True):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self.side, producer, shared), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(mine)
            self.processes.append(process)
        for end in self.ends:
            self._answer(end)

    def _answer(self, end: Any) -> Any:
        if not end.poll(READY_S):
            raise Broken(f"{self.name}: no answer within {READY_S:g} s")
        try:
            error, value = end.recv()
        except EOFError:
            raise Broken(f"{self.name}: a process has ended") from None
        if error is not None:
            raise Broken(f"{self.name}: {error}")
        return value

    def _both(self, first: tuple[str, list[Any]], second: tuple[str, list[Any]]) -> tuple[Any, Any]:
        """The consumer's call goes first; what it waits for comes after."""
        for end, call in zip(self.ends[::-1], (second, first), strict=True):
            end.send(call)
        return tuple(self._answer(end) for end in self.ends)

    def throughput(self, case: Case, count: int) -> Sample:
        self._both(("prepare", [case.name]), ("prepare", [case.name]))
        (began, spent), (ended, used) = self._both(("produce", [case.name, count]), ("consume", [case.name, count]))
        return Sample(count, ended - began, spent + used)

    def pingpong(self, case: Case, count: int) -> list[float]:
        self._both(("prepare", [case.name]), ("prepare", [case.name]))
        found, _ = self._both(("ping", [case.name, count]), ("pong", [case.name, count]))
        return list(found)

    def stop(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):  # it has ended before
                end.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for end in self.ends:
            end.close()
        self.stack.close()


__all__ = ["CASES", "Broken", "Contender", "Pair", "Sample"]
