"""The metrics of a training step, from sums over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rlinf_algos import effective_sample_size
from rlinf_core.types import Sample
from rlinf_reasoning.losses import largest
from rlinf_reasoning.training.minibatches import group_of


def sample_sums(samples: Sequence[Sample], kept: Callable[[Sample], bool]) -> dict[str, float]:
    """What ``sample_metrics`` takes, of this replica's samples."""
    return {
        "samples": float(len(samples)),
        "response": float(sum(len(s.response_ids) for s in samples)),
        "versions": float(sum(sum(s.versions) for s in samples)),
        "prompt": float(sum(len(s.prompt_ids) for s in samples)),
        "truncated": float(sum(s.finish_reason == "length" for s in samples)),
        "filtered": float(sum(not kept(s) for s in samples)),
    }


def sample_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    count = max(sums["samples"], 1.0)
    metrics = {
        "samples": sums["samples"],
        "prompt/tokens": sums["prompt"],
        "response/tokens": sums["response"],
        "response/length": sums["response"] / count,
        "response/truncated": sums["truncated"] / count,
    }
    if sums["filtered"]:
        metrics["response/filtered"] = sums["filtered"] / count
    return metrics


def group_metrics(rewards: Mapping[str, float], signal: Mapping[str, bool]) -> dict[str, float]:
    """Of rewards by sample id (NaN: none), and whether each sample has an advantage."""
    if not rewards:
        return {"groups/without_signal": 0.0}
    groups = dict.fromkeys(map(group_of, rewards), False)
    for name, has in signal.items():
        groups[group_of(name)] |= has
    metrics = {"groups/without_signal": sum(not has for has in groups.values()) / len(groups)}
    values = [v for v in rewards.values() if not math.isnan(v)]
    if values:
        mean = math.fsum(values) / len(values)
        metrics["reward/mean"] = mean
        metrics["reward/std"] = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    return metrics


class Silence:
    """Says when a step's rewards teach nothing: in the first such step, and when ``HOLDS`` come in a row."""

    HOLDS = 5

    def __init__(self) -> None:
        self._in_a_row = 0
        self._told = 0

    def word(self, step: str, metrics: Mapping[str, float]) -> str:
        """What is to be said of the step named ``step`` with these metrics (``finish``); mostly nothing."""
        if metrics.get("groups/without_signal") != 1.0 or "reward/mean" not in metrics:
            self._in_a_row = 0
            return ""
        self._in_a_row += 1
        if self._told >= 2 or (self._told == 1 and self._in_a_row != self.HOLDS):
            return ""
        self._told += 1
        when = f"in step {step}" if self._told == 1 else f"in {self._in_a_row} steps in a row, last {step}"
        return (
            f"{when} all rewards of every group were equal ({metrics['reward/mean']:.3g} on average), so that nothing "
            "was learned from them; samples.jsonl has the answers"
        )


def engine_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """How far the rollout engine's log-probs are from the trainer's before the update.

    ``policy/engine_kl``: k3 of KL(engine || trainer) per token; ``engine_gap``, ``engine_gap_max``: |difference| of
    log-probs; ``engine_ess``: effective sample size of the weights trainer / engine as a part of the tokens.
    """
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    return {
        "policy/engine_kl": sums["rollout_kl3"] / tokens,
        "policy/engine_gap": sums["gap"] / tokens,
        "policy/engine_gap_max": largest(sums, "gap"),
        "policy/engine_ess": effective_sample_size(sums, prefix="rollout_weight"),
    }


# Metric of a step: sums of the loss that it is made of, per token.
_PER_TOKEN = {
    "policy/ratio": ("ratio",),
    "policy/update_kl": ("approx_kl",),
    "policy/clipped": ("clip_low", "clip_high"),
    "policy/clipped_dual": ("clip_dual",),
    "policy/behaviour_capped": ("behaviour_capped",),
    "policy/correction_clipped": ("rollout_clipped",),
    "policy/correction_weight": ("weight",),
    "policy/entropy": ("entropy",),
    "policy/reference_kl": ("kl",),
}


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Of all minibatches and epochs together; what the loss does not report is left out."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    metrics = {"loss": sums["loss"] / sums["count"]}
    for name, parts in _PER_TOKEN.items():
        if all(part in sums for part in parts):
            metrics[name] = sum(sums[part] for part in parts) / tokens
    return metrics
