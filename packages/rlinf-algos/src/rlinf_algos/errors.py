"""Errors of the library. All are ``ValueError``s: the caller can put them right."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AlgorithmError(ValueError):
    """A shape, dtype, option or combination that cannot be right; the message names it."""


class NoSignalError(AlgorithmError):
    """Dynamic sampling used up its rounds; the message says what became of the groups."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``, or an empty string."""
    found = get_close_matches(name, list(known), n=5, cutoff=0.5)
    # Letters in another order are the likeliest slip: "gpro" is "grpo", though "gspo" scores the same.
    best = next((k for k in found if sorted(k) == sorted(name)), found[0] if found else None)
    return f" (did you mean {best!r}?)" if best else ""
