"""What a reading group's queue holds and is asked for: entries, atoms, wants, and how a step is failed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rlinf_core.board.events import ANY, Item, Mode, Req


class Fault(Exception):
    """Something that fails the step; the text is its cause."""


class Drained(Enum):
    DRAINED = "drained"


DRAINED: Final = Drained.DRAINED
"""``take`` found that nothing is left and nothing will come."""


@dataclass(frozen=True, slots=True)
class Want:
    """A reader's request, whichever event it came from."""

    req: Req
    rank: int
    mode: Mode = "items"
    n: int | None = 1
    weight: float = 0.0
    key: Hashable | None = ANY
    nowait: bool = False


@dataclass(slots=True)
class Entry:
    """An item or a matched pair; ``uid`` orders entries of one queue."""

    uid: int
    items: tuple[Item, ...]
    key: Hashable | None
    weight: float
    ids: tuple[str, ...]
    group: str | None
    group_size: int


def entry_of(item: Item) -> Entry:
    """The entry of a channel's item."""
    return Entry(item.uid, (item,), item.key, item.weight, item.ids, item.group, item.group_size)


Atom = tuple[Entry, ...]
