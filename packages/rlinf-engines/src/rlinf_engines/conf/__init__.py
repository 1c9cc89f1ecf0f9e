"""Config schemas of the engines: groups ``model``, ``trainer`` and ``rollout``.

Standard library only: composing a config must not load torch. Field metadata carries ``help`` and, where
they apply, ``min``, ``max`` and ``choices``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_engines.model_check import check_model_path, check_tiny

DTYPES = ("float32", "float64", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine")
# Head sizes that the attention of the vLLM build for CPUs is compiled for.
VLLM_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


def _plugin(group: str, name: str, key: str) -> list[str]:
    from rlinf_core.registry import check_name

    return check_name(group, name, key)


@dataclass
class TinyModel:
    """A small Qwen2 with a character tokenizer, built from its config: nothing is downloaded."""

    hidden_size: int = _key(128, "width of the residual stream", min=2)
    layers: int = _key(3, "transformer blocks", min=1)
    heads: int = _key(4, "attention heads; must divide hidden_size", min=1)
    kv_heads: int = _key(2, "key-value heads; must divide heads", min=1)
    intermediate_size: int = _key(384, "width of the feed-forward layer", min=1)
    max_positions: int = _key(64, "most tokens of prompt and response together", min=2)
    characters: str = _key("0123456789+-*= ", "alphabet of the tokenizer, each character once")


@dataclass
class Model:
    """Which model is trained: a Hugging Face directory, or the tiny one."""

    path: str | None = _key(None, "directory of a Hugging Face causal language model; null: the tiny model")
    tiny: TinyModel = field(default_factory=TinyModel, metadata={"help": "the tiny model, when path is null"})
    dtype: str = _key("float32", "number format of weights and computation", choices=DTYPES)

    def validate(self, root: Any) -> list[str]:
        return check_tiny(self.tiny) if self.path is None else check_model_path(self.path)


@dataclass
class TorchTrainer:
    """Trainer backend ``torch``: AdamW, one process or data parallel."""

    name: str = _key("torch", "trainer backend")
    lr: float = _key(1.0e-5, "learning rate after warm-up", min=0.0)
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999], metadata={"help": "AdamW's two averaging factors, each in [0, 1)"}
    )
    eps: float = _key(1.0e-8, "AdamW's denominator floor", min=0.0)
    weight_decay: float = _key(0.0, "decoupled weight decay of matrices (not of norms and biases)", min=0.0)
    grad_clip: float = _key(1.0, "largest gradient norm; 0 switches clipping off", min=0.0)
    warmup_steps: int = _key(0, "optimizer steps of linear warm-up", min=0)
    schedule: str = _key("constant", "learning rate after warm-up", choices=SCHEDULES)
    schedule_steps: int = _key(0, "optimizer steps until the schedule ends, warm-up included", min=0)
    min_lr_ratio: float = _key(0.0, "lr at the schedule's end as a part of lr", min=0.0, max=1.0)
    micro_batch_tokens: int = _key(8192, "most padded tokens in one forward and backward", min=1)

    def validate(self, root: Any) -> list[str]:
        problems = _plugin("rlinf.trainers", self.name, "trainer.name")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            problems.append(f"trainer.betas: {list(self.betas)} is not two numbers in [0, 1); try [0.9, 0.999]")
        if self.schedule != "constant" and self.schedule_steps <= self.warmup_steps:
            problems.append(
                f"trainer.schedule_steps: {self.schedule_steps} leaves no step for schedule "
                f"{self.schedule} after {self.warmup_steps} warm-up steps; give the run's number of "
                "optimizer steps, or schedule=constant"
            )
        return problems


@dataclass
class TransformersRollout:
    """Rollout backend ``transformers``: a decoding loop of our own over any Hugging Face causal LM."""

    name: str = _key("transformers", "rollout backend")
    max_num_seqs: int = _key(256, "most sequences decoded together", min=1)

    def validate(self, root: Any) -> list[str]:
        return _plugin("rlinf.rollouts", self.name, "rollout.name")


@dataclass
class VllmRollout:
    """Rollout backend ``vllm``: the engine in this process, on CPU or GPU."""

    name: str = _key("vllm", "rollout backend")
    max_num_seqs: int = _key(256, "most sequences decoded together", min=1)
    max_num_batched_tokens: int = _key(8192, "most tokens in one engine step", min=1)
    max_model_len: int | None = _key(
        None, "most tokens of prompt and response together; null: the model's own limit", min=2
    )
    enforce_eager: bool = _key(True, "run the model without compiling it")
    enable_prefix_caching: bool = _key(True, "compute a shared prompt once")
    kv_cache_gb: int = _key(1, "GiB of key-value cache on a CPU", min=1)
    gpu_memory_utilization: float = _key(0.5, "part of a GPU's memory that the engine takes", min=0.05, max=1.0)
    gpu_sleep: bool = _key(True, "give GPU memory back on offload (sleep mode)")

    def validate(self, root: Any) -> list[str]:
        model = root.model
        problems = _plugin("rlinf.rollouts", self.name, "rollout.name")
        if model.dtype == "float64":
            problems.append("model.dtype: vllm does not compute in float64; use float32 or bfloat16")
        if model.path is None:
            size = model.tiny.hidden_size // model.tiny.heads
            if size not in VLLM_HEAD_SIZES:
                sizes = ", ".join(map(str, VLLM_HEAD_SIZES))
                problems.append(
                    f"model.tiny.heads: vllm takes head sizes {sizes}, hidden_size / heads is {size}; change either"
                )
        return problems


SCHEMAS: dict[str, type] = {
    "model/causal_lm": Model,
    "trainer/torch": TorchTrainer,
    "rollout/transformers": TransformersRollout,
    "rollout/vllm": VllmRollout,
}
