"""Channels under load and misuse, in threads: nothing is lost or doubled, and whatever goes wrong is named."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import Kept, drive

from rlinf_core import In, Out, Worker, task
from rlinf_core.channel import WINDOW_ITEMS
from rlinf_core.errors import RLinfError
from rlinf_core.flow import Flow

AT_ONCE = 50
"""Items of one ``put_many``; every other batch is put one by one."""


ARRAY, LIMIT = 1 << 14, 6
"""Bytes of an array, and how many of them a channel holds."""


class Gauge:
    """Items that were put and not yet got; one for all threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.out = self.peak = 0
        self.done = False

    def add(self, change: int) -> None:
        with self.changed:
            self.out += change
            self.peak = max(self.peak, self.out)
            self.changed.notify_all()

    def finish(self) -> None:
        with self.changed:
            self.done = True
            self.changed.notify_all()

    def await_many(self, many: int) -> None:
        """Until so many are out, or no more will come."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.done or self.out >= many, timeout=20)


gauge = Gauge()


class Producer(Worker):
    """Rank r puts ``count`` numbers: r, r + ranks, r + 2 ranks, …"""

    device = False

    @task
    def produce(self, go: In[int], items: Out[int]) -> None:
        for count in go:
            mine = [self.rank + i * self.world_size for i in range(count)]
            for begin in range(0, count, AT_ONCE):
                batch = mine[begin : begin + AT_ONCE]
                if begin // AT_ONCE % 2:
                    items.put_many(batch, weights=[1.0 + number % 7 for number in batch])
                else:
                    for number in batch:
                        items.put(number, weight=1.0 + number % 7)

    @task
    def produce_arrays(self, go: In[int], items: Out[Any]) -> None:
        for count in go:
            for number in range(count):
                items.put(np.full(ARRAY, number % 251, np.uint8))
                gauge.add(1)
        gauge.finish()

    @task
    def produce_badly(self, go: In[int], items: Out[Any]) -> None:
        for _ in go:
            items.put(1)
            items.put(threading.Lock())


class Consumer(Worker):
    device = False

    @task
    def consume(self, items: In[int]) -> dict[str, float]:
        last: dict[int, int] = {}
        count = total = mixed = 0
        for number in items:
            producer = number % self.cfg["producers"]
            assert last.get(producer, -1) < number, "items of one writer out of order"
            last[producer] = number
            count, total, mixed = count + 1, total + number, mixed + hash_of(number)
        return {"count": count, "total": total, "mixed": mixed, f"of/{self.rank}": count}

    @task
    def consume_some(self, items: In[int]) -> dict[str, float]:
        for index, number in enumerate(items):
            if index == 20 and self.rank == 1:
                raise ValueError(f"cannot digest {number}")
        return {}

    @task
    def consume_slowly(self, items: In[Any]) -> dict[str, float]:
        """Begins once the writer is as far ahead as it may be, and goes on only while the channel is full."""
        count = total = 0
        gauge.await_many(WINDOW_ITEMS)
        for array in items:
            gauge.add(-1)
            assert (array == array[0]).all()
            count, total = count + 1, total + int(array[0])
            gauge.await_many(LIMIT - 1)
        return {"count": count, "total": total}


def hash_of(number: int) -> int:
    """A checksum that a swap of digits does not keep; sums of it stay exact in a float."""
    return (number * 2654435761) % 1_000_003


class Many(Producer):
    ranks = 100


class ManyConsumers(Consumer):
    ranks = 100


class Few(Producer):
    ranks = 10


class FewConsumers(Consumer):
    ranks = 10


class One(Producer):
    ranks = 1


class TwoConsumers(Consumer):
    ranks = 2


def program(flow: Flow, cfg: Any) -> None:
    producer = flow.group("producer", cfg["producer"])
    consumer = flow.group("consumer", cfg["consumer"], {"producers": cfg["producer"].ranks})
    for step in flow.steps(1):
        go = step.channel("go", deal="round_robin")
        items = step.channel("items", deal=cfg.get("deal", "shared"))
        step.feed(go, [cfg["count"]] * cfg["producer"].ranks)
        getattr(producer, cfg.get("produce", "produce"))(go, items)
        step.report(getattr(consumer, cfg.get("consume", "consume"))(items), reduce="sum")
        step.join()


def check(found: Kept, producers: int, count: int) -> None:
    (metrics,) = found.metrics
    numbers = range(producers * count)
    assert metrics["count"] == len(numbers)
    assert metrics["total"] == sum(numbers)
    assert metrics["mixed"] == sum(map(hash_of, numbers))


@pytest.mark.parametrize("deal", ["shared", "round_robin", "weight"])
def test_ten_producers_ten_consumers(tmp_path: Path, deal: str) -> None:
    cfg = {"producer": Few, "consumer": FewConsumers, "count": 200, "deal": deal}
    found = drive(program, cfg, tmp_path, max_items=64)
    check(found, 10, 200)
    if deal == "round_robin":
        assert {found.metrics[0][f"of/{rank}"] for rank in range(10)} == {200}


@pytest.mark.slow
@pytest.mark.parametrize(("deal", "count"), [("shared", 1000), ("weight", 200)])
def test_a_hundred_producers_a_hundred_consumers_and_up_to_a_hundred_thousand_items(
    tmp_path: Path, deal: str, count: int
) -> None:
    began = time.monotonic()
    cfg = {"producer": Many, "consumer": ManyConsumers, "count": count, "deal": deal}
    check(drive(program, cfg, tmp_path, max_items=4096, stall_timeout_s=300), 100, count)
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("deal", ["shared", "round_robin"])
def test_a_consumer_that_raises_is_the_cause(tmp_path: Path, deal: str) -> None:
    cfg = {"producer": Few, "consumer": TwoConsumers, "count": 200, "consume": "consume_some", "deal": deal}
    with pytest.raises(RLinfError, match=r"consumer\[1\] failed in consume_some of train/0: ValueError: cannot digest"):
        drive(program, cfg, tmp_path, max_items=16)


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    cfg = {"producer": One, "consumer": TwoConsumers, "count": 1, "produce": "produce_badly"}
    with pytest.raises(RLinfError, match=r"producer\[0\] failed in produce_badly of train/0: .*lock"):
        drive(program, cfg, tmp_path)


def test_a_limit_in_bytes_holds_a_fast_producer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, count = Gauge(), 400
    monkeypatch.setattr(f"{__name__}.gauge", fresh)
    cfg = {
        "producer": One,
        "consumer": TwoConsumers,
        "count": count,
        "produce": "produce_arrays",
        "consume": "consume_slowly",
    }
    found = drive(program, cfg, tmp_path, max_bytes=LIMIT * ARRAY + ARRAY // 2)
    assert found.metrics[0]["count"] == count
    assert found.metrics[0]["total"] == sum(number % 251 for number in range(count))
    # In the channel, not answered, and on its way to each of two readers: not one more.
    assert WINDOW_ITEMS <= fresh.peak <= LIMIT + WINDOW_ITEMS + 1 + 2
