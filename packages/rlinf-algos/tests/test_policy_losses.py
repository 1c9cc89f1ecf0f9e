"""Every loss: gradcheck, invariances, masked garbage, relations, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AGGREGATIONS,
    AlgorithmError,
    LossSum,
    cispo_loss,
    decoupled_ppo_loss,
    dpo_loss,
    entropy_loss,
    gspo_loss,
    kl_loss,
    policy_gradient_loss,
    ppo_clip_loss,
    sft_loss,
    value_loss,
)

# name -> f(x, other, advantages, mask, **options): x is what gradients flow to.
LOSSES = {
    "ppo": ppo_clip_loss,
    "ppo_dual": lambda *a, **o: ppo_clip_loss(*a, clip_high=0.28, dual_clip=3.0, **o),
    "gspo": gspo_loss,
    "gspo_wide": lambda *a, **o: gspo_loss(*a, clip_low=0.2, clip_high=0.3, **o),
    "cispo": lambda x, old, a, m, **o: cispo_loss(x, old, a, m, clip_low=0.3, clip_high=0.4, **o),
    "decoupled": lambda x, old, a, m, **o: decoupled_ppo_loss(x, old, old * 0.5, a, m, **o),
    "policy_gradient": lambda x, old, a, m, **o: policy_gradient_loss(x, a, m, **o),
    "sft": lambda x, old, a, m, **o: sft_loss(x, m, **o),
    "kl_k2": lambda x, old, a, m, **o: kl_loss(x, old, m, **o),
    "kl_k3": lambda x, old, a, m, **o: kl_loss(x, old, m, kind="k3", **o),
    "kl_abs": lambda x, old, a, m, **o: kl_loss(x, old, m, kind="abs", **o),
    "entropy": lambda x, old, a, m, **o: entropy_loss(x, m, **o),
    "value": lambda x, old, a, m, **o: value_loss(x, a, m, **o),
    "value_clipped": lambda x, old, a, m, **o: value_loss(x, a, m, old_values=old, clip=0.2, **o),
    "value_huber": lambda x, old, a, m, **o: value_loss(x, a, m, kind="huber", huber_delta=0.3, **o),
}
# Their value is not the function whose derivative the gradient is (a constant weight stands in it).
STRAIGHT = {"cispo", "gspo", "gspo_wide"}
each_loss = pytest.mark.parametrize("name", LOSSES)
each_mode = pytest.mark.parametrize("mode", AGGREGATIONS)


def options(mode):
    return {"aggregation": mode, "divisor": 7.0 if mode == "constant" else None}


@st.composite
def batches(draw, rows=None):
    rows, length = rows or draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(rows, length, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    old = -make(rows, length).abs()
    return old + 0.5 * make(rows, length), old, make(rows, length), mask


def value_and_grad(function, x, *arguments, **keywords):
    x = x.detach().clone().requires_grad_()
    loss = function(x, *arguments, **keywords)
    loss.sum.backward()
    return loss.sum.detach(), loss.count, x.grad


@each_loss
@each_mode
def test_gradcheck(name, mode):
    generator = torch.Generator().manual_seed(3)
    x, old, a = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    x = x.requires_grad_()
    if name not in STRAIGHT:
        assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, old, a, mask, **options(mode)).sum, (x,))
        return
    # The weight is a constant: compare with the gradient of the surrogate in which it is frozen.
    got = torch.autograd.grad(LOSSES[name](x, old, a, mask, **options(mode)).sum, x)[0]
    d = torch.where(mask.bool(), x - old, 0.0).detach()
    if name == "cispo":
        weight = -d.exp().clamp(0.7, 1.4) * a
    else:
        low, high = (3e-4, 4e-4) if name == "gspo" else (0.2, 0.3)
        mean = d.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        s = mean.exp().expand_as(d)
        clipped = torch.where(a > 0, s > 1 + high, s < 1 - low)
        weight = torch.where(clipped, 0.0, -a * s)
    surrogate = policy_gradient_loss(x, -weight, mask, **options(mode)).sum
    torch.testing.assert_close(got, torch.autograd.grad(surrogate, x)[0])


@each_loss
@given(batch=batches(), mode=st.sampled_from(AGGREGATIONS), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_masked_slots_touch_neither_value_nor_gradient(name, batch, mode, bad):
    x, old, a, mask = batch
    clean = value_and_grad(LOSSES[name], x, old, a, mask, **options(mode))
    spoil = lambda t: torch.where(mask, t, bad)  # noqa: E731
    dirty = value_and_grad(LOSSES[name], spoil(x), spoil(old), spoil(a), mask, **options(mode))
    assert torch.isfinite(dirty[0])
    assert torch.isfinite(dirty[2]).all()
    assert (dirty[2][~mask] == 0).all()
    torch.testing.assert_close(dirty, clean)


@each_loss
@given(batch=batches(rows=4), mode=st.sampled_from(AGGREGATIONS), cut=st.integers(0, 4), seed=st.integers(0, 99))
def test_micro_batches_ranks_and_order_change_nothing(name, batch, mode, cut, seed):
    """Any cut of any permutation: the sums and counts of the parts add up to the whole's, gradients too."""
    x, old, a, mask = batch
    whole = value_and_grad(LOSSES[name], x, old, a, mask, **options(mode))
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    leaf = x.clone().requires_grad_()
    parts = []
    for rows in (order[:cut], order[cut:]):
        parts.append(LOSSES[name](leaf[rows], old[rows], a[rows], mask[rows], **options(mode)))
        parts[-1].sum.backward()
    total = parts[0] + parts[1]
    torch.testing.assert_close((total.sum.detach(), total.count, leaf.grad), whole)
    assert float(total.metrics["tokens"]) == float(mask.sum())


