"""Environments that can be worked out by hand: an episode of environment i in its k-th episode lasts a given number of
steps, and what is observed says which step of which episode it is."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.data import Answered, Asked
from rlinf_embodied.envs import Box, EnvSpec, PerEnv

LIMIT = 5


class Counter:
    """Observes (episode's seed mod 1000, steps made). The reward is the action. Ends after ``seed % 7 + 1`` steps."""

    def __init__(self, index: int, failing: dict[int, int]) -> None:
        self.index = index
        self.failing = failing
        self.steps = 0

    def reset(self, seed: int) -> dict[str, Any]:
        self.seed, self.at = seed, 0
        return self._obs()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool]:
        self.steps += 1
        self.at += 1
        if self.failing.get(self.index) == self.steps:
            del self.failing[self.index]
            raise OSError("the simulator fell over")
        return self._obs(), float(action[0]), self.at >= self.seed % 7 + 1, self.at == 1

    def _obs(self) -> dict[str, Any]:
        return {"state": np.array([self.seed % 1000, self.at], dtype=np.float32)}

    def render(self) -> NDArray[np.uint8]:
        return np.full((40, 60, 3), self.at, dtype=np.uint8)

    def close(self) -> None:
        pass


class CountingEnv(PerEnv):
    """``cfg.failing``: by environment, the step (over all episodes) at which its simulator raises, once."""

    def make(self, index: int) -> Counter:
        return Counter(index, getattr(self.cfg, "failing", {}))

    def describe(self, env: Counter) -> EnvSpec:
        low = np.array([0.0, 0.0])
        return EnvSpec({"state": Box(low, np.array([1e3, 1e3]))}, Box(np.full(1, -1e6), np.full(1, 1e6)), LIMIT)


class Settings(SimpleNamespace):
    """A node of a configuration."""

    def __contains__(self, key: str) -> bool:
        return hasattr(self, key)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


def counting(indices: Sequence[int], failing: dict[int, int] | None = None) -> CountingEnv:
    return CountingEnv(Settings(failing=failing or {}, max_restarts=9), indices, seed=3)


def answer(asked: Asked, chunk: int = 1, values: bool = True) -> Answered:
    """Acts with environment · 1000 + decision · 10 + place in the chunk; a value is 1000 + what is observed."""
    state = asked.obs["state"]
    worth = (1000.0 + state[:, :1] + state[:, 1:] / 10).astype(np.float32)
    found = Answered(asked.place, None, None, None, worth if values else None, version=4)
    if asked.act:
        steps = np.arange(chunk)[None, :]
        found.actions = (asked.keys[:, 1:2] * 1000.0 + asked.keys[:, 2:3] * 10 + steps)[..., None].astype(np.float32)
        found.taken = found.actions.copy()
        found.logprobs = -found.actions
    if asked.final is not None:
        last = asked.final["state"]
        found.final_values = (2000.0 + last[:, :1] + last[:, 1:] / 10).astype(np.float32)
    return found
