"""The policy update: what one training step does with the scored samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlinf_core.types import Sample, Trainer
from rlinf_reasoning.batch import Row
from rlinf_reasoning.losses import PolicyLoss, preset_of
from rlinf_reasoning.training.advantages import Shaping, gather, group_advantages, token_advantages, whitened
from rlinf_reasoning.training.backend import forward_rows
from rlinf_reasoning.training.minibatches import Steps
from rlinf_reasoning.training.reference import Reference, kl_of
from rlinf_reasoning.training.report import engine_metrics, group_metrics, loss_metrics, sample_metrics, sample_sums
from rlinf_reasoning.training.rows import row_of


class PolicyUpdate:
    """One training step on the scored samples of a step, which may come in portions of whole groups.

    ``add`` each portion, then ``finish``. With one optimizer step per batch (``minibatches`` and ``epochs`` 1) portions
    only accumulate gradients: how the samples were cut changes nothing. Otherwise, or when advantages are whitened, the
    step needs the whole batch in one portion. Reads ``cfg.algorithm``, ``cfg.sampling.max_new_tokens``. ``reference``
    gives log-probs for the KL term. Ranks of a model-parallel replica share what each of them got.
    """

    def __init__(self, trainer: Trainer, cfg: Any, seed: int = 0, reference: Reference | None = None) -> None:
        algorithm = cfg.algorithm
        self.trainer = trainer
        self.reference = reference
        self.preset = preset_of(algorithm)
        self.shaping = Shaping.of(cfg)
        self.recompute: bool = algorithm.old_logprobs == "recompute"
        self.kl_in_reward: bool = algorithm.kl_coef > 0.0 and algorithm.kl_in == "reward"
        self.per_token: bool = algorithm.advantage == "gae"
        self.whiten: bool = self.per_token and algorithm.whiten
        self.bootstrap: bool = self.per_token and algorithm.bootstrap_truncated
        self.loss = PolicyLoss(
            self.preset, recompute=self.recompute, correction=algorithm.correction, cap=algorithm.correction_cap
        )
        self.steps = Steps(trainer, algorithm.minibatches, algorithm.epochs, seed)
        self._start()

    def _start(self) -> None:
        self.steps.start()
        self._own: list[Sample] = []
        self._shared: list[Sample] = []
        self._rewards: dict[str, float] = {}
        self._signal: dict[str, bool] = {}
        self._penalty = 0.0

    def __call__(self, samples: Sequence[Sample]) -> dict[str, float]:
        """``add`` and ``finish`` for a batch that comes whole."""
        self.add(samples)
        return self.finish()

    @property
    def samples(self) -> list[Sample]:
        """This rank's samples since the last ``finish``."""
        return self._own

    def add(self, samples: Sequence[Sample], *, learn: bool = True) -> None:
        """Forward and backward of this rank's part of a portion; sets ``info["advantage"]`` on each (the mean over its
        tokens). ``learn=False`` leaves the policy as it is (the critic's warm-up). Collective."""
        self._own.extend(samples)
        shared = sorted(self.trainer.share(samples), key=lambda s: s.id)
        self._shared.extend(shared)
        rewards = gather(self.trainer, {s.id: math.nan if s.reward is None else s.reward for s in shared})
        self._rewards.update(rewards)
        penalties = self.shaping.penalties(shared)
        self._penalty += math.fsum(penalties.values())
        kept = [s for s in shared if self.shaping.kept(s)]
        rows = self._logprobs([row_of(s) for s in kept], learn)
        advantages = self._advantages(shared, kept, rows, penalties)
        for sample in samples:
            own = advantages.get(sample.id, 0.0)
            sample.info["advantage"] = own if isinstance(own, float) else math.fsum(own) / len(own)
        if learn:
            rows = [replace(row, advantages=advantages[row.id]) for row in rows]
            self.steps.run(rows, rewards, self.loss)

    def finish(self, version: int | None = None) -> dict[str, float]:
        """The optimizer step over all portions. ``version`` is that of the policy before it, to say how many versions
        older the one was that drew each token (``staleness/mean``, ``staleness/max``). Collective.

        Returns the metrics of the whole step, the same on every rank. A step whose groups all have equal rewards has
        gradient zero and is counted in ``groups/without_signal``; a step without anything to train on does nothing.
        """
        totals = self.trainer.reduce({**sample_sums(self._shared, self.shaping.kept), "penalty": self._penalty})
        metrics = sample_metrics(totals)
        metrics.update(group_metrics(dict(sorted(self._rewards.items())), self._signal))
        if self.shaping.cache:
            metrics["reward/overlong_penalty"] = totals["penalty"] / max(totals["samples"], 1.0)
        if version is not None:
            oldest = min((v for s in self._shared for v in s.versions), default=version)
            metrics["staleness/max"] = float(self.trainer.most(version - oldest))
            metrics["staleness/mean"] = version - totals["versions"] / max(totals["response"], 1.0)
        info, steps = self.steps.finish(), self.steps
        if info is not None:
            metrics["grad_norm"], metrics["lr"] = info.grad_norm, info.lr
            metrics.update(engine_metrics(steps.first if self.recompute else steps.fresh))
            metrics.update(loss_metrics(steps.sums))
        self._start()
        return metrics

    def _logprobs(self, rows: list[Row], learn: bool) -> list[Row]:
        """The rows with the trainer's log-probs before the update and the reference's, where they are needed."""
        if self.recompute and not self.steps.single and learn:
            old = forward_rows(self.trainer, rows, "logprobs")
            rows = [replace(row, old_logprobs=old[row.id]) for row in rows]
        if self.reference is not None and not (self.kl_in_reward and self.per_token):
            rows = self.reference.add_logprobs(rows)
        return rows

    def _advantages(
        self, shared: list[Sample], kept: list[Sample], rows: list[Row], penalties: dict[str, float]
    ) -> dict[str, Any]:
        """Advantages by sample id: a number, or a list with one for each token."""
        if self.per_token:
            rewards = {s.id: (s.reward or 0.0) + penalties[s.id] for s in kept}
            found, _ = token_advantages(self.preset, kept, rewards, bootstrap=self.bootstrap)
            for name, signal in gather(self.trainer, {n: float(any(v)) for n, v in found.items()}).items():
                self._signal[name] = signal > 0.0
            return dict(whitened(self.trainer, found) if self.whiten else found)
        peers = {s.id: math.nan for s in shared} | {s.id: (s.reward or 0.0) + penalties[s.id] for s in kept}
        kl = None
        if self.kl_in_reward:
            known = {row.id: list(row.old_logprobs) for row in rows}
            current = known if all(known.values()) else forward_rows(self.trainer, rows, "logprobs")
            estimates = kl_of(rows, current, self.preset.kl_kind)
            kl = {s.id: math.fsum(estimates.get(s.id, ())) for s in shared}
        advantages = group_advantages(self.trainer, self.preset, peers, kl)
        self._signal.update({name: value != 0.0 for name, value in advantages.items()})
        return advantages
