"""Advantages of whole responses or episodes, compared inside groups. See ``returns`` for those over time.

Shape legend: B samples. A group is the samples of one prompt (or task), told by *id*, in any order and of any size.
An advantage is a constant to the policy: everything here is computed without gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos._dist import Group
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import whiten, zero_masked

Groups = Sequence[Hashable] | Tensor
# Rewards of a group whose standard deviation is below this, relative to their size, are equal up to rounding.
SIGNAL_TOLERANCE = 1e-6


def group_index(groups: Groups, count: int) -> tuple[Tensor, int]:
    """Number group ids 0..n-1: (index [B], n). ``groups`` holds ``count`` hashables, or is an integer tensor [B]."""
    if isinstance(groups, Tensor):
        _check.ndim(1, "[B]", groups=groups)
        _check.integral(groups=groups)
        if len(groups) != count:
            raise AlgorithmError(f"groups has {len(groups)} ids for {count} rewards")
        if count == 0:
            return groups.long(), 0
        low, high = int(groups.min()), int(groups.max())
        if high - low <= 4 * count:  # dense enough: an empty number costs nothing, sorting does
            return groups.long() - low, high - low + 1
        ids, index = torch.unique(groups, return_inverse=True)
        return index, len(ids)
    ids = group_ids(groups)
    if len(ids) != count:
        raise AlgorithmError(f"groups has {len(ids)} ids for {count} rewards")
    numbers: dict[Hashable, int] = {}
    index_list = [numbers.setdefault(g, len(numbers)) for g in ids]
    return torch.tensor(index_list, dtype=torch.long), len(numbers)


def group_ids(groups: Groups) -> list[Hashable]:
    """The ids as plain hashables: a tensor of one element hashes by identity, so its number is taken."""
    if isinstance(groups, Tensor):
        _check.ndim(1, "[B]", groups=groups)
        _check.integral(groups=groups)
        return groups.tolist()
    try:
        ids = list(groups)
        if any(issubclass(kind, (Tensor, tuple)) for kind in set(map(type, ids))):
            ids = [_plain_id(g) for g in ids]
        set(ids)
    except TypeError as error:
        raise AlgorithmError(f"groups must hold hashable ids, one per reward ({error})") from None
    return ids


def _plain_id(group: Hashable) -> Hashable:
    if isinstance(group, tuple):
        return tuple(_plain_id(g) for g in group)
    if not isinstance(group, Tensor):
        return group
    if group.numel() != 1:
        raise AlgorithmError(f"groups holds a tensor of shape {_check.shape_of(group)} as an id: an id is one number")
    number: int | float = group.item()
    return number


class Grouped:
    """Rewards [B] centred on the mean of their group, with counts and sums of squares of the groups, and which have
    signal."""

    def __init__(self, rewards: Tensor, groups: Groups, valid: Tensor | None, group_size: int | None) -> None:
        _check.floating(rewards=rewards)
        _check.ndim(1, "[B]", rewards=rewards)
        _check.same_shape(rewards=rewards, valid=valid)
        check_group_size(group_size)
        index, n = group_index(groups, len(rewards))
        self.index = index = index.to(rewards.device)
        self.dtype = _check.wide(rewards.dtype)
        exact = _check.precise(rewards)
        self.valid = ~rewards.isnan()
        if valid is not None:
            self.valid = self.valid & _check.boolean(valid, "valid")
        self.n = n
        # Counted from the group's smallest reward, so that equal rewards are exactly 0 and stay so.
        r = torch.where(self.valid, exact, torch.inf)
        low = r.new_full((n,), torch.inf).scatter_reduce_(0, index, r, "amin")
        shifted = torch.where(self.valid, r - low[index], 0.0)
        columns = torch.stack((self.valid.to(exact.dtype), shifted), 1)
        sums = r.new_zeros(n, 2).index_add_(0, index, columns)
        if bool(sums.isfinite().all().logical_not()):
            raise AlgorithmError("rewards holds an infinite value; use NaN for a reward that could not be computed")
        self.counts = sums[:, 0]
        if group_size is not None and n and int(self.counts.max()) > group_size:
            raise AlgorithmError(f"a group has {int(self.counts.max())} samples but group_size is {group_size}")
        mean = sums[:, 1] / self.counts.clamp(min=1)
        self.centred = torch.where(self.valid, shifted - mean[index], 0.0)
        self.squares = self.sums(self.centred.square())
        size = SIGNAL_TOLERANCE * (low.abs() + mean)
        self.signal = self.squares > size.square() * self.counts

    def sums(self, x: Tensor) -> Tensor:
        """Sum over each group [n]."""
        return x.new_zeros(self.n).index_add_(0, self.index, x)

    def finish(self, advantages: Tensor) -> Tensor:
        """Zero where there is no signal or the sample is left out."""
        return torch.where(self.signal[self.index], advantages, 0.0).to(self.dtype)


def check_group_size(group_size: int | None) -> None:
    """Refuse a configured group size that leaves nobody to compare with."""
    _check.whole(**_check.given(group_size=group_size))
    if group_size is not None and group_size < 2:
        raise AlgorithmError(
            f"group_size is {group_size}: a group-relative advantage compares a sample with others of its"
            " group, so it must be at least 2"
        )


@torch.no_grad()
def group_advantage(
    rewards: Tensor,
    groups: Groups,
    *,
    normalise_std: bool = True,
    eps: float = 1e-6,
    valid: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    """Group-relative advantage of GRPO: A_i = (r_i - mean(r)) / (std(r) + eps) over the sample's group.

    DeepSeekMath (arXiv 2402.03300, section 4.1.2). The standard deviation has ddof = 1, as in ``torch.std``. With
    ``normalise_std=False`` the division is left out: Dr.GRPO (arXiv 2503.20783).

    Args:
        rewards: [B]. NaN is a reward that could not be computed: the sample is no peer and gets 0.
        groups: group id of each sample, B hashables or an integer tensor [B]; any order, any sizes.
        normalise_std: divide by the group's standard deviation.
        eps: added to the standard deviation.
        valid: [B] bool or integer; false leaves a sample out like NaN does (its tokens are all masked).
        group_size: the configured group size, to be refused when it is below 2 or a group is larger.

    Returns:
        [B] float32 (float64 for float64 rewards). Zero for groups with fewer than two valid samples and where rewards
        are equal up to rounding (a relative difference of 1e-6).

    Raises:
        AlgorithmError: wrong shapes or dtypes, infinite rewards, ``group_size`` below 2.
    """
    _check.not_negative(eps=eps)
    g = Grouped(rewards, groups, valid, group_size)
    if not normalise_std:
        return g.finish(g.centred)
    std = (g.squares / (g.counts - 1).clamp(min=1)).sqrt() + eps
    return g.finish(g.centred / torch.where(g.signal, std, 1.0)[g.index])


def dr_grpo_advantage(
    rewards: Tensor, groups: Groups, *, valid: Tensor | None = None, group_size: int | None = None
) -> Tensor:
    """Dr.GRPO (arXiv 2503.20783, section 3.2): A_i = r_i - mean(r) over the group. See ``group_advantage``."""
    return group_advantage(rewards, groups, normalise_std=False, valid=valid, group_size=group_size)


@torch.no_grad()
def rloo_advantage(
    rewards: Tensor, groups: Groups, *, valid: Tensor | None = None, group_size: int | None = None
) -> Tensor:
    """REINFORCE leave-one-out: A_i = r_i - mean of the *other* samples' rewards = n / (n - 1) (r_i - mean(r)).

    Ahmadian et al., arXiv 2402.14740. Arguments and edge cases as ``group_advantage``.
    """
    g = Grouped(rewards, groups, valid, group_size)
    factor = g.counts / (g.counts - 1).clamp(min=1)
    return g.finish(g.centred * factor[g.index])


@torch.no_grad()
def remax_advantage(rewards: Tensor, greedy_rewards: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """ReMax: A_i = r_i - r(greedy response to the same prompt).

    Li et al., arXiv 2310.10505, algorithm 1.

    Args:
        rewards: [B]; NaN (or ``valid`` false) gives 0.
        greedy_rewards: [B], the greedy response's reward of each sample's prompt; NaN there leaves the sample out
            too.
        valid: [B].

    Raises:
        AlgorithmError: wrong shapes or dtypes, infinite rewards.
    """
    _check.floating(rewards=rewards, greedy_rewards=greedy_rewards)
    _check.ndim(1, "[B]", rewards=rewards)
    _check.same_shape(rewards=rewards, greedy_rewards=greedy_rewards, valid=valid)
    use = ~(rewards.isnan() | greedy_rewards.isnan())
    if valid is not None:
        use = use & _check.boolean(valid, "valid")
    advantages = zero_masked(rewards, use) - zero_masked(greedy_rewards, use)
    if not bool(advantages.isfinite().all()):
        raise AlgorithmError(
            "rewards or greedy_rewards holds an infinite value; use NaN where it could not be computed"
        )
    return advantages


def valid_rows(rewards: Tensor, mask: Tensor, valid: Tensor | None) -> Tensor:
    """Which samples count: those with a true position in ``mask`` [B, T], and ``valid`` [B] where it is given."""
    _check.floating(rewards=rewards)
    _check.ndim(1, "[B]", rewards=rewards)
    _check.ndim(2, "[B, T]", mask=mask)
    if mask.shape[0] != rewards.shape[0]:
        raise AlgorithmError(f"mask has {mask.shape[0]} rows for {rewards.shape[0]} rewards")
    trained = _check.boolean(mask).any(1)
    if valid is None:
        return trained
    _check.same_shape(rewards=rewards, valid=valid)
    return trained & _check.boolean(valid, "valid")


def reinforce_pp_baseline_advantage(
    rewards: Tensor,
    groups: Groups,
    mask: Tensor,
    *,
    eps: float = 1e-8,
    valid: Tensor | None = None,
    ranks: Group = None,
    group_size: int | None = None,
) -> Tensor:
    """REINFORCE++ with baseline: subtract the group's mean, then whiten over the tokens of the whole batch.

    Hu et al., arXiv 2501.03262 (REINFORCE++-baseline): the group's standard deviation is never divided by; one scale
    for the whole batch. Needs the whole batch (whitening), so it does not stream.

    Args:
        rewards: [B]; NaN leaves a sample out.
        groups: ids of B samples. A group lies whole on one rank: its mean is taken here, before anything is reduced.
        mask: [B, T]. A sample without a true position is left out: it is no peer.
        ranks: process group; the statistics of the whitening are those of all its ranks.

    Returns:
        [B, T], zero at false positions and for samples that were left out.
    """
    valid = valid_rows(rewards, mask, valid)
    centred = group_advantage(rewards, groups, normalise_std=False, valid=valid, group_size=group_size)
    mask = _check.boolean(mask) & (valid & ~rewards.isnan())[:, None]
    return whiten(centred[:, None].expand(mask.shape), mask, eps=eps, group=ranks)


@torch.no_grad()
def pass_at_k(correct: Tensor, total: Tensor, k: int) -> Tensor:
    """Unbiased pass@k: 1 - C(n - c, k) / C(n, k), the share of k-subsets with a correct response.

    Chen et al., arXiv 2107.03374, equation 1. ``correct`` c and ``total`` n are integer tensors of one shape; where
    n < k the answer is NaN (it cannot be estimated). Result in float64.
    """
    _check.integral(correct=correct, total=total)
    _check.same_shape(correct=correct, total=total)
    _check.whole(1, k=k)
    if bool(((correct < 0) | (correct > total)).any()):
        raise AlgorithmError("correct must lie between 0 and total")
    n, c = total.to(torch.float64), correct.to(torch.float64)
    missed = _no_hit(n, n - c, k)
    return torch.where(n >= k, 1 - missed, torch.nan)


def _no_hit(n: Tensor, wrong: Tensor, k: int) -> Tensor:
    """C(wrong, k) / C(n, k) as a product, exact and without large numbers."""
    product = torch.ones_like(n)
    for i in range(k):
        product = product * ((wrong - i).clamp(min=0) / (n - i).clamp(min=1))
    return product


@torch.no_grad()
def pass_at_k_advantage(
    rewards: Tensor,
    groups: Groups,
    *,
    k: int,
    threshold: float = 0.5,
    valid: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor:
    """Advantage of pass@k training, in closed form over all k-subsets of a group.

    Chen et al., arXiv 2508.10751, the analytical derivation. A subset's reward is 1 if one of its k
    responses is correct. With n responses, w of them wrong: mean R = 1 - C(w, k)/C(n, k), s = sqrt(R (1 - R)), and
    A(correct) = (1 - R) / s, A(wrong) = (1 - R - C(w - 1, k - 1)/C(n - 1, k - 1)) / s: each is the mean, over the
    subsets that hold the response, of (subset reward - R) / s.

    Args:
        rewards: [B]; correct means ``reward > threshold``.
        groups: ids of B samples.
        k: size of a subset, at least 1. ``k = 1`` is GRPO on the binary reward with ddof = 0.

    Returns:
        [B]. Zero where every subset has the same reward, and in groups with fewer than k valid samples.
    """
    _check.whole(k=k)
    _check.number(threshold=threshold)
    check_group_size(group_size)
    if k < 1 or (group_size is not None and k > group_size):
        limit = "" if group_size is None else f" and at most group_size ({group_size})"
        raise AlgorithmError(f"k must be at least 1{limit}, got {k}")
    g = Grouped(rewards, groups, valid, group_size)
    right = g.valid & (torch.where(g.valid, rewards, 0.0) > threshold)
    n = g.counts
    wrong = n - g.sums(right.to(n.dtype))
    none = _no_hit(n, wrong, k)
    spread = (none * (1 - none)).sqrt()
    held = _no_hit(n - 1, wrong - 1, k - 1)
    use = (n >= k) & (spread > 0)
    scale = torch.where(use, spread, 1.0)
    table = torch.stack((torch.where(use, (none - held) / scale, 0.0), torch.where(use, none / scale, 0.0)))
    return torch.where(g.valid, table[right.long(), g.index], 0.0).to(g.dtype)


@torch.no_grad()
def trajectory_group_advantage(
    rewards: Tensor,
    groups: Groups,
    trajectories: Groups,
    *,
    normalise_std: bool = True,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Group advantage of trajectories that are stored as several samples (one per turn).

    The baseline counts each trajectory once, however many turns it has; over samples, long trajectories would weigh
    more and pull the mean. The reward of a trajectory is the sum over its valid samples (a reward per turn, or the
    outcome on one of them).

    Args:
        rewards: [B], one per turn; NaN leaves the whole trajectory out, since its sum is unknown.
        groups: [B] task id of each turn.
        trajectories: [B] trajectory id of each turn, unique across groups.
        valid: [B]; a turn that is false is left out of the sum (its trajectory stays).

    Returns:
        [B]: the trajectory's advantage, on each of its valid turns.
    """
    _check.floating(rewards=rewards)
    _check.ndim(1, "[B]", rewards=rewards)
    _check.same_shape(rewards=rewards, valid=valid)
    count = len(rewards)
    trajectory, m = group_index(trajectories, count)
    group, _ = group_index(groups, count)
    trajectory, group = trajectory.to(rewards.device), group.to(rewards.device)
    keep = torch.ones_like(rewards, dtype=torch.bool) if valid is None else _check.boolean(valid, "valid")
    _check.not_negative(eps=eps)
    r = torch.where(keep, _check.precise(rewards), 0.0)
    totals = r.new_zeros(m).index_add_(0, trajectory, r)  # NaN stays NaN: the trajectory is left out
    present = torch.zeros(m, dtype=torch.long, device=r.device).index_add_(0, trajectory, keep.long()) > 0
    owner = group.new_zeros(m).scatter_(0, trajectory, group)
    if bool((owner[trajectory] != group).any()):
        raise AlgorithmError("a trajectory id appears in two groups; make trajectory ids unique")
    whole = group_advantage(totals, owner, normalise_std=normalise_std, eps=eps, valid=present)
    return torch.where(keep, whole[trajectory], 0.0).to(_check.wide(rewards.dtype))


