"""Edges found by trying to break the library: -inf, nothing to train on, odd ids, lists, missing rewards, shards."""

import math

import pytest
import torch

from rlinf_algos import (
    AlgorithmError,
    DynamicSampling,
    LossSum,
    RewardStatistics,
    aggregate,
    cispo_loss,
    decoupled_ppo_loss,
    dpo_loss,
    entropy_from_logits,
    gigpo_advantage,
    group_advantage,
    gspo_loss,
    kl_full,
    kl_loss,
    kl_penalty,
    last_trainable,
    linear_token_logprobs,
    masked_mean,
    next_token_logprobs,
    overlong_filter,
    pack,
    position_ids,
    ppo_clip_loss,
    reinforce_pp_baseline_advantage,
    remax_advantage,
    rollout_correction,
    rollout_metrics,
    sft_loss,
    terminal_reward,
    token_logprobs,
    turn_ids,
    whiten,
)
from rlinf_algos.masking import safe_exp

X, M = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
INF = math.inf


class TestInfiniteLogProbs:
    def test_the_exponential(self):
        x = torch.tensor([-INF, -1e30, 0.0, 20.0, 1e30, INF], requires_grad=True)
        y = safe_exp(x)
        y.sum().backward()
        assert y[:3].tolist() == [0.0, 0.0, 1.0]
        assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
        assert x.grad[0] == 0

    @pytest.mark.parametrize(
        "loss",
        [ppo_clip_loss, gspo_loss, cispo_loss, lambda x, old, a, m: decoupled_ppo_loss(x, old, old, a, m)],
    )
    @pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
    def test_a_token_that_cannot_be_drawn_any_more(self, loss, sign):
        x = torch.tensor([[-INF, -1.0]], requires_grad=True)
        result = loss(x, torch.tensor([[-1.0, -1.0]]), torch.tensor([sign]), torch.tensor([[1, 1]]))
        result.sum.backward()
        assert torch.isfinite(result.sum)
        assert torch.isfinite(x.grad).all()
        assert not any(v.isnan() for v in result.metrics.values())

    def test_its_ratio_is_zero(self):
        x, old = torch.tensor([[-INF, -1.0]]), torch.tensor([[-1.0, -1.0]])
        assert float(ppo_clip_loss(x, old, torch.tensor([1.0]), torch.tensor([[1, 1]])).sum) == -1.0
        correction = rollout_correction(x, old, torch.tensor([[1, 1]]))
        assert correction.weights.tolist() == [[0.0, 1.0]]

    def test_k3_is_not_negative(self):
        values = kl_penalty(torch.tensor([-INF, 0.0]), torch.tensor([0.0, -INF]), "k3")
        assert torch.isfinite(values).all() and (values > 1e19).all()


class TestLossSums:
    def test_over_a_count(self):
        x = torch.zeros(2, 3, requires_grad=True)
        loss = sft_loss(x - 2, M)
        assert float(loss.over(12).detach()) == 1.0
        assert float(loss.over(torch.tensor(24)).detach()) == 0.5
        nothing = sft_loss(x, ~M)
        value = nothing.over(nothing.count)
        value.backward()
        assert float(value.detach()) == 0.0
        assert x.grad.tolist() == [[0.0] * 3] * 2

    def test_a_count_that_cannot_be_right(self):
        for count in (0, -1.0, math.nan):
            with pytest.raises(AlgorithmError, match="count"):
                sft_loss(X, M).over(count)

    def test_sum_of_parts(self):
        parts = [sft_loss(X - 1, M), sft_loss(X - 2, M)]
        whole = sum(parts)
        assert (float(whole.sum), whole.count, float(whole.metrics["tokens"])) == (18.0, 12.0, 12.0)
        with pytest.raises(TypeError):
            1 + LossSum(torch.tensor(0.0), 0.0)

    def test_means_of_what_is_summed_over_pairs(self):
        zero, mask = torch.zeros(3, 1), torch.ones(3, 1, dtype=torch.bool)
        got = dpo_loss(zero, zero - 1, zero, zero, mask, mask).metric_means()
        assert got == {"sequences": 3.0, "accuracy": 1.0, "margin": pytest.approx(0.1)}
        assert sft_loss(X, M).metric_means() == {"tokens": 6.0}


