"""Keyed random numbers and token choice: a function of (seed, key, position) alone, and the right distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlinf_core.errors import ConfigError  # noqa: E402
from rlinf_core.types import SamplingParams  # noqa: E402
from rlinf_engines.sampling import (  # noqa: E402
    check_sampling,
    choose,
    inverse_cdf,
    request_streams,
    truncate,
    uniforms,
)
from rlinf_engines.seeds import derive_seed  # noqa: E402

GOLDEN_SEED = 187533736518199473
GOLDEN_UNIFORMS = [0.8198521268739577, 0.9450137397070566, 0.5072355874811968]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How many standard deviations Pearson's statistic lies above its mean (it has K - 1 degrees of freedom)."""
    expected = probs * counts.sum()
    statistic = float(((counts - expected).pow(2) / expected).sum())
    freedom = len(probs) - 1
    return (statistic - freedom) / math.sqrt(2.0 * freedom)


def streams(seed: int, count: int) -> torch.Tensor:
    return request_streams(seed, [(3, f"p{i // 8}", i % 8) for i in range(count)])


def test_seeds_tell_keys_apart() -> None:
    keys: list[tuple[Any, ...]] = [("a", "bc"), ("ab", "c"), ("abc",), (1,), ("1",), (1, 1), (11,), (-1,), ()]
    assert len({derive_seed(0, *key) for key in keys} | {derive_seed(1, *key) for key in keys}) == 18
    assert all(0 <= derive_seed(0, *key) < 2**63 for key in keys)
    with pytest.raises(TypeError, match=r"1\.5"):
        derive_seed(0, 1.5)  # type: ignore[arg-type]


def test_the_numbers_never_change() -> None:
    # Runs must be repeatable across versions of this package.
    assert derive_seed(0, "sample", 1, "p0", 0) == GOLDEN_SEED
    values = uniforms(request_streams(0, [(1, "p0", 0)]), torch.arange(3))
    assert values.tolist() == GOLDEN_UNIFORMS


def test_uniform_over_requests_positions_and_seeds() -> None:
    by_request = uniforms(streams(0, 20000), 5)
    by_position = uniforms(streams(0, 1), torch.arange(20000))
    by_seed = torch.cat([uniforms(streams(seed, 1), 0) for seed in range(5000)])
    for values in (by_request, by_position, by_seed):
        assert float(values.min()) >= 0.0 and float(values.max()) < 1.0
        counts = torch.histc(values, bins=50, min=0.0, max=1.0)
        assert abs(chi_square(counts, torch.full((50,), 1 / 50, dtype=torch.float64))) < 4.0


def test_neighbouring_positions_and_requests_are_not_correlated() -> None:
    grid = torch.stack([uniforms(streams(0, 200), position) for position in range(200)]) - 0.5
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        correlation = float((a * b).sum() / (a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt()))
        assert abs(correlation) < 4.0 / math.sqrt(a.numel())


def test_numbers_do_not_depend_on_batch_or_order() -> None:
    everyone = uniforms(streams(7, 32), 4)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(streams(7, 32)[order], 4), everyone[order])
    assert uniforms(streams(7, 32)[9:10], 4).item() == everyone[9].item()


def draw(logits: torch.Tensor, sampling: SamplingParams, count: int = 40000) -> torch.Tensor:
    tokens, _ = choose(
        logits.expand(count, -1), uniforms(streams(0, count), 0), torch.zeros(count, dtype=torch.bool), sampling
    )
    return torch.bincount(tokens, minlength=logits.shape[-1]).double()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution(temperature: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    counts = draw(logits, SamplingParams(1, temperature=temperature))
    assert chi_square(counts, torch.softmax(logits.double() / temperature, -1)) < 4.0


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (8, 0.5)])
def test_truncated_tokens_follow_the_truncated_distribution(top_k: int, top_p: float) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(2))
    probs = torch.softmax(logits.double(), -1)
    order = probs.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    mass, chosen = sum(float(probs[i]) for i in kept), []
    for token in kept:
        if sum(float(probs[i]) for i in chosen) >= top_p * mass:
            break
        chosen.append(token)
    counts = draw(logits, SamplingParams(1, top_k=top_k, top_p=top_p))
    assert set(counts.nonzero().flatten().tolist()) == set(chosen)
    assert chi_square(counts[chosen], probs[chosen] / probs[chosen].sum()) < 4.0


def test_log_probs_are_those_of_the_whole_vocabulary_at_the_temperature() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(3))
    greedy = torch.tensor([False, True, False, False, True, False])
    sampling = SamplingParams(1, temperature=0.7, top_k=3)
    tokens, logps = choose(logits, uniforms(streams(0, 6), 0), greedy, sampling)
    at = torch.where(greedy, 1.0, 0.7).double().unsqueeze(-1)
    expected = (logits.double() / at).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert logps.dtype == torch.float64
    assert torch.equal(logps, expected)
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    every = torch.ones(6, dtype=torch.bool)
    assert torch.equal(choose(logits, uniforms(streams(0, 6), 0), every, sampling)[0], logits.argmax(-1))


def test_impossible_tokens_are_never_drawn() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    points = torch.tensor([0.0, 0.2499999, 0.25, 0.9999, 1.0 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(probs.expand(5, -1), points).tolist() == [1, 1, 3, 3, 3]
    # A total that rounding carries to u * total.
    ragged = torch.full((1, 3), 1.0000000000000002 / 3, dtype=torch.float64)
    assert inverse_cdf(torch.cat([ragged, torch.zeros(1, 2)], 1), points[-1:]).tolist() == [2]


def test_ties_go_to_the_lower_id() -> None:
    probs = torch.full((1, 4), 0.25, dtype=torch.float64)
    assert truncate(probs, 2, 1.0).nonzero()[:, 1].tolist() == [0, 1]
    assert truncate(probs, 0, 0.5).nonzero()[:, 1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temperature": 0.0}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.1}, "sampling.top_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens"),
    ],
)
def test_bad_values_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sampling(SamplingParams(**{"max_new_tokens": 1, **keys}))
