"""Where a response says its final answer, and plain numbers as people write them. Standard library only.

Grade-school answers come as "The answer is $1,234.", "#### 18", "**5 apples**", "x = 3/4"; a parser of mathematics
reads some of them as something else. What is here is linear in the text's length.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

FORMATS = ("auto", "boxed", "hashes", "last_number")
HASHES = "####"
LONGEST = 60
"""Characters of a number that is still read as one."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = rf"[-+−]?\s?(?:\d+ \d+/\d+|(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}})?(?:\s?/\s?\d+)?)"
_LAST = re.compile(_NUMBER)
_ANSWER = re.compile(r"\banswers?\b[^\n:=]{0,60}?(?:\bis\b|\bare\b|\bequals\b|:|=)[ \t]*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_MARKUP = re.compile(r"\\[()\[\],;! ]|\\text\s*\{|\\mathrm\s*\{|\\mathbf\s*\{|[{}*`_~$€£¥\"“”]|\\[$%]|\\,")
_UNIT = r"(?:[A-Za-z]{2,}|[mghlLs])(?:\^?[23]|[²³])?"
_UNITS = rf"\s?(?:%|°\s?[CF]?|{_UNIT})?(?:\s?[/ ]\s?{_UNIT}|[.,;]\s|['’\-]\s?{_UNIT})*"
_PLAIN = re.compile(rf"({_NUMBER})({_UNITS})")
_BEFORE = re.compile(r"[A-Za-z ,.'’\\]*[=:≈~]?\s*|[-+*/×·÷().,\d\s$€£%]*[=≈]\s*")


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


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last ``####``; ``None`` when there is none."""
    _, found, rest = text.rpartition(HASHES)
    return rest.strip().partition("\n")[0].strip() if found else None


def stated(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or the like, to the end of its sentence; ``None`` when there is
    nothing like it."""
    found = _last(_ANSWER, text)
    if found is None:
        return None
    rest = text[found.end() :].lstrip(" \t").partition("\n")[0]
    return _SENTENCE_END.split(rest, maxsplit=1)[0].strip() or None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    latest = deque(pattern.finditer(text), maxlen=1)
    return latest[0] if latest else None


def last_number(text: str) -> Fraction | None:
    """The last number of a text, wherever it stands."""
    found = _last(_LAST, text)
    return None if found is None else _value(found[0])


def plain_number(text: str) -> Fraction | None:
    """The number that a short answer is, whatever currency, unit or markup surrounds it; ``None`` when it is not just
    one number (an expression, several numbers, a formula).

    A percent sign is a unit. Before the number may stand words, a name with ``=``, or the sum that it is the result of.
    """
    if len(text) > 4 * LONGEST:
        return None
    cleaned = " ".join(_MARKUP.sub(" ", text).split()).rstrip(".!,; ")
    cleaned = re.sub(r"([-+−]) (?=\d)", r"\1", cleaned) if cleaned[:1] in "-+−" else cleaned
    before = _BEFORE.match(cleaned)
    for start in dict.fromkeys((0, before.end() if before else 0)):
        found = _PLAIN.fullmatch(cleaned, start)
        if found is not None:
            return _value(found[1])
    return None


def _value(text: str) -> Fraction | None:
    plain = text.replace(",", "").replace("−", "-").strip()
    if len(plain) > LONGEST:
        return None
    sign, plain = (-1 if plain.startswith("-") else 1), plain.lstrip("+- ")
    whole, mixed, part = plain.partition(" ")
    if not mixed or "/" in whole or part.startswith("/"):  # not of the form 1 1/2
        whole, part = "0", plain
    top, slash, bottom = part.replace(" ", "").partition("/")
    try:
        return sign * (Fraction(whole) + Fraction(top) / Fraction(bottom if slash else 1))
    except (ValueError, ZeroDivisionError):
        return None
