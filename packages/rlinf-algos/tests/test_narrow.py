"""Narrow dtypes: bfloat16 and float16 inputs, small integers. What is computed is what a float64 user would compute."""

import pytest
import torch

from rlinf_algos import (
    entropy_from_logits,
    kl_full,
    kl_loss,
    overlong_penalty,
    pack,
    reward_with_kl,
    staleness_filter,
    token_logprobs,
    token_logprobs_and_entropy,
)

NARROW = [torch.bfloat16, torch.float16]
WAYS = ["plain", "masked", "chunked", "inplace"]
# What rounding the gradient itself costs, per element.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


def confident(dtype, rows=24, vocab=256):
    """Logits as a language model's head gives them: one far above the others, all rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits[torch.arange(rows), torch.randint(vocab, (rows,), generator=generator)] += 18
    return logits.to(dtype), torch.randint(vocab, (rows,), generator=generator)


def call(function, x, ids, tau, way):
    options = {
        "plain": {},
        "masked": {"mask": torch.ones(len(ids), dtype=torch.bool)},
        "chunked": {"chunk": 5},
        "inplace": {"inplace_backward": True},
    }[way]
    x = x * 1 if way == "inplace" else x
    if function is entropy_from_logits:
        return function(x, temperature=tau, **options).sum()
    result = function(x, ids, temperature=tau, **options)
    return result.sum() if isinstance(result, torch.Tensor) else result[0].sum() + 2 * result[1].sum()


def exact(function, x, ids, tau):
    logp = (x / tau).log_softmax(-1)
    chosen, entropy = logp.gather(-1, ids[:, None]).sum(), -(logp.exp() * logp).sum()
    if function is entropy_from_logits:
        return entropy
    return chosen if function is token_logprobs else chosen + 2 * entropy


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tau", [0.6, 1.0, 1.2])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("function", [token_logprobs, token_logprobs_and_entropy, entropy_from_logits])
def test_gradients_at_a_temperature(function, dtype, tau, way):
    x, ids = confident(dtype)
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    got, expected = call(function, narrow, ids, tau, way), exact(function, wide, ids, tau)
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    got.backward()
    expected.backward()
    g = narrow.grad.double()
    assert float((g - wide.grad).norm() / wide.grad.norm()) < ROUNDING[dtype]
    # Probabilities sum to 1 before and after, so a row's gradient sums to 0.
    assert (g.sum(-1).abs() <= ROUNDING[dtype] * g.abs().sum(-1) + 1e-5).all()


@pytest.mark.parametrize("tau", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("dtype", NARROW)
def test_full_kl_at_a_temperature(dtype, tau):
    generator = torch.Generator().manual_seed(0)
    x = (6 * torch.randn(1, 70, 64, generator=generator)).to(dtype)
    ref = (x.float() + 0.2 * torch.randn(1, 70, 64, generator=generator)).to(dtype)
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    got = kl_full(narrow, ref, temperature=tau)
    log_p, log_q = (wide / tau).log_softmax(-1), (ref.double() / tau).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-3)
    got.sum().backward()
    expected.sum().backward()
    assert float((narrow.grad.double() - wide.grad).norm() / wide.grad.norm()) < ROUNDING[dtype]


def test_the_k1_metric():
    x, ref = torch.tensor([[-10.0]], dtype=torch.bfloat16), torch.tensor([[-0.0352]], dtype=torch.bfloat16)
    got = kl_loss(x, ref, torch.tensor([[1]])).metrics["kl_k1"]
    assert float(got) == float(x.double() - ref.double())


def test_the_kl_in_the_reward():
    kl = torch.full((1, 300), 1.0, dtype=torch.bfloat16)  # 257 is no bfloat16
    mask = torch.arange(300)[None] < 257
    assert reward_with_kl(torch.tensor([0.0]), kl, mask, 1.0).tolist() == [-257.0]


def test_small_integers_do_not_wrap_around():
    lengths = torch.tensor([80, 81, 90, 100, 101], dtype=torch.uint8)
    torch.testing.assert_close(
        overlong_penalty(lengths, max_length=100, cache=20), torch.tensor([0.0, -0.05, -0.5, -1.0, -1.0])
    )
    long = torch.tensor([100, 20_000], dtype=torch.int16)
    assert overlong_penalty(long, max_length=40_000, cache=4_000).tolist() == [0.0, 0.0]
    versions, mask = torch.tensor([[1, 2], [255, 255]], dtype=torch.uint8), torch.tensor([[1, 1], [1, 1]])
    assert staleness_filter(versions, mask, current=256, max_staleness=1).tolist() == [False, True]


def test_packing_takes_the_dtype_that_holds_all():
    ids = [torch.tensor([1, 2], dtype=torch.int16), torch.tensor([70_000])]
    weights = [torch.tensor([1, 2]), torch.tensor([0.5])]
    packed = pack(ids, 4, fields={"weights": weights})
    assert packed.input_ids.tolist() == [[1, 2, 70_000]]
    assert packed.fields["weights"].tolist() == [[1.0, 2.0, 0.5]]
