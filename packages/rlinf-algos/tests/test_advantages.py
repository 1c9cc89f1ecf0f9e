"""Advantages in groups: against loops, relations, invariances, bad input."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AlgorithmError,
    dr_grpo_advantage,
    gigpo_advantage,
    group_advantage,
    pass_at_k,
    pass_at_k_advantage,
    reinforce_pp_baseline_advantage,
    remax_advantage,
    rloo_advantage,
    trajectory_group_advantage,
    turn_group_advantage,
    whiten,
)

FUNCTIONS = [
    group_advantage,
    dr_grpo_advantage,
    rloo_advantage,
    lambda r, g, valid=None: pass_at_k_advantage(r, g, k=2, valid=valid),
]


@st.composite
def scored(draw, max_size=24):
    n = draw(st.integers(1, max_size))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.95, math.nan]), min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    valid = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return torch.tensor(rewards, dtype=torch.float64), groups, torch.tensor(valid)


def members(rewards, groups, valid):
    found = {}
    for i, g in enumerate(groups):
        if valid[i] and not math.isnan(rewards[i]):
            found.setdefault(g, []).append(i)
    return found


@given(scored())
def test_group_advantage_is_the_loop(batch):
    rewards, groups, valid = batch
    expected = torch.zeros_like(rewards)
    for peers in members(rewards, groups, valid).values():
        r = rewards[peers]
        if len(peers) > 1 and r.max() > r.min():
            expected[peers] = (r - r.mean()) / (r.std() + 1e-6)
    torch.testing.assert_close(group_advantage(rewards, groups, valid=valid), expected)


@given(scored())
def test_rloo_is_the_loop(batch):
    rewards, groups, valid = batch
    expected = torch.zeros_like(rewards)
    for peers in members(rewards, groups, valid).values():
        for i in peers:
            others = [float(rewards[j]) for j in peers if j != i]
            if others:
                expected[i] = rewards[i] - sum(others) / len(others)
    torch.testing.assert_close(rloo_advantage(rewards, groups, valid=valid), expected)


@given(scored(max_size=10), st.integers(1, 4))
def test_pass_at_k_advantage_is_the_mean_over_all_subsets(batch, k):
    rewards, groups, valid = batch
    expected = torch.zeros_like(rewards)
    for peers in members(rewards, groups, valid).values():
        subsets = list(itertools.combinations(peers, k))
        if not subsets:
            continue
        best = torch.tensor([float(any(rewards[i] > 0.5 for i in s)) for s in subsets], dtype=torch.float64)
        mean = best.mean()
        spread = (mean * (1 - mean)).sqrt()
        if spread < 1e-9:
            continue
        for i in peers:
            held = torch.tensor([i in s for s in subsets])
            expected[i] = ((best[held] - mean) / spread).mean()
    torch.testing.assert_close(pass_at_k_advantage(rewards, groups, k=k, valid=valid), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
@given(batch=scored(), seed=st.integers(0, 100))
def test_order_does_not_matter(function, batch, seed):
    rewards, groups, valid = batch
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    shuffled = function(rewards[order], [groups[i] for i in order], valid=valid[order])
    torch.testing.assert_close(shuffled, function(rewards, groups, valid=valid)[order])


@pytest.mark.parametrize("function", FUNCTIONS)
@given(batch=scored())
def test_ids_may_be_anything_hashable_or_a_tensor(function, batch):
    rewards, groups, valid = batch
    by_list = function(rewards, groups, valid=valid)
    torch.testing.assert_close(function(rewards, [f"task-{g}" for g in groups], valid=valid), by_list)
    torch.testing.assert_close(function(rewards, torch.tensor(groups), valid=valid), by_list)
    far = torch.tensor(groups) * 10**12 - 5
    torch.testing.assert_close(function(rewards, far, valid=valid), by_list)


@pytest.mark.parametrize("function", FUNCTIONS)
@given(batch=scored())
def test_what_is_left_out_is_as_if_absent(function, batch):
    rewards, groups, valid = batch
    use = valid & ~rewards.isnan()
    whole = function(rewards, groups, valid=valid)
    assert torch.isfinite(whole).all()
    assert (whole[~use] == 0).all()
    if use.any():
        kept = [g for g, u in zip(groups, use.tolist(), strict=True) if u]
        torch.testing.assert_close(function(rewards[use], kept), whole[use])


@given(scored(), st.floats(-100, 100), st.floats(0.01, 100))
def test_shift_changes_nothing_and_scale_only_scales(batch, shift, scale):
    rewards, groups, valid = batch
    base = dr_grpo_advantage(rewards, groups, valid=valid)
    moved = dr_grpo_advantage(rewards * scale + shift, groups, valid=valid)
    torch.testing.assert_close(moved, base * scale, atol=1e-9, rtol=1e-9)
    normal = group_advantage(rewards * scale + shift, groups, valid=valid, eps=0.0)
    torch.testing.assert_close(normal, group_advantage(rewards, groups, valid=valid, eps=0.0), atol=1e-7, rtol=1e-7)


@given(scored())
def test_relations(batch):
    rewards, groups, valid = batch
    rloo, plain = rloo_advantage(rewards, groups, valid=valid), dr_grpo_advantage(rewards, groups, valid=valid)
    for peers in members(rewards, groups, valid).values():
        n = len(peers)
        torch.testing.assert_close(rloo[peers], plain[peers] * (n / max(n - 1, 1)))
        assert abs(float(plain[peers].sum())) < 1e-9
    binary = torch.where(rewards.isnan(), rewards, (rewards > 0.5).double())
    one = pass_at_k_advantage(binary, groups, k=1, valid=valid)
    for peers in members(binary, groups, valid).values():
        r = binary[peers]
        if r.max() > r.min():
            torch.testing.assert_close(one[peers], (r - r.mean()) / r.std(correction=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype(dtype):
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0], dtype=dtype)
    got = group_advantage(rewards, list("abab"))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), group_advantage(rewards.double(), list("abab")))


def test_tensor_ids_that_are_empty():
    assert group_advantage(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    assert group_advantage(torch.zeros(0), []).shape == (0,)


def test_remax_subtracts_the_greedy_reward():
    got = remax_advantage(torch.tensor([1.0, 0.0, math.nan, 1.0]), torch.tensor([0.5, 0.5, 0.0, math.nan]))
    assert got.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_reinforce_pp_baseline_whitens_over_tokens():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    rewards = torch.tensor([1.0, 0.0, 0.0, math.nan])
    got = reinforce_pp_baseline_advantage(rewards, list("aabb"), mask)
    raw = torch.tensor([[0.5] * 3, [-0.5] * 3, [0.0] * 3, [0.0] * 3])
    use = mask.clone()
    use[3] = 0
    torch.testing.assert_close(got, whiten(raw, use))


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets(n, k, data):
    c = data.draw(st.integers(0, n))
    got = float(pass_at_k(torch.tensor(c), torch.tensor(n), k))
    if k > n:
        assert math.isnan(got)
    else:
        assert got == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))


class TestAgents:
    # two trajectories of task a: x with three turns, y with one; the outcome lies on the last turn
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0])
    groups = ("a", "a", "a", "a")
    trajectories = ("x", "x", "x", "y")

    def test_a_trajectory_counts_once_in_the_baseline(self):
        got = trajectory_group_advantage(self.rewards, self.groups, self.trajectories, normalise_std=False)
        assert got.tolist() == [0.5, 0.5, 0.5, -0.5]

    def test_trajectories_of_one_turn_are_grpo(self):
        got = trajectory_group_advantage(self.rewards, self.groups, range(4))
        torch.testing.assert_close(got, group_advantage(self.rewards, self.groups))

    def test_a_missing_reward_leaves_the_trajectory_out(self):
        rewards = torch.tensor([0.0, math.nan, 1.0, 0.0, 1.0])
        got = trajectory_group_advantage(rewards, ["a"] * 5, list("xxxyz"), normalise_std=False)
        assert got.tolist() == [0, 0, 0, -0.5, 0.5]

    def test_a_masked_turn_is_left_out_of_the_sum(self):
        valid = torch.tensor([True, True, False, True])
        got = trajectory_group_advantage(self.rewards, self.groups, self.trajectories, valid=valid)
        assert got.tolist() == [0.0] * 4  # x: 0, y: 0

    def test_a_trajectory_in_two_groups_is_refused(self):
        with pytest.raises(AlgorithmError, match="two groups"):
            trajectory_group_advantage(self.rewards, list("aabb"), self.trajectories)

    def test_turns_are_compared_with_the_same_turn(self):
        returns = torch.tensor([1.0, 5.0, 0.0, 7.0])
        got = turn_group_advantage(returns, list("aaaa"), [0, 1, 0, 1], normalise_std=False)
        assert got.tolist() == [0.5, -1.0, -0.5, 1.0]

    def test_one_turn_key_is_grpo(self):
        got = turn_group_advantage(self.rewards, self.groups, [0] * 4)
        torch.testing.assert_close(got, group_advantage(self.rewards, self.groups))

    def test_gigpo_without_its_step_part_is_the_trajectory_part(self):
        arguments = (self.rewards, torch.tensor([0.1, 0.5, 1.0, 0.0]), self.groups, self.trajectories, ["s"] * 4)
        episode = trajectory_group_advantage(self.rewards, self.groups, self.trajectories)
        torch.testing.assert_close(gigpo_advantage(*arguments, step_weight=0.0), episode)
        step = turn_group_advantage(arguments[1], self.groups, ["s"] * 4)
        torch.testing.assert_close(gigpo_advantage(*arguments, step_weight=2.0), episode + 2 * step)


R = torch.tensor([1.0, 0.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantage(R, ["a"]), "1 ids for 2 rewards"),
        (lambda: group_advantage(R, torch.tensor([0])), "1 ids for 2 rewards"),
        (lambda: group_advantage(R, torch.tensor([0.0, 1.0])), "groups must be an integer"),
        (lambda: group_advantage(R.long(), ["a", "b"]), "rewards must be floating"),
        (lambda: group_advantage(R[:, None], ["a", "b"]), "rewards must have shape"),
        (lambda: group_advantage(R, ["a", "b"], valid=R), "valid must be bool"),
        (lambda: group_advantage(R, ["a", "b"], valid=torch.ones(3, dtype=torch.bool)), "valid has shape"),
        (lambda: group_advantage(R, ["a", "b"], eps=-1.0), "eps must be"),
        (lambda: group_advantage(R * math.inf, ["a", "b"], valid=torch.tensor([1, 0])), "infinite"),
        (lambda: group_advantage(torch.zeros(3), ["a"] * 3, group_size=2), "a group has 3 samples"),
        (lambda: pass_at_k_advantage(R, ["a", "a"], k=0), "k must be at least 1"),
        (lambda: pass_at_k_advantage(R, ["a", "a"], k=5, group_size=4), "at most group_size"),
        (lambda: pass_at_k(torch.tensor(3), torch.tensor(2), 1), "between 0 and total"),
        (lambda: remax_advantage(R, R[:1]), "greedy_rewards has shape"),
        (lambda: reinforce_pp_baseline_advantage(R, ["a", "a"], torch.ones(3, 2, dtype=torch.bool)), "3 rows"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()
