"""Config schemas of the recipes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_reasoning.conf.algorithm_checks import check_critic, check_flow
from rlinf_reasoning.conf.checks import check_recipe
from rlinf_reasoning.conf.evaluation import Evaluation, Sampling

RECIPES = {
    "plain": "reasoning/grpo_arithmetic or reasoning/grpo_math",
    "critic": "reasoning/ppo_arithmetic",
    "sampler": "reasoning/dapo_arithmetic",
}
MATH_RECIPES = {
    "plain": "reasoning/grpo_math",
    "critic": "reasoning/ppo_math",
    "sampler": "reasoning/dapo_math",
}


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class WarmStart:
    """Supervised steps before the reinforcement learning, so that some responses are right."""

    problems: int = _key(1200, "problems of this phase, of those that are trained on", min=0)
    held_out: int = _key(200, "of those, problems that only the target accuracy is measured on", min=0)
    max_steps: int = _key(600, "most optimizer steps; 0 skips the phase", min=0)
    batch_size: int = _key(128, "problems per optimizer step", min=1)
    target_accuracy: float = _key(0.3, "stop at this greedy accuracy on the held-out problems", min=0.0, max=1.0)
    check_every: int = _key(5, "optimizer steps between two measurements", min=1)
    lr: float = _key(1.0e-3, "learning rate", min=0.0)
    lr_warmup_steps: int = _key(20, "optimizer steps of linear warm-up", min=0)


@dataclass
class Recipe:
    """A recipe that draws each prompt once and has no critic: ``grpo_arithmetic``, ``async_arithmetic``."""

    num_steps: int = _key(200, "training steps", min=1)
    prompts_per_step: int = _key(64, "prompts per training step", min=1)
    sampling: Sampling = field(default_factory=Sampling)
    warm_start: WarmStart = field(default_factory=WarmStart)
    eval: Evaluation = field(default_factory=Evaluation)

    def validate(self, root: Any) -> list[str]:
        return [*check_recipe(root), *check_flow(root, RECIPES)]


def _check_pretrained(root: Any, **program: bool) -> list[str]:
    """What is wrong with a recipe that trains a pretrained model; ``program``: see ``check_flow``."""
    if root.model.path is None:
        return ["model.path: this recipe trains a pretrained model; give its directory, model.path=DIR"]
    return [*check_recipe(root), *check_flow(root, MATH_RECIPES, **program)]


@dataclass
class GrpoMath(Recipe):
    """The recipe ``reasoning/grpo_math``."""

    def validate(self, root: Any) -> list[str]:
        return _check_pretrained(root)


@dataclass
class DapoMath(Recipe):
    """The recipe ``reasoning/dapo_math``."""

    def validate(self, root: Any) -> list[str]:
        return _check_pretrained(root, sampler=True)


@dataclass
class DapoArithmetic(Recipe):
    """The recipe ``reasoning/dapo_arithmetic``."""

    def validate(self, root: Any) -> list[str]:
        return [*check_recipe(root), *check_flow(root, RECIPES, sampler=True)]


@dataclass
class PpoArithmetic(Recipe):
    """The recipe ``reasoning/ppo_arithmetic``."""

    critic: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "trainer settings of the critic where they differ from trainer's", "entry": "KEY"},
    )

    def validate(self, root: Any) -> list[str]:
        problems = [*check_recipe(root), *check_flow(root, RECIPES, critic=True)]
        return [*problems, *check_critic(root.critic, root.trainer, root)]


@dataclass
class PpoMath(PpoArithmetic):
    """The recipe ``reasoning/ppo_math``."""

    def validate(self, root: Any) -> list[str]:
        problems = _check_pretrained(root, critic=True)
        return problems or check_critic(root.critic, root.trainer, root)


SCHEMAS: dict[str, type] = {
    "reasoning/grpo_arithmetic": Recipe,
    "reasoning/async_arithmetic": Recipe,
    "reasoning/grpo_math": GrpoMath,
    "reasoning/dapo_arithmetic": DapoArithmetic,
    "reasoning/ppo_arithmetic": PpoArithmetic,
    "reasoning/dapo_math": DapoMath,
    "reasoning/ppo_math": PpoMath,
}
