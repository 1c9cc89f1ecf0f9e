"""Log-probs and entropy: against the plain formula, gradcheck, masks, padding, shards, memory."""

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AlgorithmError,
    entropy_from_logits,
    kl_full,
    linear_token_logprobs,
    linear_token_logprobs_and_entropy,
    next_token_logprobs,
    position_ids,
    token_logprobs,
    token_logprobs_and_entropy,
)


def plain(logits, ids, temperature=1.0):
    """The formula as one writes it."""
    logp = (logits / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
    return logp.gather(-1, ids[..., None]).squeeze(-1), entropy


@st.composite
def problems(draw):
    rows, length, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = 3 * torch.randn(rows, length, vocab, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocab, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    weights = torch.randn(2, rows, length, generator=generator, dtype=torch.float64)
    return logits, ids, mask, weights, draw(st.floats(0.2, 3.0)), draw(st.integers(1, 20))


@given(problems(), st.booleans())
def test_values_and_gradients_are_the_plain_formulas(problem, reuse):
    logits, ids, _, weights, temperature, chunk = problem
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = plain(a, ids, temperature)
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    got = token_logprobs_and_entropy(b * 1, ids, temperature=temperature, chunk=chunk, inplace_backward=reuse)
    torch.testing.assert_close(got, expected)
    (weights[0] * got[0] + weights[1] * got[1]).sum().backward()
    torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(token_logprobs(logits, ids, temperature=temperature), expected[0].detach())
    torch.testing.assert_close(entropy_from_logits(logits, temperature=temperature), expected[1].detach())


@given(problems(), st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans())
def test_masked_positions_are_not_read(problem, bad, reuse):
    logits, ids, mask, weights, temperature, chunk = problem
    expected = plain(logits, ids, temperature)
    x = torch.where(mask[..., None], logits, bad).requires_grad_()
    ids = torch.where(mask, ids, -100)
    got = token_logprobs_and_entropy(
        x * 1, ids, mask=mask, temperature=temperature, chunk=chunk, inplace_backward=reuse
    )
    for value, right in zip(got, expected, strict=True):
        torch.testing.assert_close(value, torch.where(mask, right, 0.0))
    (weights[0] * got[0] + weights[1] * got[1]).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~mask] == 0).all()


@given(problems(), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_from_hidden_states_it_is_the_same(problem, chunk_rows, chunk_vocab, masked, with_bias):
    logits, ids, mask, weights, temperature, _ = problem
    vocab, width = logits.shape[-1], 4
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*ids.shape, width, generator=generator, dtype=torch.float64).requires_grad_()
    matrix = torch.randn(vocab, width, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64).requires_grad_() if with_bias else None
    inputs = [t for t in (hidden, matrix, bias) if t is not None]
    use = mask if masked else torch.ones_like(mask)
    x = hidden @ matrix.t() + (bias if bias is not None else 0)
    expected = [torch.where(use, t, 0.0) for t in plain(x, ids, temperature)]
    got = linear_token_logprobs_and_entropy(
        hidden,
        matrix,
        torch.where(use, ids, -100),
        bias=bias,
        temperature=temperature,
        mask=mask if masked else None,
        chunk_rows=chunk_rows,
        chunk_vocab=chunk_vocab,
    )
    torch.testing.assert_close(list(got), expected)
    both = [torch.autograd.grad((weights[0] * v[0] + weights[1] * v[1]).sum(), inputs) for v in (got, expected)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(5, (2, 3))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]]) if masked else None
    function = lambda x: token_logprobs_and_entropy(x, ids, temperature=0.7, mask=mask, chunk=2)  # noqa: E731
    assert torch.autograd.gradcheck(function, (logits,))
    hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    linear = lambda h, w: linear_token_logprobs_and_entropy(  # noqa: E731
        h, w, ids, mask=mask, temperature=0.7, chunk_rows=2, chunk_vocab=2
    )
    assert torch.autograd.gradcheck(linear, (hidden, matrix))
    reference = torch.randn(2, 3, 5, dtype=torch.float64)
    full = lambda x: kl_full(x, reference, mask=mask, temperature=0.7, chunk=2)  # noqa: E731
    assert torch.autograd.gradcheck(full, (logits,))


