"""A queue whose items are dealt to the ranks as they come, and where each rank is handed its own.

What is dealt is what may not be broken: a single item, or with the barrier ``group`` a whole group once it is complete
(a drop may complete it). Until then its members are nobody's.

``round_robin``: the i-th to rank i mod n. ``weight``: to the rank to which least weight was dealt so far, among equals
to the one with fewer items, then to the lower rank; with equal weights that is round robin. This is list scheduling
(Graham, 1966): the heaviest rank gets at most the mean plus one item's weight.

A rank ends when nothing more can come and its own share is empty. A request by key names the item: it takes the oldest
of that key, whomever it was dealt to (which still counts for that rank).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from rlinf_core.board.collective import CollectiveQueue
from rlinf_core.board.entries import Atom, Drained, Entry, Fault, Want
from rlinf_core.board.events import ANY, DEALS, AddReader, Barrier, Deal
from rlinf_core.board.queue import ReaderQueue


class DealtQueue(ReaderQueue):
    """Undelivered entries of one reading group, a share for each of its ranks."""

    def __init__(
        self,
        where: str,
        group: str,
        ranks: int,
        deal: Deal,
        barrier: Barrier,
        portion: int | None,
        eager: bool = False,
    ) -> None:
        super().__init__(where, group, ranks, barrier, portion, eager=eager)
        self._deal = deal
        self._shares: list[dict[int, None]] = [{} for _ in range(ranks)]
        self._rank_of: dict[int, int] = {}
        self._rank_of_group: dict[str, int] = {}
        self._turn = 0
        self._loads = [(0.0, 0, rank) for rank in range(ranks)]
        """A heap of (weight dealt so far, atoms dealt so far, rank)."""

    def kept_for(self, asking: Collection[int]) -> dict[int, int]:
        return {rank: len(share) for rank, share in enumerate(self._shares) if share and rank not in asking}

    def add(self, entry: Entry) -> None:
        super().add(entry)
        if self.barrier != "group" or entry.group is None:
            self._give((entry.uid,), self._next_rank(entry.weight))
        elif entry.group in self._complete:
            self._give_group(entry.group)

    def note_dropped(self, ids: Iterable[tuple[str, str]]) -> None:
        news = list(ids)
        super().note_dropped(news)
        for name in dict.fromkeys(group for _, group in news):
            if name in self._complete:
                self._give_group(name)

    def take(self, want: Want) -> tuple[Entry, ...] | Drained | None:
        if not 0 <= want.rank < self.ranks:
            raise Fault(f"{self.where}: rank {want.rank} of group {self.group!r} is not below {self.ranks}")
        return super().take(want)

    def ready(self, rank: int) -> bool:
        return bool(self._shares[rank])

    # ------------------------------------------------------------ dealing

    def _next_rank(self, weight: float) -> int:
        if self._deal == "round_robin":
            rank = self._turn
            self._turn = (rank + 1) % self.ranks
            return rank
        load, count, rank = self._loads[0]
        heapq.heapreplace(self._loads, (load + weight, count + 1, rank))
        return rank

    def _give_group(self, name: str) -> None:
        """Deal a group that is complete; what comes for it later goes the same way."""
        fresh = [uid for uid in self._groups[name].uids if uid not in self._rank_of]
        if not fresh:
            return
        if name not in self._rank_of_group:
            self._rank_of_group[name] = self._next_rank(sum(self._entries[uid].weight for uid in fresh))
        self._give(fresh, self._rank_of_group[name])

    def _give(self, uids: Iterable[int], rank: int) -> None:
        for uid in uids:
            self._shares[rank][uid] = None
            self._rank_of[uid] = rank

    # ------------------------------------------------------------ what a rank may take

    def _uids(self, want: Want) -> Collection[int]:
        return self._shares[want.rank] if want.key is ANY else super()._uids(want)

    def _everything(self, want: Want) -> list[Atom]:
        """ "Everything" is the rank's own share."""
        return list(self._atoms(want))

    def _pop(self, entry: Entry) -> None:
        super()._pop(entry)
        rank = self._rank_of.pop(entry.uid, None)
        if rank is not None:
            del self._shares[rank][entry.uid]

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Of a group of one rank, whose share is everything."""
        super().put_back(entries)
        assert self.ranks == 1, "only a rank that is alone gives items back"
        back = {entry.uid: None for entry in entries}
        self._shares[0] = {**back, **self._shares[0]}
        self._rank_of.update(dict.fromkeys(back, 0))


def queue_for(spec: AddReader, where: str, order: Sequence[str] | None = None) -> ReaderQueue:
    """The queue of a reading group. ``order``: the ids of the step as they enter, for a reader that is ``ordered``."""
    assert not cannot_deal(spec.deal, spec.collective, spec.barrier), spec
    if spec.deal != "shared":
        return DealtQueue(where, spec.group, spec.ranks, spec.deal, spec.barrier, spec.portion, spec.eager)
    kind = CollectiveQueue if spec.collective and spec.ranks > 1 else ReaderQueue
    in_order = order if spec.ordered and spec.barrier == "group" else None
    return kind(where, spec.group, spec.ranks, spec.barrier, spec.portion, in_order, spec.eager)


def cannot_deal(deal: str, collective: bool, barrier: str) -> str:
    """Why the items of a channel cannot be dealt so to a group, whatever the number of its ranks; empty if they can."""
    if deal not in DEALS:
        return f"{deal!r} is not a way of dealing"
    if deal == "shared":
        return ""
    if collective:
        return (
            f"its ranks compute together and are dealt whole portions of about equal weight; {deal!r} is for ranks "
            "that work alone"
        )
    if barrier == "batch":
        return f"it takes everything at once (barrier 'batch'); there is nothing to deal by {deal!r}"
    return ""
