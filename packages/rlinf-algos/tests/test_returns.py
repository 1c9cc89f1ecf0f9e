"""GAE and returns: against loops in float64, relations, invariances, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AlgorithmError,
    chunk_rewards,
    discounted_returns,
    discounted_scan,
    gae,
    reinforce_pp_advantage,
    terminal_reward,
    turn_gae,
    turn_ids,
    whiten,
)


def gae_loop(rewards, values, mask, gamma, lam, terminated=None, truncated=None, final=None, last=None):
    """The definition, one step at a time."""
    rows, length = rewards.shape
    advantages = torch.zeros(rows, length, dtype=torch.float64)
    for b in range(rows):
        after, running = (0.0 if last is None else float(last[b])), 0.0
        until = length
        for t in reversed(range(length)):
            if not mask[b, t]:
                continue
            v_next = after
            for e in range(t, until):  # the action's own end, or the first one before the next action
                cut = truncated is not None and truncated[b, e]
                stop = terminated is not None and terminated[b, e]
                if cut or stop:
                    v_next, running = (0.0 if stop else float(final[b, e])), 0.0
                    break
            until = t
            delta = float(rewards[b, t]) + gamma * v_next - float(values[b, t])
            running = delta + gamma * lam * running
            advantages[b, t] = running
            after = float(values[b, t])
    return advantages, torch.where(mask, advantages + values.double(), 0.0)


@st.composite
def rollouts(draw, max_rows=4, max_length=40):
    rows, length = draw(st.integers(1, max_rows)), draw(st.integers(1, max_length))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["random", "left", "right", "all", "none"]))
    if kind == "random":
        mask = torch.rand(rows, length, generator=generator) < draw(st.floats(0.1, 0.95))
    elif kind in ("all", "none"):
        mask = torch.full((rows, length), kind == "all")
    else:
        counts = torch.randint(0, length + 1, (rows, 1), generator=generator)
        positions = torch.arange(length)
        mask = positions < counts if kind == "right" else positions >= length - counts
    make = lambda: torch.randn(rows, length, generator=generator, dtype=torch.float64)  # noqa: E731
    return make(), make(), mask, generator


@given(rollouts(), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_gae_is_the_loop(rollout, gamma, lam, with_last):
    rewards, values, mask, generator = rollout
    last = torch.randn(rewards.shape[0], generator=generator, dtype=torch.float64) if with_last else None
    got = gae(rewards, values, mask, gamma=gamma, lam=lam, last_values=last)
    expected = gae_loop(rewards, values, mask, gamma, lam, last=last)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


@given(rollouts(), st.floats(0, 1), st.floats(0, 1))
def test_gae_with_episode_ends_is_the_loop(rollout, gamma, lam):
    rewards, values, mask, generator = rollout
    shape = rewards.shape
    terminated = torch.rand(shape, generator=generator) < 0.2
    truncated = torch.rand(shape, generator=generator) < 0.2
    final = torch.randn(shape, generator=generator, dtype=torch.float64)
    last = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    expected = gae_loop(rewards, values, mask, gamma, lam, terminated, truncated, final, last)
    final = torch.where(truncated, final, torch.nan)  # read there alone
    got = gae(
        rewards,
        values,
        mask,
        gamma=gamma,
        lam=lam,
        terminated=terminated,
        truncated=truncated,
        final_values=final,
        last_values=last,
    )
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


@given(rollouts())
def test_masked_garbage_is_not_read(rollout):
    rewards, values, mask, _ = rollout
    clean = gae(rewards, values, mask)
    for bad in (math.nan, math.inf, -math.inf):
        dirty = gae(torch.where(mask, rewards, bad), torch.where(mask, values, bad), mask)
        torch.testing.assert_close(dirty, clean)
        returns = discounted_returns(torch.where(mask, rewards, bad), mask)
        torch.testing.assert_close(returns, discounted_returns(rewards, mask))


@given(rollouts(), st.integers(0, 5), st.integers(0, 5))
def test_padding_on_either_side_changes_nothing(rollout, left, right):
    rewards, values, mask, _ = rollout
    pad = torch.nn.functional.pad
    padded = gae(
        pad(rewards, (left, right), value=7.0), pad(values, (left, right), value=7.0), pad(mask, (left, right))
    )
    end = left + mask.shape[1]
    torch.testing.assert_close(padded[0][:, left:end], gae(rewards, values, mask)[0])


@given(rollouts())
def test_a_gap_is_not_a_time_step(rollout):
    """Taking the false positions out changes nothing at the true ones."""
    rewards, values, mask, _ = rollout
    advantages, _ = gae(rewards[:1], values[:1], mask[:1], gamma=0.9)
    keep = mask[0]
    short, _ = gae(rewards[:1, keep], values[:1, keep], mask[:1, keep], gamma=0.9)
    torch.testing.assert_close(advantages[:, keep], short)


@given(rollouts(), st.floats(0, 1))
def test_lambda_zero_is_one_step_td(rollout, gamma):
    rewards, values, _, _ = rollout
    advantages, _ = gae(rewards, values, torch.ones_like(rewards, dtype=torch.bool), gamma=gamma, lam=0.0)
    v_next = torch.nn.functional.pad(values[:, 1:], (0, 1))
    torch.testing.assert_close(advantages, rewards + gamma * v_next - values)


@given(rollouts(), st.floats(0, 1))
def test_lambda_one_is_the_return_less_the_value(rollout, gamma):
    rewards, values, mask, _ = rollout
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    expected = discounted_returns(rewards, mask, gamma=gamma)
    torch.testing.assert_close(advantages, expected - torch.where(mask, values, 0.0))
    torch.testing.assert_close(returns, expected)


@given(rollouts())
def test_an_end_in_a_row_is_the_same_as_two_rows(rollout):
    rewards, values, _, _ = rollout
    rows, length = rewards.shape
    whole = torch.ones(rows, length, dtype=torch.bool)
    ends = torch.zeros(rows, 2 * length, dtype=torch.bool)
    ends[:, length - 1] = True
    twice = gae(rewards.repeat(1, 2), values.repeat(1, 2), whole.repeat(1, 2), terminated=ends)
    once = gae(rewards, values, whole)
    torch.testing.assert_close(twice[0], once[0].repeat(1, 2))
    returns = discounted_returns(rewards.repeat(1, 2), whole.repeat(1, 2), gamma=0.9, ends=ends)
    torch.testing.assert_close(returns, discounted_returns(rewards, whole, gamma=0.9).repeat(1, 2))


@given(st.integers(1, 3), st.integers(0, 1500), st.floats(0, 1), st.integers(0, 1000))
def test_both_scans_agree_at_any_length(rows, length, c, seed):
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(discounted_scan(x, c), discounted_scan(x, torch.full_like(x, c)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_agree_with_float64(dtype):
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 300).to(dtype), torch.randn(4, 300).to(dtype)
    mask = torch.rand(4, 300) < 0.8
    got, _ = gae(rewards, values, mask)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), gae(rewards.double(), values.double(), mask)[0], atol=2e-5, rtol=2e-5)


def test_a_lowered_matmul_precision_or_autocast_changes_nothing():
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 512), torch.randn(4, 512)
    mask = torch.ones(4, 512, dtype=torch.bool)
    exact, _ = gae(rewards, values, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gae(rewards, values, mask)[0], exact)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.testing.assert_close(gae(rewards, values, mask)[0], exact)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_large_batch_worked_through_in_parts_is_the_same():
    torch.manual_seed(0)
    rewards, values, final = (torch.randn(7, 40_000) for _ in range(3))
    mask, ends = torch.rand(7, 40_000) < 0.9, torch.rand(7, 40_000) < 0.01
    last = torch.randn(7)
    options = {"terminated": ends, "truncated": ends.roll(1, 1), "final_values": final, "last_values": last}
    whole = gae(rewards, values, mask, **options)
    for b in (0, 3, 6):
        one = {k: v[b : b + 1] for k, v in options.items()}
        torch.testing.assert_close(
            [t[b : b + 1] for t in whole], list(gae(rewards[b : b + 1], values[b : b + 1], mask[b : b + 1], **one))
        )


def test_last_values_are_not_read_after_an_end():
    ends = torch.tensor([[False, True], [False, False]])
    last = torch.tensor([math.nan, 1.0])
    whole = torch.ones(2, 2, dtype=torch.bool)
    advantages, _ = gae(torch.zeros(2, 2), torch.zeros(2, 2), whole, lam=1.0, terminated=ends, last_values=last)
    assert advantages.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_an_end_in_a_gap_is_that_of_the_action_before_it():
    """The tool's answer, or the reset, ends the episode: nothing of the next one reaches back over it."""
    rewards, values = torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([[0.0, 0.0, 100.0]])
    mask, end = torch.tensor([[1, 0, 1]]), torch.tensor([[0, 1, 0]])
    advantages, returns = gae(rewards, values, mask, terminated=end, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[1.0, 0.0, -95.0]]
    assert returns.tolist() == [[1.0, 0.0, 5.0]]
    assert discounted_returns(rewards, mask, ends=end).tolist() == [[1.0, 0.0, 5.0]]
    final = torch.tensor([[math.nan, 7.0, math.nan]])
    cut, _ = gae(rewards, values, mask, truncated=end, final_values=final, gamma=1.0, lam=1.0)
    assert cut.tolist() == [[8.0, 0.0, -95.0]]