@torch.no_grad()
def turn_group_advantage(
    returns: Tensor,
    groups: Groups,
    turns: Groups,
    *,
    normalise_std: bool = True,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Group advantage per turn: a turn is compared with those turns of its group that share its key.

    ``turns`` [B] is the turn's number (compare first turns with first turns) or its *anchor state*: the step-level
    advantage of GiGPO (arXiv 2505.10978) compares actions taken in one and the same state. ``returns``
    [B] is each turn's own reward or discounted return (``discounted_returns``). A turn alone with its key gets 0.
    """
    _check.floating(returns=returns)
    _check.ndim(1, "[B]", returns=returns)
    count = len(returns)
    group, _ = group_index(groups, count)
    turn, n = group_index(turns, count)
    joint = group.to(returns.device) * max(n, 1) + turn.to(returns.device)
    return group_advantage(returns, joint, normalise_std=normalise_std, eps=eps, valid=valid)


def gigpo_advantage(
    rewards: Tensor,
    returns: Tensor,
    groups: Groups,
    trajectories: Groups,
    anchors: Groups,
    *,
    step_weight: float = 1.0,
    normalise_std: bool = True,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """GiGPO (arXiv 2505.10978): A = A_episode + ``step_weight`` * A_step.

    The episode part is ``trajectory_group_advantage(rewards, ...)``, the step part
    ``turn_group_advantage(returns, ..., anchors)``. All arguments are per turn [B].

    A trajectory one of whose (valid) rewards is NaN is left out of both parts: what its steps led to is not known.
    """
    _check.not_negative(step_weight=step_weight)
    _check.floating(rewards=rewards, returns=returns)
    _check.ndim(1, "[B]", rewards=rewards)
    _check.same_shape(rewards=rewards, returns=returns, valid=valid)
    episode = trajectory_group_advantage(
        rewards, groups, trajectories, normalise_std=normalise_std, eps=eps, valid=valid
    )
    keep = torch.ones_like(rewards, dtype=torch.bool) if valid is None else _check.boolean(valid, "valid")
    index, n = group_index(trajectories, len(rewards))
    index = index.to(rewards.device)
    missing = torch.zeros(n, dtype=torch.long, device=rewards.device)
    missing = missing.index_add_(0, index, (rewards.isnan() & keep).long())
    known = keep & (missing[index] == 0)
    step = turn_group_advantage(returns, groups, anchors, normalise_std=normalise_std, eps=eps, valid=known)
    return episode + step_weight * step
