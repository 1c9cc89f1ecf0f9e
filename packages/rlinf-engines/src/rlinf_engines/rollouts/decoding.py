"""What makes decoding with a Hugging Face model cheap: a cache that grows in place, attention without copies.

Importing this module loads torch and transformers. Legend: B sequences, H heads, G key-value heads, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "rlinf_grouped"
"""The name of ``grouped_attention`` among the library's attention implementations."""
GROW_BY = 32


class GrowingLayer(DynamicLayer):
    """A layer's keys and values in buffers with room for more: a step writes one column instead of copying all.

    ``keys`` and ``values`` [B, G, T, D] are views of the part in use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.room: list[torch.Tensor] = []  # keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        new = key_states.shape[-2]
        end = begin + new
        if not self.room or end > self.room[0].shape[-2]:
            held = [buffer[:, :, :begin] for buffer in self.room]
            self.room = [
                states.new_empty(*states.shape[:2], end + GROW_BY, states.shape[3])
                for states in (key_states, value_states)
            ]
            for buffer, old in zip(self.room, held, strict=False):  # none the first time
                buffer[:, :, :begin] = old
        keys, values = self.room
        keys.narrow(2, begin, new).copy_(key_states)
        values.narrow(2, begin, new).copy_(value_states)
        self.keys, self.values = keys.narrow(2, 0, end), values.narrow(2, 0, end)
        return self.keys, self.values

    def reorder_cache(self, indices: torch.Tensor) -> None:
        length = self.get_seq_length()
        if not length:
            return
        rooms = []
        for held in (self.keys, self.values):
            room = held.new_empty(len(indices), held.shape[1], length + GROW_BY, held.shape[3])
            torch.index_select(held, 0, indices, out=room[:, :, :length])
            rooms.append(room)
        self.room = rooms
        self.keys, self.values = (room[:, :, :length] for room in rooms)


def growing_cache(config: Any) -> DynamicCache:
    """A cache of ``GrowingLayer``s; layers of another kind (sliding windows) stay as the library makes them."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [B, 1, H, D] of one new token per sequence; anything else goes to the library's.

    The query heads [B, H, 1, D] that share a key head are taken for positions [B, G, H / G, D]: nothing of the cache
    is repeated, where the library copies it H / G times in each step.
    """
    rows, heads, length, size = query.shape
    if length != 1 or (attention_mask is not None and attention_mask.shape[1] != 1):
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], -1, size), key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(rows, 1, heads, -1), None


def use_grouped_attention(model: Any) -> None:
    """Let a model that attends by the library's ``sdpa`` use ``grouped_attention``."""
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
