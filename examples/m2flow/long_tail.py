"""Answers of very different lengths, in groups that are complete when their last one is; the trainer streams groups.

    rlinf run examples/m2flow/long_tail.py cluster.virtual_devices=8 plan=spatial
    rlinf run examples/m2flow/long_tail.py cluster.virtual_devices=8 plan=auto generator.shape=0.5

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
    group_size: int = 4
    generator: Decoding = field(
        default_factory=lambda: Decoding(slots=16, alpha=0.003, beta=0.0001, tokens=70, shape=0.85, longest=4.0)
    )
    reward: Work = field(default_factory=lambda: Work(fixed=0.0, item=0.001, load=0.0, offload=0.0))
    trainer: Work = field(default_factory=lambda: Work(fixed=0.03, item=0.012, power=0.2, log2=0.01))


@recipe(schema=Settings)
def long_tail(flow: Flow, cfg: Any) -> None:
    generator = flow.group("generator", Generator, cfg.generator)
    reward = flow.group("reward", Reward, cfg.reward)
    trainer = flow.group("trainer", Trainer, cfg.trainer, barrier="group")
    for step in flow.steps(cfg.num_steps):
        prompts, samples, scored = step.channels("prompts", "samples", "scored")
        step.feed(prompts, questions(step.index, cfg.prompts, cfg.group_size))
        generator.generate(prompts, samples)
        reward.forward(samples, scored)
        step.report(trainer.train(scored), reduce="sum")
        step.join()