@given(problems())
def test_full_kl_is_the_sum(problem):
    logits, _, mask, _, temperature, chunk = problem
    reference = logits.flip(-1) * 0.7
    log_p, log_q = (logits / temperature).log_softmax(-1), (reference / temperature).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(kl_full(logits, reference, temperature=temperature, chunk=chunk), expected)
    spoilt = torch.where(mask[..., None], logits, math.nan)
    got = kl_full(spoilt, reference, mask=mask, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(got, torch.where(mask, expected, 0.0))


@pytest.mark.parametrize("reuse", [False, True])
def test_minus_infinity_is_a_token_that_cannot_be_drawn(reuse):
    logits = torch.tensor([[1.0, -math.inf, 0.5], [-math.inf, 2.0, -math.inf]], requires_grad=True)
    ids = torch.tensor([0, 1])
    logp, entropy = token_logprobs_and_entropy(logits * 1, ids, inplace_backward=reuse)
    expected = plain(logits.detach(), ids)
    torch.testing.assert_close((logp, entropy), expected)
    (logp + entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_computed_in_float32(dtype):
    torch.manual_seed(0)
    logits = (4 * torch.randn(3, 50)).to(dtype).requires_grad_()
    ids = torch.randint(50, (3,))
    logp, entropy = token_logprobs_and_entropy(logits, ids)
    assert logp.dtype == entropy.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    expected = plain(exact, ids)
    torch.testing.assert_close((logp.double(), entropy.double()), expected, atol=1e-5, rtol=1e-5)
    (logp + entropy).sum().backward()
    (expected[0] + expected[1]).sum().backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), atol=1e-2, rtol=1e-2)


def test_narrow_hidden_states_with_a_float32_matrix():
    torch.manual_seed(0)
    hidden = torch.randn(4, 8).bfloat16().requires_grad_()
    matrix = torch.randn(20, 8, requires_grad=True)
    ids = torch.randint(20, (4,))
    logp = linear_token_logprobs(hidden, matrix, ids, chunk_vocab=6)
    logp.sum().backward()
    assert (hidden.grad.dtype, matrix.grad.dtype) == (torch.bfloat16, torch.float32)
    exact = plain((hidden.float() @ matrix.t()).detach(), ids)[0]
    torch.testing.assert_close(logp, exact, atol=0.1, rtol=0.05)


def test_autocast_does_not_lower_the_precision():
    torch.manual_seed(0)
    hidden, matrix, ids = torch.randn(4, 8), torch.randn(20, 8), torch.randint(20, (4,))
    exact = linear_token_logprobs(hidden, matrix, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(linear_token_logprobs(hidden, matrix, ids), exact)


def test_a_second_backward_after_reuse_is_refused():
    logits = torch.randn(2, 3, requires_grad=True)
    logp = token_logprobs(logits * 1, torch.tensor([0, 1]), inplace_backward=True)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


class Tiny(torch.nn.Module):
    """One attention layer with learned positions: what padding on the left breaks when positions are not given."""

    def __init__(self, vocab=11, width=8, length=16):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = torch.nn.Embedding(vocab, width), torch.nn.Embedding(length, width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, vocab)
        self.double()

    def forward(self, ids, positions, allowed):
        x = self.tokens(ids) + self.positions(positions)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out(x + attended[:, 0])


def causal(attention_mask):
    """[B, 1, T, T]: earlier real tokens, and itself so that no row is empty."""
    length = attention_mask.shape[1]
    before = torch.ones(length, length, dtype=torch.bool).tril()
    return ((before & attention_mask[:, None, :].bool()) | torch.eye(length, dtype=torch.bool))[:, None]


@given(st.integers(0, 5), st.integers(0, 5), st.floats(0.3, 2.0))
def test_padding_changes_nothing_with_learned_positions(left, right, temperature):
    model = Tiny()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    response = torch.tensor([[0, 0, 0, 1, 1, 1]])

    def run(left, right):
        pad = lambda t: torch.nn.functional.pad(t, (left, right))  # noqa: E731
        attention = pad(torch.ones_like(ids))
        logits = model(pad(ids), position_ids(attention), causal(attention))
        return next_token_logprobs(logits, pad(ids), pad(response), temperature=temperature)

    got, expected = run(left, right), run(0, 0)
    torch.testing.assert_close(got[:, left : left + 6], expected)
    assert (got[:, :left] == 0).all()
    assert (expected[:, :3] == 0).all()


def test_nothing_to_compute():
    empty = torch.zeros(0, 3, 5, requires_grad=True)
    logp, entropy = token_logprobs_and_entropy(empty, torch.zeros(0, 3, dtype=torch.long))
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0, 3)
    masked = torch.full((2, 5), math.nan, requires_grad=True)
    token_logprobs(masked, torch.tensor([-100, -100]), mask=torch.tensor([0, 0])).sum().backward()
    assert (masked.grad == 0).all()


