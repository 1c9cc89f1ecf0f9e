"""A small vision-language-action policy and what it sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rlinf_embodied.conf.vla import TinyVla, Vla
from rlinf_embodied.envs.base import Box, EnvSpec, Observation, Text
from rlinf_embodied.policies.vla import VlaPolicy

SIDE = 20
TINY = TinyVla(
    image_size=16, patch_size=8, vision_size=16, vision_layers=2, vision_heads=2, hidden_size=32, heads=2, kv_heads=1,
    intermediate_size=48,
)  # fmt: skip
DOUBLE = Vla(tiny=TINY, dtype="float64", chunk=2, prompt_tokens=48)
SINGLE = replace(DOUBLE, dtype="float32")
TEXTS = ["pick up the black bowl and place it on the plate", "push the cube", "Öffne die Tür"]


def spec(low: float = -1.0, high: float = 1.0, dims: int = 3) -> EnvSpec:
    picture = Box(np.zeros((SIDE, SIDE, 3)), np.full((SIDE, SIDE, 3), 255.0), "uint8")
    action = Box(np.full(dims, low), np.full(dims, high))
    return EnvSpec({"image": picture, "instruction": Text()}, action, 10)


def observation(count: int, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)
    return {"image": images, "instruction": [TEXTS[i % len(TEXTS)] for i in range(count)]}


def numbers(count: int, policy: VlaPolicy, seed: int = 1) -> Any:
    return np.random.default_rng(seed).random((count, policy.chunk, policy.tokens))
