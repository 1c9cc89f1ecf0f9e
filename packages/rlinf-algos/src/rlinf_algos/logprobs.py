"""Log-probs of chosen tokens and entropies, without the tensors that are not needed.

The plain formula (``logits.log_softmax(-1).gather``) writes a second and a third tensor of the logits' size, forward
and backward. Here blocks of rows that fit the cache are reduced one after another, and gradients are recomputed from
two numbers per row. From hidden states even the logits exist for one block at a time. All gradients are exact.

Shape legend: B sequences, T positions, V vocabulary, D hidden size, ``...`` any leading shape (usually [B, T]).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos._dist import Group
from rlinf_algos._softmax_stats import LinearStats, LogitsStats
from rlinf_algos.errors import AlgorithmError


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk: int | None = None,
    inplace_backward: bool = False,
    group: Group = None,
    vocab_start: int = 0,
) -> Tensor:
    """log softmax(logits / temperature)[ids]: [...] in float32 (float64 for float64 logits).

    ``logits`` at a position must be those that *predict* the id at that position; ``next_token_logprobs`` does the
    shift.

    Args:
        logits: [..., V]; -inf is allowed (a token that cannot be drawn).
        ids: [...] integers in 0..V-1 (global ids when the vocabulary is sharded).
        temperature: as when sampling, at least 1e-6: the probabilities are those of the tempered policy.
        mask: [...] bool or integer; false positions give 0 and no gradient, and neither their logits (NaN, infinite)
            nor their ids (-100) are read.
        chunk: rows reduced together; chosen so that a block fits the cache when ``None``.
        inplace_backward: write the gradient over the logits (saves their size once more). For when nothing else reads
            the logits; torch refuses a second backward.
        group: process group whose ranks each hold a vocabulary shard (collective). The loss must be the same on every
            rank.
        vocab_start: first global id of this rank's shard. Every id must lie in exactly one rank's shard.

    Raises:
        AlgorithmError: shapes, dtypes, temperature or ids that cannot be right.
    """
    return _from_logits(logits, ids, temperature, mask, chunk, inplace_backward, group, vocab_start, False)[0]


def token_logprobs_and_entropy(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk: int | None = None,
    inplace_backward: bool = False,
    group: Group = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """``token_logprobs`` and the entropy of the same (tempered) distribution, in one pass: ([...], [...]).

    Both carry gradients. Arguments as ``token_logprobs``.
    """
    return _from_logits(logits, ids, temperature, mask, chunk, inplace_backward, group, vocab_start, True)


def entropy_from_logits(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk: int | None = None,
    inplace_backward: bool = False,
    group: Group = None,
    vocab_start: int = 0,
) -> Tensor:
    """Entropy -sum p log p of softmax(logits / temperature), in nats: [...]. Arguments as ``token_logprobs``."""
    _check.floating(logits=logits)
    # Id 0 is in the first shard, whatever this rank holds.
    ids = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _from_logits(logits, ids, temperature, mask, chunk, inplace_backward, group, vocab_start, True)[1]


def next_token_logprobs(
    logits: Tensor,
    input_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    inplace_backward: bool = False,
    group: Group = None,
    vocab_start: int = 0,
) -> Tensor:
    """Log-probs of a causal model's inputs, each at its own position: out[:, t] = log pi(input_ids[:, t] | before t).

    The shift is done on the ids, so the logits are not copied.

    Args:
        logits: [B, T, V], position t predicts the id at t + 1.
        input_ids: [B, T].
        mask: [B, T], true at response tokens. Position 0 has no prediction and must be false.

    Returns:
        [B, T], zero at false positions.
    """
    shifted_ids, shifted_mask = _shift(logits, input_ids, mask)
    if not logits.shape[1]:
        return _check.widen(logits).sum(-1)  # [B, 0]
    found = token_logprobs(
        logits,
        shifted_ids,
        temperature=temperature,
        mask=shifted_mask,
        chunk=chunk,
        inplace_backward=inplace_backward,
        group=group,
        vocab_start=vocab_start,
    )
    return torch.nn.functional.pad(found[:, :-1], (1, 0))


def _shift(logits: Tensor, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    _check.ndim(3, "[B, T, V]", logits=logits)
    _check.shape(logits.shape[:2], "[B, T] of logits", input_ids=input_ids)
    _check.same_shape(input_ids=input_ids, mask=mask)
    mask = _check.boolean(mask)
    if mask.shape[1] and bool(mask[:, 0].any()):
        raise AlgorithmError("mask is true at position 0, whose token no logits predict")
    pad = torch.nn.functional.pad
    return pad(input_ids[:, 1:], (0, 1)), pad(mask[:, 1:], (0, 1))


def _from_logits(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    mask: Tensor | None,
    chunk: int | None,
    reuse: bool,
    group: Group,
    vocab_start: int,
    want_entropy: bool,
) -> tuple[Tensor, Tensor]:
    _check.floating(logits=logits)
    _check.temperature_of(temperature)
    _check.whole(1, **_check.given(chunk=chunk))
    _shards(group, vocab_start)
    vocab = _vocabulary(logits, "logits")
    flat_ids, rows = _targets(ids, mask, logits, "logits", vocab, group)
    flat = logits.reshape(-1, vocab)
    size = chunk or max(1, _block(logits) // vocab)
    with torch.autocast(device_type=logits.device.type, enabled=False):
        logp, entropy = LogitsStats.apply(  # type: ignore[no-untyped-call]
            flat, flat_ids, rows, 1.0 / temperature, size, want_entropy, reuse, group, vocab_start
        )
    return _spread(logp, rows, ids.shape), _spread(entropy, rows, ids.shape)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_rows: int | None = None,
    chunk_vocab: int | None = None,
    group: Group = None,
    vocab_start: int = 0,
) -> Tensor:
    """``token_logprobs`` of the logits hidden @ weight.T + bias, which never exist as a whole: [...].

    Costs one more product with the output matrix in the backward pass. Gradients to ``hidden``, ``weight`` and
    ``bias`` are accumulated in float32 for narrower dtypes. The products themselves are made in ``hidden``'s dtype, as
    the model's own output layer makes them: their rounding (and, in float16, overflow beyond 65504) is that layer's.

    Args:
        hidden: [..., D].
        weight: [V, D] (a rank's shard [V_local, D] with ``group``); cast to hidden's dtype for the product.
        ids: [...] integers.
        bias: [V].
        temperature, mask: as ``token_logprobs``; hidden states at false positions are not read.
        chunk_rows, chunk_vocab: size of the block of logits that exists at one time.
        group, vocab_start: vocabulary shards; the gradient to ``hidden`` (the same on all ranks) is summed over them.
    """
    return _from_hidden(
        hidden, weight, ids, bias, temperature, mask, chunk_rows, chunk_vocab, group, vocab_start, False
    )[0]


def linear_token_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_rows: int | None = None,
    chunk_vocab: int | None = None,
    group: Group = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """``linear_token_logprobs`` and the entropy, in one pass: ([...], [...]). Both carry gradients."""
    return _from_hidden(hidden, weight, ids, bias, temperature, mask, chunk_rows, chunk_vocab, group, vocab_start, True)


def _from_hidden(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    temperature: float,
    mask: Tensor | None,
    chunk_rows: int | None,
    chunk_vocab: int | None,
    group: Group,
    vocab_start: int,
    want_entropy: bool,
) -> tuple[Tensor, Tensor]:
    _check.floating(hidden=hidden, weight=weight, bias=bias)
    _check.ndim(2, "[V, D]", weight=weight)
    _check.temperature_of(temperature)
    _check.whole(1, **_check.given(chunk_rows=chunk_rows, chunk_vocab=chunk_vocab))
    _shards(group, vocab_start)
    width = _vocabulary(hidden, "hidden")
    if weight.shape[1] != width:
        raise AlgorithmError(f"weight must have shape [V, D], D = {width} as in hidden, got {_check.shape_of(weight)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise AlgorithmError(f"bias must have shape [V] = [{weight.shape[0]}], got {_check.shape_of(bias)}")
    flat_ids, rows = _targets(ids, mask, hidden, "hidden", weight.shape[0], group)
    flat = hidden.reshape(-1, width)
    if rows is not None:
        flat = flat[rows]
    block = 4 * _block(hidden)
    vocab = min(chunk_vocab or 8192, max(weight.shape[0], 1))
    size = chunk_rows or max(32, block // vocab)
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        logp, entropy = LinearStats.apply(  # type: ignore[no-untyped-call]
            flat, weight, bias, flat_ids, 1.0 / temperature, size, vocab, want_entropy, group, vocab_start
        )
    return _spread(logp, rows, ids.shape), _spread(entropy, rows, ids.shape)


def _shards(group: Group, vocab_start: int) -> None:
    _check.whole(0, vocab_start=vocab_start)
    if group is None and vocab_start:
        raise AlgorithmError(f"vocab_start is {vocab_start} without group: a shard alone has no normaliser")


def _vocabulary(x: Tensor, name: str) -> int:
    if x.ndim < 2 or x.shape[-1] == 0:
        raise AlgorithmError(f"{name} must have shape [..., n] with n > 0, got {_check.shape_of(x)}")
    return x.shape[-1]


def _block(x: Tensor) -> int:
    """Elements reduced at a time: what fits a core's cache, or enough to fill a device."""
    return 2**17 if x.device.type == "cpu" else 2**25


def _targets(
    ids: Tensor, mask: Tensor | None, x: Tensor, name: str, vocab: int, group: Group
) -> tuple[Tensor, Tensor | None]:
    """Checked flat ids of the rows to compute, and those rows' numbers (``None`` for all)."""
    _check.integral(ids=ids)
    if ids.shape != x.shape[:-1]:
        raise AlgorithmError(
            f"ids must have the leading shape of {name} {_check.shape_of(x)}, got {_check.shape_of(ids)}"
        )
    flat = ids.reshape(-1).long()
    rows = None
    if mask is not None:
        _check.same_shape(ids=ids, mask=mask)
        rows = _check.boolean(mask).reshape(-1).nonzero().squeeze(1)
        flat = flat[rows]
    if flat.numel():
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or (group is None and high >= vocab):
            bad = low if low < 0 else high
            raise AlgorithmError(f"ids holds {bad}, outside 0..{vocab - 1}; mask positions that hold no token")
    return flat, rows


def _spread(values: Tensor, rows: Tensor | None, shape: torch.Size) -> Tensor:
    if rows is None:
        return values.view(shape)
    return values.new_zeros(shape.numel()).index_copy(0, rows, values).view(shape)
