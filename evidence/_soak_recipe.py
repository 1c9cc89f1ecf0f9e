"""The flow of the soak: items of all sizes through channels, and two ranks that talk beside them, all of it counted."""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_core import Flow, In, Out, Worker, recipe, task

SIZES = (0, 30, 5_000, 20_000, 70_000, 300_000, 1_500_000, 9_000_000)
ODDS = (0.2, 0.2, 0.2, 0.15, 0.12, 0.1, 0.025, 0.005)


@dataclass
class Settings:
    num_steps: int = 60
    seconds: float = 10.0


@dataclass
class Parcel:
    id: str
    crc: int
    data: Any

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


def mine() -> dict[str, float]:
    """What this process has: private memory (MB), open files, mapped arenas, threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "private_mb": int(status["RssAnon"].split()[0]) / 1024,
        "shared_mb": int(status["RssShmem"].split()[0]) / 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "arenas": sum("memfd:rlinf-arena" in line for line in maps),
        "threads": int(status["Threads"]),
    }


def made(random: np.random.Generator) -> Any:
    size = int(random.choice(SIZES, p=ODDS))
    return random.integers(0, 255, size, dtype=np.uint8)


class Producer(Worker):
    device = False

    @task
    def make(self, parcels: Out[Parcel]) -> dict[str, float]:
        random = np.random.default_rng([self.seed, self.step_index])
        end, count = time.monotonic() + self.cfg.seconds, 0
        while time.monotonic() < end:
            data = made(random)
            parcels.put(Parcel(f"{self.step}/{count}", zlib.crc32(data), data), weight=float(data.nbytes))
            count += 1
        return {"made": count, **{f"producer/{name}": value for name, value in mine().items()}}


class Middle(Worker):
    """Passes on what it gets, as it got it."""

    device = False
    ranks = 2

    @task
    def relay(self, parcels: In[Parcel], relayed: Out[Parcel]) -> dict[str, float]:
        for parcel in parcels:
            relayed.put(parcel)
        return {f"middle/{name}": value for name, value in mine().items()}


class Consumer(Worker):
    device = False

    @task
    def take(self, relayed: In[Parcel]) -> dict[str, float]:
        seen: set[str] = set()
        wrong = 0
        for portion in relayed.batches(16):
            for parcel in portion:
                seen.add(parcel.id)
                wrong += zlib.crc32(parcel.data) != parcel.crc
            self.trained(portion)
        return {"taken": len(seen), "wrong": wrong, **{f"consumer/{name}": value for name, value in mine().items()}}


class Talker(Worker):
    """Two ranks that send each other objects and compare their sums."""

    device = False
    ranks = 2

    def setup(self) -> None:
        from rlinf_comm import communicator_of

        self.comm = communicator_of(self, timeout=120.0)

    @task
    def talk(self) -> dict[str, float]:
        other = f"{self.name}[{1 - self.rank}]"
        random = np.random.default_rng([self.seed, self.step_index, self.rank])
        end, sent, got, wrong, goes_on, hears = time.monotonic() + self.cfg.seconds, 0, 0, 0, True, True
        while goes_on or hears:
            if goes_on:
                goes_on = time.monotonic() < end
                data = made(random)
                self.comm.send({"data": data, "crc": zlib.crc32(data), "more": goes_on, "number": sent}, other)
                sent += 1
            if hears:
                message = self.comm.recv(other)
                wrong += message["number"] != got or zlib.crc32(message["data"]) != message["crc"]
                got += 1
                hears = message["more"]
        return {"sent": sent, "got": got, "talk_wrong": wrong, **{f"talker/{n}": v for n, v in mine().items()}}

    def teardown(self) -> None:
        self.comm.close()


@recipe(schema=Settings)
def soak(flow: Flow, cfg: Any) -> None:
    producer = flow.group("producer", Producer, cfg)
    middle = flow.group("middle", Middle, cfg)
    consumer = flow.group("consumer", Consumer, cfg)
    talker = flow.group("talker", Talker, cfg)
    for step in flow.steps(cfg.num_steps):
        parcels, relayed = step.channels("parcels", "relayed")
        step.report(producer.make(parcels))
        step.report(middle.relay(parcels, relayed))
        step.report(consumer.take(relayed))
        step.report(talker.talk(), reduce="sum")
        step.join()
