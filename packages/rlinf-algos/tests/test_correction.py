"""Rollout correction, entropy and KL control."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AlgorithmError,
    EntropyControl,
    KLControl,
    effective_sample_size,
    policy_gradient_loss,
    rollout_correction,
    rollout_metrics,
)
from rlinf_algos.correction import LEVELS, MODES


@st.composite
def pairs(draw):
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    make = lambda: torch.randn(rows, length, generator=generator, dtype=torch.float64)  # noqa: E731
    return make(), make(), torch.rand(rows, length, generator=generator) < 0.7


@given(pairs(), st.sampled_from(LEVELS), st.sampled_from(MODES))
def test_weights_are_the_loop(pair, level, mode):
    train, rollout, mask = pair
    got = rollout_correction(train, rollout, mask, level=level, mode=mode, upper=1.5)
    for b in range(len(mask)):
        d = [float(train[b, t] - rollout[b, t]) for t in range(mask.shape[1]) if mask[b, t]]
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                assert got.weights[b, t] == 0
                assert not got.mask[b, t]
                continue
            exponent = {"token": float(train[b, t] - rollout[b, t]), "sequence": sum(d), "geometric": sum(d) / len(d)}
            w = math.exp(exponent[level])
            inside = 1 / 1.5 <= w <= 1.5
            right = min(w, 1.5) if mode == "truncate" else w * inside
            assert float(got.weights[b, t]) == pytest.approx(right)
            assert bool(got.mask[b, t]) == (inside or mode == "truncate")


@given(pairs(), st.sampled_from(LEVELS), st.sampled_from(MODES), st.sampled_from([math.nan, math.inf]))
def test_masked_garbage_is_not_read(pair, level, mode, bad):
    train, rollout, mask = pair
    clean = rollout_correction(train, rollout, mask, level=level, mode=mode)
    spoil = lambda t: torch.where(mask, t, bad)  # noqa: E731
    dirty = rollout_correction(spoil(train), spoil(rollout), mask, level=level, mode=mode)
    torch.testing.assert_close(dirty.weights, clean.weights)
    torch.testing.assert_close(dict(dirty.metrics), dict(clean.metrics))


@given(pairs(), st.sampled_from(MODES))
def test_relations(pair, mode):
    train, _, mask = pair
    same = rollout_correction(train, train, mask, level="sequence", mode=mode)
    assert (same.weights == mask).all()
    assert effective_sample_size(same.metrics) == pytest.approx(1.0 if mask.any() else 0.0)
    one = [t[:, :1] for t in pair]
    by_level = [rollout_correction(*one, level=level, mode=mode).weights for level in LEVELS]
    torch.testing.assert_close(by_level[0], by_level[1])
    torch.testing.assert_close(by_level[0], by_level[2])


@given(pairs(), st.sampled_from(LEVELS))
def test_packed_rows_are_the_same_sequences(pair, level):
    rows, length = pair[2].shape
    segments = torch.arange(rows).repeat_interleave(length)[None]
    flat = [t.reshape(1, -1) for t in pair]
    packed = rollout_correction(*flat, level=level, segments=segments)
    torch.testing.assert_close(packed.weights.view(rows, length), rollout_correction(*pair, level=level).weights)


@given(pairs())
def test_metrics_add_over_micro_batches(pair):
    whole = rollout_metrics(*pair)
    parts = [rollout_metrics(*(t[rows] for t in pair)) for rows in (slice(0, 1), slice(1, None))]
    for name, value in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], value)
    assert float(whole["rollout_kl3"]) >= 0


def test_importance_sampling_makes_up_for_the_engine():
    """Enumerated: the weighted gradient under the engine's distribution is the on-policy one."""
    theta = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    engine = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logp, advantages = theta.log_softmax(0)[:, None], torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    mask = torch.ones(3, 1, dtype=torch.bool)
    weights = rollout_correction(logp, engine[:, None], mask, upper=1e6).weights
    drawn = engine.exp()[:, None]
    got = torch.autograd.grad(
        policy_gradient_loss(logp, advantages, mask, weights=weights * drawn).sum, theta, retain_graph=True
    )[0]
    right = torch.autograd.grad(-(theta.softmax(0) * advantages).sum(), theta)[0]
    torch.testing.assert_close(got, right)


def test_a_weight_of_zero_still_counts():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    correction = rollout_correction(x, torch.tensor([[0.0, 5.0]]), mask, mode="mask")
    assert policy_gradient_loss(x, x, mask, weights=correction.weights).count == 2
    assert policy_gradient_loss(x, x, correction.mask, weights=correction.weights).count == 1
    assert float(correction.metrics["rollout_clipped"]) == 1


def test_entropy_control_moves_towards_its_target():
    control = EntropyControl(target=0.5, step=0.1, maximum=0.25)
    for _ in range(4):
        control = control.update(0.2)
    assert control.applied == 0.25
    above = control.update(0.9)
    assert above.coefficient == pytest.approx(0.15)
    assert above.applied == 0.0
    for _ in range(5):
        above = above.update(0.9)
    assert above.coefficient == 0.0


def test_kl_control_is_the_papers_formula():
    control = KLControl(coefficient=0.2, target=6.0, horizon=1000)
    assert control.update(6.0, 100).coefficient == pytest.approx(0.2)
    assert control.update(6.6, 100).coefficient == pytest.approx(0.2 * 1.01)
    assert control.update(600.0, 100).coefficient == pytest.approx(0.2 * 1.02)


X, M = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rollout_correction(X, X, M, level="tokens"), "did you mean 'token'"),
        (lambda: rollout_correction(X, X, M, mode="clip"), "mode must be one of"),
        (lambda: rollout_correction(X, X, M, upper=0.0), "upper must be"),
        (lambda: rollout_correction(X, X, M, lower=0.5), "mode 'mask' alone"),
        (lambda: rollout_correction(X, X, M, mode="mask", lower=3.0), "exceeds upper"),
        (lambda: rollout_correction(X, X[:1], M), "rollout_logprobs has shape"),
        (lambda: EntropyControl(target=-1.0), "target must be"),
        (lambda: EntropyControl(target=1.0).update(math.nan), "entropy must be finite"),
        (lambda: KLControl(coefficient=0.1, target=0.0), "target must be"),
        (lambda: KLControl(coefficient=0.1, target=1.0).update(math.inf, 1), "kl must be finite"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()
