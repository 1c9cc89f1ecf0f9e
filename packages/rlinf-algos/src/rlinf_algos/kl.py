"""Estimates of KL(policy || reference) from the log-probs of sampled tokens, and the whole sum over the vocabulary.

With d = log pi(x) - log pi_ref(x), x drawn from pi (Schulman, "Approximating KL divergence", 2020):

====== =================== ============================================================================
kind   value               as a loss on on-policy samples its expected gradient is that of
====== =================== ============================================================================
k1     d                   nothing (E[grad log pi] = 0): refused as a loss
k2     d^2 / 2             the exact reverse KL(pi || ref): the default
k3     exp(-d) - 1 + d     the forward KL(ref || pi): what GRPO's paper has
abs    |d|                 the L1 distance between the two (twice the total variation)
====== =================== ============================================================================

Shape legend: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.aggregation import LossSum, aggregate
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import FAR, masked_sum, safe_exp, zero_masked

KINDS = ("k1", "k2", "k3", "abs")


def k3(log_ratio: Tensor) -> Tensor:
    """exp(u) - 1 - u for u = log pi_ref - log pi, any shape.

    Never negative (near 0 by its series, where the difference would round below zero) and finite for any ``u``:
    beyond u = 20 the exponential goes on as its tangent line. The common clamp at 20 has no gradient there.
    """
    log_ratio = log_ratio.clamp(-FAR, FAR)
    small = log_ratio.abs() < 1e-2
    s = torch.where(small, log_ratio, 0.0)
    series = s.square() * (0.5 + s * (1 / 6 + s * (1 / 24 + s / 120)))
    u = torch.where(small, 0.0, log_ratio)
    return torch.where(small, series, safe_exp(u) - 1 - u)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k1", *, mask: Tensor | None = None) -> Tensor:
    """KL estimate per token, for the reward or as a metric: [B, T] (any one shape).

    Gradients flow; detach it (or call without gradients) when it goes into a reward. As a loss use ``kl_loss``. In
    the reward
    k1 is the unbiased one: the reward r - beta * k1 has the gradient of E[r] - beta * KL.

    Args:
        logprobs: log pi of the sampled tokens.
        ref_logprobs: log pi_ref of the same tokens, the same shape.
        kind: k1, k2, k3 or abs.
        mask: same shape; false positions give 0 and no gradient, also when NaN or infinite.
    """
    _check.choice("kind", kind, KINDS)
    _check.floating(logprobs=logprobs, ref_logprobs=ref_logprobs)
    _check.same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    if mask is None:
        d = _check.widen(logprobs) - _check.widen(ref_logprobs)
    else:
        mask = _check.boolean(mask)
        d = zero_masked(logprobs, mask) - zero_masked(ref_logprobs, mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    return k3(-d) if kind == "k3" else d.abs()


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: str = "k2",
    straight_through: bool = False,
    behaviour_logprobs: Tensor | None = None,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
) -> LossSum:
    """KL to a reference as a loss term (sum and count).

    The default ``k2`` has, on on-policy samples, the gradient of the exact reverse KL. ``k3`` is the paper's choice
    in GRPO (arXiv 2402.03300, equation 4); its gradient is that of the forward KL. ``k1`` has no gradient in
    expectation and is refused.

    Args:
        logprobs, ref_logprobs, mask: [B, T]. The reference is a constant.
        kind: k2, k3 or abs (k1 with ``straight_through`` alone).
        straight_through: report the value of ``kind`` but take the gradient of k2.
        behaviour_logprobs: [B, T] log-probs of the policy that drew the tokens; when given, each token is weighed by
            the ratio pi / behaviour (a constant weight, at most e^20), which keeps the gradient exact off-policy.
        aggregation, divisor, segments: as ``aggregate``.

    Raises:
        AlgorithmError: for ``k1`` without ``straight_through``, with the reason.
    """
    if kind == "k1" and not straight_through:
        raise AlgorithmError(
            "kind 'k1' cannot be a loss: its gradient E[grad log pi] is zero in expectation, so it would add"
            " noise and no"
            " pull to the reference. Use 'k2' (the gradient of the exact reverse KL), or k1 in the reward."
        )
    _check.floating(logprobs=logprobs, ref_logprobs=ref_logprobs, behaviour_logprobs=behaviour_logprobs)
    _check.ndim(2, "[B, T]", logprobs=logprobs)
    mask = _check.boolean(mask)
    ref = ref_logprobs.detach()
    values = kl_penalty(logprobs, ref, kind, mask=mask)
    if straight_through:
        pull = kl_penalty(logprobs, ref, "k2", mask=mask)
        values = values.detach() + pull - pull.detach()
    if behaviour_logprobs is not None:
        _check.same_shape(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
        log_ratio = zero_masked(logprobs, mask) - zero_masked(behaviour_logprobs, mask)
        values = values * safe_exp(log_ratio.detach())
    total, count = aggregate(values, mask, aggregation, divisor=divisor, segments=segments)
    metrics = {
        "tokens": mask.sum(),
        "kl": masked_sum(values.detach(), mask),
        "kl_k1": kl_penalty(logprobs.detach(), ref, "k1", mask=mask).sum(),
    }
    return LossSum(total, count, metrics)


class _KLFull(torch.autograd.Function):
    """Rows of logits -> KL [N], with the gradient p_i ((log p_i - log q_i) - KL) computed in chunks."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: Tensor, ref: Tensor, chunk: int, temperature: float
    ) -> Tensor:
        out = torch.empty(logits.shape[0], dtype=_check.wide(logits.dtype), device=logits.device)
        for i in range(0, logits.shape[0], chunk):
            log_p = _tempered(logits[i : i + chunk], temperature)
            out[i : i + chunk] = _kl_terms(log_p, _tempered(ref[i : i + chunk], temperature)).sum(-1)
        ctx.save_for_backward(logits, ref, out)
        ctx.chunk, ctx.temperature = chunk, temperature  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ref, kl = ctx.saved_tensors  # type: ignore[attr-defined]
        chunk, temperature = ctx.chunk, ctx.temperature  # type: ignore[attr-defined]
        grad = torch.empty_like(logits)
        for i in range(0, logits.shape[0], chunk):
            log_p = _tempered(logits[i : i + chunk], temperature)
            log_q = _tempered(ref[i : i + chunk], temperature)
            part = _kl_terms(log_p, log_q) - log_p.exp() * kl[i : i + chunk, None]
            grad[i : i + chunk] = (part * (grads[0][i : i + chunk, None] / temperature)).to(grad.dtype)
        return grad, None, None, None


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), divided after widening."""
    return (_check.widen(logits) / temperature).log_softmax(-1)


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0)


def kl_full(
    logits: Tensor, ref_logits: Tensor, *, mask: Tensor | None = None, temperature: float = 1.0, chunk: int = 64
) -> Tensor:
    """The whole KL(pi || ref) per position, summed over the vocabulary: [B, T].

    Exact value and exact gradient to ``logits``; the reference gets none. Log-softmax of both exists for ``chunk``
    positions at a time. This one is right as a loss by itself: use it with ``aggregate``.

    Args:
        logits, ref_logits: [B, T, V].
        mask: [B, T]; false positions give 0, are not read and get no gradient.
        temperature: both are divided by it first (in float32 for narrower dtypes).
        chunk: positions computed together.
    """
    _check.floating(logits=logits, ref_logits=ref_logits)
    _check.ndim(3, "[B, T, V]", logits=logits)
    _check.same_shape(logits=logits, ref_logits=ref_logits)
    _check.temperature_of(temperature)
    _check.whole(1, chunk=chunk)
    x, y = logits.flatten(0, 1), ref_logits.detach().flatten(0, 1)
    keep = None
    if mask is not None:
        _check.shape(logits.shape[:2], "[B, T] of logits", mask=mask)
        keep = _check.boolean(mask).flatten()
        x, y = x[keep], y[keep]
    values = _KLFull.apply(x, y, chunk, temperature)  # type: ignore[no-untyped-call]
    if keep is not None:
        values = values.new_zeros(keep.shape).masked_scatter(keep, values)
    result: Tensor = values.view(logits.shape[:2])
    return result