class TestWhoIsAPeer:
    def test_not_a_sample_whose_tokens_are_all_masked(self):
        mask = torch.tensor([[1], [0], [1], [1], [1], [1]])
        rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 3.0, 0.0])
        got = reinforce_pp_baseline_advantage(rewards, list("aaaabb"), mask)
        centred = torch.tensor([[2 / 3], [0.0], [-1 / 3], [-1 / 3], [1.5], [-1.5]])
        torch.testing.assert_close(got, whiten(centred, mask))
        valid = torch.tensor([1, 0, 1, 1, 1, 1])
        torch.testing.assert_close(
            got, reinforce_pp_baseline_advantage(rewards, list("aaaabb"), torch.ones(6, 1).bool(), valid=valid)
        )

    def test_ids_that_are_tensors_of_one_number(self):
        rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
        expected = [0.5, -0.5, 0.5, -0.5]
        ids = torch.tensor([7, 7, 8, 8])
        pairs = [("task", i) for i in ids]
        for groups in (list(ids), pairs, [i.view(1) for i in ids]):
            assert group_advantage(rewards, groups, normalise_std=False).tolist() == expected

    def test_dynamic_sampling_counts_tensor_ids_once(self):
        rewards, ids = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1, 2, 2])
        for groups in (ids, list(ids)):
            state = DynamicSampling(target=3).add(rewards, groups)
            assert (state.kept, state.seen, state.missing) == ((0, 1), 3, 1)

    def test_a_trajectory_with_a_missing_reward_is_no_peer_in_either_part(self):
        rewards, returns = torch.tensor([1.0, 0.0, math.nan, 0.0]), torch.tensor([1.0, 0.0, 5.0, 7.0])
        got = gigpo_advantage(rewards, returns, list("aaaa"), [1, 2, 3, 3], [0, 0, 0, 0], normalise_std=False)
        assert got.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_tensors_of_no_time():
    got = next_token_logprobs(
        torch.zeros(2, 0, 9), torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.bool)
    )
    assert got.shape == (2, 0)


class Rank:
    """One rank of two, whose partner's contribution to every reduction is given."""

    def __init__(self, *others):
        self.others = list(others)

    def allreduce(self, tensors, options):
        other = self.others.pop(0)
        sums = options.reduceOp == torch.distributed.ReduceOp.SUM
        tensors[0].copy_(tensors[0] + other if sums else torch.maximum(tensors[0], other))
        return self

    def wait(self):
        return True


class TestVocabularyShards:
    logits = torch.zeros(1, 2)
    peak, sums = torch.zeros(1), torch.tensor([[2.0], [0.0], [0.0]])

    def rank(self, held):
        return Rank(self.peak, torch.cat((self.sums, torch.tensor([[held]]))))

    def test_an_id_that_one_rank_holds(self):
        got = token_logprobs(self.logits, torch.tensor([1]), group=self.rank(0.0))
        assert float(got) == pytest.approx(-math.log(4))

    @pytest.mark.parametrize(("id_", "held", "ranks"), [(1, 1.0, 2), (99, 0.0, 0)])
    def test_an_id_that_several_or_none_hold_is_refused(self, id_, held, ranks):
        with pytest.raises(AlgorithmError, match=f"ids holds {id_}, which {ranks} ranks of group hold"):
            token_logprobs(self.logits, torch.tensor([id_]), group=self.rank(held))

    def test_the_entropy_asks_for_no_id(self):
        got = entropy_from_logits(self.logits, group=self.rank(1.0), vocab_start=2)
        assert float(got) == pytest.approx(math.log(4))

    def test_a_shard_alone_is_refused(self):
        for call in (
            lambda: token_logprobs(self.logits, torch.tensor([1]), vocab_start=100),
            lambda: entropy_from_logits(self.logits, vocab_start=2),
            lambda: linear_token_logprobs(self.logits, torch.zeros(3, 2), torch.tensor([1]), vocab_start=3),
        ):
            with pytest.raises(AlgorithmError, match="without group"):
                call()


