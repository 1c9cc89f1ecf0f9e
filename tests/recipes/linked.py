"""Items of many kinds and sizes from two producers to two groups, and weights to two ranks: what arrives is checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_core import Flow, In, Out, Worker, recipe, task

SIZES = (0, 1, 4000, 5000, 9000, 70_000, 1_500_000)


@dataclass
class Settings:
    num_steps: int = 3
    count: int = 40


@dataclass
class Parcel:
    id: str
    digest: str
    data: dict[str, Any]

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)

    def right(self) -> bool:
        return digest_of(self.data) == self.digest


def digest_of(data: dict[str, Any]) -> str:
    import torch

    found = hashlib.sha256()
    for name, value in sorted(data.items()):
        if isinstance(value, torch.Tensor):
            raw = value.to(torch.float64).numpy().tobytes()
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + raw)
        elif isinstance(value, np.ndarray):
            found.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
        else:
            found.update(f"{name} {value!r}".encode())
    return found.hexdigest()


def mapped() -> int:
    """Segments of shared memory that this process has mapped."""
    return sum("memfd:rlinf-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())


class Producer(Worker):
    device = False
    ranks = 2

    def setup(self) -> None:
        self.bias = 0.0

    @task
    def make(self, parcels: Out[Parcel], tag: str) -> None:
        import torch

        random = np.random.default_rng([self.seed, self.step_index, self.rank])
        for number in range(self.cfg.count):
            size = SIZES[number % len(SIZES)]
            data: dict[str, Any] = {
                "array": random.integers(0, 255, size, dtype=np.uint8),
                "tensor": torch.from_numpy(random.standard_normal(size // 8)).to(torch.bfloat16),
                "scalar": torch.tensor(number),
                "text": "x" * (size // 100),
            }
            name = f"{self.step}/{tag}/{self.rank}/{number}"
            parcels.put(Parcel(name, digest_of(data), data), weight=size)
            data["array"][:] = 0  # what was put has left: changing it changes nothing
            data["tensor"].zero_()

    def weights(self) -> Iterator[tuple[str, Any]]:
        import torch

        yield "big", torch.full((1000, 1000), float(self.step_index))
        yield "small", torch.tensor([float(self.step_index)])


class Consumer(Worker):
    device = False

    @task
    def check(self, parcels: In[Parcel]) -> dict[str, float]:
        seen = wrong = 0
        for parcel in parcels:
            seen += 1
            wrong += not parcel.right()
            parcel.data["array"][:] = 1  # of one's own: the other group must not see it
            parcel.data["tensor"].fill_(1)
            self.trained(parcel)
        return {f"{self.name}/seen": seen, f"{self.name}/wrong": wrong, f"{self.name}/mapped": mapped()}


class Sole(Worker):
    device = False
    ranks = 2

    def setup(self) -> None:
        self.version = 0.0

    @task
    def take(self, parcels: In[Parcel]) -> dict[str, float]:
        kept: list[Parcel] = []
        for portion in parcels.batches(3):
            kept += portion  # all of them: their memory may not be used for others meanwhile
        wrong = sum(not parcel.right() for parcel in kept)
        self.trained(kept)
        mine = {"seen": len(kept), "wrong": wrong, "version": self.version, "mapped": mapped()}
        return {f"{self.name}/{key}": value for key, value in mine.items()}

    def install_weights(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        values = {name: float(tensor.mean()) for name, tensor in weights}
        assert values["big"] == values["small"]
        self.version = values["big"] + 1


@recipe(schema=Settings)
def linked(flow: Flow, cfg: Any) -> None:
    producer = flow.group("producer", Producer, cfg)
    both = [flow.group(name, Consumer, cfg) for name in ("left", "right")]
    sole = flow.group("sole", Sole, cfg)
    for step in flow.steps(cfg.num_steps):
        shared, alone = step.channels("shared", "alone")
        producer.make(shared, "s")
        producer.make(alone, "a")
        for group in both:
            step.report(group.check(shared), reduce="sum")
        step.report(sole.take(alone), reduce="sum")
        producer.publish_weights(to=sole)
        step.join()
