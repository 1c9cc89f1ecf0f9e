"""One reading group's view of a channel (or of a join): what is undelivered, and what a request may take.

The queue holds *entries* (one item, or a matched pair) in order. A portion is made of *atoms* that may not
be broken: single entries, or whole groups of samples when the stage's barrier is ``group`` or ``batch``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from rlinf_core.board.events import ANY, PLAN, Barrier, Item, Mode, Req


class Fault(Exception):
    """Something that fails the step; the text is its cause."""


class _Drained(Enum):
    DRAINED = "drained"


DRAINED: Final = _Drained.DRAINED
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


Atom = tuple[Entry, ...]
_Spec = tuple[Mode, int | None, float]


class ReaderQueue:
    """Undelivered entries of one reading group."""

    def __init__(
        self,
        where: str,
        group: str,
        ranks: int,
        collective: bool,
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
        self.collective = collective
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
        self._shards: list[deque[tuple[_Spec, Atom]]] = [deque() for _ in range(ranks)]
        self._fair: deque[list[Atom]] | None = None
        self._order = order
        self._eager = eager
        self._cursor = 0
        self._past: set[str] = set()
        self._home: dict[str, str] = {}

    def __len__(self) -> int:
        """Entries not yet delivered, shards that wait for their rank included."""
        return len(self._entries) + self.waiting_shards()

    def entries(self) -> tuple[Entry, ...]:
        """All undelivered entries, dealt shards included."""
        dealt = (entry for shards in self._shards for _, entries in shards for entry in entries)
        return (*self._entries.values(), *dealt)

    def waiting_shards(self) -> int:
        """Entries of a collective portion that were dealt and wait for their rank to ask."""
        return sum(len(entries) for shards in self._shards for _, entries in shards)

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
            return True
        for shards in self._shards:
            for index, (spec, entries) in enumerate(shards):
                if any(entry.uid == uid for entry in entries):
                    shards[index] = (spec, tuple(entry for entry in entries if entry.uid != uid))
                    return True
        return False

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

    def take(self, want: Want) -> tuple[Entry, ...] | _Drained | None:
        """Remove and return what ``want`` gets; ``None`` when it has to wait, ``DRAINED`` at the end."""
        if self.collective and self.ranks > 1:
            return self._take_shard(want)
        if want.mode == "items":
            return self._take_items(want)
        atoms = self._pick(want)
        if atoms is None:
            return None
        if not atoms:
            return DRAINED
        return self._remove_atoms(atoms)

    def _take_items(self, want: Want) -> tuple[Entry, ...] | _Drained | None:
        limit = max(1, want.n or 1)
        taken: list[Entry] = []
        for uid in self._uids(want.key):
            taken.append(self._entries[uid])
            if len(taken) == limit:
                break
        if not taken:
            return DRAINED if self.ended else None
        for entry in taken:
            self._pop(entry)
        return tuple(taken)

    def _pick(self, want: Want) -> list[Atom] | None:
        """Atoms for a portion or weight request of the whole group; ``[]`` at the end, ``None`` to wait."""
        if not self.ended and (self.barrier == "batch" or self._nothing_whole()):
            return None
        if want.mode == "weight":
            return pick_weight(self._atoms(want.key), want.weight, self.ended)
        n = self.portion if want.n == PLAN else want.n
        if self.barrier == "batch":
            n = None
        if self._eager and want.n == PLAN and self.barrier != "batch" and not self.ended:
            return self._what_is_there(want, n)
        if n is None:
            if not self.ended:
                return None
            if self.barrier == "batch" or want.key is not ANY or self.ranks == 1 or self.collective:
                return list(self._atoms(want.key))
            return self._fair_part(want)
        elif not self.ended and len(self._entries) < n:
            return None
        # A plan's portion of whole groups has one for every rank that shares it, or some would have nothing to do.
        least = self.ranks if self.collective and self.barrier == "group" and want.n == PLAN else 1
        picked: list[Atom] = []
        count = 0
        for atom in self._atoms(want.key):
            picked.append(atom)
            count += len(atom)
            if count >= n and len(picked) >= least:
                return picked
        return picked if self.ended else None

    def _fair_part(self, want: Want) -> list[Atom]:
        """ "Everything" for ranks that work alone: a part of about the same weight for each, dealt as they ask."""
        if self._fair is None:
            self._fair = deque(fair_parts(list(self._atoms(want.key)), self.ranks))
        while self._fair:
            part = [atom for atom in self._fair.popleft() if atom[0].uid in self._entries]
            if part:
                return part
        return list(self._atoms(want.key))

    def _what_is_there(self, want: Want, n: int | None) -> list[Atom] | None:
        picked: list[Atom] = []
        count = 0
        for atom in self._atoms(want.key):
            if picked and n is not None and count + len(atom) > n:
                break
            picked.append(atom)
            count += len(atom)
        return picked or None

    def _take_shard(self, want: Want) -> tuple[Entry, ...] | _Drained | None:
        """Deal portion k once over all ranks; a rank's k-th request takes its shard of it."""
        spec: _Spec = (want.mode, want.n, want.weight)
        if want.mode == "items" or want.key is not ANY:
            raise Fault(
                f"{self.where}: rank {want.rank} of collective group {self.group!r} asked for single items "
                "or a key; its "
                f"{self.ranks} ranks must be dealt the same number of portions: read with batches() or "
                "get_batch()"
            )
        if not 0 <= want.rank < self.ranks:
            raise Fault(f"{self.where}: rank {want.rank} of group {self.group!r} is not below {self.ranks}")
        mine = self._shards[want.rank]
        if not mine:
            shards = self._deal(want)
            if shards is None:
                return None
            if not shards:
                return DRAINED
            for rank, shard in enumerate(shards):
                self._shards[rank].append((spec, shard))
        dealt_as, entries = mine[0]
        if dealt_as != spec:
            raise Fault(
                f"{self.where}: ranks of collective group {self.group!r} ask differently for one portion: "
                f"{_ask(dealt_as)} and, rank {want.rank}, {_ask(spec)}"
            )
        mine.popleft()
        return entries

    def _deal(self, want: Want) -> list[Atom] | None:
        if want.mode == "weight":
            if self.barrier == "batch" and not self.ended:
                return None
            remaining = list(self._atoms(ANY))
            shards: list[Atom] = []
            for _ in range(self.ranks):
                picked = pick_weight(remaining, want.weight, self.ended)
                if picked is None:
                    return None
                del remaining[: len(picked)]
                shards.append(tuple(entry for atom in picked for entry in atom))
            if not any(shards):
                return []
            for shard in shards:
                for entry in shard:
                    self._pop(entry)
            return shards
        atoms = self._pick(want)
        if not atoms:
            return atoms if atoms is None else []
        everything = self.barrier == "batch" or (self.portion if want.n == PLAN else want.n) is None
        if everything and all(entry.ids for atom in atoms for entry in atom):
            # Arrival order depends on timing; the split of a whole batch must not.
            atoms = sorted((tuple(sorted(atom, key=lambda e: e.ids)) for atom in atoms), key=lambda a: a[0].ids)
        dealt = split_balanced(atoms, self.ranks)
        self._remove_atoms(atoms)
        return [tuple(entry for atom in shard for entry in atom) for shard in dealt]

    def ready(self, rank: int) -> bool:
        """Whether there is queued input that ``rank`` could be handed, if need be in a smaller portion."""
        if self.collective and self.ranks > 1 and self._shards[rank]:
            return True
        if self.barrier == "batch":
            return self.ended and bool(self._entries)
        return bool(self._entries) and not self._nothing_whole()

    # ------------------------------------------------------------ bookkeeping

    def _nothing_whole(self) -> bool:
        """Spares a walk over the queue at every put while all groups are still incomplete."""
        return self.barrier == "group" and not self._complete and not self._ungrouped

    def _uids(self, key: Hashable | None) -> Iterable[int]:
        return self._entries if key is ANY else self._by_key.get(key, ())

    def _atoms(self, key: Hashable | None) -> Iterator[Atom]:
        """Atoms in the order of their oldest entry; of incomplete groups none."""
        if self.barrier == "item":
            for uid in self._uids(key):
                yield (self._entries[uid],)
            return
        if self._order is not None and key is ANY:
            yield from self._atoms_in_order(self._order)
            return
        seen: set[str] = set()
        members: dict[str, list[Entry]] = {}
        if self.barrier == "batch":
            for entry in self._entries.values():
                if entry.group is not None:
                    members.setdefault(entry.group, []).append(entry)
        for uid in self._uids(key):
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

    def _record(self, group: str, size: int) -> _Group:
        if group not in self._groups:
            self._groups[group] = _Group(size, dropped=set(self._announced.get(group, ())))
        return self._groups[group]

    def _settle(self, group: str, record: _Group) -> None:
        if record.complete:
            self._complete[group] = None
        else:
            self._complete.pop(group, None)


