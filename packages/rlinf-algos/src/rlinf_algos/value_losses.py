"""Value losses. Shape legend: B sequences or environments, T positions."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.aggregation import LossSum, aggregate
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import zero_masked

KINDS = ("square", "huber")


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    kind: str = "square",
    huber_delta: float = 1.0,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
) -> LossSum:
    """Value regression: L = e^2 / 2 (or Huber), optionally the larger of it and the clipped one.

    With ``clip``: L = max(l(V - R), l(clip(V, V_old - clip, V_old + clip) - R)), the trick of OpenAI's baselines for
    PPO. Huber: e^2 / 2 for |e| <= delta, delta (|e| - delta / 2) beyond, so ``huber`` with a large delta is
    ``square``.

    Args:
        values: [B, T]; gradients flow to it alone.
        returns: [B, T].
        mask: [B, T].
        old_values: [B, T], needed with ``clip``.
        clip: width above 0, in units of the value.
        kind: square or huber.
        huber_delta: above 0.
        aggregation, divisor, segments: as ``aggregate``.

    Returns:
        LossSum; metrics are sums over tokens: ``value_clipped``, ``value_error`` (e^2), ``tokens``.
    """
    _check.choice("kind", kind, KINDS)
    _check.positive(huber_delta=huber_delta, **_check.given(clip=clip))
    _check.floating(values=values, returns=returns, old_values=old_values)
    _check.ndim(2, "[B, T]", values=values)
    _check.same_shape(values=values, returns=returns, mask=mask, old_values=old_values)
    if (clip is None) != (old_values is None):
        raise AlgorithmError("clip and old_values belong together: give both or neither")
    mask = _check.boolean(mask)
    v, target = zero_masked(values, mask), zero_masked(returns.detach(), mask)
    loss = _element(v - target, kind, huber_delta)
    metrics = {"tokens": mask.sum(), "value_error": (v - target).detach().square().sum()}
    if clip is not None and old_values is not None:
        old = zero_masked(old_values.detach(), mask)
        bounded = old + (v - old).clamp(-clip, clip)
        clipped = _element(bounded - target, kind, huber_delta)
        moved = (v - old).abs() > clip  # else the two differ by rounding alone
        metrics["value_clipped"] = ((clipped > loss) & moved & mask).sum()
        loss = torch.maximum(loss, clipped)
    total, count = aggregate(loss, mask, aggregation, divisor=divisor, segments=segments)
    return LossSum(total, count, metrics)


def _element(error: Tensor, kind: str, delta: float) -> Tensor:
    if kind == "square":
        return 0.5 * error.square()
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))
