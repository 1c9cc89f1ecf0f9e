"""Devices change hands between sections, not between tasks: when, how often, and never into a deadlock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Kept, drive

from rlinf_core import In, Out, Worker, task
from rlinf_core.errors import RLinfError, WaitTimeout


class Counting(Worker):
    """Counts its loads; a section checks that it is loaded and alone."""

    def setup(self) -> None:
        self.loaded = False
        self.loads = 0

    def onload(self) -> None:
        assert not self.loaded
        self.loaded = True
        self.loads += 1

    def offload(self) -> None:
        assert self.loaded or not self.loads, "once after set-up, then only what is loaded"
        self.loaded = False

    def use(self) -> None:
        assert self.loaded, f"{self.name} computes while offloaded"


class Source(Counting):
    @task
    def produce(self, numbers: In[int], out: Out[int]) -> dict[str, float]:
        assert Sink.fed.wait(20)
        for portion in numbers.batches():
            with self.on_device():
                self.use()
                for n in portion:
                    out.put(n)
        return {"source/loads": self.loads}

    @task
    def produce_inside(self, numbers: In[int], out: Out[int]) -> dict[str, float]:
        """One section around all gets: each of them is a safe point."""
        with self.on_device():
            for n in numbers:
                self.use()
                out.put(n)
        return {"source/loads": self.loads}

    @task
    async def produce_inside_async(self, numbers: In[int], out: Out[int]) -> dict[str, float]:
        with self.on_device():
            async for n in numbers:
                self.use()
                await out.put_async(n)
        return {"source/loads": self.loads}

    @task
    def impatient(self, numbers: In[int], out: Out[int]) -> dict[str, float]:
        with self.on_device():
            out.put(1)
            with pytest.raises(WaitTimeout):
                numbers.get(timeout=0.2)
            self.use()  # has its device again
            for n in numbers:
                out.put(n)
        return {}


class Sink(Counting):
    taken: Any = None
    fed: Any = None

    @task
    def consume(self, numbers: In[int]) -> dict[str, float]:
        total = 0
        for portion in numbers.batches():
            with self.on_device():
                self.use()
                for n in portion:
                    total += n
                    Sink.taken.release()
        return {"sum": total, "sink/loads": self.loads}

    @task
    async def consume_async(self, numbers: In[int]) -> dict[str, float]:
        total = 0
        async for n in numbers:
            with self.on_device():
                self.use()
                total += n
                Sink.taken.release()
        return {"sum": total, "sink/loads": self.loads}


def flow_of(feed: Any, produce: str = "produce", consume: str = "consume") -> Any:
    def program(flow: Any, cfg: Any) -> None:
        source, sink = flow.group("source", Source), flow.group("sink", Sink)
        for step in flow.steps(2):
            numbers, passed = step.channels("numbers", "passed")
            step.feed(numbers, feed)
            step.report(getattr(source, produce)(numbers, passed), reduce="sum")
            step.report(getattr(sink, consume)(passed), reduce="sum")
            step.join()

    return program


@pytest.fixture(autouse=True)
def semaphore() -> None:
    Sink.taken = threading.Semaphore(0)
    Sink.fed = threading.Event()
    Sink.fed.set()


def test_a_holder_with_queued_input_keeps_the_device(tmp_path: Path) -> None:
    """Portions of 2, everything queued: one switch a step, not one per portion."""

    def everything() -> Iterator[int]:
        Sink.fed.clear()
        yield from range(10)
        Sink.fed.set()

    Sink.fed.clear()
    kept = drive(flow_of(everything), None, tmp_path, devices=1, portion=2)
    assert [m["sum"] for m in kept.metrics] == [45, 45]
    assert kept.metrics[0]["sink/loads"] == kept.metrics[0]["source/loads"] == 1


def gated() -> Iterator[int]:
    """Each number comes only after the sink has had the one before: the source must let the device go."""
    for n in range(6):
        yield n
        assert Sink.taken.acquire(timeout=20), "the sink never got the device"


@pytest.mark.parametrize("produce", ["produce", "produce_inside", "produce_inside_async"])
@pytest.mark.parametrize("consume", ["consume", "consume_async"])
def test_a_waiting_holder_gives_the_device_up(tmp_path: Path, produce: str, consume: str) -> None:
    kept = drive(flow_of(gated, produce, consume), None, tmp_path, devices=1, portion=1)
    assert [m["sum"] for m in kept.metrics] == [15, 15]
    assert kept.metrics[0]["sink/loads"] == 6, "back and forth, once per number"


def test_a_get_inside_a_section_that_times_out_has_its_device_again(tmp_path: Path) -> None:
    def late() -> Iterator[int]:
        assert Sink.taken.acquire(timeout=20)
        threading.Event().wait(0.4)
        yield 7

    kept = drive(flow_of(late, "impatient"), None, tmp_path, devices=1, portion=1)
    assert [m["sum"] for m in kept.metrics] == [8, 8]


class Slow(Counting):
    """Its set-up notes when it has the device to itself."""

    running: threading.Lock = threading.Lock()

    def setup(self) -> None:
        super().setup()
        assert Slow.running.acquire(blocking=False), "two set-ups on one device at a time"
        threading.Event().wait(0.05)
        Slow.running.release()
        self.loaded = True

    def offload(self) -> None:
        assert self.loaded
        self.loaded = False


class First(Slow):
    @task
    def produce(self, numbers: In[int], out: Out[int]) -> None:
        for n in numbers:
            with self.on_device():
                self.use()
                out.put(n)


class Second(Slow):
    @task
    def consume(self, numbers: In[int]) -> dict[str, float]:
        total = 0
        for portion in numbers.batches():
            with self.on_device():
                self.use()
                total += sum(portion)
        return {"total": total}


def test_groups_that_share_a_device_are_set_up_one_after_the_other_and_offloaded(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        first, second = flow.group("first", First, cfg), flow.group("second", Second, cfg)
        for step in flow.steps(1):
            numbers, out = step.channels("numbers", "out")
            step.feed(numbers, [1, 2, 3])
            first.produce(numbers, out)
            step.report(second.consume(out))
            step.join()

    assert drive(program, {}, tmp_path, devices=1).metrics[0]["total"] == 6


class Keeper(Counting):
    """Never returns its device."""

    entered = threading.Event()
    enough = threading.Event()

    @task
    def produce(self, numbers: In[int], out: Out[int]) -> None:
        with self.on_device():
            for n in numbers:
                out.put(n)
            Keeper.entered.set()
            Keeper.enough.wait(60)

    @task
    def forget(self, numbers: In[int], out: Out[int]) -> None:
        self.section = self.on_device()
        self.section.__enter__()
        for n in numbers:
            out.put(n)


def keeping(task_name: str) -> Any:
    def program(flow: Any, cfg: Any) -> None:
        keeper, sink = flow.group("keeper", Keeper, cfg), flow.group("sink", Second, cfg)
        for step in flow.steps(1):
            numbers, out = step.channels("numbers", "out")
            step.feed(numbers, [1, 2, 3])
            getattr(keeper, task_name)(numbers, out)
            sink.consume(out)
            step.join()

    return program


def test_a_stage_that_never_returns_its_devices_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_core.hub import server

    monkeypatch.setattr(server, "DEVICE_NOTE_S", 0.3)
    monkeypatch.setattr(server, "STACKS_AFTER_S", 0.2)
    kept = Kept()
    Keeper.enough.clear()
    said = r"(?s)keeper\[0\] did not return devices .*device 0 with keeper\[0\]: in use"
    with pytest.raises(RLinfError, match=said):
        drive(keeping("produce"), {}, tmp_path, devices=1, portion=1, stall_timeout_s=2.0, kept=kept)
    Keeper.enough.set()
    assert any("s already: sink[0] waits for device 0" in line for line in kept.logs), kept.logs


def test_a_task_that_returns_inside_its_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RLinfError, match=r"forget\(\) returned inside its device section"):
        drive(keeping("forget"), {}, tmp_path, devices=1)
