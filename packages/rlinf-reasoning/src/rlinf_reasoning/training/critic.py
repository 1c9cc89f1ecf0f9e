"""The critic: values of states, and their update towards the returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlinf_core.types import Sample, Trainer
from rlinf_reasoning.losses import ValueLoss, preset_of
from rlinf_reasoning.training.advantages import Shaping, gather, token_advantages
from rlinf_reasoning.training.backend import forward_rows
from rlinf_reasoning.training.minibatches import Steps
from rlinf_reasoning.training.rows import row_of


def add_values(trainer: Trainer, samples: Sequence[Sample]) -> None:
    """Set ``info["values"]`` (R, of the state before each response token) of each sample, and ``info["last_value"]``
    (of the state after the last one) where the limit cut the response. Collective."""
    shared = sorted(trainer.share(samples), key=lambda s: s.id)
    rows = [replace(row_of(s), after=s.finish_reason == "length") for s in shared]
    found = forward_rows(trainer, rows, "values")
    for sample in samples:
        values, size = found[sample.id], len(sample.response_ids)
        sample.info["values"] = values[:size]
        if len(values) > size:
            sample.info["last_value"] = values[size]


class ValueUpdate:
    """One training step of the critic on samples that have their values; portions, minibatches and epochs as in
    ``PolicyUpdate``. The returns are those of the unwhitened GAE: advantage + value."""

    def __init__(self, trainer: Trainer, cfg: Any, seed: int = 0) -> None:
        algorithm = cfg.algorithm
        self.trainer = trainer
        self.preset = preset_of(algorithm)
        self.shaping = Shaping.of(cfg)
        self.bootstrap: bool = algorithm.bootstrap_truncated
        self.loss = ValueLoss(clip=algorithm.value_clip, kind=algorithm.value_loss)
        self.steps = Steps(trainer, algorithm.minibatches, algorithm.epochs, seed)
        self._start()

    def _start(self) -> None:
        self.steps.start()
        self._moments = dict.fromkeys(("tokens", "returns", "returns2", "errors", "errors2"), 0.0)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, float]:
        """``add`` and ``finish`` for a batch that comes whole."""
        self.add(samples)
        return self.finish()

    def add(self, samples: Sequence[Sample]) -> None:
        """Forward and backward of this rank's part of a portion. Collective."""
        shared = sorted(self.trainer.share(samples), key=lambda s: s.id)
        everyone = gather(self.trainer, {s.id: 0.0 for s in shared})
        penalties = self.shaping.penalties(shared)
        kept = [s for s in shared if self.shaping.kept(s)]
        rewards = {s.id: (s.reward or 0.0) + penalties[s.id] for s in kept}
        _, returns = token_advantages(self.preset, kept, rewards, bootstrap=self.bootstrap)
        rows = []
        for sample in kept:
            values, targets = sample.info["values"], returns[sample.id]
            self._note(targets, values)
            rows.append(replace(row_of(sample), returns=targets, old_values=values))
        self.steps.run(rows, everyone, self.loss)

    def finish(self) -> dict[str, float]:
        """The optimizer step over all portions. Collective.

        Returns ``critic/…``: ``loss``, ``grad_norm``, ``lr``, ``value`` (mean after the update began), ``return``,
        ``error`` (root of the mean square), ``clipped`` and ``explained_variance`` 1 - Var(R - V) / Var(R) of the
        values before the update (0 where the returns do not differ).
        """
        moments, info, sums = self.trainer.reduce(self._moments), self.steps.finish(), self.steps.sums
        self._start()
        if info is None:
            return {}
        count, tokens = max(moments["tokens"], 1.0), max(sums["tokens"], 1.0)
        spread = _variance(moments["returns"], moments["returns2"], count)
        left = _variance(moments["errors"], moments["errors2"], count)
        metrics = {
            "critic/loss": sums["loss"] / sums["count"],
            "critic/grad_norm": info.grad_norm,
            "critic/lr": info.lr,
            "critic/value": sums["value"] / tokens,
            "critic/return": moments["returns"] / count,
            "critic/error": math.sqrt(sums["value_error"] / tokens),
            "critic/explained_variance": 1.0 - left / spread if spread > 1e-12 else 0.0,
        }
        if "value_clipped" in sums:
            metrics["critic/clipped"] = sums["value_clipped"] / tokens
        return metrics

    def _note(self, returns: Sequence[float], values: Sequence[float]) -> None:
        moments = self._moments
        errors = [r - v for r, v in zip(returns, values, strict=True)]
        moments["tokens"] += len(returns)
        for name, numbers in (("returns", returns), ("errors", errors)):
            moments[name] += math.fsum(numbers)
            moments[f"{name}2"] += math.fsum(n * n for n in numbers)


def _variance(total: float, square: float, count: float) -> float:
    return max(square / count - (total / count) ** 2, 0.0)