@each_loss
@given(batch=batches(), mode=st.sampled_from(AGGREGATIONS), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_on_either_side_changes_nothing(name, batch, mode, left, right):
    x, old, a, mask = batch
    pad = lambda t: torch.nn.functional.pad(t, (left, right), value=3)  # noqa: E731
    wide_mask = torch.nn.functional.pad(mask, (left, right))
    plain = value_and_grad(LOSSES[name], x, old, a, mask, **options(mode))
    padded = value_and_grad(LOSSES[name], pad(x), pad(old), pad(a), wide_mask, **options(mode))
    torch.testing.assert_close(padded[:2], plain[:2])
    torch.testing.assert_close(padded[2][:, left : left + mask.shape[1]], plain[2])


@each_loss
@given(batch=batches(), mode=st.sampled_from(AGGREGATIONS), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_dtype_changes_nothing_but_rounding(name, batch, mode, dtype):
    x, old, a, mask = (t.to(dtype) if t.is_floating_point() else t for t in batch)
    low = value_and_grad(LOSSES[name], x, old, a, mask, **options(mode))
    assert low[0].dtype == torch.float32
    assert low[2].dtype == dtype
    exact = value_and_grad(LOSSES[name], x.double(), old.double(), a.double(), mask, **options(mode))
    torch.testing.assert_close(low[0].double(), exact[0], atol=1e-3, rtol=1e-4)


@each_loss
@given(batch=batches(), mode=st.sampled_from(AGGREGATIONS))
def test_packed_rows_are_the_same_sequences(name, batch, mode):
    """All sequences side by side in one row, told apart by segments."""
    x, old, a, mask = batch
    rows, length = mask.shape
    plain = value_and_grad(LOSSES[name], x, old, a, mask, **options(mode))
    segments = torch.arange(rows).repeat_interleave(length)[None]
    flat = (t.reshape(1, -1) for t in (x, old, a, mask))
    packed = value_and_grad(LOSSES[name], *flat, segments=segments, **options(mode))
    torch.testing.assert_close(packed[:2], plain[:2])
    torch.testing.assert_close(packed[2].view(rows, length), plain[2])


@each_loss
def test_a_huge_log_ratio_stays_finite(name):
    x, old = torch.tensor([[300.0, -300.0]]), torch.zeros(1, 2)
    for sign in (1.0, -1.0):
        mask = torch.ones(1, 2, dtype=torch.bool)
        value, _, grad = value_and_grad(LOSSES[name], x, old, torch.full((1, 2), sign), mask)
        assert torch.isfinite(value)
        assert torch.isfinite(grad).all()


@each_loss
@each_mode
def test_nothing_to_train_on(name, mode):
    x = torch.full((2, 3), math.nan)
    value, count, grad = value_and_grad(LOSSES[name], x, x, x, torch.zeros(2, 3, dtype=torch.bool), **options(mode))
    assert (float(value), count) == (0.0, 0.0)
    assert (grad == 0).all()


class TestRelations:
    @given(batches())
    def test_gspo_of_one_token_is_ppo(self, batch):
        x, old, a, mask = (t[:, :1] for t in batch)
        shared = {"clip_low": 0.2, "clip_high": 0.3, "aggregation": "token_mean"}
        gspo = value_and_grad(gspo_loss, x, old, a, mask, **shared)
        torch.testing.assert_close(gspo, value_and_grad(ppo_clip_loss, x, old, a, mask, **shared))

    @given(batches())
    def test_gspo_has_the_gradient_of_the_sequence_form(self, batch):
        """Equation 5 of the paper, written as such, for one advantage per sequence."""
        x, old, a, mask = batch
        a = a[:, 0]
        got = value_and_grad(gspo_loss, x, old, a, mask, clip_low=0.2, clip_high=0.3)
        leaf = x.clone().requires_grad_()
        used = mask.any(1)
        d = torch.where(mask, leaf - old, 0.0).sum(1) / mask.sum(1).clamp(min=1)
        s = d.exp()
        loss = torch.where(used, torch.maximum(-a * s, -a * s.clamp(0.8, 1.3)), 0.0).sum()
        loss.backward()
        torch.testing.assert_close(got, (loss.detach(), float(used.sum()), leaf.grad))

    @given(batches())
    def test_decoupled_with_equal_policies_is_ppo(self, batch):
        x, old, a, mask = batch
        decoupled = value_and_grad(lambda *t: decoupled_ppo_loss(t[0], t[1], t[1], t[2], t[3]), x, old, a, mask)
        torch.testing.assert_close(decoupled, value_and_grad(ppo_clip_loss, x, old, a, mask))

    @given(batches())
    def test_decoupled_weighs_by_the_behaviour_ratio(self, batch):
        x, old, a, mask = batch
        behaviour = old - 0.3
        weights = torch.full_like(old, math.exp(0.3))
        decoupled = decoupled_ppo_loss(x, old, behaviour, a, mask, behaviour_cap=None)
        torch.testing.assert_close(decoupled.sum, ppo_clip_loss(x, old, a, mask, weights=weights).sum)

    @given(batches())
    def test_on_policy_every_ratio_loss_has_the_policy_gradient(self, batch):
        _, old, a, mask = batch
        expected = value_and_grad(policy_gradient_loss, old, a, mask)[2]
        for function in (ppo_clip_loss, cispo_loss, lambda *t: gspo_loss(*t, aggregation="token_mean")):
            torch.testing.assert_close(value_and_grad(function, old, old, a, mask)[2], expected)

    @given(batches())
    def test_without_bounds_ppo_is_importance_sampling(self, batch):
        x, old, a, mask = batch
        got = ppo_clip_loss(x, old, a, mask, clip_low=1.0, clip_high=1e9).sum
        expected = torch.where(mask, -(x - old).exp() * a, 0.0).sum()
        torch.testing.assert_close(got, expected)

    @given(batches())
    def test_cispo_without_bounds_has_ppos_gradient(self, batch):
        x, old, a, mask = batch
        cispo = value_and_grad(cispo_loss, x, old, a, mask, clip_high=1e9)[2]
        ppo = value_and_grad(ppo_clip_loss, x, old, a, mask, clip_low=1.0, clip_high=1e9)[2]
        torch.testing.assert_close(cispo, ppo)

    @given(batches())
    def test_a_large_dual_clip_is_none(self, batch):
        x, old, a, mask = batch
        with_clip = value_and_grad(ppo_clip_loss, x, old, a, mask, dual_clip=1e9)
        torch.testing.assert_close(with_clip, value_and_grad(ppo_clip_loss, x, old, a, mask))

    @given(batches())
    def test_sft_is_policy_gradient_with_advantage_one(self, batch):
        x, _, a, mask = batch
        one = value_and_grad(policy_gradient_loss, x, torch.ones_like(a), mask)
        torch.testing.assert_close(value_and_grad(sft_loss, x, mask), one)

    @given(batches())
    def test_an_advantage_per_sequence_is_one_on_each_token(self, batch):
        x, old, a, mask = batch
        per_row = value_and_grad(ppo_clip_loss, x, old, a[:, 0], mask)
        torch.testing.assert_close(per_row, value_and_grad(ppo_clip_loss, x, old, a[:, :1].expand_as(x), mask))

    @given(batches())
    def test_huber_with_a_large_delta_is_the_square(self, batch):
        x, _, target, mask = batch
        huber = value_and_grad(value_loss, x, target, mask, kind="huber", huber_delta=1e6)
        torch.testing.assert_close(huber, value_and_grad(value_loss, x, target, mask))

    @given(batches())
    def test_a_wide_value_clip_is_none(self, batch):
        x, old, target, mask = batch
        clipped = value_and_grad(value_loss, x, target, mask, old_values=old, clip=1e6)
        torch.testing.assert_close(clipped, value_and_grad(value_loss, x, target, mask))


def test_ppo_is_the_loop():
    generator = torch.Generator().manual_seed(0)
    x, old, a = (torch.randn(4, 6, generator=generator) for _ in range(3))
    mask = torch.rand(4, 6, generator=generator) < 0.7
    expected = 0.0
    for b in range(4):
        for t in range(6):
            if mask[b, t]:
                r, adv = math.exp(float(x[b, t]) - float(old[b, t])), float(a[b, t])
                value = max(-r * adv, -min(max(r, 0.8), 1.28) * adv)
                expected += min(value, -3 * adv) if adv < 0 else value
    loss = ppo_clip_loss(x, old, a, mask, clip_high=0.28, dual_clip=3.0)
    assert float(loss.sum) == pytest.approx(expected, rel=1e-5)
    assert loss.count == float(mask.sum())


class TestDPO:
    chosen, rejected = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0, -2.0]])
    ref_chosen, ref_rejected = torch.tensor([[-1.5, -2.5]]), torch.tensor([[-2.5, -1.0, -1.0]])
    mask2, mask3 = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool)

    def loss(self, chosen=None, mask2=None, **keywords):
        chosen = self.chosen if chosen is None else chosen
        mask2 = self.mask2 if mask2 is None else mask2
        return dpo_loss(
            chosen, self.rejected, self.ref_chosen, self.ref_rejected, mask2, self.mask3, beta=0.5, **keywords
        )

    def test_value(self):
        z = 0.5 * (1.0 - (-1.5))
        loss = self.loss()
        assert float(loss.sum) == pytest.approx(math.log1p(math.exp(-z)))
        assert loss.count == 1
        assert float(loss.metrics["accuracy"]) == 1

    def test_label_smoothing(self):
        z = 1.25
        expected = 0.9 * math.log1p(math.exp(-z)) + 0.1 * math.log1p(math.exp(z))
        assert float(self.loss(label_smoothing=0.1).sum) == pytest.approx(expected)

    def test_gradcheck(self):
        t = {n: getattr(self, n).double() for n in ("chosen", "rejected", "ref_chosen", "ref_rejected")}
        refs = (t["ref_chosen"], t["ref_rejected"], self.mask2, self.mask3)

        def function(c, r):
            return dpo_loss(c, r, *refs, label_smoothing=0.1).sum

        assert torch.autograd.gradcheck(function, (t["chosen"].requires_grad_(), t["rejected"].requires_grad_()))

    def test_a_pair_with_an_empty_side_is_left_out(self):
        nothing = torch.full((1, 2), math.nan, requires_grad=True)
        loss = self.loss(nothing, torch.zeros(1, 2, dtype=torch.bool))
        loss.sum.backward()
        assert (float(loss.sum.detach()), loss.count) == (0.0, 0.0)
        assert (nothing.grad == 0).all()

    def test_refused(self):
        with pytest.raises(AlgorithmError, match="label_smoothing"):
            self.loss(label_smoothing=0.5)
        with pytest.raises(AlgorithmError, match="chosen_mask has shape"):
            self.loss(mask2=self.mask3)


