"""One reading group's view of a channel (or of a join): what is undelivered, and what a request may take.

The queue holds *entries* (one item, or a matched pair) in order. A portion is made of *atoms* that may not
be broken: single entries, or whole groups of samples when the stage's barrier is ``group`` or ``batch``.

Here whichever rank asks first takes the head. ``collective`` deals portions to ranks that compute together, ``dealing``
items to the ranks as they come; both are this queue with another answer to what a rank may take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rlinf_core.board.entries import DRAINED, Atom, Drained, Entry, Fault, Want
from rlinf_core.board.events import ANY, PLAN, Barrier
from rlinf_core.board.portions import fair_parts, pick_weight


@dataclass(slots=True)
class _Group:
    """What has come of one group of samples. ``ids`` and ``dropped`` may overlap; ``plain`` have no ids."""

    size: int
    ids: set[str] = field(default_factory=set)
    plain: int = 0
    dropped: set[str] = field(default_factory=set)
    uids: dict[int, None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.ids | self.dropped) + self.plain >= self.size


class ReaderQueue:
    """Undelivered entries of one reading group."""

    def __init__(
        self,
        where: str,
        group: str,
        ranks: int,
        barrier: Barrier,
        portion: int | None,
        order: Sequence[str] | None = None,
        eager: bool = False,
    ) -> None:
        """``order``: all ids of the step as they enter; groups are then handed out in this order. ``eager``: the plan's
        portion is what is there, never waited for."""
        self.where = where
        self.group = group
        self.ranks = ranks
        self.barrier: Barrier = barrier
        self.portion = portion
        self.ended = False
        self._entries: dict[int, Entry] = {}
        self._by_key: dict[Hashable | None, dict[int, None]] = {}
        self._groups: dict[str, _Group] = {}
        self._complete: dict[str, None] = {}
        self._handed_groups: set[str] = set()
        self._ungrouped = 0
        self._announced: dict[str, set[str]] = {}
        self._fair: deque[list[Atom]] | None = None
        self._order = order
        self._eager = eager
        self._cursor = 0
        self._past: set[str] = set()
        self._home: dict[str, str] = {}

    def __len__(self) -> int:
        """Entries not yet delivered."""
        return len(self._entries)

    def empty(self) -> bool:
        """Whether there is nothing for any request now, nor an end."""
        return not self._entries and not self.ended

    def entries(self) -> tuple[Entry, ...]:
        """All undelivered entries."""
        return tuple(self._entries.values())

    def kept_for(self, asking: Collection[int]) -> dict[int, int]:
        """Entries by rank that wait for that rank alone, of the ranks that are not ``asking``."""
        return {}

    # ------------------------------------------------------------ what comes in

    def add(self, entry: Entry) -> None:
        """A new entry; raises ``Fault`` when its group was already delivered as complete."""
        if self.barrier == "group" and entry.group is not None:
            if entry.group in self._handed_groups:
                raise Fault(
                    f"{self.where}: {_name(entry)} came for group {entry.group!r} after the group was "
                    "delivered to "
                    f"{self.group!r} as complete ({entry.group_size} samples, announced drops counted)"
                )
            record = self._record(entry.group, entry.group_size)
            record.size = max(record.size, entry.group_size)
            record.ids.update(entry.ids)
            record.plain += not entry.ids
            record.uids[entry.uid] = None
            if self._order is not None:
                self._home.update(dict.fromkeys(entry.ids, entry.group))
            self._settle(entry.group, record)
        self._entries[entry.uid] = entry
        self._ungrouped += entry.group is None
        self._by_key.setdefault(entry.key, {})[entry.uid] = None

    def note_dropped(self, ids: Iterable[tuple[str, str]]) -> None:
        """Announced drops as (id, its group): a group completes with fewer."""
        if self.barrier != "group":
            return
        for sample, group in ids:
            self._past.add(sample)
            self._announced.setdefault(group, set()).add(sample)
            record = self._groups.get(group)
            if record is not None:
                record.dropped.add(sample)
                self._settle(group, record)

    def remove(self, uid: int) -> bool:
        """Take an undelivered entry out (its payload is gone); True when it was here."""
        entry = self._entries.get(uid)
        if entry is not None:
            self._pop(entry)
        return entry is not None

    def finish(self) -> None:
        """Nothing more will come; raises ``Fault`` naming groups that stay incomplete."""
        self.ended = True
        broken = [(name, record) for name, record in self._groups.items() if not record.complete]
        if broken:
            name, record = broken[0]
            have = len(record.ids | record.dropped) + record.plain
            more = f" (and {len(broken) - 1} more groups)" if len(broken) > 1 else ""
            raise Fault(
                f"{self.where} ended but group {name!r} has {have} of {record.size} samples for "
                f"{self.group!r}{more}; "
                f"here: {', '.join(sorted(record.ids)) or record.plain}; announce the others with drop(id, "
                "reason)"
            )

    # ------------------------------------------------------------ what goes out

    def take(self, want: Want) -> tuple[Entry, ...] | Drained | None:
        """Remove and return what ``want`` gets; ``None`` when it has to wait, ``DRAINED`` at the end."""
        if want.mode == "items":
            return self._take_items(want)
        atoms = self._pick(want)
        if atoms is None:
            return None
        if not atoms:
            return DRAINED
        return self._remove_atoms(atoms)

    def ready(self, rank: int) -> bool:
        """Whether there is queued input that ``rank`` could be handed, if need be in a smaller portion."""
        if self.barrier == "batch":
            return self.ended and bool(self._entries)
        return bool(self._entries) and not self._nothing_whole()

    def _take_items(self, want: Want) -> tuple[Entry, ...] | Drained | None:
        limit = max(1, want.n or 1)
        taken: list[Entry] = []
        for uid in self._uids(want):
            taken.append(self._entries[uid])
            if len(taken) == limit:
                break
        if not taken:
            return DRAINED if self.ended else None
        for entry in taken:
            self._pop(entry)
        return tuple(taken)

    def _pick(self, want: Want) -> list[Atom] | None:
        """Atoms for a portion or weight request; ``[]`` at the end, ``None`` to wait."""
        if not self.ended and (self.barrier == "batch" or self._nothing_whole()):
            return None
        if want.mode == "weight":
            return pick_weight(self._atoms(want), want.weight, self.ended)
        n = self.portion if want.n == PLAN else want.n
        if self.barrier == "batch":
            n = None
        if self._eager and want.n == PLAN and self.barrier != "batch" and not self.ended:
            return self._what_is_there(want, n)
        if n is None:
            return self._everything(want) if self.ended else None
        if not self.ended and len(self._uids(want)) < n:
            return None
        least = self._fewest_atoms(want)
        picked: list[Atom] = []
        count = 0
        for atom in self._atoms(want):
            picked.append(atom)
            count += len(atom)
            if count >= n and len(picked) >= least:
                return picked
        return picked if self.ended else None

    def _fewest_atoms(self, want: Want) -> int:
        """How many atoms a portion has at least."""
        return 1

    def _everything(self, want: Want) -> list[Atom]:
        """What "everything" is at the end: for ranks that work alone a part of about the same weight for each, dealt as
        they ask."""
        if self.barrier == "batch" or want.key is not ANY or self.ranks == 1:
            return list(self._atoms(want))
        if self._fair is None:
            self._fair = deque(fair_parts(list(self._atoms(want)), self.ranks))
        while self._fair:
            part = [atom for atom in self._fair.popleft() if atom[0].uid in self._entries]
            if part:
                return part
        return list(self._atoms(want))

    def _what_is_there(self, want: Want, n: int | None) -> list[Atom] | None:
        picked: list[Atom] = []
        count = 0
        for atom in self._atoms(want):
            if picked and n is not None and count + len(atom) > n:
                break
            picked.append(atom)
            count += len(atom)
        return picked or None

    # ------------------------------------------------------------ bookkeeping

    def _nothing_whole(self) -> bool:
        """Spares a walk over the queue at every put while all groups are still incomplete."""
        return self.barrier == "group" and not self._complete and not self._ungrouped

    def _uids(self, want: Want) -> Collection[int]:
        """Entries that the request may be given, oldest first."""
        return self._entries if want.key is ANY else self._by_key.get(want.key, ())

    def _atoms(self, want: Want) -> Iterator[Atom]:
        """Atoms in the order of their oldest entry; of incomplete groups none."""
        if self.barrier == "item":
            for uid in self._uids(want):
                yield (self._entries[uid],)
            return
        if self._order is not None and want.key is ANY:
            yield from self._atoms_in_order(self._order)
            return
        seen: set[str] = set()
        members: dict[str, list[Entry]] = {}
        if self.barrier == "batch":
            for entry in self._entries.values():
                if entry.group is not None:
                    members.setdefault(entry.group, []).append(entry)
        for uid in self._uids(want):
            entry = self._entries[uid]
            if entry.group is None:
                yield (entry,)
            elif entry.group not in seen:
                seen.add(entry.group)
                if self.barrier == "batch":
                    yield tuple(members[entry.group])
                elif entry.group in self._complete:
                    yield tuple(self._entries[u] for u in self._groups[entry.group].uids)

    def _atoms_in_order(self, order: Sequence[str]) -> Iterator[Atom]:
        """Complete groups up to the first that is still awaited, in the order in which the step's samples entered."""
        for uid, entry in self._entries.items():
            if entry.group is None or not entry.ids:
                yield (self._entries[uid],)
        while self._cursor < len(order) and order[self._cursor] in self._past:
            self._cursor += 1
        seen: set[str] = set()
        for position in range(self._cursor, len(order)):
            sample = order[position]
            group = self._home.get(sample)
            if sample in self._past or group in seen:
                continue
            if group is None or group not in self._complete:
                if self.ended:
                    continue  # it went another way and never comes here
                return
            seen.add(group)
            members = [self._entries[u] for u in self._groups[group].uids]
            yield tuple(sorted((e for e in members if e.ids), key=lambda e: e.ids))

    def _remove_atoms(self, atoms: Iterable[Atom]) -> tuple[Entry, ...]:
        entries = tuple(entry for atom in atoms for entry in atom)
        for entry in entries:
            self._pop(entry)
            if self._order is not None:
                self._past.update(entry.ids)
            if self.barrier == "group" and entry.group is not None and entry.group in self._groups:
                del self._groups[entry.group]
                self._complete.pop(entry.group, None)
                self._handed_groups.add(entry.group)
        return entries

    def _pop(self, entry: Entry) -> None:
        del self._entries[entry.uid]
        self._ungrouped -= entry.group is None
        keyed = self._by_key[entry.key]
        del keyed[entry.uid]
        if not keyed:
            del self._by_key[entry.key]
        if entry.group is not None and entry.group in self._groups:
            self._groups[entry.group].uids.pop(entry.uid, None)

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Entries that were taken and not looked at, oldest first: they are undelivered again, before all others."""
        self._entries = {**{entry.uid: entry for entry in entries}, **self._entries}
        by_key: dict[Hashable | None, dict[int, None]] = {}
        for entry in entries:
            self._ungrouped += entry.group is None
            by_key.setdefault(entry.key, {})[entry.uid] = None
            if entry.group is not None and entry.group in self._groups:
                self._groups[entry.group].uids[entry.uid] = None
        for key, uids in by_key.items():
            self._by_key[key] = {**uids, **self._by_key.get(key, {})}

    def _record(self, group: str, size: int) -> _Group:
        if group not in self._groups:
            self._groups[group] = _Group(size, dropped=set(self._announced.get(group, ())))
        return self._groups[group]

    def _settle(self, group: str, record: _Group) -> None:
        if record.complete:
            self._complete[group] = None
        else:
            self._complete.pop(group, None)


def _name(entry: Entry) -> str:
    return f"sample {', '.join(entry.ids)}" if entry.ids else "an item"
