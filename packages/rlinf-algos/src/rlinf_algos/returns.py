"""Advantages and returns over time.

Shape legend: B rows (sequences or environments), T positions. Time runs over the *true* positions of ``mask`` alone:
a gap is not a time step, so discounting, the next value and the reward's way back all step over it. Rewards and
values at false positions are not read (put a terminal reward on the last true position: ``terminal_reward``).
Everything is computed without gradients.

The recursion A_t = delta_t + c_t A_{t+1} is solved in blocks: with one coefficient for all t by a product with its
powers, otherwise by scanning all blocks side by side. Work grows as T; python steps as sqrt(T) at most.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos._dist import Group
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import terminal_reward, whiten

# Width of the blocks multiplied with powers of the coefficient.
_WIDTH = 32
# Elements of a group of rows that is worked through at a time on a CPU.
_BLOCK = 2**17


@torch.no_grad()
def discounted_scan(x: Tensor, coefficient: float | Tensor) -> Tensor:
    """y_t = x_t + c_t y_{t+1} along the last dimension, y_T = 0.

    Computed without gradients, like everything here.

    Args:
        x: [B, T] floating point.
        coefficient: c, one finite number for all, or [B, T].

    Returns:
        [B, T].
    """
    _check.floating(x=x)
    _check.ndim(2, "[B, T]", x=x)
    x = _check.widen(x)
    if isinstance(coefficient, Tensor):
        _check.same_shape(x=x, coefficient=coefficient)
        _check.floating(coefficient=coefficient)
        return _scan(x, coefficient.to(x.dtype))
    _check.number(coefficient=coefficient)
    if not math.isfinite(coefficient):
        raise AlgorithmError(f"coefficient must be finite, got {coefficient}")
    if x.numel() == 0 or coefficient == 0:
        return x.clone()
    # On a GPU, or with a lowered matmul precision, a float32 product is not exact enough.
    exact = x.dtype == torch.float64 or torch.get_float32_matmul_precision() == "highest"
    if x.device.type != "cpu" or not exact or abs(coefficient) > 1:
        return _scan(x, torch.full((1, 1), coefficient, dtype=x.dtype, device=x.device).expand_as(x))
    with torch.autocast(device_type=x.device.type, enabled=False):
        return _scan_constant(x, coefficient)


def _powers(n: int, c: float, dtype: torch.dtype) -> Tensor:
    """[n, n] matrix P with P[i, j] = c^(i - j) for i >= j, so that (x P)_j = sum_{i >= j} c^(i - j) x_i."""
    steps = torch.arange(n)
    gap = (steps[:, None] - steps[None, :]).clamp(min=0).to(torch.float64)
    return torch.tril(torch.full((), c, dtype=torch.float64).pow(gap)).to(dtype)


def _scan_constant(x: Tensor, c: float) -> Tensor:
    rows, length = x.shape
    width = min(_WIDTH, length)
    blocks = math.ceil(length / width)
    if blocks * width != length:
        x = torch.nn.functional.pad(x, (0, blocks * width - length))
    local = (x.reshape(-1, width) @ _powers(width, c, x.dtype)).view(rows, blocks, width)
    if blocks == 1:
        return local.view(rows, -1)[:, :length]
    # What enters block k from its right is the same recursion over the blocks' heads, with c^width.
    heads = discounted_scan(local[:, 1:, 0].contiguous(), c**width)
    decay = torch.full((), c, dtype=torch.float64).pow(torch.arange(width, 0, -1)).to(x.dtype)
    local[:, :-1].addcmul_(heads[:, :, None], decay)
    return local.view(rows, -1)[:, :length]


def _scan(x: Tensor, c: Tensor) -> Tensor:
    rows, length = x.shape
    if length == 0:
        return x.clone()
    width = max(1, math.isqrt(length))
    blocks = math.ceil(length / width)
    pad = blocks * width - length
    if pad:
        x, c = torch.nn.functional.pad(x, (0, pad)), torch.nn.functional.pad(c, (0, pad))
    # [width, blocks, B]: every step works on contiguous memory, all blocks side by side.
    y = x.view(rows, blocks, width).permute(2, 1, 0).contiguous()
    factor = c.reshape(rows, blocks, width).permute(2, 1, 0).contiguous()
    for t in range(width - 2, -1, -1):
        y[t].addcmul_(factor[t], y[t + 1])
        factor[t].mul_(factor[t + 1])
    carry = torch.zeros_like(y[0])
    for k in range(blocks - 2, -1, -1):
        torch.addcmul(y[0, k + 1], factor[0, k + 1], carry[k + 1], out=carry[k])
    y.addcmul_(factor, carry)
    return y.permute(2, 1, 0).reshape(rows, -1)[:, :length]


def _has_gap(mask: Tensor) -> bool:
    """Whether a false position lies between two true ones."""
    starts = mask[:, 1:] & ~mask[:, :-1]
    return bool((starts.sum(1) + mask[:, 0] > 1).any())


class _Packed:
    """The true positions of each row moved to its front, and back."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        counts = mask.cumsum(1)
        self.place = (counts - 1).clamp(min=0)
        self.length = int(counts[:, -1].max())

    def front(self, x: Tensor) -> Tensor:
        """``x`` [B, T] with zeros at false positions -> [B, longest]."""
        out = x.new_zeros(x.shape[0], self.length)
        return out.scatter_add_(1, self.place, x)

    def back(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, x.gather(1, self.place), 0.0)


