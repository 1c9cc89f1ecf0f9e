"""Four stages: the samples go to a reference model and to a critic, side by side, and the trainer joins both.

    rlinf run examples/m2flow/ppo.py cluster.virtual_devices=8 plan=hybrid
    rlinf run examples/m2flow/ppo.py cluster.virtual_devices=8 plan=auto critic.power=0.0

Every stage sleeps (see stages.py): what you see is the schedule. All times are keys of the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stages import Decoding, Forward, Generator, JoiningTrainer, Work, questions

from rlinf_core import Flow, recipe


@dataclass
class Settings:
    num_steps: int = 4
    prompts: int = 64
    group_size: int = 2
    generator: Decoding = field(
        default_factory=lambda: Decoding(slots=8, tokens=30, shape=1.1, longest=3.0, load=0.06, offload=0.06)
    )
    reference: Work = field(
        default_factory=lambda: Work(fixed=0.05, item=0.006, power=0.3, log2=0.02, load=0.06, offload=0.06)
    )
    critic: Work = field(
        default_factory=lambda: Work(fixed=0.06, item=0.010, power=0.3, log2=0.02, load=0.06, offload=0.06)
    )
    trainer: Work = field(
        default_factory=lambda: Work(fixed=0.05, item=0.02, power=0.2, log2=0.02, load=0.06, offload=0.06)
    )


@recipe(schema=Settings)
def ppo(flow: Flow, cfg: Any) -> None:
    generator = flow.group("generator", Generator, cfg.generator)
    reference = flow.group("reference", Forward, cfg.reference)
    critic = flow.group("critic", Forward, cfg.critic)
    trainer = flow.group("trainer", JoiningTrainer, cfg.trainer)
    for step in flow.steps(cfg.num_steps):
        prompts, samples, logprobs, values = step.channels("prompts", "samples", "logprobs", "values")
        step.feed(prompts, questions(step.index, cfg.prompts, cfg.group_size))
        generator.generate(prompts, samples)
        reference.forward(samples, logprobs)  # both get every sample
        critic.forward(samples, values)
        step.report(trainer.train_on_both(logprobs, values), reduce="sum")
        step.join()
