"""Config schemas of the recipes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_embodied.conf.checks import check_evaluation, check_inference, check_rollout

INFERENCE = ("local", "channel")


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class Evaluation:
    """Evaluation before, within and after training, in environments and with seeds of its own."""

    episodes: int = _key(50, "episodes of an evaluation", min=1)
    every: int = _key(0, "steps between evaluations; 0: only before and after", min=0)
    num_envs: int | None = _key(None, "environments that an evaluation has; null: as many as num_envs", min=1)
    seed: int = _key(0, "which episodes: equal seeds begin with equal states, in every run", min=0)
    greedy: bool = _key(True, "take the likeliest actions instead of drawing them")
    videos: int = _key(0, "episodes of each evaluation that are filmed, side by side in one video", min=0)
    video_fps: int = _key(20, "pictures a second of the video", min=1)
    video_size: int = _key(256, "pixels that a picture has at most in height and width", min=16)

    def validate(self, root: Any) -> list[str]:
        return check_evaluation(root)


@dataclass
class Recipe:
    """A recipe whose episodes go on from step to step: ``ppo_*``."""

    num_steps: int = _key(100, "training steps", min=1)
    num_envs: int = _key(8, "environments, shared out over the ranks of the simulator", min=1)
    inference: str = _key(
        "local",
        "who decides: local: a replica of the policy in each simulator's process; channel: the group policy, to which "
        "simulators send observations",
        choices=INFERENCE,
    )
    num_stages: int = _key(
        1,
        "sub-batches of a rank's environments: one is stepped while the policy answers for another (inference=channel)",
        min=1,
    )
    rollout_steps: int = _key(128, "environment steps per training step and environment", min=1)
    eval: Evaluation = field(default_factory=Evaluation)

    def validate(self, root: Any) -> list[str]:
        return check_rollout(root) + check_inference(root)


@dataclass
class GroupRecipe(Recipe):
    """A recipe in which groups of environments begin every step with the same state: ``grpo_libero_vla``."""

    inference: str = _key(
        "channel",
        "who decides: channel: the group policy, to which simulators send observations; local: a replica of the policy "
        "in each simulator's process",
        choices=INFERENCE,
    )
    rollout_steps: int = _key(128, "longest episode of training, in environment steps", min=1)


SCHEMAS: dict[str, type] = {
    "embodied/ppo_cartpole": Recipe,
    "embodied/ppo_gymnasium": Recipe,
    "embodied/ppo_reach": Recipe,
    "embodied/ppo_pushcube": Recipe,
    "embodied/grpo_libero_vla": GroupRecipe,
}
