"""Items that a reader has been handed and not asked for yet, and its request for more: they hide the way to the hub.

Only for a rank that is alone with what it reads and holds no device that others want: nobody else could have had what
waits here, and whether it has queued input decides nothing. What is not read goes back to the channel.
"""

from __future__ import annotations

import threading
from collections import deque

from rlinf_core.board import events as ev
from rlinf_core.hub.client import Pending

MOST_ITEMS = 64
MOST_BYTES = 16 << 20
"""Ask for no more than this ahead (items of the size seen last)."""
FETCHED_AT_ONCE = 32
FETCHED_BYTES = 1 << 18
"""Say that items have been fetched, so that their memory can be used again, after so many or so much."""


class Reserve:
    """Of one reader. The task's own thread takes from it; any thread may give it back, under ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items: deque[ev.Item] = deque()
        self.pending: Pending | None = None
        """The request for more that is on its way."""
        self.asked: tuple[ev.Mode, int | None] | None = None
        """What that asks for."""
        self.size = 1
        """Items to ask for next: a first get takes one, a reader that goes on takes more and more."""
        self._fetched: list[int] = []
        self._fetched_bytes = 0

    def received(self, items: tuple[ev.Item, ...]) -> None:
        """What the hub delivered; asks for more next time, as long as the items are small."""
        self.items.extend(items)
        largest = max(item.nbytes for item in items)
        self.size = max(1, min(2 * self.size, MOST_ITEMS, MOST_BYTES // max(1, largest)))

    def low(self) -> bool:
        """Whether it is time to ask for more."""
        return self.pending is None and self.size > 1 and len(self.items) <= self.size // 2

    def fetched(self, item: ev.Item) -> tuple[int, ...]:
        """Note an item whose payload is here; returns those to tell the hub of now."""
        self._fetched.append(item.uid)
        self._fetched_bytes += item.nbytes
        if len(self._fetched) >= FETCHED_AT_ONCE or self._fetched_bytes >= FETCHED_BYTES:
            return self.all_fetched()
        return ()

    def all_fetched(self) -> tuple[int, ...]:
        """Those that the hub has not been told of."""
        uids, self._fetched, self._fetched_bytes = tuple(self._fetched), [], 0
        return uids
