"""Config schemas of the trainer backends: what they have in common, and the torch backend. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_engines.conf.fields import key, plugin

SCHEDULES = ("constant", "linear", "cosine")
SHARDINGS = ("ddp", "fsdp2")


@dataclass
class TrainerConfig:
    """The keys that every trainer backend has. A backend's schema is a subclass with a default for ``name``."""

    name: str = key("", "trainer backend")
    lr: float = key(1.0e-5, "learning rate after warm-up", min=0.0)
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999], metadata={"help": "AdamW's two averaging factors, each in [0, 1)"}
    )
    eps: float = key(1.0e-8, "AdamW's denominator floor", min=0.0)
    weight_decay: float = key(0.0, "decoupled weight decay of matrices (not of norms and biases)", min=0.0)
    grad_clip: float = key(1.0, "largest gradient norm; 0 switches clipping off", min=0.0)
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", min=0)
    schedule: str = key("constant", "learning rate after warm-up", choices=SCHEDULES)
    schedule_steps: int = key(0, "optimizer steps until the schedule ends, warm-up included", min=0)
    min_lr_ratio: float = key(0.0, "lr at the schedule's end as a part of lr", min=0.0, max=1.0)
    micro_batch_tokens: int = key(8192, "most tokens in one forward and backward", min=1)
    activation_checkpointing: bool = key(
        False, "keep each block's input only and compute the block again in the backward: less memory, a third slower"
    )

    share_prompts: bool = key(
        True, "compute a prompt that several responses of a micro-batch follow once: the same result, less work"
    )

    def validate(self, root: Any) -> list[str]:
        problems = plugin("rlinf.trainers", self.name, "trainer.name")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            problems.append(f"trainer.betas: {list(self.betas)} is not two numbers in [0, 1); try [0.9, 0.999]")
        if self.schedule != "constant" and self.schedule_steps <= self.warmup_steps:
            problems.append(
                f"trainer.schedule_steps: {self.schedule_steps} leaves no step for schedule "
                f"{self.schedule} after {self.warmup_steps} warm-up steps; give the run's number of "
                "optimizer steps, or schedule=constant"
            )
        return problems


@dataclass
class TorchTrainer(TrainerConfig):
    """Trainer backend ``torch``: AdamW, one process or data parallel, the state whole or sharded."""

    name: str = key("torch", "trainer backend")
    sharding: str = key(
        "ddp",
        "ddp: weights, gradients and optimizer state whole on every rank; fsdp2: a part of each on every rank",
        choices=SHARDINGS,
    )
