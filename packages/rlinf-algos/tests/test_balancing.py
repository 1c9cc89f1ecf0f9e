"""Karmarkar-Karp, first-fit decreasing, micro-batches, packing."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import (
    AlgorithmError,
    first_fit_decreasing,
    imbalance,
    karmarkar_karp,
    micro_batches,
    next_token_logprobs,
    pack,
    position_ids,
)

weights_of = st.lists(st.integers(0, 100), max_size=40)


def dense_karmarkar_karp(weights, parts):
    """The textbook method: every solution has all its parts, empty ones too. Returns the sorted sums."""
    states = [[*([0] * (parts - 1)), w] for w in weights] or [[0] * parts]
    while len(states) > 1:
        states.sort(key=lambda s: s[0] - s[-1])
        a, b, *rest = states
        states = [sorted(x + y for x, y in zip(a, reversed(b), strict=True)), *rest]
    return states[0]


@given(weights_of, st.integers(1, 9))
def test_karmarkar_karp_puts_every_item_once(weights, parts):
    found = karmarkar_karp(weights, parts)
    assert len(found) == parts
    assert sorted(itertools.chain(*found)) == list(range(len(weights)))
    assert found == karmarkar_karp(weights, parts)
    sums = [sum(weights[i] for i in p) for p in found]
    # List scheduling's bound, which the method meets too.
    assert max(sums) <= sum(weights) / parts + max(weights, default=0)


@given(st.lists(st.integers(1, 2**40), max_size=14, unique=True), st.integers(1, 4))
def test_karmarkar_karp_is_the_textbook_method(weights, parts):
    spreads = dense_karmarkar_karp(weights, parts)
    found = sorted(sum(weights[i] for i in p) for p in karmarkar_karp(weights, parts))
    # With equal spreads either may be taken first: the largest sums must still be close.
    assert found[-1] - found[0] <= max(2 * (spreads[-1] - spreads[0]), max(weights, default=0))


def test_karmarkar_karps_own_example():
    found = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in p) for p in found) == [14, 16]


@given(st.integers(1, 6), st.integers(0, 6), st.data())
def test_equal_sizes(parts, each, data):
    weights = data.draw(st.lists(st.integers(0, 100), min_size=parts * each, max_size=parts * each))
    found = karmarkar_karp(weights, parts, equal_size=True)
    assert [len(p) for p in found] == [each] * parts
    assert sorted(itertools.chain(*found)) == list(range(parts * each))


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 120))
def test_first_fit_decreasing_is_the_loop(weights, capacity):
    bins, room = [], []
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        k = next((k for k, left in enumerate(room) if left >= weights[i]), len(bins))
        if k == len(bins):
            bins.append([])
            room.append(capacity)
        bins[k].append(i)
        room[k] -= weights[i]
    assert first_fit_decreasing(weights, capacity) == [sorted(b) for b in bins]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 5), st.integers(50, 200))
def test_micro_batches_keep_ranks_in_step(lengths, ranks, limit):
    found = micro_batches(lengths, ranks, limit)
    assert len(found) == ranks
    assert len({len(parts) for parts in found}) == 1
    assert sorted(i for parts in found for p in parts for i in p) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in p) <= limit for parts in found for p in parts)


def test_balance_is_good_at_real_sizes():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(1024, generator=generator).mul(0.8).add(6).exp().long().clamp(1, 8192).tolist()
    assert imbalance(lengths, karmarkar_karp(lengths, 16)) < 1.001
    assert imbalance(lengths, karmarkar_karp(lengths, 16, equal_size=True)) < 1.1
    bins = first_fit_decreasing(lengths, 16384)
    assert len(bins) <= math.ceil(sum(lengths) / 16384) + 1


@st.composite
def token_sequences(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    return [torch.tensor(draw(st.lists(st.integers(1, 10), min_size=n, max_size=n))) for n in lengths]


@given(token_sequences(), st.integers(9, 20), st.booleans())
def test_packing_round_trip(sequences, capacity, full):
    weights = [s.float() / 2 for s in sequences]
    packed = pack(sequences, capacity, pad_id=99, fields={"weights": weights}, pad_to_capacity=full)
    assert [s.tolist() for s in packed.unpack(packed.input_ids)] == [s.tolist() for s in sequences]
    assert [s.tolist() for s in packed.unpack(packed.fields["weights"])] == [w.tolist() for w in weights]
    assert int(packed.attention_mask.sum()) == sum(len(s) for s in sequences)
    assert (packed.input_ids[~packed.attention_mask] == 99).all()
    assert packed.input_ids.shape[1] <= capacity
    for positions in packed.unpack(packed.position_ids):
        assert positions.tolist() == list(range(len(positions)))
    starts = packed.cumulative_lengths()
    flat = packed.input_ids[packed.attention_mask]
    by_place = sorted(range(len(sequences)), key=lambda n: packed.places[n])
    for k, n in enumerate(by_place):
        assert flat[starts[k] : starts[k + 1]].tolist() == sequences[n].tolist()


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = torch.nn.Embedding(11, 8), torch.nn.Embedding(16, 8)
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 11)
        self.double()

    def forward(self, ids, positions, allowed):
        x = self.tokens(ids) + self.positions(positions)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out(x + attended[:, 0])


@given(token_sequences(), st.integers(9, 20))
def test_a_model_sees_packed_sequences_as_it_sees_them_alone(sequences, capacity):
    model = Tiny()
    packed = pack(sequences, capacity)
    logits = model(packed.input_ids, packed.position_ids, packed.block_causal_mask())
    found = packed.unpack(next_token_logprobs(logits, packed.input_ids, packed.predicted_mask))
    for sequence, logp in zip(sequences, found, strict=True):
        ids = sequence[None]
        whole = torch.ones_like(ids)
        allowed = torch.ones(len(sequence), len(sequence), dtype=torch.bool).tril()
        predicted = whole.clone()
        predicted[:, 0] = 0
        alone = next_token_logprobs(model(ids, position_ids(whole), allowed), ids, predicted)
        torch.testing.assert_close(logp, alone[0])


A = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: karmarkar_karp([1, 2], 0), "parts must be at least 1"),
        (lambda: karmarkar_karp([1, -2], 2), r"weights\[1\] is -2"),
        (lambda: karmarkar_karp([1, math.nan], 2), "finite"),
        (lambda: karmarkar_karp([1, 2, 3], 2, equal_size=True), "multiple of 2"),
        (lambda: first_fit_decreasing([1, 9], 8), "item 1 weighs 9"),
        (lambda: first_fit_decreasing([1], 0), "capacity must be"),
        (lambda: micro_batches([1], 0, 4), "ranks must be"),
        (lambda: micro_batches([1, 1, 9], 2, 4), r"lengths\[2\] is 9"),
        (lambda: pack([A], 2), r"sequences\[0\] has 3 tokens"),
        (lambda: pack([A[:0]], 2), r"has 0 tokens"),
        (lambda: pack([A.float()], 4), "must be an integer"),
        (lambda: pack([A], 4, fields={"w": [A[:2]]}), r"fields\['w'\]"),
        (lambda: pack([A, A], 6, rows=[[0]]), "exactly once"),
        (lambda: pack([A, A], 4, rows=[[0, 1]]), "row 0 holds 6"),
        (lambda: pack([A], 4).unpack(torch.zeros(2, 2)), "must begin with shape"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()


def test_nothing_to_balance_or_pack():
    assert karmarkar_karp([], 3) == [[], [], []]
    assert first_fit_decreasing([], 3) == []
    assert micro_batches([], 2, 5) == [[], []]
    assert pack([], 4).input_ids.shape == (0, 4)
    assert imbalance([], [[], []]) == 1.0
