"""One decoding step of a Llama or Qwen2 model on a CPU, with as few operations as it takes.

A small batch spends most of a step in starting operations: the library's forward has about 45 a layer, this one 20, on
the same parameters and the same cache. Importing this module loads torch, not transformers.

Legend: B sequences, E width, H query heads, G key-value heads, D head size, F feed-forward width, T positions, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not change with the length."""
ACCURACY = 1e-4
"""Largest difference from the library's forward, as a part of the largest logit."""
TABLE = 256
"""Positions by which the table of rotary embeddings grows."""


@dataclass(frozen=True, slots=True)
class _Layer:
    before: Tensor  # [E], norm before the attention
    qkv: Tensor  # [(H + 2 G) D, E]
    qkv_bias: Tensor | None
    out: Tensor  # [H D, E]
    after: Tensor  # [E], norm before the feed-forward
    gate_up: Tensor  # [2 F, E]
    down: Tensor  # [F, E]


class FusedStep:
    """Calls are ``step(ids_B, position_B, bias, cache)``: logits [B, V] of one new token per sequence.

    Made by ``fused_step``. The model goes on to work as before, on parameters that are views of fused ones: copy new
    values into them in place.
    """

    def __init__(self, model: Any) -> None:
        config, base = model.config, model.model
        first = base.layers[0].self_attn
        self._heads, self._kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._size, self._scale, self._eps = int(first.head_dim), float(first.scaling), float(config.rms_norm_eps)
        self._rotary = base.rotary_emb
        self._embedding, self._norm = base.embed_tokens.weight, base.norm.weight
        self._head = model.lm_head
        self._layers = [_fused_layer(layer) for layer in base.layers]
        self._cos = self._sin = torch.empty(0, 1, self._size)

    def __call__(self, ids_B: Tensor, position_B: Tensor, bias: Tensor | None, cache: Any) -> Tensor:
        """``bias`` [B, 1, 1, T + 1] is added to the attention scores (``None``: every sequence sees all that is
        cached); the cache grows by one."""
        rows, heads, both = len(ids_B), self._heads, self._heads + self._kv_heads
        hidden = functional.embedding(ids_B, self._embedding)
        width = (hidden.shape[1],)
        cos_B1D, sin_B1D = self._rotations(position_B)
        for layer, cached in zip(self._layers, cache.layers, strict=True):
            normed = functional.rms_norm(hidden, width, layer.before, self._eps)
            qkv = functional.linear(normed, layer.qkv, layer.qkv_bias).view(rows, -1, self._size)
            turned = qkv[:, :both]  # queries and keys
            turned = torch.addcmul(turned * cos_B1D, turned.roll(self._size // 2, -1), sin_B1D)
            keys, values = cached.update(turned[:, heads:].unsqueeze(2), qkv[:, both:].unsqueeze(2))
            # The query heads that share a key head stand for positions of it.
            seen = functional.scaled_dot_product_attention(
                turned[:, :heads].reshape(rows, self._kv_heads, -1, self._size),
                keys,
                values,
                attn_mask=bias,
                scale=self._scale,
            )
            hidden = torch.addmm(hidden, seen.reshape(rows, -1), layer.out)
            normed = functional.rms_norm(hidden, width, layer.after, self._eps)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down)
        hidden = functional.rms_norm(hidden, width, self._norm, self._eps)
        return functional.linear(hidden, self._head.weight, self._head.bias)

    def _rotations(self, position_B: Tensor) -> tuple[Tensor, Tensor]:
        """(cosines, sines) [B, 1, D] of the positions; the first half of the sines is negative, so that
        ``x * cos + x.roll(D / 2) * sin`` turns a head ``x``."""
        need = int(position_B.max()) + 1
        if need > len(self._cos):
            position_1T = torch.arange(-(-need // TABLE) * TABLE).unsqueeze(0)
            cos, sin = (table[0].unsqueeze(1) for table in self._rotary(self._embedding, position_1T))
            half = self._size // 2
            self._cos, self._sin = cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return self._cos[position_B], self._sin[position_B]


def fused_step(model: Any) -> FusedStep | None:
    """The step of a Hugging Face model on a CPU in float32, or ``None`` where only the library's forward will do.

    It is taken only when it gives the library's logits (``ACCURACY``).
    """
    config = model.config
    parameter = next(model.parameters())
    rope = getattr(config, "rope_parameters", None) or {}
    fits = (
        type(model).__name__ in CLASSES
        and parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in ROPES
        and not any(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ())
        and not getattr(config, "mlp_bias", False)
        and all(layer.self_attn.o_proj.bias is None for layer in model.model.layers)
        and model.model.layers[0].self_attn.head_dim % 2 == 0
    )
    if not fits:
        return None
    with torch.no_grad():
        step = FusedStep(model)
        return step if _agrees(model, step) else None


def _agrees(model: Any, step: FusedStep) -> bool:
    """Whether a step after three tokens gives what the model says of the fourth."""
    from rlinf_engines.rollouts.decoding import growing_cache

    ids = torch.arange(1, 9).view(2, 4) % int(model.config.vocab_size)
    cache = growing_cache(model.config)
    model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
    expected = model(input_ids=ids).logits[:, -1]
    found = step(ids[:, 3], torch.full((2,), 3), None, cache)
    return float((found - expected).abs().max()) <= ACCURACY * max(float(expected.abs().max()), 1e-6)


def _fused_layer(layer: Any) -> _Layer:
    attention, feed = layer.self_attn, layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layer(
        before=layer.input_layernorm.weight,
        qkv=_fused([projection.weight for projection in inputs]),
        qkv_bias=None if inputs[0].bias is None else _fused([projection.bias for projection in inputs]),
        out=attention.o_proj.weight.t(),
        after=layer.post_attention_layernorm.weight,
        gate_up=_fused([feed.gate_proj.weight, feed.up_proj.weight]),
        down=feed.down_proj.weight.t(),
    )


def _fused(parameters: list[Any]) -> Tensor:
    """The parameters one below the other in new memory, of which each becomes a view."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
