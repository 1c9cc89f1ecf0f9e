"""rlinf-core: workers, channels, flows and plans for reinforcement learning on large models.

Names load on first use: importing this package loads neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_core.config import Config, compose, recipe
    from rlinf_core.errors import RLinfError
    from rlinf_core.flow import Flow
    from rlinf_core.reader import join
    from rlinf_core.registry import Registry
    from rlinf_core.types import (
        Env,
        Generated,
        GenerateRequest,
        ParallelInfo,
        Prompt,
        Rollout,
        Sample,
        SamplingParams,
        StepInfo,
        Trainer,
        Trajectory,
    )
    from rlinf_core.worker import In, Out, Worker, task

_HOME = {
    "join": "reader",
    "Config": "config",
    "compose": "config",
    "recipe": "config",
    "RLinfError": "errors",
    "Flow": "flow",
    "Registry": "registry",
    **dict.fromkeys(
        (
            "Env",
            "Generated",
            "GenerateRequest",
            "ParallelInfo",
            "Prompt",
            "Rollout",
            "Sample",
            "SamplingParams",
            "StepInfo",
            "Trainer",
            "Trajectory",
        ),
        "types",
    ),
    **dict.fromkeys(("In", "Out", "Worker", "task"), "worker"),
}

__all__ = [
    "Config",
    "Env",
    "Flow",
    "GenerateRequest",
    "Generated",
    "In",
    "Out",
    "ParallelInfo",
    "Prompt",
    "RLinfError",
    "Registry",
    "Rollout",
    "Sample",
    "SamplingParams",
    "StepInfo",
    "Trainer",
    "Trajectory",
    "Worker",
    "compose",
    "join",
    "recipe",
    "task",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'rlinf_core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlinf_core.{home}"), name)


def __dir__() -> list[str]:
    return __all__
