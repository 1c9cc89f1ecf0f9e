"""Packed attention against plain padded Hugging Face models: outputs and gradients, any lengths."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rlinf_core.errors import ConfigError, RLinfError  # noqa: E402
from rlinf_engines.models import load_model  # noqa: E402
from rlinf_engines.trainers import plans  # noqa: E402
from rlinf_engines.trainers.attention import (  # noqa: E402
    check_packing,
    packed_attention,
    packed_inputs,
    use_packed_attention,
)
from rlinf_engines.trainers.plans import make_plan  # noqa: E402

LENGTHS = [
    [1],
    [7],
    [1, 1, 1],
    [6, 6, 6],
    [3, 9, 1, 4, 12, 1, 2],
    [40, 2, 39, 1, 17, 18],
    list(range(1, 30)),
]


def cu_of(lengths: list[int]) -> Any:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def random(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(dtype or torch.float64)


def plain(q: Any, k: Any, v: Any, lengths: list[int], scale: float | None, window: int | None) -> Any:
    """Each sequence alone, written out."""
    outs = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        group = q.shape[1] // k.shape[1]
        ks, vs = ks.repeat_interleave(group, 1), vs.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", qs, ks) * (scale or q.shape[-1] ** -0.5)
        i = torch.arange(len(qs))
        seen = i[:, None] >= i
        if window is not None:
            seen &= i[:, None] - i < window
        weights = scores.where(seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", weights, vs))
    return torch.cat(outs)


@pytest.mark.parametrize("cost", [0, 64, 4096, 10**9])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_it_is_attention_within_each_sequence(lengths: list[int], cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "BUCKET_COST", cost)
    total = sum(lengths)
    for heads, groups in ((4, 4), (4, 2), (3, 1)):
        for scale, window in ((None, None), (0.3, None), (None, 1), (None, 3), (0.2, 8), (None, 1000)):
            q, k, v = random(total, heads, 8), random(total, groups, 8, seed=1), random(total, groups, 8, seed=2)
            grads = []
            for tensors in ([x.clone().requires_grad_(True) for x in (q, k, v)] for _ in range(2)):
                if not grads:
                    out = packed_attention(*tensors, cu_of(lengths), max(lengths), scale=scale, sliding_window=window)
                    first = out.detach()
                else:
                    out = plain(*tensors, lengths, scale, window)
                    assert float((first - out.detach()).abs().max()) < 1e-12
                (out * random(*out.shape, seed=3)).sum().backward()
                grads.append([x.grad for x in tensors])
            assert all(float((a - b).abs().max()) < 1e-11 for a, b in zip(*grads, strict=True))


def test_what_padding_holds_is_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of padding holds a token of its own sequence; were it read, one sequence would see twice."""
    monkeypatch.setattr(plans, "BUCKET_COST", 10**9)
    lengths = [9, 2, 5]
    assert make_plan(cu_of(lengths)).buckets == [(3, 9)]
    q, k, v = (random(16, 2, 4, seed=s) for s in range(3))
    whole = packed_attention(q, k, v, cu_of(lengths), 9)
    k[9:11] += 100.0  # of the second sequence
    v[9:11] -= 50.0
    changed = packed_attention(q, k, v, cu_of(lengths), 9)
    assert torch.equal(whole[:9], changed[:9]) and torch.equal(whole[11:], changed[11:])
    assert not torch.equal(whole[9:11], changed[9:11])


def test_dropout_drops() -> None:
    q = random(20, 2, 4)
    torch.manual_seed(0)
    a = packed_attention(q, q, q, cu_of([12, 8]), 12, dropout=0.5)
    b = packed_attention(q, q, q, cu_of([12, 8]), 12, dropout=0.5)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[], [3, 0, 2]])
def test_empty_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        make_plan(cu_of(lengths))


def test_plans_fill_buckets_and_leave_equal_lengths_alone() -> None:
    equal = make_plan(cu_of([5] * 9))
    assert (equal.buckets, equal.places, equal.slots) == ([(9, 5)], None, None)
    near = make_plan(cu_of([10, 11, 9, 10] * 16))  # prompts of nearly equal length: one bucket
    assert near.buckets == [(64, 11)]
    far = make_plan(cu_of([500, 20, 490, 21]))
    assert far.buckets == [(1, 500), (1, 490), (2, 21)]
    assert far.places is not None and far.slots is not None
    assert torch.equal(far.places[far.slots], torch.arange(1031))


def test_a_plan_is_made_once_for_a_batch_and_forgotten_with_it() -> None:
    lengths = cu_of([3, 2])
    count = len(plans._PLANS)
    first = plans.plan_of(lengths, None)
    assert plans.plan_of(lengths, None) is first
    assert len(plans._PLANS) == count + 1
    del lengths
    assert len(plans._PLANS) == count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 5])
