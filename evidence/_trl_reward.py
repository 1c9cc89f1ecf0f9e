"""Rewards that both sides of ``against_trl.py`` compute. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def even(text: str, answer: str, fields: Mapping[str, Any] | None = None) -> float:
    """The share of even digits among the characters: any model can learn it, and every group has a signal."""
    return sum(c in "02468" for c in text) / max(len(text), 1)


def digits(text: str, answer: str, fields: Mapping[str, Any] | None = None) -> float:
    """The share of digits among the characters."""
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def exact(text: str, answer: str, fields: Mapping[str, Any] | None = None) -> float:
    """1 for the answer and nothing else."""
    return float(text.strip() == answer)
