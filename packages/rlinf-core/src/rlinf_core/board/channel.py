"""One channel: writers, credit, pending puts, a queue per reading group. No answers are sent from here."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from rlinf_core.board.dealing import queue_for
from rlinf_core.board.entries import Fault, Want, entry_of
from rlinf_core.board.events import AddReader, Item, OpenChannel, Put, Req, member_of
from rlinf_core.board.join import Matcher
from rlinf_core.board.queue import ReaderQueue


@dataclass(slots=True)
class Record:
    """A live item. ``to_hand``: groups that have not been handed it (it takes credit until none is left);
    ``to_fetch``: groups that have not got the payload (it is released when none is left)."""

    item: Item
    channel: Channel
    writer: str
    to_hand: set[str]
    to_fetch: set[str]


@dataclass(slots=True)
class PendingPut:
    put: Put
    done: int = 0

    @property
    def req(self) -> Req:
        return self.put.req


@dataclass(slots=True)
class Reader:
    """A reading group's end of the channel: its own queue, or the matcher of a join that took its place."""

    spec: AddReader
    queue: ReaderQueue
    waiting: dict[Req, Want] = field(default_factory=dict)
    matcher: Matcher | None = None

    def kept(self) -> dict[int, int]:
        """How many entries wait for each rank that has not asked, where no other rank may have them."""
        if self.matcher is None:
            queue, waiting = self.queue, self.waiting
        else:
            queue, waiting = self.matcher.queue, self.matcher.waiting
        return queue.kept_for({want.rank for want in waiting.values()})

    def kept_text(self) -> str:
        """The same in words: ``3 dealt to r[0], 1 dealt to r[2]``; empty when there is nothing."""
        kept = [f"{count} dealt to {self.spec.group}[{rank}]" for rank, count in self.kept().items()]
        more = f" and {len(kept) - 8} more ranks" if len(kept) > 8 else ""
        return ", ".join(kept[:8]) + more


