"""Policy losses: each a sum and a count over the tokens the policy produced.

Shape legend: B sequences, T positions. Advantages are [B] (one per sequence) or [B, T]. Everything but ``logprobs``
is a constant. ``weights`` [B, T] (rollout correction) multiply the loss of each token and are constants too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.aggregation import LossSum, aggregate
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import FAR, per_sequence, safe_exp, sequence_sums, zero_masked


def _constant(x: Tensor, mask: Tensor, name: str, dtype: torch.dtype, *, per_row: bool = False) -> Tensor:
    """A constant input as [B, T], zero where masked."""
    _check.floating(**{name: x})
    if per_row and x.ndim == 1:
        if x.shape[0] != mask.shape[0]:
            raise AlgorithmError(f"{name} has {x.shape[0]} entries for {mask.shape[0]} sequences")
        x = x[:, None].expand(mask.shape)
    if x.shape != mask.shape:
        legend = "[B] or [B, T]" if per_row else "[B, T]"
        raise AlgorithmError(
            f"{name} must have shape {legend} of the mask {_check.shape_of(mask)}, got {_check.shape_of(x)}"
        )
    return torch.where(mask, x.detach().to(dtype), 0.0)


def _policy(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Checked (logprobs with zeros at masked positions, bool mask)."""
    _check.floating(logprobs=logprobs)
    _check.ndim(2, "[B, T]", logprobs=logprobs)
    _check.same_shape(logprobs=logprobs, mask=mask)
    mask = _check.boolean(mask)
    return zero_masked(logprobs, mask), mask


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Refuse impossible clip ranges."""
    _check.not_negative(clip_low=clip_low, clip_high=clip_high)
    if clip_low > 1:
        raise AlgorithmError(f"clip_low is {clip_low}: the lower bound 1 - clip_low would be negative")
    _check.number(**_check.given(dual_clip=dual_clip))
    if dual_clip is not None and not dual_clip > 1 + clip_high:
        raise AlgorithmError(f"dual_clip is {dual_clip}: it must exceed 1 + clip_high = {1 + clip_high:g}")


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token of the clipped objective, and which tokens were clipped."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    with torch.no_grad():
        clips = {
            "clip_low": (ratio < 1 - clip_low) & (advantages < 0),
            "clip_high": (ratio > 1 + clip_high) & (advantages > 0),
        }
    if dual_clip is not None:
        limit = -advantages * dual_clip
        loss = torch.where(advantages < 0, torch.minimum(loss, limit), loss)
        clips["clip_dual"] = (ratio.detach() > dual_clip) & (advantages < 0)
    return loss, clips


def _finish(
    loss: Tensor,
    mask: Tensor,
    log_ratio: Tensor | None,
    flags: dict[str, Tensor],
    weights: Tensor | None,
    aggregation: str,
    divisor: float | None,
    segments: Tensor | None,
) -> LossSum:
    if weights is not None:
        loss = loss * _constant(weights, mask, "weights", loss.dtype)
    total, count = aggregate(loss, mask, aggregation, divisor=divisor, segments=segments)
    with torch.no_grad():
        metrics: dict[str, Tensor] = {"tokens": mask.sum()}
        for name, flag in flags.items():
            metrics[name] = (flag & mask).sum()
        if log_ratio is not None:
            d = log_ratio.detach().clamp(-FAR, FAR)
            ratio = safe_exp(d)
            metrics["ratio"] = torch.where(mask, ratio, 0.0).sum()
            metrics["approx_kl"] = torch.where(mask, ratio - 1 - d, 0.0).sum()
    return LossSum(total, count, metrics)


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """Clipped surrogate: L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

    PPO (arXiv 1707.06347, equation 7). ``clip_high > clip_low`` is clip-higher of DAPO (arXiv 2503.14476, equation
    8). With ``dual_clip``
    = c > 1, for A < 0 also L = min(L, -c A): Ye et al. (arXiv 1912.09729).

    Args:
        logprobs: [B, T] log pi of the sampled tokens; gradients flow to it alone.
        old_logprobs: [B, T] log-probs under the policy before this update.
        advantages: [B] or [B, T].
        mask: [B, T] bool or integer; false positions are not read.
        clip_low, clip_high: the two widths, at least 0.
        dual_clip: bound of the ratio for negative advantages, above ``1 + clip_high``; ``None`` for none.
        aggregation, divisor, segments: as ``aggregate``.
        weights: [B, T], see ``rollout_correction``.

    Returns:
        LossSum; metrics are sums over tokens: ``clip_low``, ``clip_high``, (``clip_dual``), ``ratio``, ``approx_kl``,
        ``tokens``. The ratio's exponential goes on as its tangent line beyond e^20, so that value and gradient stay
        finite.
    """
    check_clip(clip_low, clip_high, dual_clip)
    logp, mask = _policy(logprobs, mask)
    log_ratio = logp - _constant(old_logprobs, mask, "old_logprobs", logp.dtype)
    a = _constant(advantages, mask, "advantages", logp.dtype, per_row=True)
    loss, flags = _clipped(safe_exp(log_ratio), a, clip_low, clip_high, dual_clip)
    return _finish(loss, mask, log_ratio, flags, weights, aggregation, divisor, segments)


def policy_gradient_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """Plain policy gradient: L = -A log pi (Williams 1992, REINFORCE). Arguments as ``ppo_clip_loss``."""
    logp, mask = _policy(logprobs, mask)
    a = _constant(advantages, mask, "advantages", logp.dtype, per_row=True)
    return _finish(-a * logp, mask, None, {}, weights, aggregation, divisor, segments)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    aggregation: str = "sequence_mean_of_token_means",
    divisor: float | None = None,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """GSPO: the clipped surrogate with one ratio per sequence, s = exp(mean_t (log pi - log pi_old)).

    Zheng et al., arXiv 2507.18071, equations 5 and 7; in the token form of equation 13: s_t = sg[s] * pi_t /
    sg[pi_t], which has the same value and, for one advantage per sequence, the same gradient, and admits advantages
    per token.

    Args: as ``ppo_clip_loss``; the clip widths are the paper's, which are small since s is a geometric mean.
        ``segments`` tells the sequences of packed rows apart and is needed there.
    """
    check_clip(clip_low, clip_high)
    logp, mask = _policy(logprobs, mask)
    log_ratio = logp - _constant(old_logprobs, mask, "old_logprobs", logp.dtype)
    a = _constant(advantages, mask, "advantages", logp.dtype, per_row=True)
    sums, counts, keys = sequence_sums(log_ratio.detach(), mask, segments)
    mean = per_sequence(sums / counts.clamp(min=1), keys, mask.shape[1])
    through = torch.where(logp.isfinite(), logp - logp.detach(), 0.0)  # 0, with the gradient of log pi
    ratio = safe_exp(torch.where(mask, mean, 0.0) + through)
    loss, flags = _clipped(ratio, a, clip_low, clip_high, None)
    return _finish(loss, mask, log_ratio, flags, weights, aggregation, divisor, segments)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """CISPO: L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi; no token loses its gradient.

    MiniMax-M1, arXiv 2506.13585. The upper bound of the ratio is ``1 + clip_high``, as in the
    paper.

    Args: as ``ppo_clip_loss``.
        clip_low: ``None`` is no lower bound, which is how the paper uses it.
        clip_high: 4.0 bounds the ratio by 5.
    """
    check_clip(0.0 if clip_low is None else clip_low, clip_high)
    logp, mask = _policy(logprobs, mask)
    log_ratio = (logp - _constant(old_logprobs, mask, "old_logprobs", logp.dtype)).detach()
    a = _constant(advantages, mask, "advantages", logp.dtype, per_row=True)
    ratio = safe_exp(log_ratio)
    low = 0.0 if clip_low is None else 1 - clip_low
    weight = ratio.clamp(low, 1 + clip_high)
    flags = {"clip_low": ratio < low, "clip_high": ratio > 1 + clip_high}
    # A log-prob of -inf has weight 0 here: 0 times it shall be 0.
    return _finish(-weight * a * logp.clamp(min=-FAR), mask, log_ratio, flags, weights, aggregation, divisor, segments)


def decoupled_ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    behaviour_cap: float | None = 5.0,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """Decoupled PPO for asynchronous training: clip against a recent policy, correct for the one that drew the
    tokens.

    L = (pi_prox / pi_behav) * max(-r A, -clip(r) A), r = pi / pi_prox. Hilton et al. (arXiv 2110.00641, the decoupled
    objective), as used by AReaL (arXiv 2505.24298). With equal policies it is PPO.

    Args: as ``ppo_clip_loss``.
        proximal_logprobs: [B, T], the policy that the update may not leave (the trainer's weights at the step's
            start).
        behaviour_logprobs: [B, T], the policy that drew each token.
        behaviour_cap: upper bound of the constant weight pi_prox / pi_behav; ``None`` for none.
    """
    check_clip(clip_low, clip_high, dual_clip)
    _check.positive(**_check.given(behaviour_cap=behaviour_cap))
    logp, mask = _policy(logprobs, mask)
    proximal = _constant(proximal_logprobs, mask, "proximal_logprobs", logp.dtype)
    behaviour = _constant(behaviour_logprobs, mask, "behaviour_logprobs", logp.dtype)
    a = _constant(advantages, mask, "advantages", logp.dtype, per_row=True)
    log_ratio = logp - proximal
    loss, flags = _clipped(safe_exp(log_ratio), a, clip_low, clip_high, dual_clip)
    correction = safe_exp(proximal - behaviour)
    if behaviour_cap is not None:
        flags["behaviour_capped"] = correction > behaviour_cap
        correction = correction.clamp(max=behaviour_cap)
    return _finish(loss * correction, mask, log_ratio, flags, weights, aggregation, divisor, segments)


def sft_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """Supervised fine-tuning: L = -log pi of the target tokens (negative log-likelihood). Arguments as
    ``ppo_clip_loss``."""
    logp, mask = _policy(logprobs, mask)
    return _finish(-logp, mask, None, {}, weights, aggregation, divisor, segments)
