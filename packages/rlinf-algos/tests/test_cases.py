"""Hand-computed cases: what goes wrong in practice, with the right values (and, where known, the wrong ones seen)."""

import pytest
import torch

from rlinf_algos import (
    AlgorithmError,
    aggregate,
    discounted_returns,
    gae,
    group_advantage,
    kl_loss,
    kl_penalty,
    last_trainable,
    overlong_penalty,
    ppo_clip_loss,
    terminal_reward,
    whiten,
)

NAN = float("nan")


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def near(actual, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected.view(actual.shape), atol=1e-6, rtol=0)


class TestGAE:
    def test_plain(self):
        advantages, returns = gae(
            row(0, 0, 1), row(0.1, 0.2, 0.3), torch.ones(1, 3, dtype=torch.bool), gamma=0.99, lam=0.95
        )
        near(advantages, [0.808406675, 0.75535, 0.7])
        near(returns, [0.908406675, 0.95535, 1.0])

    def test_the_value_after_the_masks_end_is_not_bootstrapped(self):
        advantages, _ = gae(row(0, 1, 0), row(0, 0, 100), torch.tensor([[1, 1, 0]]), gamma=1.0, lam=0.95)
        near(advantages, [0.95, 1, 0])  # seen: 5.7, 6

    def test_a_gap_is_stepped_over(self):
        advantages, _ = gae(row(0, 0, 0, 1), row(0.1, 0.2, 9, 0.3), torch.tensor([[1, 1, 0, 1]]), gamma=1.0, lam=0.5)
        near(advantages, [0.325, 0.45, 0, 0.7])  # seen: 2.41, 4.63

    def test_nan_in_the_gap_is_not_read(self):
        advantages, returns = gae(
            row(0, 0, NAN, 1), row(0.1, 0.2, NAN, 0.3), torch.tensor([[1, 1, 0, 1]]), gamma=1.0, lam=0.5
        )
        near(advantages, [0.325, 0.45, 0, 0.7])
        near(returns, [0.425, 0.65, 0, 1.0])


def test_the_last_reward_reaches_actions_before_a_gap():
    returns = discounted_returns(row(0, 0, 0, 0, 0, 1), torch.tensor([[1, 1, 0, 0, 1, 1]]), gamma=1.0)
    near(returns, [1, 1, 0, 0, 1, 1])  # seen: 0, 0, 0, 0, 1, 1


def test_a_gap_costs_no_discount():
    returns = discounted_returns(row(0, 0, 0, 1), torch.tensor([[1, 0, 0, 1]]), gamma=0.5)
    near(returns, [0.5, 0, 0, 1])


def test_the_terminal_reward_goes_on_the_last_trainable_token():
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    assert last_trainable(mask).tolist() == [3]
    near(terminal_reward(torch.tensor([2.0]), mask), [0, 0, 0, 2, 0])


