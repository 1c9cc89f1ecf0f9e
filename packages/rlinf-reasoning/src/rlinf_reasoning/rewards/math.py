"""Reward by mathematical equality, with math-verify (https://github.com/huggingface/Math-Verify).

Call it in a process that may be killed: on hostile input the comparison can run for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlinf_core.errors import ConfigError, nearest
from rlinf_reasoning.rewards.answers import (
    FORMATS,
    after_hashes,
    last_boxed,
    last_number,
    plain_number,
    stated,
)

__all__ = ["MathReward", "last_boxed", "math_reward"]


class MathReward:
    """``math_reward`` as a plugin, with the settings ``reward.format`` and ``reward.format_score``.

    ``format_score`` is the reward of a response whose answer is wrong but stands where ``format`` wants it.
    """

    isolated = True
    options = ("format", "format_score")
    """Keys of the config node that the constructor takes."""

    def __init__(self, format: str = "auto", format_score: float = 0.0) -> None:
        if format not in FORMATS:
            raise ConfigError(f"reward.format={format}: must be one of {', '.join(FORMATS)}{nearest(format, FORMATS)}")
        self.format = format
        self.format_score = format_score
        # Imports and the parser's first use take a second or more: while the process gets ready, not in an item's time.
        math_reward("1", "1", {})

    def __call__(self, text: str, answer: str, fields: Mapping[str, Any]) -> float:
        right = math_reward(text, answer, fields, format=self.format)
        if right or not self.format_score:
            return right
        formed = {"boxed": last_boxed, "hashes": after_hashes}.get(self.format)
        return self.format_score if formed is not None and (formed(text) or "").strip() else right


def math_reward(text: str, answer: str, fields: Mapping[str, Any], *, format: str = "auto") -> float:
    r"""1.0 when the final answer of ``text`` equals ``answer`` as mathematics, else 0.0.

    ``format`` says where the final answer is:

    - ``auto``: in the last ``\boxed{...}``; without one, after the last ``####``; without that, after the last "the
      answer is" or "answer:"; else wherever math-verify finds an expression in the text, or it is the last number.
    - ``boxed``, ``hashes``: only there. An empty one scores 0.
    - ``last_number``: the last number of the text.

    Where ``answer`` is a number, currency signs, units, thousands separators and a full stop do not count ("$1,234." is
    1234, "50%" is 50). ``answer`` may itself be boxed, or a solution that ends with ``#### 18``.

    Raises:
        ValueError: ``answer`` itself is not an expression (a fault of the data, not of the response).
    """
    wanted = _wanted(answer)
    number = plain_number(wanted)
    if number is None or format != "last_number":
        _gold(wanted)  # a fault of the data shows with every response
    if format == "last_number":
        return float(last_number(text) == number) if number is not None else _equal(wanted, text)
    found = last_boxed(text) if format in ("auto", "boxed") else None
    if found is not None:
        return _same(found, wanted, number, boxed=True)
    if format == "boxed":
        return 0.0
    found = after_hashes(text)
    if found is not None or format == "hashes":
        return _same(found or "", wanted, number)
    found = stated(text)
    if found is not None:
        return _same(found, wanted, number)
    if _equal(wanted, text):
        return 1.0
    cut_off = r"\boxed" in text  # a box that was begun and not closed is no answer
    return float(number is not None and not cut_off and last_number(text) == number)


def _same(found: str, wanted: str, number: Any, *, boxed: bool = False) -> float:
    """Compare a final answer that has been found with the one that is wanted."""
    if not found.strip():
        return 0.0
    if number is not None and (value := plain_number(found)) is not None:
        return float(value == number)
    if boxed or "$" in found or "\\(" in found:
        return _equal(wanted, rf"\boxed{{{found}}}" if boxed else found)
    return _equal(wanted, f"${found}$") or _equal(wanted, found)


def _equal(wanted: str, text: str) -> float:
    parse, verify = _math_verify()
    found = parse(text, parsing_timeout=None)
    return float(bool(found) and bool(verify(_gold(wanted), found, timeout_seconds=None)))


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any]:
    # Its own time limits need signals, which only a main thread has; the pool's limit replaces them, and the
    # warning that says so once per process is of no use.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    return parse, verify


def _wanted(answer: str) -> str:
    """The final answer of a reference answer that may be a whole solution."""
    if last_boxed(answer) is None and (found := after_hashes(answer)):
        return found
    return answer


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    parse, _ = _math_verify()
    number = plain_number(answer)
    if number is not None:  # "$1,234." is no formula
        answer = str(number)
    source = answer if last_boxed(answer) is not None or "$" in answer else f"${answer}$"
    found = parse(source, parsing_timeout=None)
    if not found:
        raise ValueError(f"the answer {answer!r} is not a mathematical expression")
    return list(found)