class Channel:
    """State of one channel; the board moves items through it and answers requests."""

    def __init__(self, spec: OpenChannel) -> None:
        self.name = spec.name
        self.step = spec.step
        self.spec = spec
        self.readers: dict[str, Reader] = {}
        self.writers: dict[str, bool] = {}
        self.sealed = False
        self.poison: str | None = None
        self.pending: deque[PendingPut] = deque()
        self.records: dict[int, Record] = {}
        self.items_in = 0
        self.bytes_in = 0
        self.beyond = 0
        self.peak_items = 0
        self._finished = False
        self._seen: dict[str, str] = {}
        self._dropped: list[tuple[str, str]] = []

    # ------------------------------------------------------------ set-up

    def add_reader(self, spec: AddReader, order: Sequence[str]) -> None:
        """``order``: the ids of the step as they enter, for a reader that is ``ordered``."""
        queue = queue_for(spec, f"channel {self.name}", order)
        self.readers[spec.group] = Reader(spec, queue)

    def attach(self, group: str, matcher: Matcher) -> tuple[Item, ...]:
        """From now on the group reads this channel through a join; returns items that leave at once."""
        reader = self.readers[group]
        reader.matcher = matcher
        matcher.drop(self._dropped)
        gone: list[Item] = []
        for entry in reader.queue.entries():
            reader.queue.remove(entry.uid)
            gone.extend(matcher.add(self.name, entry.items[0]))
        if self._finished:
            matcher.finish(self.name)
        return tuple(gone)

    # ------------------------------------------------------------ credit

    def fits(self, items: Iterable[Item]) -> bool:
        """Whether all of ``items`` may enter now: within both limits, or alone in an empty channel."""
        if self.spec.spill:
            return True
        count, size = self.items_in, self.bytes_in
        for item in items:
            full = 0 < self.spec.max_items <= count
            heavy = self.spec.max_bytes > 0 and size + item.nbytes > self.spec.max_bytes
            if count and (full or heavy):
                return False
            count += 1
            size += item.nbytes
        return True

    def starving(self) -> bool:
        """Whether only more items can help: a reader waits for more than is here (a portion, a whole group,
        a key, a partner), and no group that could free credit is at work. Then the limit must yield, or the
        writer and the reader would wait for each other."""
        hungry = False
        for reader in self.readers.values():
            if reader.matcher is not None:
                left, waits = reader.matcher.undelivered(self.name), bool(reader.matcher.waiting)
            else:
                left, waits = len(reader.queue), bool(reader.waiting)
            if left and (not waits or reader.kept()):
                return False
            hungry = hungry or waits
        return hungry

    # ------------------------------------------------------------ items

    def admit(self, item: Item, writer: str, beyond: bool) -> tuple[Record, tuple[tuple[str, Item], ...]]:
        """Take an item in (its ``uid`` is set; ``beyond``: past the limits); returns its record and the (group, item)
        that leave joins."""
        for sample in item.ids:
            if sample in self._seen:
                raise Fault(
                    f"sample {sample} was put twice on channel {self.name}, by {self._seen[sample]} and by {writer}"
                )
        self.beyond += beyond
        if item.ids:
            self._seen.update(dict.fromkeys(item.ids, writer))
        record = Record(item, self, writer, set(self.readers), set(self.readers))
        self.records[item.uid] = record
        if record.to_hand:
            self.items_in += 1
            self.bytes_in += item.nbytes
            self.peak_items = max(self.peak_items, self.items_in)
        gone: list[tuple[str, Item]] = []
        for group, reader in self.readers.items():
            if reader.matcher is not None:
                gone.extend((group, left) for left in reader.matcher.add(self.name, item))
            else:
                reader.queue.add(entry_of(item))
        return record, tuple(gone)

    def handed(self, record: Record, group: str) -> None:
        """The group was handed the item, or will never be."""
        if group in record.to_hand:
            record.to_hand.remove(group)
            if not record.to_hand:
                self.items_in -= 1
                self.bytes_in -= record.item.nbytes

    def returned(self, record: Record, group: str) -> None:
        """The group was handed the item and gives it back."""
        if not record.to_hand:
            self.items_in += 1
            self.bytes_in += record.item.nbytes
        record.to_hand.add(group)

    def note_dropped(self, ids: Iterable[tuple[str, str]]) -> tuple[tuple[str, Item], ...]:
        """Announced drops as (id, its group); returns (group, item) that leave joins."""
        news = list(ids)
        self._dropped.extend(news)
        gone: list[tuple[str, Item]] = []
        for group, reader in self.readers.items():
            if reader.matcher is not None:
                gone.extend((group, item) for item in reader.matcher.drop(news))
            else:
                reader.queue.note_dropped(news)
        return tuple(gone)

    def unread(self) -> int:
        return sum(1 for record in self.records.values() if record.to_hand)

    def untaken(self) -> str:
        """Which ranks have not taken what was dealt to them; empty when nothing is kept for a rank."""
        return ", ".join(text for text in (reader.kept_text() for reader in self.readers.values()) if text)

    # ------------------------------------------------------------ end

    def close(self, writer: str) -> None:
        self.writers[writer] = False

    def finish_if_ended(self) -> bool:
        """Mark the end once no writer can add anything; True the first time. Raises ``Fault`` for what
        is left incomplete."""
        if self._finished or not self.sealed or self.pending or any(self.writers.values()):
            return False
        self._finished = True
        for reader in self.readers.values():
            if reader.matcher is not None:
                reader.matcher.finish(self.name)
            else:
                reader.queue.finish()
        return True

    @property
    def ended(self) -> bool:
        return self._finished

    def explain(self) -> str:
        """One line for a timed-out wait: who still writes, who waits, how full it is."""
        parts = [f"channel {self.name}: {self.items_in} items"]
        if self.spec.max_items > 0 and not self.spec.spill:
            parts[0] += f" (limit {self.spec.max_items})"
        open_writers = [writer for writer, is_open in self.writers.items() if is_open]
        if self.poison is not None:
            parts.append(f"poisoned: {self.poison}")
        elif self._finished:
            parts.append("ended")
        elif open_writers:
            parts.append(f"still open for {', '.join(sorted(open_writers))}")
        elif not self.sealed:
            parts.append("more writers may register")
        if self.pending:
            names = sorted({member_of(pending.put.writer) for pending in self.pending})
            parts.append(f"{', '.join(names)} waiting for credit")
        for group, reader in self.readers.items():
            waiting: dict[Hashable, Want] = reader.matcher.waiting if reader.matcher else reader.waiting
            left = reader.matcher.undelivered(self.name) if reader.matcher else len(reader.queue)
            ranks = ", ".join(f"{group}[{want.rank}]" for want in waiting.values())
            kept = reader.kept_text()
            parts.append(
                f"{group}: {left} undelivered"
                + (f", {kept}, which asks for nothing" if kept else "")
                + (f", waiting: {ranks}" if ranks else "")
            )
        return "; ".join(parts)
