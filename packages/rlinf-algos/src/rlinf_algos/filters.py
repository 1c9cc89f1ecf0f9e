"""What to keep, and what a reward becomes before it is compared.

Shape legend: B samples, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.advantages import SIGNAL_TOLERANCE, Grouped, Groups, group_ids
from rlinf_algos.errors import AlgorithmError, NoSignalError


@torch.no_grad()
def groups_with_signal(rewards: Tensor, groups: Groups, *, valid: Tensor | None = None) -> Tensor:
    """Dynamic sampling's filter: [B] bool, true for samples of groups whose rewards differ.

    DAPO (arXiv 2503.14476, equation 11). Works for any reward, not 0 and 1 alone; rewards that are equal up to
    rounding, and groups with fewer than two valid samples, have no signal. NaN rewards and samples with ``valid``
    false are no peers and are not kept.
    """
    grouped = Grouped(rewards, groups, valid, None)
    return grouped.signal[grouped.index] & grouped.valid


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Bounded refill: draw until ``target`` groups have signal, in at most ``max_rounds`` rounds. Pure state.

    ``state = state.add(rewards, groups)`` after each round (whole groups), then ``state.done``; ``state.missing`` is
    how many more groups are wanted and ``state.kept`` the ids to train on, oldest first, never more than ``target``.

    Raises:
        NoSignalError: by ``add``, when the last round is used up; the message says what became of all groups.
    """

    target: int
    max_rounds: int = 10
    rounds: int = 0
    kept: tuple[Hashable, ...] = ()
    seen: int = 0
    no_reward: int = 0
    equal: dict[float, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check.whole(target=self.target, max_rounds=self.max_rounds)
        if self.target < 1 or self.max_rounds < 1:
            raise AlgorithmError(f"target and max_rounds must be at least 1, got {self.target} and {self.max_rounds}")

    @property
    def done(self) -> bool:
        return len(self.kept) >= self.target

    @property
    def missing(self) -> int:
        return max(self.target - len(self.kept), 0)

    def add(self, rewards: Tensor, groups: Groups, *, valid: Tensor | None = None) -> DynamicSampling:
        """The state after one more round of complete groups, with ids that were not used before (an integer tensor
        [B] counts by its numbers)."""
        groups = group_ids(groups)
        keep = groups_with_signal(rewards, groups, valid=valid).tolist()
        use = ~rewards.isnan() if valid is None else ~rewards.isnan() & _check.boolean(valid, "valid")
        signal = dict.fromkeys(g for g, k in zip(groups, keep, strict=True) if k)
        used = set(self.kept)
        again = [g for g in dict.fromkeys(groups) if g in used]
        if again:
            raise AlgorithmError(f"group {again[0]!r} was kept in an earlier round; group ids must be new")
        equal, no_reward = dict(self.equal), self.no_reward
        flat: dict[Hashable, float] = {}
        for g, r, u in zip(groups, rewards.tolist(), use.tolist(), strict=True):
            if u and g not in signal:
                flat.setdefault(g, r)
        names = dict.fromkeys(groups)
        for g in names:
            if g in flat:
                equal[flat[g]] = equal.get(flat[g], 0) + 1
            elif g not in signal:
                no_reward += 1
        state = replace(
            self,
            rounds=self.rounds + 1,
            kept=(*self.kept, *signal)[: self.target],
            seen=self.seen + len(names),
            no_reward=no_reward,
            equal=equal,
        )
        if not state.done and state.rounds >= state.max_rounds:
            raise NoSignalError(state.explain())
        return state

    def explain(self) -> str:
        """What became of the groups so far, and what to change."""
        common = sorted(self.equal.items(), key=lambda kv: -kv[1])
        parts = [f"{count} with every reward equal to {value:g}" for value, count in common[:3]]
        rest = sum(count for _, count in common[3:])
        if rest:
            parts.append(f"{rest} equal at other values")
        if self.no_reward:
            parts.append(f"{self.no_reward} without any reward (the reward function failed, or all were masked)")
        advice = "the tasks are too hard or too easy for the policy, or the group is too small"
        if self.no_reward > self.seen / 2:
            advice = "look at the reward function"
        elif len(common) == 1 and not self.no_reward:
            advice = f"the reward is always {common[0][0]:g}: look at the reward function and the answer format"
        return (
            f"{len(self.kept)} of {self.target} groups have signal after {self.rounds} rounds ({self.seen} groups):"
            f" {'; '.join(parts) or 'none was drawn'}. {advice[0].upper()}{advice[1:]}."
        )


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_length: int, cache: int) -> Tensor:
    """Soft over-long punishment to add to the reward: 0 up to ``max_length - cache``, falling to -1 at
    ``max_length``: [B].

    DAPO (arXiv 2503.14476, equation 13). ``lengths`` [B] integers, in tokens; beyond ``max_length`` the penalty stays
    -1.
    """
    _check.integral(lengths=lengths)
    _check.whole(max_length=max_length, cache=cache)
    if not 0 < cache <= max_length:
        raise AlgorithmError(f"cache must lie in 1..max_length ({max_length}), got {cache}")
    return ((max_length - cache - lengths.long()) / cache).clamp(-1.0, 0.0)


