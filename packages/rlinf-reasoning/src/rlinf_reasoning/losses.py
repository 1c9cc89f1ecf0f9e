"""Loss functions for trainer backends: (outputs, micro-batch) -> (loss sum, count, sums of metrics)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import kl_loss, ppo_clip_loss, sft_loss


class GrpoLoss:
    """Clipped policy loss, plus ``kl_coef`` times the KL to a reference when it is not zero.

    ``cfg`` is the recipe's ``algorithm`` node. The behaviour log-probs of the rollout are the old ones: the ratio is
    against the policy that drew the tokens.
    """

    def __init__(self, cfg: Any) -> None:
        self.clip_low: float = cfg.clip_low
        self.clip_high: float = cfg.clip_high
        self.aggregation: str = cfg.aggregation
        self.kl_coef: float = cfg.kl_coef
        self.kl_kind: str = cfg.kl_kind

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Mapping[str, Any]
    ) -> tuple[Tensor, float, dict[str, float]]:
        """Metric sums, over tokens: ``tokens``, ``ratio``, ``clip_low``, ``clip_high``, ``approx_kl``, ``entropy``,
        ``kl`` (with a reference)."""
        mask = batch["mask"]
        loss = ppo_clip_loss(
            outputs["logprobs"],
            batch["old_logprobs"],
            batch["advantages"],
            mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            aggregation=self.aggregation,
        )
        if self.kl_coef > 0.0:
            kl = kl_loss(
                outputs["logprobs"], batch["ref_logprobs"], mask, kind=self.kl_kind, aggregation=self.aggregation
            )
            loss = loss.plus(kl, self.kl_coef)
        metrics = {name: float(value) for name, value in loss.metrics.items()}
        metrics["entropy"] = float(torch.where(mask, outputs["entropy"].detach(), 0.0).sum())
        return loss.sum, loss.count, metrics


def supervised_loss(outputs: Mapping[str, Tensor], batch: Mapping[str, Any]) -> tuple[Tensor, float, dict[str, float]]:
    """Negative log-likelihood of the response tokens, a sum over tokens."""
    loss = sft_loss(outputs["logprobs"], batch["mask"])
    return loss.sum, loss.count, {}
