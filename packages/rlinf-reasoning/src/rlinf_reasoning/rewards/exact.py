"""Reward 1 for the answer itself and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ExactReward:
    """1.0 when the response equals the answer up to surrounding white space, else 0.0."""

    isolated = False  # cannot hang, crash or raise: scored in the reward worker itself

    def __call__(self, text: str, answer: str, fields: Mapping[str, Any]) -> float:
        return float(text.strip() == answer.strip())
