"""Masks, positions, whitening, aggregation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AGGREGATIONS,
    AlgorithmError,
    aggregate,
    last_trainable,
    masked_mean,
    masked_sum,
    position_ids,
    terminal_reward,
    turn_ids,
    whiten,
)
from rlinf_algos.masking import safe_exp

masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4).map(torch.tensor)


@given(masks)
def test_last_trainable_and_terminal_reward(mask):
    last = last_trainable(mask)
    rewards = torch.arange(1.0, len(mask) + 1)
    placed = terminal_reward(rewards, mask)
    for b, flags in enumerate(mask.tolist()):
        right = max((t for t, m in enumerate(flags) if m), default=-1)
        assert int(last[b]) == right
        assert placed[b].tolist() == [float(rewards[b]) if t == right else 0.0 for t in range(5)]


@given(masks)
def test_position_ids_count_real_tokens(mask):
    positions = position_ids(mask)
    for flags, row in zip(mask.tolist(), positions.tolist(), strict=True):
        count = 0
        for m, p in zip(flags, row, strict=True):
            assert p == (count if m else 0)
            count += m


@given(masks)
def test_turn_ids_number_the_stretches(mask):
    for flags, row in zip(mask.tolist(), turn_ids(mask).tolist(), strict=True):
        turn, before = -1, False
        for m, number in zip(flags, row, strict=True):
            turn += m and not before
            before = m
            assert number == (turn if m else -1)


@given(masks, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_sums_and_means(mask, bad):
    x = torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape)
    x = torch.where(mask, x, bad).requires_grad_()
    kept = x.detach()[mask]
    assert float(masked_sum(x, mask).detach()) == float(kept.sum())
    mean = masked_mean(x, mask)
    assert float(mean.detach()) == pytest.approx(float(kept.mean()) if len(kept) else 0.0)
    mean.backward()
    assert torch.isfinite(x.grad).all()


@given(masks, st.integers(0, 99), st.sampled_from([math.nan, math.inf]))
def test_whitening_is_the_formula(mask, seed, bad):
    x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = x[mask]
    got = whiten(torch.where(mask, x, bad), mask)
    assert (got[~mask] == 0).all()
    if len(kept) > 1:
        torch.testing.assert_close(got[mask], (kept - kept.mean()) / (kept.std(correction=0) + 1e-8))
        torch.testing.assert_close(whiten(x, mask, shift_mean=False)[mask], kept / (kept.std(correction=0) + 1e-8))
    else:
        assert (got == 0).all()


@pytest.mark.parametrize("value", [0.95, 1e6, -3.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_equal_values_is_zero(value, dtype):
    x = torch.full((3, 7), value, dtype=dtype)
    assert (whiten(x, torch.ones(3, 7, dtype=torch.bool)) == 0).all()


@given(masks, st.sampled_from(AGGREGATIONS))
def test_aggregation_is_the_loop(mask, mode):
    losses = torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape).sin()
    divisor = 7.0 if mode == "constant" else None
    total, count = aggregate(losses, mask, mode, divisor=divisor)
    rows = [losses[b][mask[b]] for b in range(len(mask)) if mask[b].any()]
    if mode == "token_mean":
        expected = (sum(float(r.sum()) for r in rows), sum(len(r) for r in rows))
    elif mode == "sequence_mean_of_token_means":
        expected = (sum(float(r.mean()) for r in rows), len(rows))
    else:
        expected = (sum(float(r.sum()) for r in rows) / (divisor or 1.0), len(rows))
    assert (float(total), count) == pytest.approx(expected)


def test_safe_exp_goes_on_as_its_tangent():
    x = torch.tensor([-1e4, 0.0, 19.0, 21.0, 1e4], dtype=torch.float64, requires_grad=True)
    y = safe_exp(x)
    y.sum().backward()
    torch.testing.assert_close(y[:3].detach(), x[:3].detach().exp())
    assert float(y[3].detach()) == pytest.approx(2 * math.exp(20))
    assert float(x.grad[4]) == pytest.approx(math.exp(20))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: whiten(torch.zeros(2), torch.zeros(3, dtype=torch.bool)), "mask has shape"),
        (lambda: whiten(torch.zeros(2).long(), torch.ones(2, dtype=torch.bool)), "values must be floating"),
        (lambda: last_trainable(torch.ones(3)), "mask must have shape"),
        (lambda: terminal_reward(torch.zeros(3), torch.ones(2, 2, dtype=torch.bool)), "3 entries but mask has 2"),
        (lambda: aggregate(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), "mean"), "mode must be one of"),
        (lambda: aggregate(torch.zeros(2, 2), [[1, 1], [1, 1]]), "mask must be a tensor, got list"),
        (lambda: masked_sum(torch.zeros(2), torch.zeros(2)), "use mask.bool"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()


def test_empty_rows_and_no_rows():
    assert last_trainable(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [-1, -1]
    for mode in AGGREGATIONS:
        total, count = aggregate(
            torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), mode, divisor=2.0 if mode == "constant" else None
        )
        assert (float(total), count) == (0.0, 0.0)
