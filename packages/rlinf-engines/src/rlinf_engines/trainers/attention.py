"""Causal attention over packed sequences of different lengths, for Hugging Face models and for others.

Sequences lie end to end without padding and do not see each other. On a GPU the flash kernels for variable lengths do
it; where they cannot (CPU, other number formats, dropout) sequences of similar length are put side by side, padded only
as far as the longest of them, and go through torch's scaled dot product attention. Importing this module loads torch,
not transformers.

Shape legend: N tokens of all sequences, S sequences, H query heads, G key-value heads (dividing H), D head size; b
sequences of one bucket, L tokens of the longest of them, P = sum of b * L over buckets. Where sequences share tokens
(``sharing.py``), N counts a shared token once and T, the tokens of all sequences laid end to end, once for each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.types import Batch
from rlinf_engines.trainers.plans import plan_of, trees_of

NAME = "rlinf_packed"
# Arguments of attention functions that change the result and that this one does not know.
UNKNOWN = ("softcap", "s_aux", "position_bias", "block_table", "cache")


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    shared: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v within each sequence, every token seeing itself and those before it: [N, H, D].

    Args:
        q, k, v: [N, H, D], [N, G, D], [N, G, D] of one number format; head h reads key-value head h * G // H.
        cu_seqlens: int32 [S + 1], where each sequence begins, and N (with ``shared`` T); none may be empty. Tensors are
            recognised by identity: do not change one in place.
        max_len: tokens of the longest sequence.
        scale: factor of the scores; ``None``: 1 / sqrt(D).
        sliding_window: how many tokens, itself included, a token sees; ``None``: all.
        dropout: probability with which an attention weight is dropped.
        shared: int64 [T], which of the N tokens is at each place of the sequences, every one somewhere. A token must
            have the same ones before it in each of its sequences. ``None``: N = T, each in its place.
    """
    if sliding_window is not None and sliding_window >= max_len:
        sliding_window = None
    if torch.is_autocast_enabled(q.device.type):
        # Rotary embeddings leave queries and keys in float32.
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if dropout == 0.0 and q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        if shared is None:
            return _flash(q, k, v, cu_seqlens, max_len, scale, sliding_window)
        q, k, v = (_copies(x, shared) for x in (q, k, v))
        return _flash(q, k, v, cu_seqlens, max_len, scale, sliding_window)[plan_of(cu_seqlens, shared).first]
    if shared is not None and sliding_window is None and (plan := trees_of(cu_seqlens, shared)) is not None:
        ((count, length),) = plan.buckets
        q, k, v = (_Spread.apply(x, plan.places, plan.slots) for x in (q, k, v))
        qs, ks, vs = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return _Collect.apply(_one_bucket(qs, ks, vs, scale, plan.mask, dropout), plan.places, plan.slots)
    plan = plan_of(cu_seqlens, shared)
    if plan.places is not None:
        q = _Spread.apply(q, plan.places, plan.slots)
        if shared is None:
            k, v = (_Spread.apply(x, plan.places, plan.slots) for x in (k, v))
        else:
            k, v = (_copies(x, plan.places) for x in (k, v))
    parts = []
    start = 0
    for count, length in plan.buckets:
        end = start + count * length
        qs, ks, vs = (x[start:end].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        parts.append(_one_bucket(qs, ks, vs, scale, _window(length, sliding_window, q.device), dropout))
        start = end
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out if plan.places is None else _Collect.apply(out, plan.places, plan.slots)


def packed_inputs(batch: Batch) -> dict[str, Any]:
    """The arguments with which a Hugging Face model whose attention is ``rlinf_packed`` runs on a packed micro-batch.

    Sequences have the names that the library's flash attention gives them, so that other layers which mix tokens and
    know those names keep sequences apart too.
    """
    cu, longest = batch["cu_seqlens"], int(batch["max_len"])
    return {
        "input_ids": batch["input_ids"].unsqueeze(0),
        "position_ids": batch["position_ids"].unsqueeze(0),
        "attention_mask": None,
        "use_cache": False,
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": longest,
        "max_length_k": longest,
        **({"shared_tokens": batch["shared"]} if "shared" in batch else {}),
    }


def use_packed_attention(network: Any) -> None:
    """Let a Hugging Face model attend within packed sequences (``packed_inputs``); it then takes no other inputs.

    Raises ``ConfigError`` for architectures whose attention cannot be replaced or does not mean the same.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _hugging_face_attention)
    config = network.config.get_text_config()
    kind = type(network).__name__
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ConfigError(f"model.path: {kind} attends in chunks, which packed sequences do not support")
    try:
        network.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: the attention of {kind} cannot be replaced: {error}") from error
    if network.config._attn_implementation != NAME:
        raise ConfigError(f"model.path: the attention of {kind} cannot be replaced, so it cannot train packed batches")


def check_packing(network: Any) -> None:
    """Refuse, by name, a network for which packed sequences are not what they are alone.

    Of two packed sequences the second must not depend on the first, and must have the outputs that it has alone. Call
    after ``use_packed_attention``, with the whole model on one rank, in float32 or float64; runs three tiny forwards.
    """
    device = next(network.parameters()).device
    size = int(network.config.get_text_config().vocab_size)
    ids = torch.arange(1, 8, device=device) % size
    other = torch.cat([(ids[:3] + 3) % size, ids[3:]])
    mode = network.training
    network.eval()
    with torch.no_grad():
        batches = (_two(ids, 3), _two(other, 3), _two(ids[3:], 0))
        outputs = [network(**packed_inputs(batch)).logits[0] for batch in batches]
    network.train(mode)
    packed, beside_other, alone = outputs[0][3:], outputs[1][3:], outputs[2]
    largest = max(float(alone.abs().max()), 1e-6)
    leak = float((packed - beside_other).abs().max()) / largest
    apart = float((packed - alone).abs().max()) / largest
    if not (leak <= 1e-5 and apart <= 1e-3):
        raise ConfigError(
            f"model.path: {type(network).__name__} mixes the sequences of a packed batch (outputs change by "
            f"{max(leak, apart):.2g} of their size): layers other than attention look at other tokens, so it cannot be "
            "trained"
        )


def _two(ids: Tensor, first: int) -> dict[str, Any]:
    """A packed batch of a sequence of ``first`` tokens, if any, and one of the rest."""
    starts = sorted({0, first, len(ids)})
    lengths = [end - start for start, end in pairwise(starts)]
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(length, device=ids.device) for length in lengths]),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32, device=ids.device),
        "max_len": max(lengths),
    }


def _hugging_face_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    shared_tokens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, H, N, D], [1, G, N, D] twice -> [1, N, H, D]."""
    if cu_seq_lens_q is None or max_length_q is None:
        raise RLinfError(f"{NAME}: the model was called without packed sequences (see packed_inputs)")
    strange = [name for name in UNKNOWN if others.get(name) is not None]
    if attention_mask is not None:
        strange.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        strange.append("is_causal=False")
    if strange:
        raise ConfigError(f"model.path: {type(module).__name__} needs {', '.join(strange)}, not supported with packing")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = packed_attention(
        q,
        k,
        v,
        cu_seq_lens_q,
        max_length_q,
        scale=scaling,
        sliding_window=sliding_window,
        dropout=dropout if module.training else 0.0,
        shared=shared_tokens,
    )
    return out.unsqueeze(0), None


class _Spread(torch.autograd.Function):
    """Tokens [N, ...] into slots [P, ...]. Backward reads the slots of tokens alone: those of padding get no gradient,
    because what comes out of them is not used and nothing else sees them."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


def _copies(tokens: Tensor, places: Tensor) -> Tensor:
    """Tokens [N, ...] at ``places``, some several times. The gradients of copies are added in a fixed order, on a GPU
    too, which those of indexing are not."""
    return functional.embedding(places, tokens.flatten(1)).view(len(places), *tokens.shape[1:])


class _Collect(torch.autograd.Function):
    """Slots [P, ...] back into tokens [N, ...]."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.length = len(out)
        return out.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_copy_(0, slots, grad), None, None


def _window(length: int, size: int | None, device: torch.device) -> Tensor | None:
    """bool [L, L], what each token sees of the ``size`` last ones; ``None`` where that is all before it."""
    if size is None or size >= length:
        return None
    row = torch.arange(length, device=device)
    back = row[:, None] - row
    return (back >= 0) & (back < size)


def _one_bucket(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention of sequences of one length, causal where there is no mask: [b, H, L, D], [b, G, L, D] twice ->
    [b * L, H, D]."""
    out = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, scale: float | None, sliding_window: int | None
) -> Tensor:
    """torch's kernels for variable lengths, on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if sliding_window is None else sliding_window - 1  # the kernel counts the tokens to the left
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens,
        cu_seqlens,
        max_len,
        max_len,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if not isinstance(out, Tensor):
        raise TypeError(f"varlen_attn gave {type(out).__name__}")
    return out
