"""Which models trainer=megatron takes, and how they can be split: tables and checks for configs and for the trainer.

Standard library only, since composing a config must not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Architectures that are computed exactly as Hugging Face computes them (logits and gradients; see the tests).
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def supported_architecture(named: Sequence[str], kind: str) -> str:
    """The supported architecture, or ``""``, of a model whose config.json has these ``architectures`` and this
    ``model_type``. A critic's config names another head on the same backbone, and a config made in memory may name
    none."""
    known = [name for name in named if name in ARCHITECTURES]
    return known[0] if known else _TYPES.get(kind, "")


def architecture_problem(named: Sequence[str], kind: str) -> str:
    """Why a model whose config.json has these ``architectures`` and this ``model_type`` is not supported, or ``""``."""
    if supported_architecture(named, kind):
        return ""
    return (
        f"model.path: trainer=megatron does not support {', '.join(map(str, named)) or kind or 'this architecture'}; "
        f"it supports {', '.join(ARCHITECTURES)}. trainer=torch takes any causal language model"
    )


def world_problem(world: int, tp: int, pp: int) -> str:
    """Why a trainer cannot have ``world`` ranks, or ``""``."""
    if world % (tp * pp) == 0:
        return ""
    return (
        f"trainer.tp: {tp} times trainer.pp {pp} needs a multiple of {tp * pp} ranks, and the trainer has {world}; "
        "give its group that many devices, or lower one of them"
    )


def split_problems(heads: int, kv_heads: int, intermediate: int, layers: int, tp: int, pp: int) -> list[str]:
    """Why a model of these sizes cannot be split over ``tp`` times ``pp`` ranks."""
    common = math.gcd(heads, kv_heads, intermediate)
    if common % tp:
        count, what = next(
            (count, what)
            for count, what in (
                (heads, "attention heads"),
                (kv_heads, "key-value heads"),
                (intermediate, "intermediate_size"),
            )
            if count % tp
        )
        fits = ", ".join(str(n) for n in range(1, min(common, 64) + 1) if common % n == 0)
        return [
            f"trainer.tp: {tp} does not divide the model's {what} {count} (it has {heads} attention heads, {kv_heads} "
            f"key-value heads, intermediate_size {intermediate}); choose from {fits}, or split it by trainer.pp"
        ]
    if pp > layers:
        return [f"trainer.pp: {pp} stages are more than the model's {layers} layers; choose at most {layers}"]
    return []
