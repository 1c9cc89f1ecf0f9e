"""Items of known lengths to ranks that wait so long for each: what ``evidence/balance.py`` runs in threads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_core import In, Out, Worker, task
from rlinf_core.config import recipe
from rlinf_core.flow import Flow

RANKS, ITEMS_A_RANK = 4, 32


@dataclass
class Settings:
    num_steps: int = 5
    mean_s: float = 0.01
    noise: float = 0.0


def lengths(step: int, count: int) -> Any:
    """Log-normal with mean 1, the same for every way of dealing."""
    return np.random.default_rng(step).lognormal(-0.5, 1.0, count)


class Source(Worker):
    device = False

    @task
    def make(self, steps: In[int], items: Out[float]) -> None:
        for step in steps:
            noise = np.random.default_rng(1000 + step)
            for length in lengths(step, RANKS * ITEMS_A_RANK):
                guess = float(length) * float(np.exp(noise.normal(0.0, self.cfg.noise)))
                items.put(float(length), weight=guess)


class Reader(Worker):
    device = False
    ranks = RANKS

    @task
    def work(self, items: In[float]) -> dict[str, float]:
        worked, count = 0.0, 0
        for length in items:
            began = time.perf_counter()
            time.sleep(length * self.cfg.mean_s)
            worked += time.perf_counter() - began
            count += 1
        return {f"work/{self.rank}": worked, f"items/{self.rank}": float(count)}


@recipe(schema=Settings)
def program(flow: Flow, cfg: Any) -> None:
    source, reader = flow.group("source", Source, cfg), flow.group("reader", Reader, cfg)
    for step in flow.steps(cfg.num_steps):
        steps, items = step.channels("steps", "items")
        step.feed(steps, [step.index])
        source.make(steps, items)
        step.report(reader.work(items), reduce="sum")
        step.join()
