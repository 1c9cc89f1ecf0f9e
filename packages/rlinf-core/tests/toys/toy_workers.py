"""Small workers without any model, for tests of the runtime; imported by the worker processes by module name."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_core import In, Out, Prompt, Worker, join, task


@dataclass
class Toy:
    id: str
    value: int
    group: str
    group_size: int

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


class Maker(Worker):
    """Makes ``group_size`` toys of each prompt."""

    def setup(self) -> None:
        self.loaded = False
        self.events: list[str] = []
        self.weight = 0
        fault(self, "setup")

    def onload(self) -> None:
        self.loaded = True
        self.events.append("onload")

    def offload(self) -> None:
        self.loaded = False
        self.events.append("offload")

    @task
    def make(self, prompts: In[Prompt], toys: Out[Toy]) -> dict[str, float]:
        count = 0
        for portion in prompts.batches():
            with self.on_device():
                assert self.loaded
                fault(self, "make")
                for prompt in portion:
                    for i, sample in enumerate(prompt.account_ids()):
                        toys.put(
                            Toy(sample, int(prompt.text) + i + self.weight, prompt.id, prompt.group_size), key=prompt.id
                        )
                        count += 1
        return {"made": count, "onloads": self.events.count("onload"), "offloads": self.events.count("offload")}

    def install_weights(self, version: int, weights: Any) -> None:
        self.version = version
        self.weight = int(dict(weights)["w"].sum())


class Doubler(Worker):
    device = False

    def setup(self) -> None:
        fault(self, "setup_doubler")

    @task
    def double(self, toys: In[Toy], doubled: Out[Toy]) -> None:
        for toy in toys:
            fault(self, "double")
            if (self.cfg or {}).get("drop") == toy.id:
                self.drop(toy, "asked for")
                continue
            toy.value *= 2
            doubled.put(toy, key=toy.group)


class Adder(Worker):
    """Reads everything at once and sums."""

    collective = True
    barrier = "batch"

    def setup(self) -> None:
        self.total = 0
        self.loaded = False

    def onload(self) -> None:
        self.loaded = True

    def offload(self) -> None:
        self.loaded = False

    @task
    def add(self, doubled: In[Toy]) -> dict[str, float]:
        total = 0
        for portion in doubled.batches():
            with self.on_device():
                assert self.loaded
                fault(self, "add")
                total += sum(t.value for t in portion)
                if (self.cfg or {}).get("forget") is None:
                    self.trained(portion)
        self.total += total
        return {"total": total}

    def weights(self) -> Any:
        import torch

        return [("w", torch.tensor([self.step_index + 1, 0]))]


class PairAdder(Worker):
    device = False

    @task
    def add(self, toys: In[Toy], doubled: In[Toy]) -> dict[str, float]:
        total = 0
        for a, b in join(toys, doubled, by="id"):
            assert a.id == b.id
            total += a.value * b.value
            self.trained(a)
        return {"pairs": total}


def fault(worker: Worker, place: str) -> None:
    """Do what ``cfg["fault"]`` asks for at ``place`` (``place:what``), on rank 0."""
    where, _, what = ((worker.cfg or {}).get("fault") or "").partition(":")
    if where != place or worker.rank != 0:
        return
    if what == "raise":
        raise RuntimeError("as asked")
    if what == "forkdie":
        if os.fork() == 0:
            threading.Event().wait(8)  # a child that outlives its parent and holds its files
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(3)
    if what == "_exit":
        os._exit(3)
    raise AssertionError(what)


def program(flow: Any, cfg: Any) -> None:
    """Prompts -> Maker -> Doubler -> Adder, with weights back to the maker."""
    maker = flow.group("maker", Maker, cfg)
    doubler = flow.group("doubler", Doubler, cfg)
    adder = flow.group("adder", Adder, cfg)
    for step in flow.steps(cfg["num_steps"]):
        prompts, toys, doubled = step.channels("prompts", "toys", "doubled")
        step.feed(prompts, lambda index=step.index: prompts_of(index, cfg["prompts"], cfg["group_size"]))
        step.report(maker.make(prompts, toys), reduce="sum")
        doubler.double(toys, doubled)
        step.report(adder.add(doubled), reduce="sum")
        adder.publish_weights(to=maker)
        flow.record(f"step {step.index}", step.join())


def prompts_of(step: int, count: int, group_size: int) -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), group_size=group_size, step=step) for i in range(count)]


def expected(steps: int, prompts: int, group_size: int) -> list[int]:
    """Sum that the adder must find in each step; the weight of step t is t (t >= 1)."""
    return [sum(2 * (p + i + step) for p in range(prompts) for i in range(group_size)) for step in range(steps)]


class Idler(Worker):
    """For the death of a rank that has nothing to do."""

    device = False

    @task
    def write_pid(self) -> None:
        (Path(self.cfg["place"]) / "victim.pid").write_text(str(os.getpid()))

    @task
    def kill_victim(self) -> None:
        os.kill(int((Path(self.cfg["place"]) / "victim.pid").read_text()), signal.SIGKILL)

    @task
    def linger(self) -> None:
        threading.Event().wait(30)


class Machine(Worker):
    """Says what its process was given."""

    @task
    def describe(self) -> dict[str, float]:
        import torch

        return {
            "cores": len(os.sched_getaffinity(0)),
            "omp": int(os.environ["OMP_NUM_THREADS"]),
            "threads": torch.get_num_threads(),
            "main_thread": float(threading.current_thread() is threading.main_thread()),
        }


class PairTrainer(Worker):
    """Two ranks that share the pairs of a join in whole portions, without a process group."""

    collective = True
    process_group = False
    barrier = "group"

    @task
    def add(self, toys: In[Toy], doubled: In[Toy]) -> dict[str, float]:
        total, portions = 0, 0
        for pairs in join(toys, doubled, by="id").batches():
            portions += 1
            with self.on_device():
                total += sum(a.value * b.value for a, b in pairs)
                assert all(a.id == b.id for a, b in pairs)
                self.trained([a for a, _ in pairs])
        return {"pairs": total, "portions": portions}