IDS, LOGITS = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 5)
LIST = [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rollout_metrics(X, X, M[0]), "mask has shape"),
        (lambda: rollout_metrics(X, X[0], M), "rollout_logprobs has shape"),
        (lambda: rollout_metrics(X.long(), X, M), "train_logprobs must be floating"),
        (lambda: rollout_metrics(X[0], X[0], M[0]), "train_logprobs must have shape"),
        (lambda: rollout_correction(X, X, M, segments=torch.zeros(5, 5).long()), "segments has shape"),
        (lambda: rollout_correction(X, X, M, upper="2"), "upper must be a number"),
        (lambda: ppo_clip_loss(X, X, X, M, segments=torch.zeros(5, 5).long()), "segments has shape"),
        (lambda: aggregate(X, M, segments=X), "segments must be an integer"),
        (lambda: ppo_clip_loss(X, X, X, M, clip_high=None), "clip_high must be a number, got None"),
        (lambda: whiten(torch.tensor([1.0, INF]), torch.tensor([1, 1])), "values holds NaN or an infinite"),
        (lambda: remax_advantage(torch.tensor([1.0, INF]), X[0, :2]), "infinite value"),
        (lambda: remax_advantage(torch.tensor([INF]), torch.tensor([INF])), "infinite value"),
        (lambda: RewardStatistics().add(torch.tensor([1.0, INF])), "infinite value"),
        (lambda: group_advantage(X[0], [[1], [1], [1]]), "groups must hold hashable ids"),
        (lambda: group_advantage(X[0], None), "groups must hold hashable ids"),
        (lambda: group_advantage(X[0, :1], [torch.tensor([1, 2])]), "an id is one number"),
        (lambda: group_advantage(X[0], list("aaa"), group_size="8"), "group_size must be an integer"),
        (lambda: token_logprobs(LOGITS, IDS, temperature=1e-40), "temperature must be at least 1e-06"),
        (lambda: token_logprobs(LOGITS, IDS, temperature="0.7"), "temperature must be a number"),
        (lambda: token_logprobs(LOGITS, IDS, chunk=2.5), "chunk must be an integer"),
        (lambda: kl_full(LOGITS, LOGITS, temperature=1e-40), "temperature must be at least"),
        (lambda: kl_full(LOGITS, LOGITS, mask=LIST), "mask must be a tensor, got list"),
        (lambda: kl_loss(LIST, X, M), "logprobs must be a tensor, got list"),
        (lambda: kl_loss(X, LIST, M), "ref_logprobs must be a tensor, got list"),
        (lambda: kl_loss(X, X, M, behaviour_logprobs=X.long()), "behaviour_logprobs must be floating"),
        (lambda: masked_mean(X.long(), M), "x must be floating"),
        (lambda: entropy_from_logits([[1.0]]), "logits must be a tensor, got list"),
        (lambda: next_token_logprobs([[1.0]], IDS, M), "logits must be a tensor, got list"),
        (lambda: next_token_logprobs(LOGITS, LIST, M), "input_ids must be a tensor, got list"),
        (lambda: last_trainable(LIST), "mask must be a tensor, got list"),
        (lambda: terminal_reward(X[:, 0], LIST), "mask must be a tensor, got list"),
        (lambda: position_ids(LIST), "attention_mask must be a tensor, got list"),
        (lambda: turn_ids(LIST), "mask must be a tensor, got list"),
        (lambda: reinforce_pp_baseline_advantage(X[:, 0], ["a", "a"], LIST), "mask must be a tensor, got list"),
        (lambda: overlong_filter(LIST, M[:, 0]), "mask must be a tensor, got list"),
        (lambda: overlong_filter(M, [True, True]), "truncated must be a tensor, got list"),
        (lambda: pack([IDS[0]], 4, fields={"a": [torch.zeros(3, 2)]}), r"fields\['a'\]\[0\] must have shape"),
        (lambda: pack([IDS[0]], 4, fields={"a": [[1, 2, 3]]}), "must be a tensor, got list"),
        (lambda: pack([IDS[0]], 4.0), "capacity must be an integer"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()
