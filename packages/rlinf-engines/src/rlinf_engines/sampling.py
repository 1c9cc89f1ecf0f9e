"""Token choice with keyed random numbers.

One uniform number per token, a function of (seed, key, position): the same request gets the same number
in any batch, order or process. The token is the inverse of the cumulative distribution at that number,
so no noise per vocabulary entry is needed.

Legend: B sequences, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rlinf_core.errors import ConfigError
from rlinf_core.types import SamplingParams
from rlinf_engines.seeds import derive_seed

# Entries of a vocabulary that are summed together, and the fewest that are worth it.
BLOCK, MIN_BLOCK = 256, 32


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse values that no distribution can be drawn from, by name."""
    if not sampling.temperature > 0.0:
        raise ConfigError(
            f"sampling.temperature: {sampling.temperature} is not above 0; ask for greedy decoding per request"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"sampling.top_p: {sampling.top_p} is not in (0, 1]; 1 takes every token")
    if sampling.top_k < 0:
        raise ConfigError(f"sampling.top_k: {sampling.top_k} is below 0; 0 takes every token")
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"sampling.max_new_tokens: {sampling.max_new_tokens} is below 1")


def request_streams(seed: int, keys: Sequence[tuple[int | str, ...]]) -> torch.Tensor:
    """One int64 stream id per request key [B]."""
    return torch.tensor([derive_seed(seed, "sample", *key) for key in keys], dtype=torch.int64)


def uniforms(streams_B: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
    """The float64 numbers in [0, 1) of the streams at ``position`` (an int, or int64 [B]); returns [B]."""
    z_B = streams_B + (torch.as_tensor(position, dtype=torch.int64) + 1) * _GAMMA
    z_B = (z_B ^ _shift(z_B, 30)) * _MIX_1
    z_B = (z_B ^ _shift(z_B, 27)) * _MIX_2
    z_B = z_B ^ _shift(z_B, 31)
    return _shift(z_B, 11).to(torch.float64) * 2.0**-53


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own keeps the sign)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def log_distribution(logits_BV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Float64 log-probabilities of the whole vocabulary at ``temperature`` [B, V]."""
    return torch.log_softmax(logits_BV.to(torch.float64) / temperature, dim=-1)


def truncate(probs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Zero what top-k and top-p leave out; the rest is not renormalised [B, V].

    Top-p keeps the smallest set of most likely tokens whose mass, within what top-k left, reaches
    ``top_p``. Ties go to the lower token id.
    """
    if not top_k and top_p >= 1.0:
        return probs_BV
    ordered_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered_BV[..., top_k:] = 0.0
    if top_p < 1.0:
        mass_BV = ordered_BV.cumsum(-1)
        before_BV = mass_BV - ordered_BV
        ordered_BV = torch.where(before_BV < top_p * mass_BV[..., -1:], ordered_BV, 0.0)
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, ordered_BV)


def inverse_cdf(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The token ids [B] at which the cumulative distribution passes ``uniform_B``.

    ``probs_BV`` need not sum to one. A token of probability zero is never chosen.
    """
    cdf_BV = probs_BV.cumsum(dim=-1)
    total_B = cdf_BV[..., -1]
    # Rounding may carry u * total to total itself, beyond the last token.
    point_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    index_B = torch.searchsorted(cdf_BV, point_B.unsqueeze(-1), right=True).squeeze(-1)
    return index_B.clamp(max=probs_BV.shape[-1] - 1)  # a row of NaN, which callers refuse, finds no index


def choose(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, greedy_B: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row.

    Returns (token ids [B], log-probs [B] in float64). The log-prob is that of the whole vocabulary at the
    temperature, ``log_softmax(logits / temperature)``, which a trainer recomputes: top-k and top-p decide
    what can be drawn and leave the log-prob as it is. A greedy row takes the most likely token (the
    lowest id of equal ones); its log-prob is taken at temperature 1.

    Large vocabularies are computed in float32 with float64 sums, unless the logits are float64.
    """
    any_greedy = bool(greedy_B.any())
    most_B = logits_BV.argmax(dim=-1) if any_greedy else None
    if most_B is not None and bool(greedy_B.all()):
        logps_BV = log_distribution(logits_BV, 1.0)
        return most_B, logps_BV.gather(-1, most_B.unsqueeze(-1)).squeeze(-1)
    temperature: torch.Tensor | float = sampling.temperature
    if any_greedy:
        temperature = torch.where(greedy_B, 1.0, sampling.temperature).to(torch.float64).unsqueeze(-1)
    whole = not sampling.top_k and sampling.top_p >= 1.0
    if whole and logits_BV.dtype != torch.float64 and logits_BV.shape[-1] > BLOCK:
        return _choose_in_blocks(logits_BV, uniform_B, most_B, greedy_B, temperature)
    logps_BV = torch.log_softmax(logits_BV.to(torch.float64) / temperature, dim=-1)
    tokens_B = inverse_cdf(truncate(logps_BV.exp(), sampling.top_k, sampling.top_p), uniform_B)
    if most_B is not None:
        tokens_B = torch.where(greedy_B, most_B, tokens_B)
    return tokens_B, logps_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)


def _choose_in_blocks(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    most_B: torch.Tensor | None,
    greedy_B: torch.Tensor,
    temperature: torch.Tensor | float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``choose`` over the whole distribution: the block of the vocabulary that the uniform number falls into first,
    then the token in it. One exponential per entry and no float64 pass over the vocabulary."""
    logits_BV = logits_BV.float()
    rows, vocabulary = logits_BV.shape
    if isinstance(temperature, torch.Tensor):
        weights_BV = logits_BV / temperature.float()
    else:
        weights_BV = logits_BV / temperature if temperature != 1.0 else logits_BV
    top_B1 = weights_BV.amax(dim=-1, keepdim=True)
    weights_BV = (weights_BV - top_B1).exp_()
    block = math.gcd(vocabulary, BLOCK)
    if block < MIN_BLOCK:
        block = BLOCK
        weights_BV = torch.nn.functional.pad(weights_BV, (0, -vocabulary % BLOCK))
    blocks_BNK = weights_BV.view(rows, -1, block)
    cdf_BN = blocks_BNK.sum(-1).to(torch.float64).cumsum(-1)
    total_B = cdf_BN[:, -1]
    point_B1 = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B))).unsqueeze(-1)
    # A row of NaN, which callers refuse, finds no index.
    block_B1 = torch.searchsorted(cdf_BN, point_B1, right=True).clamp(max=cdf_BN.shape[-1] - 1)
    before_B1 = torch.where(block_B1 > 0, cdf_BN.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    inner_BK = blocks_BNK.gather(1, block_B1.unsqueeze(-1).expand(rows, 1, block)).squeeze(1).to(torch.float64)
    inner_BK = inner_BK.cumsum(-1)
    last_B1 = inner_BK[:, -1:]
    rest_B1 = torch.minimum(point_B1 - before_B1, torch.nextafter(last_B1, torch.zeros_like(last_B1)))
    inner_B1 = torch.searchsorted(inner_BK, rest_B1, right=True).clamp(max=block - 1)
    tokens_B = (block_B1 * block + inner_B1).squeeze(-1)
    if most_B is not None:
        tokens_B = torch.where(greedy_B, most_B, tokens_B)
    chosen_B1 = logits_BV.gather(-1, tokens_B.clamp(max=vocabulary - 1).unsqueeze(-1)).to(torch.float64) / temperature
    return tokens_B, (chosen_B1 - top_B1).squeeze(-1) - total_B.log()
