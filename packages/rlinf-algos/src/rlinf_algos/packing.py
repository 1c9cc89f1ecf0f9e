"""Sequences of different lengths in shared rows, with the ids that keep them apart.

Shape legend: N sequences, R rows, L row length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.balancing import first_fit_decreasing
from rlinf_algos.errors import AlgorithmError


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows that hold one or more whole sequences, and where each lies.

    ``input_ids`` [R, L] (padding id at the end), ``position_ids`` [R, L] from 0 in every sequence, ``segments`` [R,
    L]: 1, 2, ... by place in the row and 0 for padding, ``fields``: further tensors per token [R, L]. ``places[n]``
    is (row, start, length) of sequence n in the given order.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor
    fields: Mapping[str, Tensor]
    places: tuple[tuple[int, int, int], ...]

    @property
    def attention_mask(self) -> Tensor:
        """[R, L] bool, true at tokens."""
        return self.segments > 0

    @property
    def predicted_mask(self) -> Tensor:
        """[R, L] bool, true at tokens that the one before them predicts: not the first of each sequence, whose
        predecessor in the row belongs to another. And it with the loss mask before ``next_token_logprobs``."""
        return self.attention_mask & (self.position_ids > 0)

    def block_causal_mask(self) -> Tensor:
        """[R, 1, L, L] bool for ``scaled_dot_product_attention``: true where a query (row) sees a key: not later, and
        of its own sequence. Padding sees itself, so that no row of the softmax is empty."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        length = self.segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        return (same & causal)[:, None]

    def cumulative_lengths(self) -> Tensor:
        """[N + 1] int32 starts of the sequences in the rows laid end to end without padding, for varlen kernels, in
        the order (row, start)."""
        ordered = sorted(self.places)
        lengths = torch.tensor([0, *(length for _, _, length in ordered)], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.input_ids.device)

    def unpack(self, values: Tensor) -> list[Tensor]:
        """``values`` [R, L, ...] -> one tensor [length, ...] per sequence, in the given order. Views: gradients
        flow."""
        if values.shape[:2] != self.input_ids.shape:
            raise AlgorithmError(
                f"values must begin with shape {_check.shape_of(self.input_ids)}, got {_check.shape_of(values)}"
            )
        return [values[row, start : start + length] for row, start, length in self.places]


def pack(
    sequences: Sequence[Tensor],
    capacity: int,
    *,
    pad_id: int = 0,
    fields: Mapping[str, Sequence[Tensor]] | None = None,
    rows: Sequence[Sequence[int]] | None = None,
    pad_to_capacity: bool = False,
) -> Packed:
    """Pack token sequences into rows of at most ``capacity`` tokens.

    Args:
        sequences: N integer tensors [length], each of 1..capacity tokens.
        capacity: tokens per row.
        pad_id: what padding holds.
        fields: further values per token (masks, advantages, log-probs): name -> N tensors [length]. Padded with zero.
            Sequences of different dtypes, and fields too, are packed in the dtype that holds them all.
        rows: which sequences share a row (``micro_batches`` or own choice); first-fit decreasing when ``None``.
        pad_to_capacity: rows of exactly ``capacity`` (for compiled models) and not of the longest.
    """
    _check.whole(1, capacity=capacity)
    lengths = []
    for n, sequence in enumerate(sequences):
        _check.integral(**{f"sequences[{n}]": sequence})
        _check.ndim(1, "[length]", **{f"sequences[{n}]": sequence})
        if not 1 <= len(sequence) <= capacity:
            raise AlgorithmError(f"sequences[{n}] has {len(sequence)} tokens; must be 1..{capacity}")
        lengths.append(len(sequence))
    for name, values in (fields or {}).items():
        if len(values) != len(lengths):
            raise AlgorithmError(f"fields[{name!r}] must hold one tensor per sequence, of its length")
        for n, value in enumerate(values):
            _check.shape((lengths[n],), "[length]", **{f"fields[{name!r}][{n}]": value})
    chosen = first_fit_decreasing(lengths, capacity) if rows is None else [list(r) for r in rows]
    if sorted(i for r in chosen for i in r) != list(range(len(lengths))):
        raise AlgorithmError("rows must name every sequence exactly once")
    used = [sum(lengths[i] for i in r) for r in chosen]
    if used and max(used) > capacity:
        raise AlgorithmError(f"row {used.index(max(used))} holds {max(used)} tokens, more than {capacity}")
    width = capacity if pad_to_capacity or not used else max(used)
    places = [(0, 0, 0)] * len(lengths)
    device = sequences[0].device if lengths else None
    input_ids = torch.full((len(chosen), width), pad_id, dtype=_dtype(sequences, torch.long), device=device)
    position_ids = torch.zeros(len(chosen), width, dtype=torch.long, device=device)
    segments = torch.zeros_like(position_ids)
    for row, members in enumerate(chosen):
        start = 0
        for segment, n in enumerate(members, start=1):
            end = start + lengths[n]
            input_ids[row, start:end] = sequences[n]
            position_ids[row, start:end] = torch.arange(lengths[n], device=device)
            segments[row, start:end] = segment
            places[n] = (row, start, lengths[n])
            start = end
    packed_fields = {name: _lay(values, places, input_ids) for name, values in (fields or {}).items()}
    return Packed(input_ids, position_ids, segments, packed_fields, tuple(places))


def _dtype(values: Sequence[Tensor], empty: torch.dtype) -> torch.dtype:
    """The dtype that holds all ``values``: the first one's alone would cut the others down without a word."""
    return reduce(torch.promote_types, (v.dtype for v in values)) if len(values) else empty


def _lay(values: Sequence[Tensor], places: Sequence[tuple[int, int, int]], like: Tensor) -> Tensor:
    out = torch.zeros(like.shape, dtype=_dtype(values, torch.float32), device=like.device)
    for value, (row, start, length) in zip(values, places, strict=True):
        out[row, start : start + length] = value
    return out