class TestLossSum:
    def test_terms_of_one_loss_share_the_count(self):
        x, old, a, mask = torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.long)
        policy, kl = ppo_clip_loss(x, old, a, mask), kl_loss(x, old + 1, mask)
        total = policy.plus(kl, 0.1)
        assert float(total.sum) == pytest.approx(-2 + 0.1 * 1)
        assert total.count == 2
        assert {"clip_low", "kl", "tokens"} <= set(total.metrics)
        assert total.metric_means()["kl"] == pytest.approx(0.5)
        with pytest.raises(AlgorithmError, match="one count"):
            policy.plus(kl_loss(x, old, mask, aggregation="sequence_mean_of_token_sums"))

    def test_unpacks(self):
        total, count, metrics = LossSum(torch.tensor(3.0), 2.0)
        assert (float(total), count, dict(metrics)) == (3.0, 2.0, {})
        assert float(LossSum(torch.tensor(3.0), 2.0).mean()) == 1.5
        assert float(LossSum(torch.tensor(0.0), 0.0).mean()) == 0.0


X, M = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ppo_clip_loss(X, X, X, M, clip_low=-0.1), "clip_low must be"),
        (lambda: ppo_clip_loss(X, X, X, M, clip_low=1.5), "would be negative"),
        (lambda: ppo_clip_loss(X, X, X, M, dual_clip=1.0), "must exceed"),
        (lambda: ppo_clip_loss(X, X[:1], X, M), "old_logprobs must have shape"),
        (lambda: ppo_clip_loss(X, X, X[:, 0].repeat(2), M), "advantages has 4 entries for 2"),
        (lambda: ppo_clip_loss(X, X, X[:, :2], M), r"advantages must have shape \[B\] or"),
        (lambda: ppo_clip_loss(X, X, X.long(), M), "advantages must be floating"),
        (lambda: ppo_clip_loss(X, X, X, M.float()), "mask must be bool"),
        (lambda: ppo_clip_loss(X[0], X[0], X[0], M[0]), "logprobs must have shape"),
        (lambda: ppo_clip_loss(X, X, X, M, aggregation="token_maen"), "did you mean 'token_mean'"),
        (lambda: ppo_clip_loss(X, X, X, M, aggregation="constant"), "needs divisor"),
        (lambda: ppo_clip_loss(X, X, X, M, divisor=3.0), "'constant' alone"),
        (lambda: ppo_clip_loss(X, X, X, M, weights=X[0]), "weights must have shape"),
        (lambda: gspo_loss(X, X, X, M, segments=X), "segments must be an integer"),
        (lambda: gspo_loss(X, X, X, M, segments=M.long() * 10**9 - M.cumsum(1)), None),
        (lambda: gspo_loss(X, X, X, M, segments=M.cumsum(1) * 10**6), "small integers"),
        (lambda: decoupled_ppo_loss(X, X, X, X, M, behaviour_cap=0.0), "behaviour_cap must be"),
        (lambda: value_loss(X, X, M, clip=0.2), "belong together"),
        (lambda: value_loss(X, X, M, kind="hubber"), "did you mean 'huber'"),
        (lambda: kl_loss(X, X, M, kind="k4"), "kind must be one of"),
        (lambda: kl_loss(X, X[:1], M), "ref_logprobs has shape"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    if message is None:
        call()
        return
    with pytest.raises(AlgorithmError, match=message):
        call()
