"""What the actor does with a trainer backend: a GRPO update, the supervised warm start, a frozen reference.

Everything here gives the same result with one rank or several: rewards are gathered by sample id, losses are sums
that are divided once by the global count, and batches are cut by ids, never by who holds them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf_algos import group_advantage
from rlinf_core.config import Config
from rlinf_core.registry import Registry
from rlinf_core.types import LossFn, ParallelInfo, Prompt, Sample, StepInfo, Trainer
from rlinf_reasoning.batch import Row, TokenForward, collate, micro_batches, per_row
from rlinf_reasoning.losses import GrpoLoss, supervised_loss


def load_trainer(cfg: Any, parallel: ParallelInfo, seed: int) -> Trainer:
    """The trainer backend that ``cfg.trainer.name`` names, set up with the model ``cfg.model``."""
    trainer: Trainer = Registry("rlinf.trainers").load(cfg.trainer.name)(cfg.trainer)
    trainer.setup(cfg.model, TokenForward(cfg.sampling.temperature), parallel, seed=seed)
    return trainer


def gather_rewards(trainer: Trainer, samples: Iterable[Sample]) -> dict[str, float]:
    """Rewards of the samples of all ranks by sample id, in the order of the ids. Collective."""
    everyone = trainer.reduce({s.id: float("nan") if s.reward is None else s.reward for s in samples})
    return dict(sorted(everyone.items()))


def advantages_of(rewards: dict[str, float], *, normalise_std: bool) -> dict[str, float]:
    """Group-relative advantages by sample id; the group of ``group/index`` is ``group``. Empty for no samples."""
    if not rewards:
        return {}
    values = group_advantage(
        torch.tensor(list(rewards.values()), dtype=torch.float64),
        [group_of(name) for name in rewards],
        normalise_std=normalise_std,
    )
    return dict(zip(rewards, values.tolist(), strict=True))


def group_of(sample_id: str) -> str:
    """The group (prompt id) in a sample id."""
    return sample_id.rpartition("/")[0]


class GrpoUpdate:
    """One training step of GRPO on the scored samples of a step, which may come in portions of whole groups.

    ``add`` each portion, then ``finish``. With ``algorithm.minibatches=1`` portions only accumulate gradients, and one
    optimizer step is taken at the end: how the samples were cut changes nothing. With more minibatches the step needs
    the whole batch in one portion. Reads ``cfg.algorithm`` and ``cfg.trainer.micro_batch_tokens``. ``reference`` gives
    log-probs for the KL term.
    """

    def __init__(self, trainer: Trainer, cfg: Any, reference: Reference | None = None) -> None:
        self.trainer = trainer
        self.reference = reference
        self.normalise_std: bool = cfg.algorithm.normalise_std
        self.minibatches: int = cfg.algorithm.minibatches
        self.max_tokens: int = cfg.trainer.micro_batch_tokens
        self.loss = GrpoLoss(cfg.algorithm)
        self._start()

    def _start(self) -> None:
        self._sums: dict[str, float] = {}
        self._before_update: dict[str, float] = {}
        self._samples: list[Sample] = []
        self._rewards: dict[str, float] = {}
        self._advantages: dict[str, float] = {}
        self._info: StepInfo | None = None

    def __call__(self, samples: Sequence[Sample]) -> dict[str, float]:
        """``add`` and ``finish`` for a batch that comes whole."""
        self.add(samples)
        return self.finish()

    @property
    def samples(self) -> list[Sample]:
        """This rank's samples since the last ``finish``."""
        return self._samples

    def add(self, samples: Sequence[Sample]) -> None:
        """Forward and backward of this rank's part of a portion; sets ``info["advantage"]`` on each. Collective."""
        rewards = gather_rewards(self.trainer, samples)
        advantages = advantages_of(rewards, normalise_std=self.normalise_std)
        for sample in samples:
            sample.info["advantage"] = advantages[sample.id]
        self._samples.extend(samples)
        self._rewards.update(rewards)
        self._advantages.update(advantages)
        for rows in self._minibatches(samples, rewards):
            totals = accumulate(self.trainer, rows, self.loss, self._pad_id, self.max_tokens)
            if self._info is None:  # nothing is updated yet: what remains is the rollout engine against the trainer
                _add(self._before_update, totals)
            _add(self._sums, totals)
            if self.minibatches > 1:
                self._info = self.trainer.step(totals["count"])

    def finish(self) -> dict[str, float]:
        """The optimizer step over all portions. Collective.

        Returns the metrics of the whole step, the same on every rank. A step whose groups all have equal rewards has
        gradient zero and is counted in ``groups/without_signal``; a step without samples does nothing.
        """
        sums, rewards = self._sums, self._rewards
        metrics = _sample_metrics(self.trainer.reduce(_sample_sums(self._samples)))
        metrics.update(_group_metrics(dict(sorted(rewards.items())), self._advantages))
        if rewards:
            info = self._info or self.trainer.step(sums["count"])
            metrics["grad_norm"], metrics["lr"] = info.grad_norm, info.lr
            metrics["policy/engine_kl"] = self._before_update["approx_kl"] / self._before_update["tokens"]
            tokens = sums["tokens"]
            metrics["loss"] = sums["loss"] / sums["count"]
            metrics["policy/ratio"] = sums["ratio"] / tokens
            metrics["policy/clipped"] = (sums["clip_low"] + sums["clip_high"]) / tokens
            metrics["policy/entropy"] = sums["entropy"] / tokens
            if "kl" in sums:
                metrics["policy/reference_kl"] = sums["kl"] / tokens
        self._start()
        return metrics

    @property
    def _pad_id(self) -> int:
        return int(self.trainer.tokenizer.pad_token_id)

    def _minibatches(self, samples: Sequence[Sample], rewards: dict[str, float]) -> list[list[Row]]:
        """This rank's rows of every minibatch. Whole groups, in the order of their ids over all ranks."""
        groups = list(dict.fromkeys(map(group_of, rewards)))
        count = min(self.minibatches, len(groups))
        place = {group: number * count // len(groups) for number, group in enumerate(groups)}
        parts: list[list[Row]] = [[] for _ in range(count)]
        rows = [_row(sample) for sample in samples]
        if self.reference is not None:
            rows = self.reference.add_logprobs(rows)
        for row in rows:
            parts[place[group_of(row.id)]].append(row)
        return parts


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def accumulate(
    trainer: Trainer, rows: Sequence[Row], loss_fn: LossFn, pad_id: int, max_tokens: int
) -> dict[str, float]:
    """Forward and backward of this rank's rows, in micro-batches.

    Returns ``loss``, ``count`` and metric sums over all ranks. Collective.
    """
    sums = {"loss": 0.0, "count": 0.0}
    for part in micro_batches(rows, max_tokens):
        loss, count, metrics = trainer.accumulate(collate(part, pad_id), loss_fn)
        _add(sums, {"loss": loss, "count": count, **metrics})
    return trainer.reduce(sums)


class Reference:
    """The policy as it is now, frozen: a second trainer backend of the same kind, loaded from an export.

    Made by every rank together; each holds all of it.
    """

    def __init__(self, trainer: Trainer, cfg: Any, path: Path, parallel: ParallelInfo, seed: int) -> None:
        trainer.export(path)
        model = Config({**cfg.model.to_dict(), "path": str(path)})
        self._backend: Trainer = Registry("rlinf.trainers").load(cfg.trainer.name)(cfg.trainer)
        alone = replace(parallel, rank=0, world_size=1, init_method="")
        self._backend.setup(model, TokenForward(cfg.sampling.temperature), alone, seed=seed)
        self._pad_id = int(self._backend.tokenizer.pad_token_id)
        self._max_tokens: int = cfg.trainer.micro_batch_tokens
        self._backend.offload()

    def add_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, in the order of their ids, with the reference's log-probs of the response tokens."""
        self._backend.onload()
        done: list[Row] = []
        for part in micro_batches(rows, self._max_tokens):
            batch = collate(part, self._pad_id)
            values = self._backend.logprobs(batch)["logprobs"].cpu()
            done += [replace(row, ref_logprobs=v) for row, v in zip(part, per_row(values, batch["mask"]), strict=True)]
        self._backend.offload()
        return done


class WarmStart:
    """Supervised training on (prompt, answer) pairs until a share of held-out problems is answered right.

    Reads ``cfg.warm_start``, ``cfg.trainer``. The answer is the whole response, so that being right greedily is the
    same as every target token (the end token too) being the most likely one, which needs no decoding.
    """

    def __init__(self, trainer: Any, cfg: Any, parallel: ParallelInfo, seed: int) -> None:
        self.trainer = trainer
        self.cfg = cfg.warm_start
        self.trainer_cfg = cfg.trainer
        self.parallel = parallel
        self.seed = seed
        self._pad_id = int(trainer.tokenizer.pad_token_id)

    def __call__(
        self, problems: Sequence[Prompt], progress: Callable[[str], None] = lambda text: None
    ) -> dict[str, float]:
        """Train on ``problems`` (all of them on every rank); the first ``held_out`` are only measured on. Collective.

        Returns ``warm_start/steps``, ``warm_start/accuracy``, ``warm_start/loss`` (the last step's).
        """
        rows = [self._row(problem) for problem in problems]
        held_out, rows = rows[: self.cfg.held_out], rows[self.cfg.held_out :]
        settings = {"lr": self.cfg.lr, "warmup_steps": self.cfg.lr_warmup_steps, "schedule": "constant"}
        self.trainer.restart_optimizer(Config({**self.trainer_cfg.to_dict(), **settings}))
        order = random.Random(f"{self.seed}/warm_start")
        accuracy, loss, steps = self.accuracy(held_out), math.nan, 0
        queue: list[Row] = []
        while steps < self.cfg.max_steps and accuracy < self.cfg.target_accuracy:
            if len(queue) < self.cfg.batch_size:
                queue = order.sample(rows, len(rows))
            batch, queue = queue[: self.cfg.batch_size], queue[self.cfg.batch_size :]
            totals = accumulate(
                self.trainer, self._mine(batch), supervised_loss, self._pad_id, self.trainer_cfg.micro_batch_tokens
            )
            self.trainer.step(totals["count"])
            steps, loss = steps + 1, totals["loss"] / totals["count"]
            if steps % self.cfg.check_every == 0 or steps == self.cfg.max_steps:
                accuracy = self.accuracy(held_out)
                progress(f"warm start: step {steps}, loss {loss:.3f}, held-out accuracy {accuracy:.1%}")
        self.trainer.restart_optimizer(self.trainer_cfg)
        if accuracy < self.cfg.target_accuracy and self.cfg.max_steps > 0:
            progress(
                f"warm start: ended at warm_start.max_steps={self.cfg.max_steps} with {accuracy:.1%} right, short of "
                f"warm_start.target_accuracy={self.cfg.target_accuracy:.1%} (few problems? see warm_start.problems)"
            )
        return {"warm_start/steps": float(steps), "warm_start/accuracy": accuracy, "warm_start/loss": loss}

    def accuracy(self, rows: Sequence[Row]) -> float:
        """Share of rows whose whole response is the greedy one. Collective."""
        right = 0
        for part in micro_batches(self._mine(rows), self.trainer_cfg.micro_batch_tokens):
            batch = collate(part, self._pad_id)
            greedy = self.trainer.logprobs(batch)["greedy"].cpu()
            right += int((greedy | ~batch["mask"]).all(dim=1).sum())
        return self.trainer.reduce({"right": float(right)})["right"] / max(len(rows), 1)

    def _mine(self, rows: Sequence[Row]) -> list[Row]:
        return list(rows[self.parallel.rank :: self.parallel.world_size])

    def _row(self, problem: Prompt) -> Row:
        tokenizer = self.trainer.tokenizer
        answer = [*tokenizer.encode(problem.answer, add_special_tokens=False), tokenizer.eos_token_id]
        return Row(problem.id, tokenizer.encode(problem.text), answer)


def _row(sample: Sample) -> Row:
    return Row(
        sample.id,
        sample.prompt_ids,
        sample.response_ids,
        old_logprobs=sample.logprobs,
        advantage=sample.info["advantage"],
    )


def _sample_sums(samples: Sequence[Sample]) -> dict[str, float]:
    return {
        "samples": float(len(samples)),
        "response": float(sum(len(s.response_ids) for s in samples)),
        "prompt": float(sum(len(s.prompt_ids) for s in samples)),
        "truncated": float(sum(s.finish_reason == "length" for s in samples)),
    }


def _sample_metrics(sums: dict[str, float]) -> dict[str, float]:
    count = max(sums["samples"], 1.0)
    return {
        "samples": sums["samples"],
        "prompt/tokens": sums["prompt"],
        "response/tokens": sums["response"],
        "response/length": sums["response"] / count,
        "response/truncated": sums["truncated"] / count,
    }


def _group_metrics(rewards: dict[str, float], advantages: dict[str, float]) -> dict[str, float]:
    if not rewards:
        return {"groups/without_signal": 0.0}
    signal: dict[str, bool] = {}
    for name, value in advantages.items():
        group = group_of(name)
        signal[group] = signal.get(group, False) or value != 0.0
    values = list(rewards.values())
    mean = math.fsum(values) / len(values)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)),
        "groups/without_signal": sum(not s for s in signal.values()) / len(signal),
    }