def _inputs(rewards: Tensor, mask: Tensor, gamma: float, lam: float, **others: Tensor | None) -> tuple[Tensor, Tensor]:
    _check.floating(rewards=rewards)
    _check.ndim(2, "[B, T]", rewards=rewards)
    _check.same_shape(rewards=rewards, mask=mask, **others)
    _check.unit(gamma=gamma, lam=lam)
    mask = _check.boolean(mask)
    r = torch.where(mask, _check.widen(rewards), 0.0)
    if not bool(r.sum().isfinite()) and not bool(r.isfinite().all()):
        raise AlgorithmError(
            "rewards holds NaN or an infinite value at a true position of mask. Leave the rows whose reward could not"
            " be computed out of mask: mask & ~rewards_per_row.isnan()[:, None], or valid by name"
        )
    return r, mask


def _own(mask: Tensor, flags: Tensor) -> Tensor | None:
    """For each true position of ``mask`` the first position from it on, and before the next true one, where ``flags``
    holds: [B, T], T where there is none. ``None`` where no flag lies at a false position.

    An episode may end in what follows an action (the tool's answer, an auto-reset): the end belongs to the action.
    """
    if not bool((flags & ~mask).any()):
        return None
    length = mask.shape[1]
    position = torch.arange(length, device=mask.device).expand_as(mask)
    owner = torch.where(mask, position, -1).cummax(1).values
    first = torch.full(mask.shape, length, device=mask.device)
    held = torch.where(flags & (owner >= 0), position, length)
    return first.scatter_reduce_(1, owner.clamp(min=0), held, "amin")


