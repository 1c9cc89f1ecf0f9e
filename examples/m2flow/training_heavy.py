"""Short answers and a trainer that needs the whole batch and most of the time.

    rlinf run examples/m2flow/training_heavy.py cluster.virtual_devices=8 plan=temporal
    rlinf run examples/m2flow/training_heavy.py cluster.virtual_devices=8 plan=auto trainer.item=0.02

Every stage sleeps (see stages.py): what you see is the schedule. All times are keys of the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stages import Decoding, Generator, Reward, Trainer, Work, questions

from rlinf_core import Flow, recipe


@dataclass
class Settings:
    num_steps: int = 4
    prompts: int = 64
    group_size: int = 2
    generator: Decoding = field(default_factory=lambda: Decoding(slots=8, tokens=25, shape=1.2, longest=3.0))
    reward: Work = field(default_factory=lambda: Work(fixed=0.0, item=0.001, load=0.0, offload=0.0))
    trainer: Work = field(default_factory=lambda: Work(fixed=0.05, item=0.045, power=0.15, log2=0.02))


@recipe(schema=Settings)
def training_heavy(flow: Flow, cfg: Any) -> None:
    generator = flow.group("generator", Generator, cfg.generator)
    reward = flow.group("reward", Reward, cfg.reward)
    trainer = flow.group("trainer", Trainer, cfg.trainer)
    for step in flow.steps(cfg.num_steps):
        prompts, samples, scored = step.channels("prompts", "samples", "scored")
        step.feed(prompts, questions(step.index, cfg.prompts, cfg.group_size))
        generator.generate(prompts, samples)
        reward.forward(samples, scored)
        step.report(trainer.train(scored), reduce="sum")
        step.join()
