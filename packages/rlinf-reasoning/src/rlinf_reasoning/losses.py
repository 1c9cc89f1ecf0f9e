"""Loss functions for trainer backends: (outputs, packed micro-batch) -> (loss sum, count, sums of metrics).

Outputs and fields are [M], targets of several sequences end to end; rlinf-algos takes them as one row [1, M] with
``segments``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import LossInputs, Preset, advantage, loss, rollout_correction, rollout_metrics, sft_loss
from rlinf_algos.errors import AlgorithmError
from rlinf_core.errors import ConfigError
from rlinf_core.types import Batch

CLIPPED = ("ppo", "dapo", "decoupled_ppo")
LARGEST = "largest/"
"""Before the name of a metric that is a maximum: each micro-batch reports its own under its first id, since metrics of
micro-batches and ranks are added."""


def preset_of(algorithm: Any) -> Preset:
    """The ``algorithm`` node of a configuration as a preset of rlinf-algos: its advantage and loss, by name, with
    the options that they have.

    Whitening is left out: it goes over all ranks and is the update's.
    """
    values = algorithm.to_dict()
    shared = {name: values[name] for name in ("aggregation", "divisor")}
    loss_options: dict[str, Any] = _own(loss(values["loss"]), shared)
    if values["loss"] in CLIPPED:
        loss_options |= {name: values[name] for name in ("clip_low", "clip_high", "dual_clip")}
    if values["loss"] == "decoupled_ppo":
        loss_options["behaviour_cap"] = values["behaviour_cap"]
    options: dict[str, Any] = {}
    if values["advantage"] == "group":
        options = {"normalise_std": values["normalise_std"], "group_size": values["group_size"]}
    elif values["advantage"] == "gae":
        options = {"gamma": values["gamma"], "lam": values["lam"]}
    try:
        preset = Preset(
            name=values["name"],
            source="configuration",
            note="",
            advantage=values["advantage"],
            loss=values["loss"],
            advantage_options={**options, **values["advantage_options"]},
            loss_options={**loss_options, **values["loss_options"]},
            kl_coefficient=values["kl_coef"],
            kl_kind=values["kl_kind"],
            kl_in=values["kl_in"],
            entropy_coefficient=values["entropy_coef"],
        )
        preset.check()
        if values["kl_in"] == "loss" and values["kl_coef"]:
            advantage(values["advantage"])  # a plugin's is loaded here and not in the middle of a step
    except AlgorithmError as error:
        raise ConfigError(f"algorithm ({values['name']}): {error}") from error
    return preset


def _own(algorithm: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that the algorithm has as options."""
    known = getattr(algorithm.options, "__dataclass_fields__", {})
    return {name: value for name, value in values.items() if name in known}


class PolicyLoss:
    """The preset's policy loss with its KL and entropy terms, and how far engine and trainer are apart.

    Reads the fields ``advantages``, ``behaviour_logprobs`` and, where the batch has them, ``old_logprobs`` and
    ``ref_logprobs``. ``recompute``: the old policy is the trainer's before the update, that is ``old_logprobs``, or in
    a batch without them the current one (a batch that gets one optimizer step). Otherwise the behaviour's log-probs are
    the old ones, so that the ratio covers the rollout engine's numerical differences. ``correction`` (``none``, ``tis``
    or ``mask``) weighs tokens by old / behaviour, at most ``cap``; rejected tokens still count.
    """

    def __init__(self, preset: Preset, *, recompute: bool = False, correction: str = "none", cap: float = 2.0) -> None:
        self.preset = preset
        self.recompute = recompute
        self.mode = {"none": "", "tis": "truncate", "mask": "mask"}[correction]
        self.cap = cap

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float, dict[str, float]]:
        """Metric sums over tokens: those of the loss (``tokens``, ``ratio``, ``approx_kl``, ``clip_low``, …, ``kl``),
        ``entropy``, those of ``rollout_metrics`` and ``gap`` (|trainer - engine|, also as a maximum)."""
        mask, segments = batch["mask"][None], batch["segments"][None]
        logprobs, entropy = outputs["logprobs"][None], outputs["entropy"][None]
        behaviour = batch["behaviour_logprobs"][None]
        old = behaviour
        if self.recompute:
            old = batch["old_logprobs"][None] if "old_logprobs" in batch else logprobs.detach()
        weights, more = None, {}
        if self.mode:
            found = rollout_correction(
                old, behaviour, mask, level="token", mode=self.mode, upper=self.cap, segments=segments
            )
            weights, more = found.weights, dict(found.metrics)
        inputs = LossInputs(
            logprobs=logprobs,
            mask=mask,
            advantages=batch["advantages"][None],
            old_logprobs=old,
            behaviour_logprobs=behaviour,
            ref_logprobs=batch["ref_logprobs"][None] if "ref_logprobs" in batch else None,
            entropy=entropy,
            weights=weights,
            segments=segments,
        )
        total = self.preset.compute_loss(inputs)
        trainer = old if self.recompute else logprobs.detach()
        more |= rollout_metrics(trainer, behaviour, mask)
        gap = torch.where(mask, (trainer - behaviour).abs(), 0.0)
        metrics = {name: float(value) for name, value in {**more, **total.metrics}.items()}
        metrics["entropy"] = float(torch.where(mask, entropy.detach(), 0.0).sum())
        metrics["gap"] = float(gap.sum())
        metrics[f"{LARGEST}gap/{batch['ids'][0]}"] = float(gap.max()) if gap.numel() else 0.0
        return total.sum, total.count, metrics


class ValueLoss:
    """The critic's loss on ``returns``, bounded by ``clip`` around ``old_values`` (``None``: not)."""

    def __init__(self, *, clip: float | None, kind: str) -> None:
        self.options = {"clip": clip, "kind": kind}
        self.loss = loss("value")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float, dict[str, float]]:
        """Metric sums over tokens: ``tokens``, ``value_error`` (squared), ``value_clipped``, ``value``."""
        mask, values = batch["mask"][None], outputs["values"][None]
        inputs = LossInputs(
            values=values,
            returns=batch["returns"][None],
            old_values=batch["old_values"][None],
            mask=mask,
            segments=batch["segments"][None],
        )
        total = self.loss(inputs, **self.options)
        metrics = {name: float(value) for name, value in total.metrics.items()}
        metrics["value"] = float(torch.where(mask, values.detach(), 0.0).sum())
        return total.sum, total.count, metrics


def supervised_loss(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float, dict[str, float]]:
    """Negative log-likelihood of the response tokens, a sum over tokens."""
    total = sft_loss(outputs["logprobs"][None], batch["mask"][None])
    return total.sum, total.count, {}


def largest(sums: Mapping[str, float], name: str) -> float:
    """The maximum of a metric over micro-batches and ranks (see ``LARGEST``); 0 where there is none."""
    found: Sequence[float] = [value for key, value in sums.items() if key.startswith(f"{LARGEST}{name}/")]
    return max(found, default=0.0)
