"""Ray's two ways: ``ray.util.queue.Queue``, and objects handed to an actor's calls. Both need a Ray that is started."""

from __future__ import annotations

import time
from collections import deque
from itertools import cycle, islice
from typing import Any, ClassVar

from ways.cases import CASES, Case
from ways.pair import Contender, Sample
from ways.side import Side

UNDER_WAY_BYTES = 256 << 20
MOST_UNDER_WAY = 64


def under_way(case: Case) -> int:
    return max(2, min(MOST_UNDER_WAY, UNDER_WAY_BYTES // case.nbytes))


class QueueSide(Side):
    """``shared``: the two queues, and whether calls take several items along."""

    def open(self) -> None:
        *queues, self.batch = self.shared
        self.out, self.inbox = queues if self.producer else queues[::-1]

    def send(self, item: Any) -> None:
        self.out.put(item)

    def recv(self) -> Any:
        return self.inbox.get()

    def send_all(self, items: list[Any], count: int, send: Any) -> None:
        if not self.batch:
            return super().send_all(items, count, send)
        from ray.util.queue import Full

        left = count
        while left:
            now = items[:left]
            try:
                self.out.put_nowait_batch(now)
                left -= len(now)
            except Full:
                self.out.put(now[0])  # waits
                left -= 1
        return None

    def take_all(self, case: Case, count: int) -> Any:
        if not self.batch:
            return super().take_all(case, count)
        from ray.util.queue import Empty

        left, item = count, None
        while left:
            try:
                items = self.inbox.get_nowait_batch(max(1, min(self.inbox.qsize(), left)))
            except Empty:
                items = [self.inbox.get()]
            for item in items:
                case.touch(item)
            left -= len(items)
        return item


class RayQueue(Contender):
    name = "ray.util.queue.Queue"
    batched: ClassVar[bool] = False

    def start(self) -> None:
        import ray
        from ray.util.queue import Queue

        self.queues = [Queue(4 * MOST_UNDER_WAY, actor_options={"num_cpus": 0}) for _ in range(2)]
        kind = ray.remote(num_cpus=0)(QueueSide)
        self.sides = [kind.remote(producer, (*self.queues, self.batched)) for producer in (True, False)]
        ray.get([side.prepare.remote(CASES["4 B"]) for side in self.sides])

    def throughput(self, case: Case, count: int) -> Sample:
        import ray

        producer, consumer = self.sides
        taken = consumer.consume.remote(case.name, count)
        (began, spent), (ended, used) = ray.get([producer.produce.remote(case.name, count), taken])
        return Sample(count, ended - began, spent + used)

    def pingpong(self, case: Case, count: int) -> list[float]:
        import ray

        producer, consumer = self.sides
        answered = consumer.pong.remote(case.name, count)
        found, _ = ray.get([producer.ping.remote(case.name, count), answered])
        return list(found)

    def stop(self) -> None:
        import ray

        for side in self.sides:
            ray.kill(side)
        for queue in self.queues:
            queue.shutdown(force=True)


class RayQueueBatches(RayQueue):
    name = "ray.util.queue.Queue, batches of 64"
    batched = True
    most_bytes = 512 << 20
    round_trips = False


class Taker:
    """The consumer: Ray calls it for each item, in order."""

    def begin(self) -> None:
        self.cpu = time.process_time()

    def take(self, name: str, item: Any) -> None:
        CASES[name].touch(item)
        self.last = item

    def end(self, name: str) -> tuple[float, float]:
        ended, cpu = time.perf_counter(), time.process_time() - self.cpu
        CASES[name].check(self.last)
        del self.last
        return ended, cpu

    def echo(self, item: Any) -> Any:
        return item


class Giver:
    """The producer. ``put``: objects are put first and handed over by reference; else they are plain arguments, of
    which Ray puts the large ones itself."""

    def __init__(self, taker: Any, put: bool) -> None:
        self.taker = taker
        self.put = put

    def give(self, name: str, count: int) -> tuple[float, float, float]:
        import ray

        case = CASES[name]
        items, most = case.batch(), under_way(case)
        ray.get(self.taker.begin.remote())
        pending: deque[Any] = deque()
        take = self.taker.take
        cpu, began = time.process_time(), time.perf_counter()
        for item in islice(cycle(items), count):
            if len(pending) >= most:
                ray.get(pending.popleft())
            pending.append(take.remote(name, ray.put(item) if self.put else item))
        ray.get(list(pending))
        cpu = time.process_time() - cpu
        ended, used = ray.get(self.taker.end.remote(name))
        return began, ended, cpu + used

    def ping(self, name: str, count: int) -> list[float]:
        import ray

        item, found = CASES[name].make(), []
        for _ in range(count):
            began = time.perf_counter()
            back = ray.get(self.taker.echo.remote(item))
            found.append(time.perf_counter() - began)
            del back
        return found


class RayObjects(Contender):
    name = "Ray objects, actor calls"
    put: ClassVar[bool] = False

    def start(self) -> None:
        import ray

        taker = ray.remote(num_cpus=0)(Taker).remote()
        self.actors = (ray.remote(num_cpus=0)(Giver).remote(taker, self.put), taker)
        ray.get(self.actors[0].give.remote("4 B", 2))

    def throughput(self, case: Case, count: int) -> Sample:
        import ray

        began, ended, cpu = ray.get(self.actors[0].give.remote(case.name, count))
        return Sample(count, ended - began, cpu)

    def pingpong(self, case: Case, count: int) -> list[float]:
        import ray

        return list(ray.get(self.actors[0].ping.remote(case.name, count)))

    def stop(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)


class RayPut(RayObjects):
    name = "Ray objects, ray.put and reference"
    put = True
    round_trips = False
