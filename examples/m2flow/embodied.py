"""A simulator and a policy that feed each other for some rounds, then training on the episodes.

    rlinf run examples/m2flow/embodied.py cluster.virtual_devices=8 plan=spatial portion=4
    rlinf run examples/m2flow/embodied.py cluster.virtual_devices=8 plan=auto simulator.env=0.02

Every stage sleeps (see stages.py): what you see is the schedule. All times are keys of the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stages import Policy, Simulator, Trainer, Work

from rlinf_core import Flow, recipe


@dataclass
class Rollout:
    """``fixed`` seconds a round and sub-batch, ``env`` · luck for each environment."""

    envs: int = 64
    rounds: int = 10
    fixed: float = 0.02
    env: float = 0.005
    tail: float = 0.4
    load: float = 0.1
    offload: float = 0.1
    bytes: int = 0


@dataclass
class Settings:
    num_steps: int = 4
    simulator: Rollout = field(default_factory=Rollout)
    policy: Work = field(default_factory=lambda: Work(fixed=0.02, item=0.003))
    trainer: Work = field(default_factory=lambda: Work(fixed=0.05, item=0.03, power=0.2, log2=0.02))


@recipe(schema=Settings)
def embodied(flow: Flow, cfg: Any) -> None:
    simulator = flow.group("simulator", Simulator, cfg.simulator)
    policy = flow.group("policy", Policy, cfg.policy)
    trainer = flow.group("trainer", Trainer, cfg.trainer)
    for step in flow.steps(cfg.num_steps):
        observations, actions, episodes = step.channels("observations", "actions", "episodes")
        simulator.rollout(actions, observations, episodes)
        policy.act(observations, actions)
        step.report(trainer.train(episodes), reduce="sum")
        step.join()
