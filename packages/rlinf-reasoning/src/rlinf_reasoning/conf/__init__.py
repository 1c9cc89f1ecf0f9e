"""Config schemas of the reasoning recipes: groups ``task``, ``reward`` and ``algorithm``, and the recipes themselves.

Standard library only: composing a config must load neither torch nor a dataset library. Field metadata
carries ``help`` and, where they apply, ``min``, ``max`` and ``choices``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_reasoning.conf import algorithms, evaluation, recipes, tasks
from rlinf_reasoning.conf.algorithms import Algorithm, AsyncPpo, Dapo, Ppo
from rlinf_reasoning.conf.checks import check_function, check_reward
from rlinf_reasoning.conf.evaluation import Evaluation
from rlinf_reasoning.conf.recipes import Recipe, Sampling, WarmStart
from rlinf_reasoning.conf.task_checks import check_format
from rlinf_reasoning.conf.tasks import Jsonl, ReasoningGym
from rlinf_reasoning.rewards.answers import FORMATS

ON_ERROR = ("fail", "drop", "zero")

__all__ = [
    "SCHEMAS",
    "Algorithm",
    "AsyncPpo",
    "Dapo",
    "Evaluation",
    "FunctionReward",
    "IsolatedReward",
    "Jsonl",
    "MathReward",
    "Ppo",
    "ReasoningGym",
    "Recipe",
    "Reward",
    "Sampling",
    "WarmStart",
]


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class Reward:
    """Settings that every reward has."""

    name: str = _key("exact", "reward function")
    on_error: str = _key("fail", "an item that cannot be scored: stop the run, drop it, or score 0", choices=ON_ERROR)

    def validate(self, root: Any) -> list[str]:
        return check_reward(self)


@dataclass
class IsolatedReward(Reward):
    """A reward that runs in processes of its own, which can be killed."""

    name: str = _key("math", "reward function")
    timeout_s: float = _key(5.0, "limit of one item", min=0.01)
    processes: int = _key(1, "processes that score, per rank", min=1)
    memory_mb: int = _key(4096, "address-space limit of one process; 0 for none", min=0)


@dataclass
class MathReward(IsolatedReward):
    """Equality of mathematics."""

    format: str = _key("auto", "where the final answer is: docs/reasoning-data.md", choices=FORMATS)
    format_score: float = _key(0.0, "reward of a wrong answer that is where format=boxed or hashes wants it")

    def validate(self, root: Any) -> list[str]:
        return [*check_reward(self), *check_format(self.format, self.format_score)]


@dataclass
class FunctionReward(IsolatedReward):
    """A reward function of your own."""

    name: str = _key("function", "reward function")
    function: str = _key("???", "module:function, called as function(text, answer, fields) -> number")

    def validate(self, root: Any) -> list[str]:
        return [*check_reward(self), *check_function(self.function)]


SCHEMAS: dict[str, type] = {
    **recipes.SCHEMAS,
    **algorithms.SCHEMAS,
    **evaluation.SCHEMAS,
    **tasks.SCHEMAS,
    "reward/exact": Reward,
    "reward/math": MathReward,
    "reward/function": FunctionReward,
}
