"""Dynamic sampling, over-long responses, staleness, reward normalisation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AlgorithmError,
    DynamicSampling,
    NoSignalError,
    RewardStatistics,
    group_advantage,
    groups_with_signal,
    normalise_rewards,
    overlong_filter,
    overlong_penalty,
    staleness_filter,
)

rewards_of = st.lists(st.sampled_from([0.0, 1.0, 0.95, math.nan]), min_size=1, max_size=20)


@given(rewards_of, st.integers(1, 4))
def test_signal_is_where_the_advantage_is_not_zero(values, modulus):
    rewards = torch.tensor(values, dtype=torch.float64)
    groups = [i % modulus for i in range(len(values))]
    keep = groups_with_signal(rewards, groups)
    advantages = group_advantage(rewards, groups)
    for g in range(modulus):
        rows = torch.tensor([i for i in range(len(values)) if i % modulus == g], dtype=torch.long)
        signal = bool((advantages[rows] != 0).any())
        assert keep[rows].tolist() == [signal and not math.isnan(values[i]) for i in rows.tolist()]


class TestDynamicSampling:
    def test_refills_until_enough_groups_have_signal(self):
        state = DynamicSampling(target=2, max_rounds=3)
        state = state.add(torch.tensor([1.0, 0.0, 1.0, 1.0]), list("aabb"))
        assert (state.done, state.missing, state.kept) == (False, 1, ("a",))
        state = state.add(torch.tensor([1.0, 0.0, 0.0, 1.0]), list("ccdd"))
        assert (state.done, state.missing, state.kept) == (True, 0, ("a", "c"))

    def test_the_last_round_names_the_cause(self):
        state = DynamicSampling(target=2, max_rounds=2).add(torch.tensor([0.0, 0.0, 1.0, 1.0]), list("aabb"))
        with pytest.raises(NoSignalError) as caught:
            state.add(torch.tensor([0.0, 0.0, math.nan, math.nan]), list("ccdd"))
        text = str(caught.value)
        assert "0 of 2 groups have signal after 2 rounds (4 groups)" in text
        assert "2 with every reward equal to 0" in text
        assert "1 with every reward equal to 1" in text
        assert "1 without any reward" in text

    def test_a_broken_reward_function_is_suspected(self):
        with pytest.raises(NoSignalError, match="Look at the reward function"):
            DynamicSampling(target=1, max_rounds=1).add(torch.tensor([math.nan] * 2), ["a", "a"])
        with pytest.raises(NoSignalError, match="The reward is always 0"):
            DynamicSampling(target=1, max_rounds=1).add(torch.zeros(4), list("aabb"))

    def test_refused(self):
        with pytest.raises(AlgorithmError, match="at least 1"):
            DynamicSampling(target=0)
        state = DynamicSampling(target=2).add(torch.tensor([1.0, 0.0]), ["a", "a"])
        with pytest.raises(AlgorithmError, match="'a' was kept"):
            state.add(torch.tensor([1.0, 0.0]), ["a", "a"])

    def test_state_is_not_changed_in_place(self):
        state = DynamicSampling(target=1)
        state.add(torch.tensor([0.0, 0.0]), ["a", "a"])
        assert (state.rounds, state.equal) == (0, {})


@given(st.integers(1, 200), st.data())
def test_overlong_penalty_is_the_equation(max_length, data):
    cache = data.draw(st.integers(1, max_length))
    length = data.draw(st.integers(0, 2 * max_length))
    if length <= max_length - cache:
        expected = 0.0
    elif length <= max_length:
        expected = ((max_length - cache) - length) / cache
    else:
        expected = -1.0
    got = overlong_penalty(torch.tensor([length]), max_length=max_length, cache=cache)
    assert float(got) == pytest.approx(expected)


def test_overlong_filter_and_the_advantage_agree():
    mask = torch.ones(3, 2, dtype=torch.long)
    kept = overlong_filter(mask, torch.tensor([False, True, False]))
    assert kept.tolist() == [[True, True], [False, False], [True, True]]
    advantages = group_advantage(torch.tensor([1.0, 0.0, 0.0]), ["a"] * 3, normalise_std=False, valid=kept.any(1))
    assert advantages.tolist() == [0.5, 0.0, -0.5]


def test_staleness_by_the_oldest_trainable_token():
    versions = torch.tensor([[5, 5, 4], [3, 5, 5], [0, 5, 5], [5, 5, 5]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 0]])
    assert staleness_filter(versions, mask, current=5, max_staleness=1).tolist() == [True, False, True, False]
    assert staleness_filter(versions, mask, current=5, max_staleness=0).tolist() == [False, False, True, False]
    with pytest.raises(AlgorithmError, match="newer than current"):
        staleness_filter(versions, mask, current=4, max_staleness=1)


@given(st.lists(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), max_size=6), min_size=1, max_size=5))
def test_running_statistics_are_those_of_the_whole(batches):
    state, other = RewardStatistics(), RewardStatistics()
    for i, batch in enumerate(batches):
        values = torch.tensor(batch, dtype=torch.float64)
        state = state.add(values)
        other = other.merge(RewardStatistics().add(values)) if i else RewardStatistics().add(values)
    everything = torch.tensor([v for b in batches for v in b if not math.isnan(v)], dtype=torch.float64)
    for got in (state, other):
        assert got.count == len(everything)
        if len(everything):
            assert got.mean == pytest.approx(float(everything.mean()), abs=1e-9)
            assert got.std == pytest.approx(float(everything.std(correction=0)), abs=1e-6)


def test_normalised_rewards():
    statistics = RewardStatistics().add(torch.tensor([1.0, 3.0]))
    rewards = torch.tensor([1.0, 3.0, math.nan, 100.0])
    got = normalise_rewards(rewards, statistics, clip=5.0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0, math.nan, 5.0]), equal_nan=True)
    scaled = normalise_rewards(rewards[:2], statistics, shift_mean=False)
    torch.testing.assert_close(scaled, torch.tensor([1.0, 3.0]))
    flat = RewardStatistics().add(torch.full((5,), 0.95))
    assert normalise_rewards(torch.tensor([0.95]), flat).tolist() == [0.0]
    assert normalise_rewards(torch.tensor([7.0]), RewardStatistics()).tolist() == [0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlong_penalty(torch.tensor([1.0]), max_length=10, cache=2), "lengths must be an integer"),
        (lambda: overlong_penalty(torch.tensor([1]), max_length=10, cache=0), "cache must lie"),
        (lambda: overlong_penalty(torch.tensor([1]), max_length=10, cache=11), "cache must lie"),
        (lambda: overlong_filter(torch.ones(2, 2, dtype=torch.bool), torch.tensor([True])), "truncated must have"),
        (lambda: groups_with_signal(torch.tensor([1]), ["a"]), "rewards must be floating"),
        (lambda: normalise_rewards(torch.zeros(1), RewardStatistics(), clip=0.0), "clip must be"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()
