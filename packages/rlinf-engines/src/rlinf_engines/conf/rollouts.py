"""Config schemas of the rollout backends. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_core.accelerators import accelerator_here
from rlinf_engines.conf.fields import key, plugin
from rlinf_engines.model_check import attention_heads, head_size, max_positions

# Head sizes that the attention of the vLLM build for CPUs is compiled for (vLLM 0.32, CPUAttentionBackend).
VLLM_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def may_have_accelerator(cluster: Any, devices: Path = Path("/dev")) -> bool:
    """Whether a run with these ``cluster`` settings may get an accelerator: this machine has one, or the run joins a
    cluster whose machines are not known yet."""
    if cluster.address or os.environ.get("RAY_ADDRESS"):
        return True
    return not cluster.virtual_devices and accelerator_here(devices)


def check_head_size(size: int | None, sizes: Sequence[int] = VLLM_HEAD_SIZES) -> list[str]:
    """Say when vLLM has no attention for a model of such heads on a CPU."""
    if size is None or size in sizes:
        return []
    return [
        f"rollout: on a CPU vllm takes models whose attention heads are {', '.join(map(str, sizes))} wide, those of "
        f"this one are {size}; use rollout=transformers, or a model of another head size"
    ]


def check_tensor_parallel(size: int, heads: int, kv_heads: int) -> list[str]:
    """Say when a tensor-parallel size does not divide the model's heads."""
    if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        return []
    return [
        f"rollout.tensor_parallel_size: {size} does not divide the model's {heads} attention heads and {kv_heads} "
        "key-value heads; use 1 or a common divisor"
    ]


@dataclass
class TransformersRollout:
    """Rollout backend ``transformers``: a decoding loop of our own over any Hugging Face causal LM."""

    name: str = key("transformers", "rollout backend")
    max_num_seqs: int = key(256, "most sequences decoded together", min=1)

    def validate(self, root: Any) -> list[str]:
        return plugin("rlinf.rollouts", self.name, "rollout.name")


@dataclass
class VllmRollout:
    """Rollout backend ``vllm``: the engine in the worker's process or one of its own, on CPU or GPU."""

    name: str = key("vllm", "rollout backend")
    max_num_seqs: int = key(256, "most sequences decoded together", min=1)
    max_num_batched_tokens: int = key(8192, "most tokens in one engine step", min=1)
    max_model_len: int | None = key(
        None, "most tokens of prompt and response together; null: the model's own limit", min=2
    )
    enforce_eager: bool = key(True, "run the model without compiling it")
    enable_prefix_caching: bool = key(True, "compute a shared prompt once")
    kv_cache_gb: int = key(1, "GiB of key-value cache on a CPU", min=1)
    gpu_memory_utilization: float = key(0.5, "part of a GPU's memory that the engine takes", min=0.05, max=1.0)
    gpu_sleep: bool = key(True, "give GPU memory back on offload (sleep mode)")
    tensor_parallel_size: int = key(1, "processes that one copy of the model is split over", min=1)
    engine_process: bool = key(False, "run the engine in a process of its own, so that its crash costs a restart")
    max_restarts: int = key(2, "restarts of a dead engine before generating fails; keeps a copy of the weights", min=0)
    stall_timeout_s: float = key(300.0, "seconds without a sign of life after which an engine counts as dead", min=1.0)

    def validate(self, root: Any) -> list[str]:
        model = root.model
        problems = plugin("rlinf.rollouts", self.name, "rollout.name")
        if model.dtype == "float64":
            problems.append("model.dtype: vllm does not compute in float64; use float32 or bfloat16")
        limit = max_positions(model)
        if self.max_model_len is not None and limit is not None and self.max_model_len > limit:
            problems.append(
                f"rollout.max_model_len: {self.max_model_len} is more than the {limit} tokens that the model takes; "
                "lower it, or null for the model's limit"
            )
        heads = attention_heads(model)
        if heads is not None:
            problems += check_tensor_parallel(self.tensor_parallel_size, *heads)
        if model.path is None:
            size = model.tiny.hidden_size // model.tiny.heads
            if size not in VLLM_HEAD_SIZES:
                sizes = ", ".join(map(str, VLLM_HEAD_SIZES))
                problems.append(
                    f"model.tiny.heads: vllm takes head sizes {sizes}, hidden_size / heads is {size}; change either"
                )
        elif not may_have_accelerator(root.cluster):
            problems += check_head_size(head_size(model))
        return problems
