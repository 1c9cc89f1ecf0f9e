"""Reward by mathematical equality, with math-verify (https://github.com/huggingface/Math-Verify).

Call it in a process that may be killed: on hostile input the comparison can run for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any


class MathReward:
    """``math_reward`` as a plugin."""

    isolated = True

    def __call__(self, text: str, answer: str, fields: Mapping[str, Any]) -> float:
        return math_reward(text, answer, fields)


def math_reward(text: str, answer: str, fields: Mapping[str, Any]) -> float:
    r"""1.0 when the last ``\boxed{...}`` of ``text`` equals ``answer`` as mathematics, else 0.0.

    Without a box the expression is looked for in the whole text, as math-verify does. An empty box scores 0.

    Raises:
        ValueError: ``answer`` itself is not an expression (a fault of the data, not of the response).
    """
    parse, verify = _math_verify()
    gold = _gold(answer)
    boxed = last_boxed(text)
    if boxed is not None and not boxed.strip():
        return 0.0
    found = parse(text if boxed is None else rf"\boxed{{{boxed}}}", parsing_timeout=None)
    return float(bool(found) and bool(verify(gold, found, timeout_seconds=None)))


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete ``\boxed{...}``, braces balanced; ``None`` when there is none."""
    end = len(text)
    while (start := text.rfind(r"\boxed", 0, end)) >= 0:
        opening = start + len(r"\boxed")
        while opening < len(text) and text[opening].isspace():
            opening += 1
        closing = _closing_brace(text, opening)
        if closing is not None:
            return text[opening + 1 : closing]
        end = start
    return None


def _closing_brace(text: str, opening: int) -> int | None:
    if opening >= len(text) or text[opening] != "{":
        return None
    depth = 0
    position = opening
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 1
    return None


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any]:
    # Its own time limits need signals, which only a main thread has; the pool's limit replaces them, and the
    # warning that says so once per process is of no use.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    return parse, verify


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    parse, _ = _math_verify()
    source = answer if last_boxed(answer) is not None or "$" in answer else f"${answer}$"
    found = parse(source, parsing_timeout=None)
    if not found:
        raise ValueError(f"the answer {answer!r} is not a mathematical expression")
    return list(found)