def _at(first: Tensor | None, x: Tensor) -> Tensor:
    """``x`` [B, T] read where ``first`` says; False or 0 where there is nothing."""
    if first is None:
        return x
    length = x.shape[1]
    return x.gather(1, first.clamp(max=length - 1)).masked_fill(first == length, 0)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (advantages, returns), both [B, T].

    Schulman et al., arXiv 1506.02438, equations 11 and 16: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma
    lam A_{t+1}, return_t = A_t + V_t, where t + 1 is the next *true* position. After a row's last one the value is 0
    (the response has ended), or ``last_values``.

    Works at any level by what a position is: a token, an environment step, an action chunk (``chunk_rewards``), or a
        turn.

    Args:
        rewards: [B, T]; what lies at false positions is not read.
        values: [B, T], V of the state *before* the position's action.
        mask: [B, T] bool or integer; any padding side, gaps allowed.
        gamma: discount in [0, 1]; the reference for token level is 1.
        lam: lambda in [0, 1].
        terminated: [B, T], true where an episode really ended at this step: nothing is bootstrapped over it.
        truncated: [B, T], true where an episode was cut off (time limit) at this step: the recursion stops, and
            ``final_values`` at this step is bootstrapped. Where both are true the episode terminated.
            An end at a false position (in a gap, or in the padding after the row) is that of the last true position
            before it; where that has several, the first counts. Before a row's first true position none is read.
        final_values: [B, T], V of the observation before the reset, read where truncated; needed with ``truncated``.
        last_values: [B], V of the state after each row's last true position, for a rollout cut while the episode goes
            on. Not read where that position terminated or was truncated.

    Returns:
        float32 (float64 when rewards and values are float64), zero at false positions.

    Raises:
        AlgorithmError: wrong shapes, dtypes or options; NaN or infinite rewards at true positions (a returns target
            cannot be made up: leave such rows out of ``mask``).
    """
    _check.floating(values=values, final_values=final_values, last_values=last_values)
    r, mask = _inputs(
        rewards, mask, gamma, lam, values=values, terminated=terminated, truncated=truncated, final_values=final_values
    )
    if truncated is not None and final_values is None:
        raise AlgorithmError("truncated needs final_values: the value of the observation where it was cut off")
    if final_values is not None and truncated is None:
        raise AlgorithmError("final_values is read where truncated is true; give truncated as well")
    _check.shape(rewards.shape[:1], "[B]", last_values=last_values)
    dtype = torch.promote_types(r.dtype, _check.wide(values.dtype))
    if r.numel() > _BLOCK and r.shape[0] > 1 and r.device.type == "cpu":
        return _by_rows(r, values, mask, gamma, lam, terminated, truncated, final_values, last_values, dtype)
    v = torch.where(mask, values.to(dtype), 0.0)
    r = r.to(dtype)
    if r.numel() == 0:
        return r, v
    whole, packed = mask, None
    if _has_gap(mask):
        packed = _Packed(mask)
        r, v, mask = packed.front(r), packed.front(v), packed.front(mask.to(dtype)) > 0
    after = torch.zeros_like(v)
    torch.mul(v[:, 1:], gamma, out=after[:, :-1])
    if last_values is not None:
        after += gamma * terminal_reward(last_values.to(dtype), mask)
    coefficient: float | Tensor = gamma * lam
    if terminated is not None or truncated is not None:
        none = torch.zeros_like(whole)
        cuts = none if truncated is None else _check.boolean(truncated, "truncated")
        stops = none if terminated is None else _check.boolean(terminated, "terminated")
        first = _own(whole, cuts | stops)
        ends = none
        if truncated is not None and final_values is not None:
            cut = _at(first, cuts) & whole
            ends = ends | cut
            final = _values(cut, _at(first, final_values), dtype, packed)
            after = torch.where(_moved(cut, packed), gamma * final, after)
        if terminated is not None:
            stop = _at(first, stops) & whole
            ends = ends | stop
            after = torch.where(_moved(stop, packed), 0.0, after)
        coefficient = (gamma * lam) * _moved(ends, packed).logical_not().to(dtype)
    delta = torch.where(mask, r + after - v, 0.0)
    advantages = discounted_scan(delta, coefficient)
    if packed is not None:
        advantages = packed.back(advantages)
        v = packed.back(v)
    else:
        advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + v


def _by_rows(
    r: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    terminated: Tensor | None,
    truncated: Tensor | None,
    final_values: Tensor | None,
    last_values: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``gae`` of some rows at a time, so that what lies between the steps stays in the cache."""
    advantages, returns = torch.empty_like(r, dtype=dtype), torch.empty_like(r, dtype=dtype)
    step = max(1, _BLOCK // r.shape[1])
    for i in range(0, r.shape[0], step):
        part = slice(i, i + step)
        advantages[part], returns[part] = gae(
            r[part],
            values[part],
            mask[part],
            gamma=gamma,
            lam=lam,
            terminated=None if terminated is None else terminated[part],
            truncated=None if truncated is None else truncated[part],
            final_values=None if final_values is None else final_values[part],
            last_values=None if last_values is None else last_values[part],
        )
    return advantages, returns


def _moved(flags: Tensor, packed: _Packed | None) -> Tensor:
    return flags if packed is None else packed.front(flags.float()) > 0


def _values(where: Tensor, values: Tensor, dtype: torch.dtype, packed: _Packed | None) -> Tensor:
    kept = torch.where(where, values.to(dtype), 0.0)
    return kept if packed is None else packed.front(kept)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, ends: Tensor | None = None) -> Tensor:
    """Return-to-go R_t = r_t + gamma R_{t+1} over the true positions: [B, T].

    A later reward reaches the actions before a gap, and the gap costs no discount.

    Args:
        rewards, mask: [B, T].
        gamma: in [0, 1].
        ends: [B, T], true where an episode ended at this step, for several episodes in a row. At a false position it is
            the end of the last true one before it.
    """
    r, mask = _inputs(rewards, mask, gamma, 1.0, ends=ends)
    if r.numel() == 0:
        return r
    packed = _Packed(mask) if _has_gap(mask) else None
    coefficient: float | Tensor = gamma
    if packed is not None:
        r = packed.front(r)
    if ends is not None:
        flags = _check.boolean(ends, "ends")
        stop = _at(_own(mask, flags), flags) & mask
        coefficient = gamma * _moved(stop, packed).logical_not().to(r.dtype)
    returns = discounted_scan(r, coefficient)
    return torch.where(mask, returns, 0.0) if packed is None else packed.back(returns)


