"""Masks: what a position counts for, applied before anything that can overflow.

Shape legend: B sequences, T positions. ``mask`` is true where the policy produced the token (or took the step).
A stretch of false positions between two true ones is a *gap* (tool output): it is not a time step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos._dist import Group, sum_over_ranks
from rlinf_algos.errors import AlgorithmError

# exp(20) = 4.9e8: beyond it a ratio says nothing more, and float32 has room to multiply and sum.
EXP_LIMIT = 20.0
# As far as a log-ratio is told apart from infinity: e^20 times it still fits float32, and 0 times it is 0.
FAR = 1e20


def safe_exp(x: Tensor, limit: float = EXP_LIMIT) -> Tensor:
    """exp(x) for x <= ``limit``, its tangent line beyond.

    Value and gradient stay finite for any ``x``, -inf (a token that the policy gives no probability) and +inf
    included; the function stays increasing and convex, so unlike with a clamp the gradient does not vanish where it
    is needed most.
    """
    if x.device.type == "cpu" and not bool((x > limit).any()):
        return torch.exp(x)  # looking is cheaper there than what follows
    bounded = x.clamp(max=limit)
    return torch.exp(bounded) * (1 + torch.relu(x - limit).clamp(max=FAR))


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` [B, T] in computing precision with zeros where ``mask`` is false; NaN and infinities there touch
    neither value nor gradient."""
    return torch.where(mask, _check.widen(x), 0.0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``x`` over the true positions of ``mask`` (same shape), a scalar."""
    _check.floating(x=x)
    _check.same_shape(x=x, mask=mask)
    return zero_masked(x, _check.boolean(mask)).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` over the true positions of ``mask`` (same shape), a scalar; zero when there are none."""
    _check.floating(x=x)
    _check.same_shape(x=x, mask=mask)
    mask = _check.boolean(mask)
    return zero_masked(x, mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    group: Group = None,
) -> Tensor:
    """Whiten over all true positions, and over all ranks when ``group`` is given.

    (x - mean) / (std + eps), std with ddof = 0 (so that one position gives 0, not NaN). Where the values
    do not differ by more than rounding, the result is zero; with ``shift_mean=False``, the values as they are.

    Args:
        values: any shape.
        mask: bool or integer, the same shape.
        shift_mean: ``False`` keeps the mean (scales only, as some do with rewards).
        eps: added to the standard deviation.
        group: ``torch.distributed`` process group; statistics are then those of all its ranks (collective: every
            rank must call, also one with nothing).

    Returns:
        values' shape, zero where the mask is false. One position alone gives 0 (itself with ``shift_mean=False``).

    Raises:
        AlgorithmError: on every rank, when a value at a true position (of any rank) is NaN or infinite.
    """
    _check.floating(values=values)
    _check.same_shape(values=values, mask=mask)
    _check.not_negative(eps=eps)
    mask = _check.boolean(mask)
    x = torch.where(mask, _check.precise(values), 0.0)
    count, total = sum_over_ranks(torch.stack((mask.sum().to(x.dtype), x.sum())), group).unbind()
    if not bool(total.isfinite()):
        raise AlgorithmError("values holds NaN or an infinite value at a true position of mask; leave it out of mask")
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, x - mean, 0.0)
    square = sum_over_ranks(centred.square().sum(), group)
    std = (square / count.clamp(min=1)).sqrt()
    noise = 4 * torch.finfo(_check.wide(values.dtype)).eps * mean.abs()
    flat = (std <= noise) | (count < 2)
    scaled = (centred if shift_mean else x) / (std + eps)
    kept = torch.zeros_like(x) if shift_mean else x
    return torch.where(flat, kept, scaled).to(_check.wide(values.dtype))


def last_trainable(mask: Tensor) -> Tensor:
    """Index [B] of the last true position of each row of ``mask`` [B, T]; -1 for a row without any."""
    _check.ndim(2, "[B, T]", mask=mask)
    mask = _check.boolean(mask)
    positions = torch.arange(mask.shape[1], device=mask.device)
    if mask.shape[1] == 0:
        return torch.full((mask.shape[0],), -1, dtype=torch.long, device=mask.device)
    return torch.where(mask, positions, -1).amax(dim=1)


def terminal_reward(rewards: Tensor, mask: Tensor) -> Tensor:
    """Put each sequence's reward [B] on its last trainable token: [B, T], zero elsewhere.

    Not on the last position: that may be padding, or tool output. A row without any true position has no place for
    its reward and stays zero. NaN is put there too, and refused by ``gae``: leave such rows out of the mask.
    """
    _check.floating(rewards=rewards)
    _check.ndim(1, "[B]", rewards=rewards)
    last = last_trainable(mask)
    if last.shape != rewards.shape:
        raise AlgorithmError(f"rewards has {rewards.shape[0]} entries but mask has {mask.shape[0]} rows")
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(positions == last[:, None], rewards[:, None].to(_check.wide(rewards.dtype)), 0.0)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position ids [B, T] that count real tokens from 0, so that padding on the left changes nothing, also for
    learned positions. Padding gets 0. ``attention_mask`` is true at real tokens (prompt and tool output included).
    """
    _check.ndim(2, "[B, T]", attention_mask=attention_mask)
    mask = _check.boolean(attention_mask, "attention_mask")
    return torch.where(mask, mask.long().cumsum(dim=1) - 1, 0)


def turn_ids(mask: Tensor) -> Tensor:
    """Number the stretches of true positions of each row from 0: [B, T], -1 at false positions.

    In a conversation with tools each stretch is one turn of the policy.
    """
    _check.ndim(2, "[B, T]", mask=mask)
    mask = _check.boolean(mask)
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0)) if mask.shape[1] else mask
    starts = mask & ~before
    return torch.where(mask, starts.long().cumsum(dim=1) - 1, -1)


def sequence_keys(mask: Tensor, segments: Tensor | None) -> tuple[Tensor, int]:
    """Number the sequences of a batch: ([B, T] of 0..n-1, n).

    Without ``segments`` a sequence is a row. With them [B, T] (integers of at least 0, as packing gives them) it is
    the positions of one row with one id.
    """
    rows, length = mask.shape
    row = torch.arange(rows, device=mask.device)[:, None]
    if segments is None:
        return row.expand(rows, length), rows
    _check.integral(segments=segments)
    _check.same_shape(mask=mask, segments=segments)
    if segments.numel() == 0:
        return row.expand(rows, length), rows
    low, high = int(segments.min()), int(segments.max())
    width = high - low + 1
    if rows * width > 16 * max(mask.numel(), 1):
        raise AlgorithmError(f"segments must be small integers counted per row; got ids from {low} to {high}")
    return row * width + (segments.long() - low), rows * width


def sequence_sums(x: Tensor, mask: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per sequence: the sum of ``x`` [n], the count of true positions [n], and the keys [B, T] of the sequences
    (``None`` where a sequence is a row)."""
    if segments is None:
        return zero_masked(x, mask).sum(dim=1), mask.sum(dim=1), None
    keys, n = sequence_keys(mask, segments)
    flat = keys.reshape(-1)
    values = zero_masked(x, mask).reshape(-1)
    sums = values.new_zeros(n).index_add(0, flat, values)
    counts = torch.zeros(n, dtype=torch.long, device=mask.device).index_add_(0, flat, mask.reshape(-1).long())
    return sums, counts, keys


def per_sequence(values: Tensor, keys: Tensor | None, length: int) -> Tensor:
    """Spread a value of each sequence [n] back over its positions [B, T]."""
    return values[:, None].expand(-1, length) if keys is None else values[keys]
