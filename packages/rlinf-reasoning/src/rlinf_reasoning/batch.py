"""From samples to padded tensors, micro-batches and log-probs.

Shape legend: B sequences, T padded positions (prompt and response), W positions from the first one that any
response token of the micro-batch can have, V vocabulary. Rows are padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import token_logprobs_and_entropy
from rlinf_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence brings to a batch: R response tokens after P prompt tokens.

    ``old_logprobs`` (R) are the behaviour's; empty stands for zeros, in supervised batches. ``ref_logprobs`` likewise.
    """

    id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    old_logprobs: Sequence[float] = ()
    ref_logprobs: Sequence[float] = ()
    advantage: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def collate(rows: Sequence[Row], pad_id: int) -> dict[str, Any]:
    """Padded tensors of one micro-batch.

    Returns:
        ``ids`` (list of str), ``input_ids``, ``attention_mask``, ``position_ids`` int64 [B, T]; ``targets`` int64
        [B, W] (the last W columns of ``input_ids``), ``mask`` bool [B, W] (true at response tokens),
        ``old_logprobs``, ``ref_logprobs`` float64 [B, W], ``advantages`` float64 [B].
    """
    if not rows:
        raise ValueError("collate() needs at least one row")
    for row in rows:
        if not row.prompt_ids or not row.response_ids:
            raise ConfigError(f"sample {row.id} has an empty {'response' if row.prompt_ids else 'prompt'}")
    count, width = len(rows), max(row.num_tokens for row in rows)
    first = min(len(row.prompt_ids) for row in rows)
    ids_BT = torch.full((count, width), pad_id, dtype=torch.int64)
    attention_BT = torch.zeros((count, width), dtype=torch.int64)
    mask_BW = torch.zeros((count, width - first), dtype=torch.bool)
    old_BW = torch.zeros((count, width - first), dtype=torch.float64)
    ref_BW = torch.zeros((count, width - first), dtype=torch.float64)
    for i, row in enumerate(rows):
        start, end = len(row.prompt_ids), row.num_tokens
        ids_BT[i, :end] = torch.tensor([*row.prompt_ids, *row.response_ids], dtype=torch.int64)
        attention_BT[i, :end] = 1
        mask_BW[i, start - first : end - first] = True
        for name, values, target in (("old", row.old_logprobs, old_BW), ("ref", row.ref_logprobs, ref_BW)):
            if values:
                if len(values) != len(row.response_ids):
                    raise ValueError(
                        f"sample {row.id}: {len(values)} {name} log-probs for {len(row.response_ids)} response tokens"
                    )
                target[i, start - first : end - first] = torch.tensor(values, dtype=torch.float64)
    return {
        "ids": [row.id for row in rows],
        "input_ids": ids_BT,
        "attention_mask": attention_BT,
        "position_ids": (attention_BT.cumsum(dim=1) - 1).clamp(min=0),
        "targets": ids_BT[:, first:],
        "mask": mask_BW,
        "old_logprobs": old_BW,
        "ref_logprobs": ref_BW,
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float64),
    }


def micro_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Cut rows, in the order of their ids, so that no batch has more than ``max_tokens`` padded positions.

    A single row that is longer comes alone. The order makes sums of floating-point numbers reproducible.
    """
    batch: list[Row] = []
    width = 0
    for row in sorted(rows, key=lambda r: r.id):
        wider = max(width, row.num_tokens)
        if batch and wider * (len(batch) + 1) > max_tokens:
            yield batch
            batch, wider = [], row.num_tokens
        batch.append(row)
        width = wider
    if batch:
        yield batch


class TokenForward:
    """The forward function that trainer backends call: log-probs, entropy and the greedy choice of response tokens.

    ``temperature`` is the sampling temperature, so that log-probs are those of the policy that drew the tokens.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """``logprobs``, ``entropy`` [B, W] (zero at masked positions) and ``greedy`` bool [B, W]: the target is the
        most likely token."""
        targets_BW, mask_BW = batch["targets"], batch["mask"]
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
            logits_to_keep=targets_BW.shape[1] + 1,
        ).logits
        logits_BWV = logits[:, -(targets_BW.shape[1] + 1) : -1]
        logprobs, entropy = token_logprobs_and_entropy(
            logits_BWV, targets_BW, temperature=self.temperature, mask=mask_BW
        )
        with torch.no_grad():
            greedy = logits_BWV.argmax(dim=-1) == targets_BW
        return {"logprobs": logprobs, "entropy": entropy, "greedy": greedy}


def per_row(values: Tensor, mask: Tensor) -> list[list[float]]:
    """The true positions of each row of ``values`` [B, W], as lists."""
    return [row[keep].tolist() for row, keep in zip(values, mask, strict=True)]