def test_the_temperature_is_the_one_of_sampling():
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    for temperature in (0.5, 1.0, 2.0):
        drawn = torch.distributions.Categorical(logits=logits / temperature)
        got = token_logprobs(logits, torch.tensor([1]), temperature=temperature)
        torch.testing.assert_close(got, drawn.log_prob(torch.tensor([1])))
        torch.testing.assert_close(entropy_from_logits(logits, temperature=temperature), drawn.entropy())


def on_ranks(world, function):
    """Run function(rank, group) on threads joined by gloo; returns the results, raises the first error."""
    store = torch.distributed.HashStore()
    results, errors = [None] * world, []

    def work(rank):
        try:
            group = torch.distributed.ProcessGroupGloo(store, rank, world, torch.distributed.default_pg_timeout)
            results[rank] = function(rank, group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("sizes", [(4, 3), (1, 6), (2, 2, 3)])
def test_vocabulary_shards_give_the_whole(sizes):
    torch.manual_seed(0)
    vocab, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    hidden = torch.randn(2, 3, 4, dtype=torch.float64)
    matrix = torch.randn(vocab, 4, dtype=torch.float64)
    ids, weights = torch.randint(vocab, (2, 3)), torch.randn(2, 2, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])

    def run(matrix, group=None, start=0):
        h, w = hidden.clone().requires_grad_(), matrix.clone().requires_grad_()
        linear = linear_token_logprobs_and_entropy(
            h, w, ids, temperature=0.8, mask=mask, group=group, vocab_start=start, chunk_vocab=2
        )
        (weights[0] * linear[0] + weights[1] * linear[1]).sum().backward()
        x = (hidden @ matrix.t()).requires_grad_()
        direct = token_logprobs_and_entropy(x, ids, temperature=0.8, mask=mask, group=group, vocab_start=start)
        (weights[0] * direct[0] + weights[1] * direct[1]).sum().backward()
        return [t.detach() for t in (*linear, *direct)], h.grad, w.grad, x.grad

    values, dh, dw, dx = run(matrix)
    parts = on_ranks(
        len(sizes), lambda rank, group: run(matrix[starts[rank] : starts[rank] + sizes[rank]], group, starts[rank])
    )
    for rank_values, rank_dh, _, _ in parts:
        torch.testing.assert_close(rank_values, values)
        torch.testing.assert_close(rank_dh, dh)
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), dw)
    torch.testing.assert_close(torch.cat([p[3] for p in parts], -1), dx)


def test_whitening_over_ranks_is_whitening_the_whole():
    from rlinf_algos import whiten

    torch.manual_seed(0)
    values, mask = torch.randn(4, 5), torch.rand(4, 5) < 0.6
    mask[3] = False  # a rank with nothing
    parts = on_ranks(2, lambda rank, group: whiten(values[3 * rank :][:3], mask[3 * rank :][:3], group=group))
    torch.testing.assert_close(torch.cat(parts), whiten(values, mask))


IDS, LOGITS = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_logprobs(LOGITS, IDS, temperature=0.0), "temperature must be"),
        (lambda: token_logprobs(LOGITS, IDS + 5), "ids holds 5, outside 0..4"),
        (lambda: token_logprobs(LOGITS, IDS - 100), "ids holds -100"),
        (lambda: token_logprobs(LOGITS, IDS[:1]), "ids must have the leading shape"),
        (lambda: token_logprobs(LOGITS, IDS.float()), "ids must be an integer"),
        (lambda: token_logprobs(LOGITS.long(), IDS), "logits must be floating"),
        (lambda: token_logprobs(LOGITS, IDS, mask=IDS[0]), "mask has shape"),
        (lambda: token_logprobs(LOGITS, IDS, chunk=0), "chunk must be"),
        (lambda: token_logprobs(torch.zeros(2, 0), IDS[0, :2]), "n > 0"),
        (lambda: next_token_logprobs(LOGITS, IDS, IDS + 1), "position 0"),
        (lambda: next_token_logprobs(LOGITS, IDS[:, :2], IDS), "input_ids must have shape"),
        (lambda: linear_token_logprobs(LOGITS, torch.zeros(7, 4), IDS), "D = 5 as in hidden"),
        (lambda: linear_token_logprobs(LOGITS, torch.zeros(7, 5), IDS, bias=torch.zeros(6)), "bias must have"),
        (lambda: kl_full(LOGITS, LOGITS, mask=IDS[0]), "mask must have shape"),
        (lambda: kl_full(LOGITS, LOGITS[:1]), "ref_logits has shape"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()
