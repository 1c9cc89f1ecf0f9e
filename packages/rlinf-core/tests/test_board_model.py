"""The board against a simple model, over random runs.

Nothing lost, nothing doubled, order per key, no false end, credit never exceeded but for the stated cases, no
lost wake-up, equal portions for collective ranks, every request answered exactly once.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlinf_core.board import ANY, DEALS, Board, Item
from rlinf_core.board import events as ev
from rlinf_core.board.dealing import DealtQueue
from rlinf_core.board.entries import DRAINED
from rlinf_core.board.queue import ReaderQueue

C = "s:c"
WRITERS = ("w[0]#0", "w[1]#0", "driver#feed0")
KEYS = (None, "x", "y")


class Model(RuleBasedStateMachine):
    """Group ``a`` (2 ranks) takes items by any key, portion or weight; ``b`` (2 ranks) is collective; ``c`` (3 ranks)
    is dealt what comes."""

    @initialize(
        max_items=st.integers(0, 4),
        max_bytes=st.sampled_from([0, 10]),
        with_b=st.booleans(),
        portion=st.integers(1, 5),
        deal=st.sampled_from([None, "round_robin", "weight"]),
    )
    def open(self, max_items: int, max_bytes: int, with_b: bool, portion: int, deal: Any) -> None:
        self.board = Board()
        self.max_items, self.max_bytes, self.portion = max_items, max_bytes, portion
        self.groups = ("a", *(["b"] if with_b else []), *(["c"] if deal else []))
        self.deal = deal
        self.open_writers = set(WRITERS)
        self.count = 0
        self.line: list[Item] = []  # every item of every put that was not refused, in order
        self.handed: dict[str, list[Item]] = {group: [] for group in self.groups}
        self.by_rank: dict[int, list[tuple[Item, ...]]] = {0: [], 1: []}
        self.waiting: dict[int, ev.Put | ev.Get] = {}
        self.unfetched: list[tuple[int, str]] = []
        self.released: list[Any] = []
        self.ended: set[tuple[str, int]] = set()
        self.died = False
        self.feed(ev.OpenChannel(C, "s", max_items, max_bytes))
        self.feed(ev.AddReader(C, "a", ranks=2))
        if with_b:
            self.feed(ev.AddReader(C, "b", ranks=2, collective=True, portion=portion))
        if deal:
            self.feed(ev.AddReader(C, "c", ranks=3, portion=portion, deal=deal))
        for writer in WRITERS:
            self.feed(ev.AddWriter(C, writer))
        self.feed(ev.SealWriters(C))

    # ------------------------------------------------------------ plumbing

    def feed(self, event: Any) -> None:
        for out in self.board.handle(event):
            self.answer(out)

    def answer(self, out: Any) -> None:
        if isinstance(out, ev.Released):
            self.released.extend(out.descriptors)
            return
        if isinstance(out, ev.StepFailed | ev.StepAccount):
            return
        asked = self.waiting.pop(out.req)  # KeyError: answered twice, or never asked
        if isinstance(out, ev.Deliver):
            assert isinstance(asked, ev.Get)
            self.delivered(asked, out.items)
        elif isinstance(out, ev.End):
            assert isinstance(asked, ev.Get)
            assert not self.open_writers, "a false end"
            assert not [w for w in self.waiting.values() if isinstance(w, ev.Put)], "an end before a pending put"
            if asked.key is ANY:
                self.ended.add((asked.group, asked.rank))
            self.drained(asked)
        elif isinstance(out, ev.CancelDone) and isinstance(asked, ev.Put):
            for item in asked.items[out.admitted :]:
                self.line.remove(next(i for i in self.line if i.descriptor == item.descriptor))
        elif isinstance(out, ev.PutRefused):
            assert self.died or (isinstance(asked, ev.Put) and asked.nowait and out.admitted == 0)

    def left(self, group: str) -> list[Item]:
        """Undelivered items in order, also those that have no credit yet."""
        gone = {item.descriptor for item in self.handed[group]}
        return [item for item in self.line if item.descriptor not in gone]

    def delivered(self, asked: ev.Get, items: tuple[Item, ...]) -> None:
        fresh = {item.descriptor for item in self.left(asked.group)}
        for item in items:
            assert item.descriptor in fresh, "an item twice, or from nowhere"
        queue = [i for i in self.left(asked.group) if asked.key is ANY or i.key == asked.key]
        if asked.group == "a":
            got, there = [i.descriptor for i in items], [i.descriptor for i in queue]
            if asked.mode == "portion" and asked.n is None:  # a fair part by weight: in order, but not the first ones
                assert got == [name for name in there if name in got], "out of order"
            else:
                assert got == there[: len(got)], "out of order"
            assert items
            if asked.mode == "weight" and len(items) > 1:
                assert sum(i.weight for i in items) <= asked.weight
            if asked.mode == "portion" and asked.n is not None and self.open_writers:
                assert len(items) == asked.n
            if asked.mode == "items":
                assert len(items) <= (asked.n or 1)
        elif asked.group == "c":
            self.check_share(asked, items)
        else:
            self.by_rank[asked.rank].append(items)
        self.handed[asked.group].extend(items)
        self.unfetched.extend((item.uid, asked.group) for item in items)

    def share(self, rank: int) -> list[Item]:
        """What was dealt to a rank of ``c``, of all that came or waits for credit."""
        loads = [(0.0, 0, r) for r in range(3)]
        mine: list[Item] = []
        for i, item in enumerate(self.line):
            to = i % 3 if self.deal == "round_robin" else min(loads)[2]
            load, count, _ = loads[to]
            loads[to] = (load + item.weight, count + 1, to)
            if to == rank:
                mine.append(item)
        return mine

    def own(self, asked: ev.Get) -> list[Item]:
        """What is left for a request of ``c``: of the key, or of the rank's share."""
        left = {item.descriptor for item in self.left("c")}
        found = self.share(asked.rank) if asked.key is ANY else [i for i in self.line if i.key == asked.key]
        return [item for item in found if item.descriptor in left]

    def check_share(self, asked: ev.Get, items: tuple[Item, ...]) -> None:
        own, got = [i.descriptor for i in self.own(asked)], [i.descriptor for i in items]
        assert got and got == own[: len(got)], "not the head of its share"
        if asked.mode == "portion" and asked.n is not None and self.open_writers:
            assert len(got) == (self.portion if asked.n == ev.PLAN else asked.n)
        if asked.mode == "weight" and len(items) > 1:
            assert sum(i.weight for i in items) <= asked.weight

    def drained(self, asked: ev.Get) -> None:
        if asked.group == "c":
            assert not self.own(asked), "an end before its share was read"
            return
        if asked.group == "a":
            assert not [i for i in self.left("a") if asked.key is ANY or i.key == asked.key], (
                "an end before all was read"
            )
        else:
            assert len(self.by_rank[asked.rank]) == self.dealt()

    def dealt(self) -> int:
        return max(len(shards) for shards in self.by_rank.values())

    def ask(self, event: Any) -> None:
        self.waiting[event.req] = event
        self.feed(event)

    def next(self) -> int:
        self.count += 1
        return self.count

    # ------------------------------------------------------------ rules

    @rule(data=st.data(), writer=st.sampled_from(WRITERS), n=st.integers(1, 3), nowait=st.booleans())
    def put(self, data: st.DataObject, writer: str, n: int, nowait: bool) -> None:
        if writer not in self.open_writers or self.died:
            return
        items = tuple(
            Item(
                f"{self.next()}",
                key=data.draw(st.sampled_from(KEYS)),
                weight=data.draw(st.integers(1, 6)),
                nbytes=data.draw(st.sampled_from([1, 4, 30])),
            )
            for _ in range(n)
        )
        req = self.next()
        before = len(self.line)
        self.line.extend(items)
        self.waiting[req] = put = ev.Put(req, writer, C, items, nowait)
        out = self.board.handle(put)
        if any(isinstance(o, ev.PutRefused) for o in out):
            del self.line[before:]
        for instruction in out:
            self.answer(instruction)

    @rule(
        rank=st.integers(0, 1),
        key=st.sampled_from([ANY, ANY, *KEYS]),
        mode=st.sampled_from(["items", "portion", "weight"]),
        n=st.one_of(st.none(), st.integers(1, 4)),
        nowait=st.booleans(),
    )
    def get(self, rank: int, key: Any, mode: Any, n: int | None, nowait: bool) -> None:
        if mode == "items" and n is None:
            n = 1
        self.ask(ev.Get(self.next(), C, "a", rank, key, mode, n, 5.0, nowait))

    @precondition(lambda self: "b" in self.groups)
    @rule(rank=st.integers(0, 1))
    def get_shard(self, rank: int) -> None:
        if not any(isinstance(w, ev.Get) and w.group == "b" and w.rank == rank for w in self.waiting.values()):
            self.ask(ev.Get(self.next(), C, "b", rank, ANY, "portion", ev.PLAN))

    @precondition(lambda self: "c" in self.groups)
    @rule(
        rank=st.integers(0, 2),
        key=st.sampled_from([ANY, ANY, ANY, "x"]),
        mode=st.sampled_from(["items", "portion", "weight"]),
        n=st.sampled_from([1, 2, 3, ev.PLAN, None]),
        nowait=st.booleans(),
    )
    def get_own(self, rank: int, key: Any, mode: Any, n: int | None, nowait: bool) -> None:
        if mode == "items" and n not in (1, 2, 3):
            n = 1
        self.ask(ev.Get(self.next(), C, "c", rank, key, mode, n, 5.0, nowait))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.waiting:
            self.feed(ev.CancelRequest(data.draw(st.sampled_from(sorted(self.waiting)))))

    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        if self.unfetched:
            uid, group = self.unfetched.pop(data.draw(st.integers(0, len(self.unfetched) - 1)))
            self.feed(ev.Fetched((uid,), group))

    @rule(writer=st.sampled_from(WRITERS))
    def close(self, writer: str) -> None:
        if writer in self.open_writers:
            self.open_writers.remove(writer)
            self.feed(ev.CloseWriter(C, writer))

    @precondition(lambda self: self.count > 20 and not self.died)
    @rule()
    def die(self) -> None:
        self.died = True
        mine = [r for r, w in self.waiting.items() if isinstance(w, ev.Put) and w.writer == "w[0]#0"]
        for req in mine:
            del self.waiting[req]  # nobody is there to be answered
        self.feed(ev.MemberDied("w[0]", "killed"))
        assert not self.waiting, "a request that waits for ever"
        self.ask(ev.Get(self.next(), C, "a"))
        assert not self.waiting

    # ------------------------------------------------------------ what always holds

    def pending(self) -> list[ev.Put]:
        return [w for w in self.waiting.values() if isinstance(w, ev.Put)]

    def inside(self) -> list[Item]:
        """Items that have been admitted: all but the tail of the line that waits for credit."""
        out = [i for put in self.pending() for i in put.items]
        pending = {i.descriptor for i in out}
        settled = [i for i in self.line if i.descriptor not in pending]
        taken = self.board.stats(C)["items"]
        live = [i for i in settled if any(i in self.left(g) for g in self.groups)]
        # Of puts that are half in: what every group has had already, and what takes credit now.
        gone = [i for i in out if not any(i in self.left(g) for g in self.groups)]
        extra = out[: len(gone) + taken - len(live)]
        return [*settled, *extra]

    @invariant()
    def credit_holds(self) -> None:
        if not hasattr(self, "board") or self.died:
            return
        stats = self.board.stats(C)
        if stats["beyond"] == 0 and self.max_items:
            assert stats["items"] <= max(1, self.max_items)
        if stats["beyond"] == 0 and self.max_bytes and stats["items"] > 1:
            assert stats["bytes"] <= self.max_bytes

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        if not hasattr(self, "board") or self.died:
            return
        there = {item.descriptor for item in self.inside()}
        ended = not self.open_writers and not self.pending()
        for asked in self.waiting.values():
            if isinstance(asked, ev.Put):
                assert self.board.stats(C)["items"] > 0, "a put waits on an empty channel"
                continue
            assert not ended, "a reader waits on an ended channel"
            queue = [i for i in self.left(asked.group) if i.descriptor in there]
            if asked.group == "b":
                assert len(self.by_rank[asked.rank]) == self.dealt(), "a dealt shard is held back"
                dealt = self.dealt() * self.portion
                assert len(there) - dealt < self.portion, "a portion is there and not dealt"
                continue
            if asked.group == "c":
                queue = [i for i in self.own(asked) if i.descriptor in there]
                mine = [i for i in self.own(ev.Get(0, C, "c", asked.rank)) if i.descriptor in there]
                assert self.board.ready(C, "c", asked.rank) == bool(mine)
            queue = [i for i in queue if asked.key is ANY or i.key == asked.key]
            if asked.mode == "items":
                assert not queue
            elif asked.mode == "portion":
                assert asked.n is None or len(queue) < (self.portion if asked.n == ev.PLAN else asked.n)
            else:
                assert sum(i.weight for i in queue) < asked.weight
        if self.pending() and self.board.stats(C)["items"]:
            busy = [g for g in self.groups if [i for i in self.left(g) if i.descriptor in there]]
            hungry = {w.group for w in self.waiting.values() if isinstance(w, ev.Get)}
            asking = {w.rank for w in self.waiting.values() if isinstance(w, ev.Get) and w.group == "c"}
            at_work = [r for r in range(3) if r not in asking and self.kept(r, there)] if "c" in busy else []
            stuck = busy and set(busy) <= hungry and "b" not in busy and not at_work
            assert not stuck, "writer and reader wait for each other"

    def kept(self, rank: int, there: set[Any]) -> bool:
        """Whether items wait in the share of a rank of ``c``."""
        return any(i.descriptor in there for i in self.own(ev.Get(0, C, "c", rank)))

    def teardown(self) -> None:
        """Close and drain: then everything was read once by each group, and released."""
        if not hasattr(self, "board") or self.died:
            return
        for writer in sorted(self.open_writers):
            self.open_writers.remove(writer)
            self.feed(ev.CloseWriter(C, writer))
        everybody = {(group, rank) for group in self.groups for rank in range(3 if group == "c" else 2)}
        for _ in range(4 * len(self.line) + 8):
            for group, rank in sorted(everybody - self.ended):
                if not any(isinstance(w, ev.Get) and (w.group, w.rank) == (group, rank) for w in self.waiting.values()):
                    mode: Any = "portion" if group == "b" else "items"
                    self.ask(ev.Get(self.next(), C, group, rank, ANY, mode, ev.PLAN if group == "b" else 1))
        assert self.ended >= everybody, "somebody never comes to an end"
        assert not self.waiting
        names = [i.descriptor for i in self.line]
        for group in self.groups:
            assert sorted(str(i.descriptor) for i in self.handed[group]) == sorted(map(str, names))
        assert len(self.by_rank[0]) == len(self.by_rank[1])
        for uid, group in self.unfetched:
            self.feed(ev.Fetched((uid,), group))
        assert sorted(map(str, self.released)) == sorted(map(str, names))
        self.feed(ev.CloseStep("s"))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("broken", ["another rank's items", "an early end", "a wrong rule", "not ready"])
