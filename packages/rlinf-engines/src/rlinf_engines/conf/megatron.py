"""Config schema of the trainer backend ``megatron``. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_engines.conf.fields import key
from rlinf_engines.conf.trainers import TrainerConfig
from rlinf_engines.trainers.megatron.supported import architecture_problem, split_problems


@dataclass
class MegatronTrainer(TrainerConfig):
    """Trainer backend ``megatron``: AdamW; a model of the Llama, Qwen2 or Qwen3 family split over tp * pp ranks, and as
    many copies of it as the ranks give (data parallel; each copy has its whole optimizer state)."""

    name: str = key("megatron", "trainer backend")
    tp: int = key(1, "tensor parallel: ranks that share each layer; divides attention heads and key-value heads", min=1)
    pp: int = key(1, "pipeline parallel: stages that the layers are split into, one after the other", min=1)
    sequence_parallel: bool = key(False, "tensor parallel ranks share the tokens between layers too: less memory")

    def validate(self, root: Any) -> list[str]:
        problems = TrainerConfig.validate(self, root)  # self is a config node: no super()
        if self.sequence_parallel and self.tp == 1:
            problems.append("trainer.sequence_parallel: needs trainer.tp of 2 or more, it is 1; set it to false")
        return problems + _split_problems(root.model, self.tp, self.pp)


def _split_problems(model: Any, tp: int, pp: int) -> list[str]:
    """What of the model cannot be split so, as far as its config tells without loading anything."""
    if model.path is None:
        tiny = model.tiny
        return split_problems(tiny.heads, tiny.kv_heads, tiny.intermediate_size, tiny.layers, tp, pp)
    try:
        config = json.loads((Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
        problem = architecture_problem(config.get("architectures") or [], str(config.get("model_type", "")))
        if problem:
            return [problem]
        heads = int(config["num_attention_heads"])
        return split_problems(
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config["intermediate_size"]),
            int(config["num_hidden_layers"]),
            tp,
            pp,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the model's own checks name what is wrong with the directory