@torch.no_grad()
def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """Mask [B, T] without the responses that the length limit cut (``truncated`` [B]): their reward tells nothing.

    DAPO (arXiv 2503.14476, section 3.4). Give ``valid = result.any(1)`` to the advantage, so that they are no peers
    either.
    """
    _check.ndim(2, "[B, T]", mask=mask)
    _check.shape(mask.shape[:1], "[B]", truncated=truncated)
    return _check.boolean(mask) & ~_check.boolean(truncated, "truncated")[:, None]


@torch.no_grad()
def staleness_filter(versions: Tensor, mask: Tensor, *, current: int, max_staleness: int) -> Tensor:
    """[B] bool, true where every trainable token was drawn by a policy at most ``max_staleness`` versions old.

    Args:
        versions: [B, T] integers, the policy version that drew each token.
        mask: [B, T]; versions at false positions are not read. A row without a true position is not kept.
        current: the version about to be trained.
    """
    _check.integral(versions=versions)
    _check.ndim(2, "[B, T]", versions=versions)
    _check.same_shape(versions=versions, mask=mask)
    _check.whole(current=current)
    _check.whole(0, max_staleness=max_staleness)
    mask, versions = _check.boolean(mask), versions.long()
    if bool((mask & (versions > current)).any()):
        raise AlgorithmError(f"versions holds one newer than current ({current}): wrong counters")
    return ((current - versions <= max_staleness) | ~mask).all(1) & mask.any(1)


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """Running mean and variance of rewards (Welford; Chan et al. for batches). Pure state; merging is exact in any
    order."""

    count: float = 0.0
    mean: float = 0.0
    square: float = 0.0

    def add(self, rewards: Tensor) -> RewardStatistics:
        """With one more batch; NaN rewards are left out, infinite ones refused."""
        _check.floating(rewards=rewards)
        r = rewards.detach().double().flatten()
        r = r[~r.isnan()]
        if not len(r):
            return self
        if not bool(r.isfinite().all()):
            raise AlgorithmError("rewards holds an infinite value; use NaN for a reward that could not be computed")
        mean = float(r.mean())
        return self.merge(RewardStatistics(float(len(r)), mean, float((r - mean).square().sum())))

    def merge(self, other: RewardStatistics) -> RewardStatistics:
        """With what another rank has seen."""
        count = self.count + other.count
        if count == 0:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        square = self.square + other.square + gap * gap * self.count * other.count / count
        return RewardStatistics(count, mean, square)

    @property
    def std(self) -> float:
        """Standard deviation with ddof = 0."""
        return math.sqrt(self.square / self.count) if self.count else 0.0


def normalise_rewards(
    rewards: Tensor,
    statistics: RewardStatistics,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    clip: float | None = None,
) -> Tensor:
    """(r - mean) / (std + eps), clipped to [-clip, clip]: [B]. NaN stays NaN (a reward that could not be computed).

    Zero where the statistics have no spread (shifted), or the rewards as they are (not shifted).
    """
    _check.floating(rewards=rewards)
    _check.positive(**_check.given(clip=clip))
    _check.not_negative(eps=eps)
    r = _check.widen(rewards)
    spread = statistics.std
    if spread <= SIGNAL_TOLERANCE * abs(statistics.mean) or statistics.count < 2:
        spread = 0.0
    if shift_mean:
        r = (r - statistics.mean) / (spread + eps) if spread else torch.where(r.isnan(), r, 0.0)
    elif spread:
        r = r / (spread + eps)
    return r if clip is None else r.clamp(-clip, clip)
