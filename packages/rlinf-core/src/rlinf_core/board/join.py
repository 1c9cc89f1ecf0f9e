"""Matching of two channels for one reading group: pairs of items with the same id, key or group."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from rlinf_core.board.entries import Entry, Fault, Want
from rlinf_core.board.events import Item, JoinBy
from rlinf_core.board.queue import ReaderQueue


class Matcher:
    """Holds unmatched items of both sides and a queue of the pairs.

    Items whose ids were all announced as dropped leave with their partner; what is unmatched when both
    sides have ended fails the step by name.
    """

    def __init__(self, a: str, b: str, by: JoinBy, queue: ReaderQueue) -> None:
        self.a = a
        self.b = b
        self.by: JoinBy = by
        self.queue = queue
        self.waiting: dict[Hashable, Want] = {}
        self.ended: set[str] = set()
        self.dropped: set[str] = set()
        self._sides: dict[str, dict[Hashable, Item]] = {a: {}, b: {}}
        self._pairs = 0
        self._matched: set[Hashable] = set()

    @property
    def group(self) -> str:
        return self.queue.group

    def other(self, channel: str) -> str:
        return self.b if channel == self.a else self.a

    def undelivered(self, channel: str) -> int:
        """Items of ``channel`` that this group has not been handed."""
        return len(self._sides[channel]) + len(self.queue)

    def unmatched(self, channel: str) -> int:
        return len(self._sides[channel])

    def add(self, channel: str, item: Item) -> tuple[Item, ...]:
        """A new item of one side; returns the items that leave at once because they were dropped."""
        match = self._match(channel, item)
        if match in self._sides[channel] or match in self._matched:
            raise Fault(
                f"join({self.a}, {self.b}, by={self.by!r}) of group {self.group!r}: {_show(match)} came "
                f"twice on {channel}"
            )
        if _all_dropped(item, self.dropped):
            return (item,)
        partner = self._sides[self.other(channel)].pop(match, None)
        if partner is None:
            self._sides[channel][match] = item
            return ()
        self._matched.add(match)
        first, second = (item, partner) if channel == self.a else (partner, item)
        grouped = first if first.group is not None else second
        ids = tuple(dict.fromkeys((*first.ids, *second.ids)))
        self.queue.add(
            Entry(self._pairs, (first, second), first.key, first.weight, ids, grouped.group, grouped.group_size)
        )
        self._pairs += 1
        return ()

    def drop(self, ids: Collection[tuple[str, str]]) -> tuple[Item, ...]:
        """Announced drops as (id, its group); returns the unmatched items that leave."""
        self.dropped.update(sample for sample, _ in ids)
        self.queue.note_dropped(ids)
        gone: list[Item] = []
        for side in self._sides.values():
            for match, item in list(side.items()):
                if _all_dropped(item, self.dropped):
                    del side[match]
                    gone.append(item)
        return tuple(gone)

    def remove(self, uids: Collection[int]) -> tuple[Item, ...]:
        """Take out items whose payload is gone; returns partners that can no longer be matched."""
        orphans: list[Item] = []
        for side in self._sides.values():
            for match, item in list(side.items()):
                if item.uid in uids:
                    del side[match]
        for entry in self.queue.entries():
            if any(item.uid in uids for item in entry.items):
                self.queue.remove(entry.uid)
                orphans.extend(item for item in entry.items if item.uid not in uids)
        return tuple(orphans)

    def finish(self, channel: str) -> None:
        """One side has ended; raises ``Fault`` for what stays unmatched once both have."""
        self.ended.add(channel)
        if len(self.ended) < 2:
            return
        for side, items in self._sides.items():
            if items:
                names = [_show(match) for match in items]
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                raise Fault(
                    f"join({self.a}, {self.b}, by={self.by!r}) of group {self.group!r}: both channels ended "
                    "and "
                    f"{', '.join(names[:8])}{more} came on {side} without a partner on {self.other(side)}, "
                    "and no drop "
                    "was announced; use drop(id, reason) for what is left out"
                )
        self.queue.finish()

    def _match(self, channel: str, item: Item) -> Hashable:
        if self.by == "key":
            return item.key
        found: Hashable = item.ids if self.by == "id" else item.group
        if not found:
            what = "sample id" if self.by == "id" else "group"
            raise Fault(
                f"join({self.a}, {self.b}, by={self.by!r}) of group {self.group!r}: an item of {channel} has no {what}"
            )
        return found


def _all_dropped(item: Item, dropped: set[str]) -> bool:
    return bool(item.ids) and all(sample in dropped for sample in item.ids)


def _show(match: Hashable) -> str:
    if isinstance(match, tuple):
        parts: Iterable[object] = match
        return ", ".join(str(part) for part in parts)
    return repr(match)