def pick_weight(atoms: Iterable[Atom], target: float, ended: bool) -> list[Atom] | None:
    """Atoms from the head up to a total weight of ``target``; a heavier head comes alone.

    ``None``: more may come and still fit. ``[]``: nothing is left and nothing will come.
    """
    picked: list[Atom] = []
    total = 0.0
    for atom in atoms:
        weight = sum(entry.weight for entry in atom)
        if picked and total + weight > target:
            return picked
        picked.append(atom)
        total += weight
        if total >= target:
            return picked
    return picked if ended else None


def fair_parts(atoms: Sequence[Atom], parts: int) -> list[list[Atom]]:
    """Dealt so that the heaviest part is light: the heaviest atom first, always to the lightest part (the longest-
    processing-time rule, at most 4/3 of the best). Each part keeps the order of arrival; the heaviest part is first."""
    weights = [sum(entry.weight for entry in atom) for atom in atoms]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0.0, 0, part) for part in range(parts)]
    for index in sorted(range(len(atoms)), key=lambda i: (-weights[i], i)):
        total, count, part = heapq.heappop(lightest)
        dealt[part].append(index)
        heapq.heappush(lightest, (total + weights[index], count + 1, part))
    order = sorted(lightest, key=lambda one: (-one[0], -one[1], one[2]))
    return [[atoms[i] for i in sorted(dealt[part])] for _, _, part in order]


def split_balanced(atoms: Sequence[Atom], ranks: int) -> list[Sequence[Atom]]:
    """Cut into ``ranks`` contiguous runs of about equal weight; none is empty if there are enough atoms."""
    weights = [sum(entry.weight for entry in atom) for atom in atoms]
    left = sum(weights)
    runs: list[Sequence[Atom]] = []
    start = 0
    for rank in range(ranks):
        others = ranks - rank - 1
        if not others:
            runs.append(atoms[start:])
            break
        target = left / (others + 1)
        last = max(start, len(atoms) - others)
        stop, total = start, 0.0
        while stop < len(atoms) and (stop < last or stop == start):
            # Take the next atom while that brings the run nearer to its share.
            if stop > start and total + weights[stop] / 2 > target:
                break
            total += weights[stop]
            stop += 1
        runs.append(atoms[start:stop])
        left -= total
        start = stop
    return runs


def _name(entry: Entry) -> str:
    return f"sample {', '.join(entry.ids)}" if entry.ids else "an item"


def _ask(spec: _Spec) -> str:
    mode, n, weight = spec
    if mode == "weight":
        return f"get_batch(weight={weight:g})"
    shown = "the plan's" if n == PLAN else "everything" if n is None else n
    return f"batches(n={shown})"
