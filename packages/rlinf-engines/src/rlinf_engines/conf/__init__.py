"""Config schemas of the engines: groups ``model``, ``trainer`` and ``rollout``.

Standard library only: composing a config must not load torch. Field metadata carries ``help`` and, where
they apply, ``min``, ``max`` and ``choices``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_engines.conf.deepspeed import DeepSpeedTrainer
from rlinf_engines.conf.fields import key
from rlinf_engines.conf.megatron import MegatronTrainer
from rlinf_engines.conf.rollouts import TransformersRollout, VllmRollout
from rlinf_engines.conf.trainers import TorchTrainer, TrainerConfig
from rlinf_engines.model_check import FAMILIES, check_model_path, check_tiny, check_vocabulary

__all__ = [
    "DTYPES",
    "FAMILIES",
    "SCHEMAS",
    "DeepSpeedTrainer",
    "MegatronTrainer",
    "Model",
    "TinyModel",
    "TorchTrainer",
    "TrainerConfig",
    "TransformersRollout",
    "VllmRollout",
]

DTYPES = ("float32", "float64", "bfloat16")


@dataclass
class TinyModel:
    """A small model with a character tokenizer, built from its config: nothing is downloaded."""

    family: str = key("qwen2", "architecture", choices=FAMILIES)
    hidden_size: int = key(128, "width of the residual stream", min=2)
    layers: int = key(3, "transformer blocks", min=1)
    heads: int = key(4, "attention heads; must divide hidden_size", min=1)
    kv_heads: int = key(2, "key-value heads; must divide heads", min=1)
    intermediate_size: int = key(384, "width of the feed-forward layer", min=1)
    max_positions: int = key(64, "most tokens of prompt and response together", min=2)
    characters: str = key("0123456789+-*= ", "alphabet of the tokenizer, each character once")


@dataclass
class Model:
    """Which model is trained: a Hugging Face directory, or the tiny one."""

    path: str | None = key(None, "directory of a Hugging Face causal language model; null: the tiny model")
    tiny: TinyModel = field(default_factory=TinyModel, metadata={"help": "the tiny model, when path is null"})
    dtype: str = key("float32", "number format of weights and computation", choices=DTYPES)

    def validate(self, root: Any) -> list[str]:
        if self.path is None:
            return check_tiny(self.tiny)
        return check_model_path(self.path) or check_vocabulary(self.path)


SCHEMAS: dict[str, type] = {
    "model/causal_lm": Model,
    "trainer/torch": TorchTrainer,
    "trainer/deepspeed": DeepSpeedTrainer,
    "trainer/megatron": MegatronTrainer,
    "rollout/transformers": TransformersRollout,
    "rollout/vllm": VllmRollout,
}
