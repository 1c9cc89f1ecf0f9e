"""Core's channel in a real flow: two groups of one worker each, items over the link that is named.

This file is also the recipe. Its program asks the measuring process over a socket what the next step is to move.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, ClassVar

from rlinf_core import Flow, In, Out, Worker, recipe, task
from ways.cases import CASES, Case
from ways.pair import Broken, Contender, Sample

STEPS = 1_000_000
START_S = 120.0
PLAN = """\
name: apart
tree:
  cycle:
    a: {{leaf: {{stage: producer, devices: '{}'}}}}
    b: {{leaf: {{stage: consumer, devices: '{}'}}}}
"""


@dataclass(frozen=True)
class Job:
    """What one step does: ``count`` items one way (``many``: by ``put_many`` and ``batches``), ``trips`` both ways."""

    case: str
    count: int = 0
    trips: int = 0
    many: bool = False


class Producer(Worker):
    @task
    def produce(self, out: Out[Any], job: Job) -> dict[str, float]:
        case = CASES[job.case]
        batch = case.batch()
        cpu, began = time.process_time(), time.perf_counter()
        if job.many:
            left = job.count
            while left:
                out.put_many(batch[:left])
                left -= len(batch[:left])
        else:
            for item in islice(cycle(batch), job.count):
                out.put(item)
        return {"began": began, "produce_cpu": time.process_time() - cpu}

    @task(ends=True)
    def ping(self, back: In[Any], forth: Out[Any], job: Job) -> list[float]:
        item, found = CASES[job.case].make(), []
        for _ in range(job.trips):
            began = time.perf_counter()
            forth.put(item)
            answer = back.get()
            found.append(time.perf_counter() - began)
            del answer
        return found


class Consumer(Worker):
    @task
    def consume(self, inbox: In[Any], job: Job) -> dict[str, float]:
        case, item, found = CASES[job.case], None, 0
        touch = case.touch
        cpu = time.process_time()
        if job.many:
            for items in inbox.batches(case.batch_size):
                for item in items:
                    touch(item)
                found += len(items)
        else:
            for item in inbox:
                touch(item)
                found += 1
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        if found != job.count:
            raise RuntimeError(f"{found} items came of {job.count}")
        if item is not None:
            case.check(item)
        return {"ended": ended, "consume_cpu": cpu}

    @task
    def pong(self, forth: In[Any], back: Out[Any], job: Job) -> None:
        for item in forth:
            back.put(item)
            del item


@dataclass
class Settings:
    num_steps: int = STEPS
    address: str = ""
    key: str = ""


@recipe(schema=Settings)
def channel(flow: Flow, cfg: Any) -> None:
    import ray

    producer, consumer = flow.group("producer", Producer), flow.group("consumer", Consumer)
    live = ray.is_initialized()  # not while the program is traced
    line = Client(cfg.address, "AF_UNIX", authkey=bytes.fromhex(cfg.key)) if live else None
    if line:
        line.send("flow")
    for step in flow.steps(cfg.num_steps):
        job = line.recv() if line else Job("4 B")
        if job is None:
            return
        items, forth, back = step.channels("items", "forth", "back")
        made = producer.produce(items, job)
        taken = consumer.consume(items, job)
        trips = producer.ping(back, forth, job)
        consumer.pong(forth, back, job)
        step.join()
        if line:
            line.send((made.wait(), taken.wait(), trips.wait()))


class Channel(Contender):
    """``RAY_ADDRESS`` says which Ray; without, the run starts its own."""

    kind = "ours"
    name = "rlinf channel"
    link: ClassVar[str] = "auto"
    devices: ClassVar[tuple[int, int]] = (0, 1)
    """Of the two groups; flows beside each other need different ones."""
    many: ClassVar[bool] = False

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="channel-")
        key = secrets.token_bytes(16)
        address = str(Path(self.folder.name) / "line")
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        plan = Path(self.folder.name) / "plan.yaml"
        plan.write_text(PLAN.format(*self.devices))
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            command = [sys.executable, "-m", "rlinf_core.cli.main", "run", __file__, f"plan={plan}"]
            options = [f"address={address}", f"key={key.hex()}", f"channels.link={self.link}", "channels.max_items=256"]
            options += [f"run_dir={self.folder.name}/run"]
            self.log = (Path(self.folder.name) / "log").open("w+")
            self.process = subprocess.Popen(
                [*command, *options], env={**os.environ, "PYTHONPATH": path}, stdout=self.log, stderr=self.log
            )
            # Its end, however early, is seen by connecting to the listener in its place.
            waiter = threading.Thread(target=self._watch, args=(address, key), daemon=True)
            waiter.start()
            self.line = listener.accept()
            if self.line.recv() != "flow":
                raise Broken(f"{self.name}: the flow did not start: {self._said()}")

    def _watch(self, address: str, key: bytes) -> None:
        try:
            self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            if hasattr(self, "line"):
                return
        with contextlib.suppress(OSError), Client(address, "AF_UNIX", authkey=key) as line:
            line.send("ended")

    def _said(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()[-3000:]

    def _do(self, job: Job) -> Any:
        self.line.send(job)
        try:
            return self.line.recv()
        except EOFError:
            raise Broken(f"{self.name}: the flow ended: {self._said()}") from None

    def throughput(self, case: Case, count: int) -> Sample:
        (made,), (taken,), _ = self._do(Job(case.name, count, many=self.many))
        return Sample(count, taken["ended"] - made["began"], made["produce_cpu"] + taken["consume_cpu"])

    def pingpong(self, case: Case, count: int) -> list[float]:
        *_, (trips,) = self._do(Job(case.name, trips=count))
        return list(trips)

    def stop(self) -> None:
        self.line.send(None)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.line.close()
        self.log.close()
        self.folder.cleanup()


class ChannelMany(Channel):
    name = "rlinf channel, put_many and batches"
    many = True
    devices = (2, 3)
    round_trips = False


class ChannelSocket(Channel):
    name = "rlinf channel, sockets only"
    link = "socket"
    devices = (4, 5)