class TestGroupAdvantage:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("value", [0.95, 0.1, -0.7, 1 / 3, 1e6])
    def test_equal_rewards_have_no_signal(self, value, dtype):
        rewards = torch.full((7,), value, dtype=dtype)
        assert group_advantage(rewards, ["a"] * 7).tolist() == [0.0] * 7  # seen: 0.912

    def test_equal_up_to_float_noise_has_no_signal(self):
        rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.6 - 0.3], dtype=torch.float64)
        assert rewards.max() != rewards.min()
        assert group_advantage(rewards, ["a"] * 4).tolist() == [0.0] * 4

    def test_a_group_left_with_one_member_has_no_signal(self):
        assert group_advantage(torch.tensor([1.0]), ["a"]).tolist() == [0.0]  # seen: 0.999999

    @pytest.mark.parametrize("size", [1, 0, -3])
    def test_a_configured_group_size_of_one_is_refused(self, size):
        with pytest.raises(AlgorithmError, match="group_size"):
            group_advantage(torch.tensor([1.0]), ["a"], group_size=size)

    def test_uneven_groups_by_id_and_in_any_order(self):
        rewards = torch.tensor([1.0, 0, 0, 1, 0])
        near(
            group_advantage(rewards, ["a", "b", "a", "a", "b"], normalise_std=False),
            [1 / 3, 0, -2 / 3, 1 / 3, 0],
        )

    def test_a_fully_masked_sample_is_no_peer(self):
        valid = torch.tensor([True, False, True, True])
        advantages = group_advantage(torch.tensor([1.0, 1, 0, 0]), ["a"] * 4, normalise_std=False, valid=valid)
        near(advantages, [2 / 3, 0, -1 / 3, -1 / 3])

    def test_a_reward_that_could_not_be_computed_is_left_out(self):
        advantages = group_advantage(torch.tensor([1.0, NAN, 0]), ["a"] * 3, normalise_std=False)
        near(advantages, [0.5, 0, -0.5])


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize(("mask", "kept"), [([1], 3.0), ([0], 0.0)])
def test_whitening_one_token_or_none_is_finite(mask, kept, shift_mean):
    whitened = whiten(torch.tensor([3.0]), torch.tensor(mask), shift_mean=shift_mean)
    assert whitened.tolist() == [0.0 if shift_mean else kept]


class TestAggregation:
    losses = torch.tensor([[1.0, 0, 0, 0], [3, 3, 3, 3]])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])

    def test_token_mean(self):
        total, count = aggregate(self.losses, self.mask, "token_mean")
        assert float(total) / count == pytest.approx(2.6)

    def test_sequence_mean_of_token_means(self):
        total, count = aggregate(self.losses, self.mask, "sequence_mean_of_token_means")
        assert float(total) / count == pytest.approx(2.0)

    @pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]]])
    def test_token_mean_does_not_depend_on_micro_batches(self, split):
        parts = [aggregate(self.losses[rows], self.mask[rows], "token_mean") for rows in split]
        total, count = sum(float(p[0]) for p in parts), sum(p[1] for p in parts)
        assert total / count == pytest.approx(2.6)  # seen: 2.0

    def test_nothing_to_train_on_gives_zero_and_zero_gradient(self):
        losses = torch.tensor([[5.0, 5.0]], requires_grad=True)
        total, count = aggregate(losses, torch.zeros(1, 2, dtype=torch.long))
        total.backward()
        assert (float(total.detach()), count) == (0.0, 0.0)  # seen: nan
        assert losses.grad.tolist() == [[0.0, 0.0]]

    @pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
    def test_nan_at_a_masked_slot_touches_neither_value_nor_gradient(self, bad):
        losses = torch.tensor([[1, bad, 3]], requires_grad=True)
        total, count = aggregate(losses, torch.tensor([[1, 0, 1]]))
        total.backward()
        assert float(total.detach()) / count == 2.0
        assert losses.grad.tolist() == [[1.0, 0.0, 1.0]]