def test_of_several_ends_after_an_action_the_first_counts():
    rewards, values = torch.tensor([[0.0, 1.0, 0.0, 0.0, 5.0, 0.0]]), torch.zeros(1, 6)
    mask = torch.tensor([[0, 1, 0, 0, 1, 0]])
    cut, stop = torch.tensor([[1, 0, 1, 0, 0, 0]]), torch.tensor([[1, 0, 0, 1, 0, 1]])
    final = torch.tensor([[math.nan, math.nan, 7.0, math.nan, math.nan, math.nan]])
    last = torch.tensor([9.0])  # not read: the row ended in its padding
    got, _ = gae(
        rewards, values, mask, truncated=cut, terminated=stop, final_values=final, last_values=last, gamma=1.0, lam=1.0
    )
    assert got.tolist() == [[0.0, 8.0, 0.0, 0.0, 5.0, 0.0]]


def test_the_scan_is_computed_without_gradients():
    x = torch.ones(1, 4, requires_grad=True)
    for coefficient in (0.5, torch.full((1, 4), 0.5)):
        got = discounted_scan(x, coefficient)
        assert not got.requires_grad
        assert got.tolist() == [[1.875, 1.75, 1.5, 1.0]]


def test_turns_numbered_across_conversations_cost_no_memory():
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    mask = torch.ones(1, 2, dtype=torch.bool)
    far, _ = turn_gae(rewards, values, mask, torch.tensor([[5, 10**12]]), gamma=1.0, lam=1.0)
    assert far.tolist() == [[3.0, 2.0]]


