"""A queue for ranks that compute together: whole portions are dealt over all of them at once, by weight."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from rlinf_core.board.entries import DRAINED, Atom, Drained, Entry, Fault, Want
from rlinf_core.board.events import ANY, PLAN, Barrier, Mode
from rlinf_core.board.portions import pick_weight, split_balanced
from rlinf_core.board.queue import ReaderQueue

_Spec = tuple[Mode, int | None, float]


class CollectiveQueue(ReaderQueue):
    """Every rank gets equally many lists, the k-th of each cut from one portion; some may be empty."""

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
        super().__init__(where, group, ranks, barrier, portion, order, eager)
        self._shards: list[deque[tuple[_Spec, Atom]]] = [deque() for _ in range(ranks)]

    def __len__(self) -> int:
        """Entries not yet delivered, shards that wait for their rank included."""
        return len(self._entries) + sum(len(entries) for shards in self._shards for _, entries in shards)

    def empty(self) -> bool:
        """Never said: an empty shard is an answer too."""
        return False

    def entries(self) -> tuple[Entry, ...]:
        dealt = (entry for shards in self._shards for _, entries in shards for entry in entries)
        return (*self._entries.values(), *dealt)

    def kept_for(self, asking: Collection[int]) -> dict[int, int]:
        """A rank that asks has no shard left."""
        counts = {rank: sum(len(entries) for _, entries in shards) for rank, shards in enumerate(self._shards)}
        return {rank: count for rank, count in counts.items() if count}

    def remove(self, uid: int) -> bool:
        if super().remove(uid):
            return True
        for shards in self._shards:
            for index, (spec, entries) in enumerate(shards):
                if any(entry.uid == uid for entry in entries):
                    shards[index] = (spec, tuple(entry for entry in entries if entry.uid != uid))
                    return True
        return False

    def ready(self, rank: int) -> bool:
        return bool(self._shards[rank]) or super().ready(rank)

    def take(self, want: Want) -> tuple[Entry, ...] | Drained | None:
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
            remaining = list(self._atoms(want))
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

    def _fewest_atoms(self, want: Want) -> int:
        """A plan's portion of whole groups has one for every rank, or some would have nothing to do."""
        return self.ranks if self.barrier == "group" and want.n == PLAN else 1

    def _everything(self, want: Want) -> list[Atom]:
        return list(self._atoms(want))


def _ask(spec: _Spec) -> str:
    mode, n, weight = spec
    if mode == "weight":
        return f"get_batch(weight={weight:g})"
    shown = "the plan's" if n == PLAN else "everything" if n is None else n
    return f"batches(n={shown})"
