"""A recipe whose trainer has its weights in parts by rows and whose rollout wants them in parts by columns.

Each step trains, publishes and then looks, on every rollout rank, at what is installed there. On CPUs there are two
trainer ranks and three rollout ranks; with ``on_devices=true`` as many as the plan has devices for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_comm.weights import Layout, Spec, fsdp, split
from rlinf_comm.weights.worker import ShardedWeights
from rlinf_core import Flow, In, Out, recipe, task

SPECS = {
    "embed": Spec((40, 12)),
    "up": Spec((31, 12)),
    "bias": Spec((7,)),
    "scale": Spec(()),
    "seen": Spec((2,), "int64"),
}
TIED = {"head": "embed"}


def trainer_layout(ranks: int) -> Layout:
    return fsdp(SPECS, ranks, TIED)


def rollout_layout(ranks: int) -> Layout:
    specs = {name: Spec(spec.shape, "bfloat16" if name == "up" else spec.dtype) for name, spec in SPECS.items()}
    return split(specs, {"embed": 1, "up": 1}, ranks, "balanced", TIED)


def value(name: str, version: int) -> Any:
    """A parameter as it is after ``version`` steps."""
    import torch

    spec = SPECS[name]
    generator = torch.Generator().manual_seed(100 * version + list(SPECS).index(name))
    if spec.dtype == "int64":
        return torch.randint(0, 100, spec.shape, generator=generator)
    return torch.randn(spec.shape, generator=generator)


def part_of(layout: Layout, rank: int, version: int) -> dict[str, Any]:
    """A rank's places; here every place is a slice of one parameter."""
    import torch

    found = {}
    for part in layout.ranks[rank].parts:
        whole = value(part.parameter, version)[tuple(slice(*r) for r in part.box)]
        found[part.place] = whole.to(getattr(torch, layout.parameters[part.parameter].dtype)).clone()
    return found


@dataclass
class Settings:
    num_steps: int = 3
    on_devices: bool = False
    fail_at: int = -1


class Trainer(ShardedWeights):
    collective = True
    process_group = False
    weight_bucket_bytes = 512
    weight_checksum = "crc32"

    def setup(self) -> None:
        self.version = 0

    def weight_layout(self) -> Layout:
        return trainer_layout(self.world_size)

    def target_layout(self, targets: int) -> Layout:
        return rollout_layout(targets)

    def weight_places(self) -> Mapping[str, Any]:
        if self.cfg.fail_at == self.step_index and self.rank == 1:
            raise RuntimeError("the weights are not finite")
        return part_of(self.weight_layout(), self.rank, self.version)

    @task
    def train(self, orders: In[int]) -> None:
        for _ in orders.batches():
            with self.on_device():
                self.version = self.step_index + 1


class CpuTrainer(Trainer):
    device = False
    ranks = 2


class Rollout(ShardedWeights):
    def setup(self) -> None:
        self.installed: list[tuple[int, dict[str, Any]]] = []

    def weight_layout(self) -> Layout:
        return rollout_layout(self.world_size)

    def install_weights(self, version: int, weights: Any) -> None:
        self.installed.append((version, {name: tensor.clone() for name, tensor in weights}))

    @task
    def look(self, orders: Out[int]) -> dict[str, float]:
        """Whether what is installed is, bit for bit, what the step before had."""
        import torch

        with self.on_device():
            orders.put(1)
        if self.step_index == 0:
            return {}
        version, found = self.installed[-1]
        expected = part_of(self.weight_layout(), self.rank, self.step_index)
        equal = found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
        versions = [v for v, _ in self.installed]
        increasing = versions == list(range(1, version + 1))
        return {"equal": float(equal), "version": version, "increasing": float(increasing), "ranks": self.world_size}


class CpuRollout(Rollout):
    device = False
    ranks = 3


@recipe(schema=Settings)
def sharded(flow: Flow, cfg: Any) -> None:
    rollout = flow.group("rollout", Rollout if cfg.on_devices else CpuRollout, cfg)
    trainer = flow.group("trainer", Trainer if cfg.on_devices else CpuTrainer, cfg)
    for step in flow.steps(cfg.num_steps):
        orders = step.channels("orders")
        step.report(rollout.look(orders))
        trainer.train(orders)
        trainer.publish_weights(to=rollout)
        step.join()
