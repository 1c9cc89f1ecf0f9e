"""Items that a reader has been handed and not asked for yet, and its request for more: they hide the way to the hub.

Only for a rank that is alone with what it reads and holds no device that others want: nobody else could have had what
waits here, and whether it has queued input decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from rlinf_core.board import events as ev
from rlinf_core.hub.client import Pending

MOST_ITEMS = 64
MOST_BYTES = 16 << 20
"""Ask for no more than this ahead (items of the size seen last)."""
FETCHED_AT_ONCE = 32
FETCHED_BYTES = 1 << 18
"""Say that items have been fetched, so that their memory can be used again, after so many or so much."""


class Reserve:
    """Of one channel in one process; kept beyond a call, since a later one of the step may read on."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
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

    def take(self, key: Hashable | None) -> ev.Item | None:
        """The oldest item (of a key), if there is one here."""
        if key is ev.ANY:
            return self.items.popleft() if self.items else None
        for index, item in enumerate(self.items):
            if item.key == key:
                del self.items[index]
                return item
        return None

    def take_many(self, n: int | None) -> list[ev.Item]:
        """Up to ``n`` items; ``None``: all."""
        count = len(self.items) if n is None else min(n, len(self.items))
        return [self.items.popleft() for _ in range(count)]

    def take_weight(self, target: float) -> list[ev.Item]:
        """Items up to a total weight; a heavier head comes alone."""
        taken: list[ev.Item] = []
        total = 0.0
        while self.items and (not taken or total + self.items[0].weight <= target):
            item = self.items.popleft()
            total += item.weight
            taken.append(item)
            if total >= target:
                break
        return taken

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


class Reserves:
    """All of a process, the oldest forgotten beyond a bound (a channel belongs to one step)."""

    KEPT = 256

    def __init__(self) -> None:
        self._of: dict[str, Reserve] = {}

    def of(self, channel: str) -> Reserve:
        found = self._of.get(channel)
        if found is None:
            found = self._of[channel] = Reserve(channel)
            while len(self._of) > self.KEPT:
                del self._of[next(iter(self._of))]
        return found

    def ended(self, channel: str) -> None:
        """Nothing more will come."""
        found = self._of.get(channel)
        if found is not None and not found.items and found.pending is None:
            del self._of[channel]
