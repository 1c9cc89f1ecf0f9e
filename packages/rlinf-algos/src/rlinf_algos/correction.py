"""Rollout correction: the engine that drew the tokens is not exactly the policy that is trained.

Other kernels, other precision, older weights: pi_train(token) / pi_rollout(token) is the importance weight that makes
up for it, bounded since its product over a sequence explodes.

Shape legend: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.kl import k3
from rlinf_algos.masking import per_sequence, safe_exp, sequence_sums, zero_masked

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


@dataclass(frozen=True, slots=True)
class Correction:
    """``weights`` [B, T]: constants for the ``weights`` argument of a loss (0 at false positions). ``mask`` [B, T]:
    the given mask without what mode ``mask`` rejected. ``metrics``: sums, see ``rollout_metrics``."""

    weights: Tensor
    mask: Tensor
    metrics: Mapping[str, Tensor]


@torch.no_grad()
def rollout_correction(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    segments: Tensor | None = None,
) -> Correction:
    """Importance weights between trainer and engine, truncated or masked.

    With d_t = log pi_train - log pi_rollout the weight is, by ``level``: ``token`` exp(d_t); ``sequence`` exp(sum_t
    d_t), unbiased for a sequence's reward; ``geometric`` exp(mean_t d_t), comparable between lengths. ``truncate``
    (TIS; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; IMPALA's
    rho-bar): w = min(w, upper). ``mask`` (MIS; IcePop, arXiv 2510.18855): w = 0 outside [lower, upper].

    Args:
        train_logprobs: [B, T] under the trainer's weights before the update.
        rollout_logprobs: [B, T] as the engine drew them.
        mask: [B, T].
        level: token, sequence or geometric.
        mode: truncate or mask.
        upper: bound above 0.
        lower: bound in (0, upper]; for ``mask`` alone (1 / ``upper`` when ``None``).
        segments: [B, T] for packed rows.

    Returns:
        Correction. To keep the count of the loss as it was, pass ``weights`` alone (a rejected token counts with loss
        0, as in the papers); to leave rejected tokens out of the count as well, pass ``mask`` too.
    """
    _check.choice("level", level, LEVELS)
    _check.choice("mode", mode, MODES)
    _check.positive(upper=upper, **_check.given(lower=lower))
    if lower is not None and mode != "mask":
        raise AlgorithmError("lower is read by mode 'mask' alone: raising small weights would add bias")
    if lower is not None and lower > upper:
        raise AlgorithmError(f"lower ({lower}) exceeds upper ({upper})")
    mask = _checked(train_logprobs, rollout_logprobs, mask)
    _check.integral(segments=segments)
    _check.same_shape(mask=mask, segments=segments)
    d = zero_masked(train_logprobs, mask) - zero_masked(rollout_logprobs, mask)
    log_weight = d
    if level != "token":
        sums, counts, keys = sequence_sums(d, mask, segments)
        if level == "geometric":
            sums = sums / counts.clamp(min=1)
        log_weight = per_sequence(sums, keys, mask.shape[1])
    raw = torch.where(mask, safe_exp(log_weight), 0.0)
    if mode == "truncate":
        weights, kept = raw.clamp(max=upper), mask
        clipped = mask & (raw > upper)
    else:
        floor = 1 / upper if lower is None else lower
        kept = mask & (raw >= floor) & (raw <= upper)
        weights, clipped = torch.where(kept, raw, 0.0), mask & ~kept
    metrics = dict(rollout_metrics(train_logprobs, rollout_logprobs, mask))
    metrics["rollout_clipped"] = clipped.sum()
    metrics["weight"] = weights.sum()
    metrics["weight_square"] = _check.precise(weights).square().sum()
    return Correction(weights, kept, metrics)


@torch.no_grad()
def rollout_metrics(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Mapping[str, Tensor]:
    """How far engine and trainer are apart, as sums over ``tokens`` (so that they add over micro-batches and ranks).

    ``rollout_kl``: k1 of KL(rollout || train), -d; ``rollout_kl3``: its k3, never negative; ``rollout_gap``:
    |pi_train - pi_rollout| of the drawn token; ``rollout_weight`` and ``rollout_weight_square``: of exp(d), for
    ``effective_sample_size``.
    """
    mask = _checked(train_logprobs, rollout_logprobs, mask)
    train, rollout = zero_masked(train_logprobs, mask), zero_masked(rollout_logprobs, mask)
    d = train - rollout
    weight = torch.where(mask, safe_exp(d), 0.0)
    return {
        "tokens": mask.sum(),
        "rollout_kl": -d.sum(),
        "rollout_kl3": torch.where(mask, k3(d), 0.0).sum(),
        "rollout_gap": torch.where(mask, (train.exp() - rollout.exp()).abs(), 0.0).sum(),
        "rollout_weight": weight.sum(),
        "rollout_weight_square": _check.precise(weight).square().sum(),
    }


def _checked(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    _check.floating(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs)
    _check.ndim(2, "[B, T]", train_logprobs=train_logprobs)
    _check.same_shape(train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    return _check.boolean(mask)


def effective_sample_size(metrics: Mapping[str, Tensor | float], *, prefix: str = "weight") -> float:
    """Kish's effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2), in (0, 1]; 0 without tokens.

    ``metrics`` are (added-up) sums of ``rollout_correction``; ``prefix="rollout_weight"`` for the weights before any
    bound.
    """
    tokens, total = float(metrics["tokens"]), float(metrics[prefix])
    square = float(metrics[f"{prefix}_square"])
    return total * total / (tokens * square) if tokens and square else 0.0