def test_the_model_sees_wrong_dealing(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    if broken == "another rank's items":
        monkeypatch.setattr(DealtQueue, "_uids", ReaderQueue._uids)
    elif broken == "an early end":
        monkeypatch.setattr(
            DealtQueue, "take", lambda self, want: (self.ended and DRAINED) or ReaderQueue.take(self, want)
        )
    elif broken == "a wrong rule":
        monkeypatch.setattr(DealtQueue, "_next_rank", lambda self, weight: 0)
    else:
        monkeypatch.setattr(DealtQueue, "ready", ReaderQueue.ready)
    # Found is enough: a failure is not made smaller.
    quick = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Model, settings=quick)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_groups_are_never_broken(data: st.DataObject) -> None:
    """Random groups, drops, ranks and portions: each group whole, on one rank, once; equal portions."""
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=5), label="group sizes")
    ranks = data.draw(st.integers(1, 3), label="ranks")
    collective = data.draw(st.booleans(), label="collective")
    portion = data.draw(st.one_of(st.none(), st.integers(1, 6)), label="portion")
    limit = data.draw(st.integers(0, 3), label="limit")
    members = [(f"g{g}", f"g{g}/{i}", size) for g, size in enumerate(sizes) for i in range(size)]
    dropped = data.draw(st.sets(st.sampled_from([m[1] for m in members])) if members else st.just(set()))
    board = Board()
    board.handle(ev.OpenChannel(C, "s", limit))
    deal: Any = "shared" if collective else data.draw(st.sampled_from(DEALS), label="deal")
    board.handle(ev.AddReader(C, "r", ranks, collective, "group", portion, deal=deal))
    board.handle(ev.AddWriter(C, "w[0]#0"))
    board.handle(ev.SealWriters(C))
    shards: dict[int, list[tuple[Item, ...]]] = {rank: [] for rank in range(ranks)}
    ended: set[int] = set()
    asked: dict[int, int] = {}

    def run(event: Any) -> None:
        for out in board.handle(event):
            assert not isinstance(out, ev.StepFailed), out
            if isinstance(out, ev.Deliver):
                shards[asked.pop(out.req)].append(out.items)  # type: ignore[arg-type]
            elif isinstance(out, ev.End):
                ended.add(asked.pop(out.req))  # type: ignore[arg-type]

    def ask(req: int, rank: int) -> None:
        if rank not in asked.values() and rank not in ended:
            asked[req] = rank
            run(ev.Get(req, C, "r", rank, ANY, "portion", ev.PLAN))

    for index, (group, name, size) in enumerate(data.draw(st.permutations(members))):
        if data.draw(st.booleans()):
            ask(2 * index, data.draw(st.integers(0, ranks - 1)))
        if name in dropped:
            run(ev.Drop((name,), "bad", "w[0]", "s"))
        else:
            run(ev.Put(2 * index + 1, "w[0]#0", C, (Item(name, ids=(name,), group=group, group_size=size),)))
    run(ev.CloseWriter(C, "w[0]#0"))
    for req in range(1000, 1000 + 200 * ranks):
        ask(req, req % ranks)
    assert ended == set(range(ranks))
    assert not asked
    deliveries = [shard for rank in shards for shard in shards[rank]]
    names = [item.descriptor for shard in deliveries for item in shard]
    assert sorted(map(str, names)) == sorted({m[1] for m in members} - dropped)
    for shard in deliveries:
        for group in {item.group for item in shard}:
            whole = {m[1] for m in members if m[0] == group} - dropped
            assert {item.descriptor for item in shard if item.group == group} == whole
    if collective:
        assert len({len(found) for found in shards.values()}) == 1
