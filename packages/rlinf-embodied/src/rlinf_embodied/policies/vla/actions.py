"""Actions as tokens: 256 bins per dimension, at the end of the vocabulary (OpenVLA, arXiv 2406.09246, section 3.2).

Shape legend: D numbers of one action. With V tokens of the tokenizer, bin i of 1 ... 256 is token V - i, so that low
actions have high ids. The 256 edges span [-1, 1] and there are 255 centres: bins 255 and 256 mean the same action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, nearest
from rlinf_embodied.envs.base import Box, EnvSpec

KEY = "env"
"""Under which name the tiny model keeps the statistics of its environment's actions."""


class ActionTokens:
    """Numbers of an environment to token ids and back.

    ``vocabulary`` V is the size of the tokenizer's vocabulary. ``statistics`` are those of one dataset's actions
    (``q01``, ``q99``, and ``mask``: false for dimensions that are not normalised), [D] each.
    """

    def __init__(self, vocabulary: int, bins: int, statistics: Mapping[str, Any]) -> None:
        self.vocabulary = vocabulary
        self.bins = bins
        self._edges = np.linspace(-1.0, 1.0, bins)
        self._centres = (self._edges[:-1] + self._edges[1:]) / 2.0
        self._low = np.asarray(statistics["q01"], dtype=np.float64)
        self._high = np.asarray(statistics["q99"], dtype=np.float64)
        self._mask = np.asarray(statistics.get("mask", np.ones(self._low.shape)), dtype=bool)
        if not self._low.shape == self._high.shape == self._mask.shape or self._low.ndim != 1:
            raise ConfigError(
                f"model.path: action statistics have q01, q99 and mask of shapes {self._low.shape}, "
                f"{self._high.shape} and {self._mask.shape}; one number per dimension each is right"
            )
        self.first = vocabulary - bins
        """The lowest action token; the highest is ``first + bins - 1``."""

    @property
    def dims(self) -> int:
        return int(self._low.shape[0])

    def decode(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Actions [..., D] of token ids [..., D]."""
        normal = self._centres[np.clip(self.vocabulary - tokens - 1, 0, len(self._centres) - 1)]
        return np.where(self._mask, 0.5 * (normal + 1.0) * (self._high - self._low) + self._low, normal)

    def encode(self, actions: NDArray[Any]) -> NDArray[np.int64]:
        """Token ids [..., D] of actions [..., D]; those outside the statistics are clipped. What ``decode`` gives back
        is at most half a bin away."""
        span = np.where(self._high > self._low, self._high - self._low, 1.0)
        normal = np.where(self._mask, 2.0 * (actions - self._low) / span - 1.0, actions)
        return self.vocabulary - np.digitize(np.clip(normal, -1.0, 1.0), self._edges).astype(np.int64)


def spec_statistics(spec: EnvSpec) -> dict[str, Any]:
    """Statistics that make the whole action space of an environment reachable.

    Raises ConfigError when its actions are not a vector within finite bounds.
    """
    space = spec.action
    if not isinstance(space, Box) or len(space.shape) != 1 or not np.isfinite([space.low, space.high]).all():
        raise ConfigError(
            f"model.name=vla: it acts with vectors of numbers within bounds, and the environment's actions are "
            f"{space}; use another policy (model=mlp) or environment"
        )
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    values = {
        "q01": low,
        "q99": high,
        "min": low,
        "max": high,
        "mean": (low + high) / 2.0,
        "std": (high - low) / 12**0.5,
    }
    return {**{name: value.tolist() for name, value in values.items()}, "mask": [True] * len(low)}


def choose_statistics(stats: Mapping[str, Any], key: str | None, where: str) -> Mapping[str, Any]:
    """The action statistics called ``key`` (``None``: the only ones) of a directory's ``norm_stats``."""
    if key is None and len(stats) == 1:
        key = next(iter(stats))
    if key is None:
        raise ConfigError(f"model.unnorm_key: {where} has statistics of {', '.join(stats) or 'nothing'}; name one")
    if key not in stats:
        raise ConfigError(
            f"model.unnorm_key: {where} has no statistics of {key!r}{nearest(key, stats)}; it has {', '.join(stats)}"
        )
    chosen: Mapping[str, Any] = stats[key]["action"]
    return chosen