def test_ppo_clipped_both_ways_with_dual_clip():
    loss = ppo_clip_loss(
        row(0, 0.7, 0, 1.5),
        row(0, 0, 0, 0),
        row(1, 1, -1, -1),
        torch.ones(1, 4, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    assert float(loss.mean()) == pytest.approx(0.45, abs=1e-6)
    assert {k: float(loss.metrics[k]) for k in ("clip_low", "clip_high", "clip_dual")} == {
        "clip_low": 0,
        "clip_high": 1,
        "clip_dual": 1,
    }


class TestKLGradient:
    """Exact enumeration on a 3-way categorical: E_pi[grad of the loss] against the gradients of both divergences."""

    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    reference = torch.tensor([-0.2, 0.5, 0.4], dtype=torch.float64).log_softmax(0)

    def expected_gradient(self, **options):
        theta = self.logits.clone().requires_grad_()
        logp = theta.log_softmax(0)[:, None]  # three sequences of one token, one per outcome
        ref = self.reference[:, None]
        probabilities = logp.detach().exp()[:, 0]
        total = torch.zeros_like(theta)
        for x in range(3):
            loss = kl_loss(logp[x : x + 1], ref[x : x + 1], torch.ones(1, 1, dtype=torch.bool), **options)
            (grad,) = torch.autograd.grad(loss.sum, theta, retain_graph=True)
            total += probabilities[x] * grad
        return total

    def exact(self, direction):
        theta = self.logits.clone().requires_grad_()
        logp = theta.log_softmax(0)
        if direction == "reverse":
            kl = (logp.exp() * (logp - self.reference)).sum()
        else:
            kl = (self.reference.exp() * (self.reference - logp)).sum()
        return torch.autograd.grad(kl, theta)[0]

    def test_the_default_has_the_gradient_of_the_exact_reverse_kl(self):
        torch.testing.assert_close(self.expected_gradient(), self.exact("reverse"))

    def test_k3_has_another_one_that_of_the_forward_kl(self):
        gradient = self.expected_gradient(kind="k3")
        assert (gradient - self.exact("reverse")).abs().max() > 1e-2
        torch.testing.assert_close(gradient, self.exact("forward"))

    def test_k1_has_none(self):
        theta = self.logits.clone().requires_grad_()
        logp = theta.log_softmax(0)
        values = kl_penalty(logp, self.reference, "k1")
        gradient = torch.autograd.grad((logp.detach().exp() * values).sum(), theta)[0]
        torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64))

    def test_k1_as_a_loss_is_refused_with_the_reason(self):
        with pytest.raises(AlgorithmError, match="zero in expectation"):
            self.expected_gradient(kind="k1")

    @pytest.mark.parametrize("kind", ["k1", "k3", "abs"])
    def test_straight_through_has_the_right_gradient_for_every_kind(self, kind):
        gradient = self.expected_gradient(kind=kind, straight_through=True)
        torch.testing.assert_close(gradient, self.exact("reverse"))

    def test_off_policy_the_ratio_keeps_it_right(self):
        theta = self.logits.clone().requires_grad_()
        logp = theta.log_softmax(0)[:, None]
        behaviour = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()[:, None]
        total = torch.zeros(3, dtype=torch.float64)
        one = torch.ones(1, 1, dtype=torch.bool)
        for x in range(3):
            part = slice(x, x + 1)
            loss = kl_loss(logp[part], self.reference[:, None][part], one, behaviour_logprobs=behaviour[part])
            (grad,) = torch.autograd.grad(loss.sum, theta, retain_graph=True)
            total += behaviour[x, 0].exp() * grad
        torch.testing.assert_close(total, self.exact("reverse"))

    def test_abs_has_the_gradient_of_the_l1_distance(self):
        theta = self.logits.clone().requires_grad_()
        distance = (theta.softmax(0) - self.reference.exp()).abs().sum()
        exact = torch.autograd.grad(distance, theta)[0]
        torch.testing.assert_close(self.expected_gradient(kind="abs"), exact)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 88.0, 1e-7, -1e-7, 3e-4, 0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_k3_is_never_negative_and_stays_finite(log_ratio, dtype):
    logp = torch.zeros(1, dtype=dtype, requires_grad=True)
    value = kl_penalty(logp, torch.tensor([log_ratio], dtype=dtype), "k3")
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert (value >= 0).all()
    assert torch.isfinite(logp.grad).all()


def test_k3_is_right_near_zero_and_where_the_series_ends():
    d = torch.linspace(-0.03, 0.03, 241, dtype=torch.float64)
    exact = torch.expm1(d) - d
    torch.testing.assert_close(kl_penalty(torch.zeros_like(d), d, "k3"), exact, rtol=1e-9, atol=1e-15)


def test_overlong_penalty():
    penalties = overlong_penalty(torch.tensor([80, 81, 90, 100, 101]), max_length=100, cache=20)
    near(penalties, [0, -0.05, -0.5, -1, -1])
