"""Timeouts that are over while the answer is on its way: nothing is lost, nothing comes twice, nothing stands still."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from driving import drive

from rlinf_core import In, Out, Worker, task
from rlinf_core.errors import EndOfChannel, WaitTimeout

COUNT = 300
SHORT = 0.0018


class Source(Worker):
    device = False

    @task
    def make(self, out: Out[int]) -> None:
        pause = threading.Event()
        for i in range(COUNT):
            pause.wait(0.002)
            out.put(i)

    @task
    def make_impatiently(self, out: Out[int]) -> None:
        for i in range(COUNT):
            while True:
                try:
                    out.put(i, timeout=SHORT)
                    break
                except WaitTimeout:
                    continue


class Sink(Worker):
    device = False

    @task
    def take(self, numbers: In[int]) -> dict[str, float]:
        got: list[int] = []
        while True:
            try:
                got.append(numbers.get(timeout=SHORT))
            except WaitTimeout:
                continue
            except EndOfChannel:
                return {"count": len(got), "in order": got == list(range(len(got)))}

    @task
    async def take_async(self, numbers: In[int]) -> dict[str, float]:
        got: list[int] = []
        while True:
            try:
                got.append(await numbers.get_async(timeout=SHORT))
            except TimeoutError:
                continue
            except EndOfChannel:
                return {"count": len(got), "in order": got == list(range(len(got)))}

    @task
    def take_slowly(self, numbers: In[int]) -> dict[str, float]:
        got, pause = [], threading.Event()
        for number in numbers:
            got.append(number)
            pause.wait(SHORT)
        return {"count": len(got), "in order": got == list(range(len(got)))}


def between(make: str, take: str) -> Any:
    def program(flow: Any, cfg: Any) -> None:
        source, sink = flow.group("source", Source, cfg), flow.group("sink", Sink, cfg)
        for step in flow.steps(1):
            numbers = step.channels("numbers")
            getattr(source, make)(numbers)
            step.report(getattr(sink, take)(numbers))
            step.join()

    return program


@pytest.mark.parametrize(
    ("make", "take"), [("make", "take"), ("make", "take_async"), ("make_impatiently", "take_slowly")]
)
def test_a_timeout_neither_loses_nor_doubles(tmp_path: Path, make: str, take: str) -> None:
    (metrics,) = drive(between(make, take), {}, tmp_path, devices=1, max_items=1).metrics
    assert (metrics["count"], metrics["in order"]) == (COUNT, True)


class Beside(Worker):
    """Shares the device with the reader, and puts from sections."""

    @task
    def make(self, out: Out[int]) -> None:
        pause = threading.Event()
        for i in range(COUNT // 5):
            with self.on_device():
                pause.wait(0.002)
                out.put(i)


class Inside(Worker):
    """Gets with timeouts from inside one section."""

    @task
    def take(self, numbers: In[int]) -> dict[str, float]:
        got: list[int] = []
        with self.on_device():
            while True:
                try:
                    got.append(numbers.get(timeout=0.003))
                except WaitTimeout:
                    continue
                except EndOfChannel:
                    return {"count": len(got), "in order": got == list(range(len(got)))}


@pytest.mark.parametrize("attempt", range(3))
def test_inside_a_section_too(tmp_path: Path, attempt: int) -> None:
    def program(flow: Any, cfg: Any) -> None:
        source, sink = flow.group("source", Beside, cfg), flow.group("sink", Inside, cfg)
        for step in flow.steps(1):
            numbers = step.channels("numbers")
            source.make(numbers)
            step.report(sink.take(numbers))
            step.join()

    (metrics,) = drive(program, {}, tmp_path, devices=1).metrics
    assert (metrics["count"], metrics["in order"]) == (COUNT // 5, True)


def test_a_task_that_is_cancelled_is_cancelled(tmp_path: Path) -> None:
    """Only an answer that was on its way survives a cancellation; a wait for nothing ends."""

    class Waiter(Worker):
        device = False

        @task
        async def take(self, numbers: In[int]) -> dict[str, float]:
            waiting = asyncio.ensure_future(numbers.get_async())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return {"left": float(len([n async for n in numbers]))}

    globals()["Waiter"] = Waiter
    Waiter.__qualname__ = "Waiter"
    fed = threading.Event()

    def items() -> Any:
        fed.wait(0.5)
        yield from range(3)

    def program(flow: Any, cfg: Any) -> None:
        waiter = flow.group("waiter", Waiter, cfg)
        for step in flow.steps(1):
            numbers = step.channels("numbers")
            step.feed(numbers, items)
            step.report(waiter.take(numbers))
            step.join()

    (metrics,) = drive(program, {}, tmp_path, devices=1).metrics
    assert metrics["left"] == 3
