"""From sequences to packed micro-batches, and from logits to log-probs.

Shape legend: S sequences laid end to end, N tokens of them together, M targets (response tokens), V vocabulary (or the
part of it that a rank has). Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import token_logprobs_and_entropy
from rlinf_core.errors import ConfigError
from rlinf_core.types import Batch, VocabShard

PER_TOKEN = ("behaviour_logprobs", "old_logprobs", "ref_logprobs", "advantages", "returns", "old_values")


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence brings to a batch: R response tokens after P prompt tokens.

    Per response token (R), or empty where the batch has no such thing: ``behaviour_logprobs`` of the engine that drew
    them, ``old_logprobs`` of the trainer before the update, ``ref_logprobs``, ``returns``, ``old_values``.
    ``advantages`` is one number for all of them, or one each. ``after``: the state after the last token gets a place
    too (its value is what a response that was cut off is bootstrapped with).
    """

    id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    behaviour_logprobs: Sequence[float] = ()
    old_logprobs: Sequence[float] = ()
    ref_logprobs: Sequence[float] = ()
    advantages: float | Sequence[float] = ()
    returns: Sequence[float] = ()
    old_values: Sequence[float] = ()
    after: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def places(self) -> int:
        """How many outputs the row gets: R, and one more with ``after``."""
        return len(self.response_ids) + self.after


def collate(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows laid end to end: one packed micro-batch.

    Returns:
        What ``rlinf_core.types.Batch`` says, and float64 [M] of each field that the rows have (``PER_TOKEN``). With
        ``Row.after`` the place after the last token has ``mask`` false and zeros.

    Raises:
        ConfigError: a row has an empty prompt or response.
        ValueError: no rows; a field that some rows lack, or of another length than the response.
    """
    if not rows:
        raise ValueError("collate() needs at least one row")
    ids: list[int] = []
    positions: list[int] = []
    starts, predict, targets, mask, segments = [0], list[int](), list[int](), list[bool](), list[int]()
    for number, row in enumerate(rows, start=1):
        if not row.prompt_ids or not row.response_ids:
            raise ConfigError(f"sample {row.id} has an empty {'response' if row.prompt_ids else 'prompt'}")
        start, first = starts[-1], len(row.prompt_ids) - 1
        ids += [*row.prompt_ids, *row.response_ids]
        positions += range(row.num_tokens)
        predict += range(start + first, start + first + row.places)
        targets += [*row.response_ids, *([row.response_ids[-1]] if row.after else [])]
        mask += [True] * len(row.response_ids) + [False] * row.after
        segments += [number] * row.places
        starts.append(start + row.num_tokens)
    batch: dict[str, Any] = {
        "ids": [row.id for row in rows],
        "input_ids": torch.tensor(ids, dtype=torch.int64),
        "position_ids": torch.tensor(positions, dtype=torch.int64),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "max_len": max(row.num_tokens for row in rows),
        "predict": torch.tensor(predict, dtype=torch.int64),
        "targets": torch.tensor(targets, dtype=torch.int64),
        "mask": torch.tensor(mask, dtype=torch.bool),
        "segments": torch.tensor(segments, dtype=torch.int64),
    }
    for name in PER_TOKEN:
        values = [_field(row, name) for row in rows]
        if any(values):
            filled = [_filled(row, own, name) for row, own in zip(rows, values, strict=True)]
            batch[name] = torch.tensor([v for own in filled for v in own], dtype=torch.float64)
    return batch


def _field(row: Row, name: str) -> Sequence[float]:
    value = getattr(row, name)
    return [float(value)] * len(row.response_ids) if isinstance(value, int | float) else value


def _filled(row: Row, values: Sequence[float], name: str) -> list[float]:
    if len(values) != len(row.response_ids):
        raise ValueError(f"sample {row.id}: {len(values)} {name} for {len(row.response_ids)} response tokens")
    return [*map(float, values), *([0.0] if row.after else [])]


def micro_batches(
    rows: Sequence[Row], max_tokens: int, most: Callable[[int], int] = lambda number: number
) -> list[list[Row]]:
    """Cut rows, in the order of their ids, so that no batch has more than ``max_tokens`` tokens.

    A single row that is longer comes alone. ``most`` (``Trainer.most``, collective) gives the largest number over all
    ranks: one that needs fewer cuts further, as far as its rows go, so that no rank waits for another's surplus. The
    order makes sums of floating-point numbers reproducible.
    """
    parts: list[list[Row]] = []
    used = 0
    for row in sorted(rows, key=lambda r: r.id):
        if not parts or used + row.num_tokens > max_tokens:
            parts.append([])
            used = 0
        parts[-1].append(row)
        used += row.num_tokens
    count = most(len(parts))
    while len(parts) < min(count, len(rows)):
        sizes = [sum(row.num_tokens for row in part) if len(part) > 1 else 0 for part in parts]
        place = sizes.index(max(sizes))
        parts[place : place + 1] = _halves(parts[place])
    return parts


def _halves(part: list[Row]) -> list[list[Row]]:
    """Two runs of about equally many tokens, neither empty."""
    total, left, cut = sum(row.num_tokens for row in part), 0, 0
    for row in part[:-1]:
        if cut and left + row.num_tokens / 2 > total / 2:
            break
        left, cut = left + row.num_tokens, cut + 1
    return [part[:cut], part[cut:]]


class TokenHead:
    """The head that trainer backends put on the logits (``rlinf_core.types.HeadFn``): log-probs, entropy and the
    greedy choice, also of logits whose vocabulary is split over ranks.

    ``temperature`` is the sampling temperature, so that log-probs are those of the policy that drew the tokens.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def __call__(self, logits: Tensor, batch: Batch, shard: VocabShard) -> dict[str, Tensor]:
        """``logprobs``, ``entropy`` [M] (zero where masked) and ``greedy`` bool [M]: the target is the most likely
        token, the one with the smaller id of equal ones."""
        targets, mask = batch["targets"], batch["mask"]
        logprobs, entropy = token_logprobs_and_entropy(
            logits, targets, temperature=self.temperature, mask=mask, group=shard.group, vocab_start=shard.start
        )
        return {"logprobs": logprobs, "entropy": entropy, "greedy": _most_likely(logits, shard) == targets}


@torch.no_grad()
def _most_likely(logits: Tensor, shard: VocabShard) -> Tensor:
    """Global id of the largest logit of each row [M]; collective where the vocabulary is split."""
    if shard.group is None:
        return logits.argmax(dim=-1)
    import torch.distributed as dist

    highest, local = logits.max(dim=-1)
    overall = highest.float().clone()  # reduced in place; float() gives float32 logits themselves
    dist.all_reduce(overall, dist.ReduceOp.MAX, group=shard.group)
    beyond = torch.iinfo(torch.int64).max
    found = torch.where(highest.float() == overall, local + shard.start, beyond)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=shard.group)
    return found


def per_row(values: Tensor, rows: Sequence[Row]) -> list[list[float]]:
    """``values`` [M] of the batch that ``collate(rows)`` made, as one list for each row (``Row.places`` long)."""
    return [part.tolist() for part in values.split([row.places for row in rows])]