def test_reinforce_pp_leaves_out_rows_with_a_missing_reward():
    mask = torch.ones(3, 2, dtype=torch.long)
    rewards = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [0.0, 0.0]])
    got = reinforce_pp_advantage(rewards, mask)
    assert got.tolist() == [[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]]


def test_no_gradient_is_recorded():
    values = torch.zeros(1, 3, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 3), values, torch.ones(1, 3, dtype=torch.bool))
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_empty_batches():
    for shape in ((0, 5), (3, 0), (0, 0)):
        x = torch.zeros(shape)
        mask = torch.zeros(shape, dtype=torch.bool)
        assert gae(x, x, mask)[0].shape == shape
        assert discounted_returns(x, mask).shape == shape


def test_chunks_are_one_time_step():
    rewards = torch.arange(12.0).view(1, 2, 6)
    mask = torch.ones(1, 2, 6, dtype=torch.long)
    mask[0, 1, 3:] = 0
    total, held = chunk_rewards(torch.where(mask.bool(), rewards, math.nan), mask)
    assert total.tolist() == [[15.0, 21.0]]
    assert held.tolist() == [[True, True]]
    advantages, _ = gae(total, torch.zeros(1, 2), held, gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[25.5, 21.0]]


def test_turns_of_one_token_are_gae():
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 7), torch.randn(3, 7)
    mask = torch.ones(3, 7, dtype=torch.bool)
    turns = torch.arange(7).expand(3, 7)
    torch.testing.assert_close(turn_gae(rewards, values, mask, turns), gae(rewards, values, mask))