def reinforce_pp_advantage(
    rewards: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
    gamma: float = 1.0,
    eps: float = 1e-8,
    ranks: Group = None,
) -> Tensor:
    """REINFORCE++: return-to-go of the reward less the KL penalty, whitened over all tokens of the batch: [B, T].

    Hu et al., arXiv 2501.03262: A_t = r 1[t is last] - beta sum_{i >= t} KL_i, then (A - mean) / std over
    the batch. Needs the whole batch, so it does not stream.

    Args:
        rewards: [B] per sequence (put on the last true position) or [B, T]. NaN (at a true position) leaves the
            sequence out; infinite rewards are refused.
        mask: [B, T].
        kl: [B, T] estimate per token (``kl_penalty(..., "k1")``), a constant.
        kl_coefficient: beta.
        gamma: discount.
        ranks: process group; the statistics are those of all its ranks.
    """
    _check.floating(rewards=rewards, kl=kl)
    _check.not_negative(kl_coefficient=kl_coefficient)
    _check.ndim(2, "[B, T]", mask=mask)
    mask = _check.boolean(mask)
    if rewards.ndim == 1:
        if rewards.shape[0] != mask.shape[0]:
            raise AlgorithmError(f"rewards has {rewards.shape[0]} entries but mask has {mask.shape[0]} rows")
        rewards = terminal_reward(rewards, mask)
    _check.ndim(2, "[B] or [B, T]", rewards=rewards)
    _check.same_shape(mask=mask, rewards=rewards, kl=kl)
    mask = mask & ~(rewards.isnan() & mask).any(1)[:, None]
    if kl is not None and kl_coefficient:
        rewards = rewards - kl_coefficient * torch.where(mask, kl.detach(), 0.0)
    elif kl_coefficient:
        raise AlgorithmError("kl_coefficient needs kl: the estimate per token")
    return whiten(discounted_returns(rewards, mask, gamma=gamma), mask, eps=eps, group=ranks)


@torch.no_grad()
def chunk_rewards(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """From environment steps to action chunks: ([B, T] sum of each chunk's rewards, [B, T] mask of chunks).

    ``rewards`` and ``mask`` are [B, T, C] with C steps per chunk; a chunk counts when one of its steps does (an
    episode may end inside it). With ``gae`` on the result a chunk is one time step, at which one value was predicted.
    """
    _check.floating(rewards=rewards)
    _check.ndim(3, "[B, T, C]", rewards=rewards)
    _check.same_shape(rewards=rewards, mask=mask)
    mask = _check.boolean(mask)
    return torch.where(mask, _check.widen(rewards), 0.0).sum(-1), mask.any(-1)


@torch.no_grad()
def turn_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, turns: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """GAE where a time step is a whole turn: (advantages, returns), [B, T], the turn's on each of its tokens.

    A turn's reward is the sum over its tokens, its value that of its first token (the state in which it begins).

    Args:
        rewards, values, mask: [B, T].
        turns: [B, T] integers of at least 0, the number of each position's turn, not falling along a row; read at true
            positions (``turn_ids(mask)`` makes every stretch a turn). Numbers that are left out are no turns.
    """
    _check.floating(values=values)
    _check.integral(turns=turns)
    r, mask = _inputs(rewards, mask, gamma, lam, values=values, turns=turns)
    if r.numel() == 0 or not bool(mask.any()):
        return torch.zeros_like(r), torch.zeros_like(r)
    numbers = torch.where(mask, turns.long(), 0)
    if int(numbers.min()) < 0:
        raise AlgorithmError("turns holds a negative number at a true position of mask")
    reached = torch.where(mask, numbers, -1).cummax(1).values
    if bool((mask & (numbers < reached)).any()):
        raise AlgorithmError("turns falls along a row: number the turns of a row in the order they were taken")
    # Counted densely, so that turns numbered across conversations cost no memory.
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0), value=-1)
    index = ((mask & (numbers > before)).long().cumsum(1) - 1).clamp(min=0)
    n = int(index.max()) + 1
    held = r.new_zeros(r.shape[0], n).scatter_add_(1, index, mask.to(r.dtype)) > 0
    reward = r.new_zeros(r.shape[0], n).scatter_add_(1, index, r)
    length = mask.shape[1]
    position = torch.arange(length, device=r.device).expand_as(mask)
    first = torch.full((r.shape[0], n), length, device=r.device)
    first = first.scatter_reduce_(1, index, torch.where(mask, position, length), "amin")
    v = torch.where(mask, _check.widen(values), 0.0)
    value = torch.where(held, v.gather(1, first.clamp(max=length - 1)), 0.0)
    advantages, returns = gae(reward, value, held, gamma=gamma, lam=lam)
    return torch.where(mask, advantages.gather(1, index), 0.0), torch.where(mask, returns.gather(1, index), 0.0)
