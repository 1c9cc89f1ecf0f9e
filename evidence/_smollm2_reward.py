"""The reward of ``smollm2.py``: a right answer, and something of every response, so that each group has a signal.

A model of this size answers few grade-school problems within 64 tokens. With equal rewards no weight would change, and
equal log-probs of engine and trainer would show nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_reasoning.rewards.math import math_reward


def graded(text: str, answer: str, fields: Mapping[str, Any]) -> float:
    """1 for a right answer, and a tenth of the share of digits among the characters."""
    return math_reward(text, answer, fields) + 0.1 * sum(c.isdigit() for c in text) / max(len(text), 1)
