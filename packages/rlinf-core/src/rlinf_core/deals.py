"""How a user says how a channel's items are dealt, in the program or in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_core.board.events import DEALS
from rlinf_core.errors import nearest

EVERY = ""
"""Stands for every reading group that is not named."""


def read_deal(value: Any) -> dict[str, str]:
    """As group -> way: ``"weight"`` (for every reading group), ``{"reward": "weight"}`` or, in one text,
    ``"reward:weight, other:shared"``. Raises ``ValueError`` saying what is wrong with it."""
    if isinstance(value, Mapping):
        named = dict(value)
    elif isinstance(value, str) and ":" in value:
        pairs = [part.partition(":") for part in value.split(",")]
        named = {group.strip(): way.strip() for group, _, way in pairs}
        if len(named) < len(pairs) or EVERY in named:
            raise ValueError(f"group:way, each group once, got {value!r}")
    else:
        named = {EVERY: value}
    for group, way in named.items():
        if not isinstance(group, str):
            raise ValueError(f"by names of groups, got a {type(group).__name__}")
        if not isinstance(way, str) or way not in DEALS:
            shown = repr(way) if isinstance(way, str) else type(way).__name__
            of = f"{group}: " if group != EVERY else ""
            raise ValueError(f"{of}one of {', '.join(DEALS)}, got {shown}{nearest(str(way), DEALS)}")
    return {group: way for group, way in named.items() if not (group == EVERY and way == "shared")}


def deal_text(deal: Mapping[str, str]) -> str:
    """``by weight``, ``reward by weight`` or ``shared``, for messages."""
    return ", ".join(f"{group} by {way}".strip() for group, way in deal.items()) or "shared"