def test_flash_kernels_give_what_buckets_give(window: int | None) -> None:
    lengths = [3, 9, 1, 40]
    shapes = ((53, 4, 64), (53, 2, 64), (53, 2, 64))
    exact = [random(*shape, seed=s) for s, shape in enumerate(shapes)]
    low = [x.to("cuda", torch.bfloat16).requires_grad_(True) for x in exact]
    expected = plain(*exact, lengths, None, window)
    found = packed_attention(*low, cu_of(lengths).cuda(), 40, sliding_window=window)
    assert float((found.double().cpu() - expected).abs().max()) < 0.05
    found.float().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in low)


def tiny(kind: str, **sizes: Any) -> Any:
    """A network of random weights with sizes that differ from each other."""
    common = {
        "vocab_size": 23,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "sdpa",
    }
    config = getattr(transformers, f"{kind}Config")(**{**common, **sizes})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "qwen2-some-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
}


def batch_of(lengths: list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return {
        "input_ids": torch.randint(0, 17, (sum(lengths),), generator=generator),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": cu_of(lengths),
        "max_len": max(lengths),
    }


def padded_logits(network: Any, batch: dict[str, Any], lengths: list[int]) -> Any:
    """Logits [N, V] from rows padded on the right, as the library computes them."""
    ids = torch.nn.utils.rnn.pad_sequence(list(batch["input_ids"].split(lengths)), batch_first=True)
    real = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return network(input_ids=ids, attention_mask=real.long(), use_cache=False).logits[real]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_logits_and_gradients_of_padded_rows(kind: str, dtype: str, limit: float) -> None:
    name, sizes = KINDS[kind]
    number = getattr(torch, dtype)
    plain_one, packed = (tiny(name, **sizes).to(number) for _ in range(2))
    if dtype == "float64":
        from rlinf_engines.models import _norms_in_float64

        _norms_in_float64(plain_one)
        _norms_in_float64(packed)
    use_packed_attention(packed)
    check_packing(packed)
    for lengths in ([1], [1, 1], [5, 5, 5], [3, 9, 1, 4, 12, 1, 2], [40, 2, 39, 1, 17, 18]):
        batch = batch_of(lengths)
        expected = padded_logits(plain_one, batch, lengths)
        found = packed(**packed_inputs(batch)).logits[0]
        assert float((found - expected).detach().abs().max()) < limit
        weight = random(*expected.shape, seed=1, dtype=number) / sum(lengths)
        for network, logits in ((plain_one, expected), (packed, found)):
            network.zero_grad()
            (logits * weight).sum().backward()
        for (which, a), b in zip(plain_one.named_parameters(), packed.parameters(), strict=True):
            assert float((a.grad - b.grad).abs().max()) < limit, which


def test_logits_of_some_places(make_model: Any) -> None:
    network = load_model(make_model(), 0)
    use_packed_attention(network)
    batch = batch_of([4, 6])
    places = torch.tensor([0, 3, 8])
    with torch.no_grad():
        every = network(**packed_inputs(batch)).logits[0]
        some = network(**packed_inputs(batch), logits_to_keep=places).logits[0]
    assert torch.allclose(some, every[places], atol=1e-14, rtol=0)


def test_a_model_called_without_packing_says_so(make_model: Any) -> None:
    network = load_model(make_model(), 0)
    use_packed_attention(network)
    with pytest.raises(RLinfError, match="called without packed sequences"):
        network(input_ids=torch.tensor([[2, 3]]), use_cache=False)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("Gemma2", {"head_dim": 8}, "Gemma2Attention needs softcap, not supported with packing"),
        ("Mamba", {"state_size": 4, "attn_implementation": None}, "MambaForCausalLM mixes the sequences of a packed"),
        ("Bloom", {"attn_implementation": None}, "the attention of BloomForCausalLM cannot be replaced"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ForCausalLM mixes the sequences of a packed batch"),
    ],
)
def test_models_that_cannot_be_packed_are_refused_by_name(kind: str, sizes: dict[str, Any], message: str) -> None:
    network = tiny(kind, **sizes)

    def prepare() -> None:
        use_packed_attention(network)
        check_packing(network)

    with pytest.raises(ConfigError, match=message):
        prepare()


def test_a_model_with_learned_positions_can_be_packed() -> None:
    config = transformers.GPT2Config(vocab_size=23, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    network = transformers.GPT2LMHeadModel(config)
    use_packed_attention(network)
    check_packing(network)