def test_a_turn_shares_its_advantage():
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    turns = turn_ids(mask)
    assert turns.tolist() == [[0, 0, -1, 1, 1]]
    rewards = torch.tensor([[0.0, 0.5, 9.0, 0.0, 1.0]])
    values = torch.tensor([[0.25, 7.0, 7.0, 0.5, 7.0]])  # the first token of a turn carries its value
    advantages, returns = turn_gae(rewards, values, mask, turns, gamma=0.5, lam=0.5)
    second = 1.0 - 0.5
    first = 0.5 + 0.5 * 0.5 - 0.25 + 0.25 * second
    assert advantages.tolist() == [[first, first, 0.0, second, second]]
    assert returns.tolist() == [[first + 0.25, first + 0.25, 0.0, 1.0, 1.0]]


def test_reinforce_pp_is_the_whitened_return_to_go():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    kl = torch.randn(2, 4)
    rewards = torch.tensor([1.0, 0.0])
    got = reinforce_pp_advantage(rewards, mask, kl=kl, kl_coefficient=0.1)
    raw = torch.zeros(2, 4)
    for b, n in enumerate((3, 2)):
        for t in range(n):
            raw[b, t] = rewards[b] - 0.1 * kl[b, t:n].sum()
    torch.testing.assert_close(got, whiten(raw, mask))


def test_reinforce_pp_leaves_out_what_has_no_reward():
    mask = torch.ones(3, 2, dtype=torch.long)
    got = reinforce_pp_advantage(torch.tensor([1.0, math.nan, 0.0]), mask)
    torch.testing.assert_close(got[[0, 2]], reinforce_pp_advantage(torch.tensor([1.0, 0.0]), mask[:2]))
    assert got[1].tolist() == [0.0, 0.0]


X, M = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gae(X, X, M, gamma=1.1), "gamma must lie"),
        (lambda: gae(X, X, M, lam=-0.1), "lam must lie"),
        (lambda: gae(X, X[:, :2], M), "values has shape"),
        (lambda: gae(X, X, M[:1]), "mask has shape"),
        (lambda: gae(X.long(), X, M), "rewards must be floating point"),
        (lambda: gae(X, X, M.float()), "mask must be bool or integer"),
        (lambda: gae(X[0], X[0], M[0]), "rewards must have shape"),
        (lambda: gae(X, X, M, truncated=M), "truncated needs final_values"),
        (lambda: gae(X, X, M, final_values=X), "give truncated"),
        (lambda: gae(X, X, M, last_values=X), "last_values must have shape"),
        (lambda: reinforce_pp_advantage(X, M, kl_coefficient=0.1), "needs kl"),
        (lambda: reinforce_pp_advantage(X[0], M), "3 entries but mask has 2"),
        (lambda: turn_gae(X, X, M, X), "turns must be an integer"),
        (lambda: turn_gae(X, X, M, -M.long()), "negative"),
        (lambda: chunk_rewards(X, M), "shape"),
        (lambda: discounted_scan(X, X[:, :2]), "coefficient has shape"),
        (lambda: discounted_scan(X, math.nan), "coefficient must be finite"),
        (lambda: discounted_scan(X, "0.9"), "coefficient must be a number"),
        (lambda: turn_gae(X, X, M, torch.tensor([[0, 1, 0]] * 2)), "turns falls along a row"),
        (lambda: reinforce_pp_advantage(X[:, :1], M, kl=X), "rewards has shape"),
        (lambda: reinforce_pp_advantage(X[:, :1], M, kl=X, kl_coefficient=0.1), "rewards has shape"),
        (lambda: reinforce_pp_advantage(torch.tensor([math.inf, 0.0]), M), "rewards holds NaN or an infinite"),
        (lambda: gae(X + math.inf, X, M), "rewards holds NaN or an infinite"),
        (lambda: gae(terminal_reward(torch.tensor([1.0, math.nan]), M), X, M), "Leave the rows"),
        (lambda: discounted_returns(X + math.nan, M), "rewards holds NaN or an infinite"),
        (lambda: turn_gae(X + math.nan, X, M, M.long()), "rewards holds NaN or an infinite"),
        (lambda: gae(X, X, M, last_values=[0.0, 0.0]), "last_values must be a tensor"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()
