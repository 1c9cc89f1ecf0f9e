"""Config schemas of evaluation: the ``eval`` keys of every recipe, and the recipe ``reasoning/eval``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_reasoning.conf.checks import check_room, check_stop
from rlinf_reasoning.conf.task_checks import check_eval


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class Answers:
    """How problems are answered in an evaluation, and what is estimated from it."""

    samples: int = _key(
        1, "answers per problem; a lone one is greedy, several are drawn at sampling.temperature", min=1
    )
    k: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "the k of each pass@k; at most eval.samples", "min": 1}
    )
    greedy: bool | None = _key(None, "take the likeliest tokens; null: when there is one answer per problem")
    threshold: float = _key(0.5, "an answer with a greater reward counts as right")

    def validate(self, root: Any) -> list[str]:
        return check_eval(self)


@dataclass
class Evaluation(Answers):
    """Evaluation within training."""

    problems: int = _key(256, "problems that no phase trains on (with task.eval_path: the most of that file)", min=1)
    every: int = _key(0, "steps between evaluations; 0: only before and after", min=0)


@dataclass
class EvalAnswers(Answers):
    problems: int | None = _key(None, "most problems of the set; null: all", min=1)


@dataclass
class Sampling:
    """How responses are drawn, in training."""

    max_new_tokens: int = _key(5, "limit of a response, end token included", min=1)
    temperature: float = _key(1.0, "temperature of sampling, where answers are not greedy", min=1e-3)
    top_p: float = _key(1.0, "least probability mass to draw from", min=1e-6, max=1.0)
    top_k: int = _key(0, "most tokens to draw from; 0: all", min=0)
    stop: list[str] = field(
        default_factory=list,
        metadata={"help": "texts that end a response; the token that completes one is its last"},
    )
    ignore_eos: bool = _key(False, "let end tokens end nothing: responses of full length, to measure speed")

    def validate(self, root: Any) -> list[str]:
        return check_stop(self.stop, root.model)


@dataclass
class EvalSampling(Sampling):
    max_new_tokens: int = _key(512, "limit of a response, end token included", min=1)


@dataclass
class Eval:
    """The recipe ``reasoning/eval``."""

    num_steps: int = _key(0, "training steps: an evaluation has none", max=0)
    sampling: EvalSampling = field(default_factory=EvalSampling)
    eval: EvalAnswers = field(default_factory=EvalAnswers)

    def validate(self, root: Any) -> list[str]:
        return check_room(root)


SCHEMAS: dict[str, type] = {"reasoning/eval": Eval}
