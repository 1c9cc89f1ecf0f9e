"""The channel state machine, case by case. A small rig drives it; nothing here starts a process or waits."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.board import ANY, FULL, PLAN, Board, Item, describe_lost
from rlinf_core.board import events as ev
from rlinf_core.board.entries import Entry
from rlinf_core.board.portions import fair_parts
from rlinf_core.errors import ChannelError

C = "train/0:c"
D = "train/0:d"
STEP = "train/0"


class Rig:
    """A board with one step; collects the answers by request."""

    def __init__(self) -> None:
        self.board = Board()
        self.answers: dict[Any, Any] = {}
        self.released: list[Any] = []
        self.failed: list[ev.StepFailed] = []
        self.accounts: list[ev.StepAccount] = []
        self._req = 0

    def do(self, event: ev.Event) -> list[ev.Instruction]:
        out = self.board.handle(event)
        for instruction in out:
            if isinstance(instruction, ev.Released):
                self.released.extend(instruction.descriptors)
            elif isinstance(instruction, ev.StepFailed):
                self.failed.append(instruction)
            elif isinstance(instruction, ev.StepAccount):
                self.accounts.append(instruction)
            else:
                assert instruction.req not in self.answers, "a request was answered twice"
                self.answers[instruction.req] = instruction
        return out

    def channel(
        self,
        name: str = C,
        *,
        writers: tuple[str, ...] = ("w[0]#0",),
        readers: Any = None,
        step: str = STEP,
        **limits: Any,
    ) -> None:
        self.do(ev.OpenChannel(name, step, **limits))
        for reader in readers or (ev.AddReader(name, "r"),):
            self.do(reader)
        for writer in writers:
            self.do(ev.AddWriter(name, writer))
        self.do(ev.SealWriters(name))

    def req(self) -> str:
        self._req += 1
        return f"q{self._req}"

    def put(self, *items: Item, channel: str = C, writer: str = "w[0]#0", nowait: bool = False) -> str:
        req = self.req()
        self.do(ev.Put(req, writer, channel, items, nowait))
        return req

    def get(self, channel: str = C, group: str = "r", rank: int = 0, **kw: Any) -> str:
        req = self.req()
        self.do(ev.Get(req, channel, group, rank, **kw))
        return req

    def got(self, req: str) -> list[Any]:
        answer = self.answers[req]
        assert isinstance(answer, ev.Deliver), answer
        return [item.descriptor for item in answer.items]

    def close(self, channel: str = C, writer: str = "w[0]#0") -> None:
        self.do(ev.CloseWriter(channel, writer))

    def account(self) -> ev.StepAccount:
        self.do(ev.EndStep(STEP))
        return self.accounts[-1]


def item(name: str, *, ids: tuple[str, ...] = (), group: str | None = None, size: int = 1, **kw: Any) -> Item:
    return Item(name, ids=ids, group=group, group_size=size, **kw)


def sample(name: str, size: int, **kw: Any) -> Item:
    return item(name, ids=(name,), group=name.partition("/")[0], size=size, **kw)


def portion(rig: Rig, n: int | None = PLAN, **kw: Any) -> str:
    return rig.get(mode="portion", n=n, **kw)


def reader(channel: str = C, **kw: Any) -> ev.AddReader:
    return ev.AddReader(channel, kw.pop("group", "r"), **kw)


@pytest.fixture
def rig() -> Rig:
    return Rig()


class TestOrderAndKeys:
    def test_first_in_first_out(self, rig: Rig) -> None:
        rig.channel()
        rig.put(item("a"), item("b"))
        rig.put(item("c"))
        assert [rig.got(rig.get()) for _ in range(3)] == [["a"], ["b"], ["c"]]

    def test_keys_are_separate_and_any_takes_the_oldest(self, rig: Rig) -> None:
        rig.channel()
        rig.put(item("x1", key="x"), item("y1", key="y"), item("x2", key="x"), item("n", key=None))
        assert rig.got(rig.get(key="y")) == ["y1"]
        assert rig.got(rig.get()) == ["x1"]
        assert rig.got(rig.get(key=None)) == ["n"]
        waiting = rig.get(key="z")
        assert waiting not in rig.answers
        assert pickle.loads(pickle.dumps(ANY)) is ANY
        rig.put(item("z1", key="z"))
        assert rig.got(waiting) == ["z1"]

    def test_items_takes_what_is_there(self, rig: Rig) -> None:
        rig.channel()
        rig.put(item("a"), item("b"), item("c"))
        assert rig.got(rig.get(n=2)) == ["a", "b"]
        assert rig.got(rig.get(n=8)) == ["c"]

    def test_waiters_are_served_in_order(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2),))
        first, second = rig.get(rank=1), rig.get(rank=0)
        rig.put(item("a"), item("b"))
        assert (rig.got(first), rig.got(second)) == (["a"], ["b"])

    def test_nowait(self, rig: Rig) -> None:
        rig.channel()
        assert isinstance(rig.answers[rig.get(nowait=True)], ev.Empty)
        rig.put(item("a"))
        assert rig.got(rig.get(nowait=True)) == ["a"]

    def test_every_reading_group_gets_every_item(self, rig: Rig) -> None:
        rig.channel(readers=(reader(group="r"), reader(group="s")))
        rig.put(item("a"))
        assert rig.got(rig.get(group="r")) == rig.got(rig.get(group="s")) == ["a"]


class TestEnd:
    def test_end_only_after_seal_all_closed_and_drained(self, rig: Rig) -> None:
        rig.do(ev.OpenChannel(C, STEP))
        rig.do(reader())
        rig.do(ev.AddWriter(C, "w[0]#0"))
        rig.do(ev.AddWriter(C, "w[1]#0"))
        waiting = rig.get()
        rig.close()
        rig.put(item("a"), writer="w[1]#0")
        assert rig.got(waiting) == ["a"]
        waiting = rig.get()
        rig.close(writer="w[1]#0")
        assert waiting not in rig.answers, "not sealed yet"
        rig.do(ev.SealWriters(C))
        assert isinstance(rig.answers[waiting], ev.End)
        assert isinstance(rig.answers[rig.get()], ev.End)

    def test_sealed_without_writers_is_ended(self, rig: Rig) -> None:
        rig.channel(writers=())
        assert isinstance(rig.answers[rig.get()], ev.End)

    def test_end_waits_for_pending_puts_of_a_closed_writer(self, rig: Rig) -> None:
        rig.channel(max_items=1)
        rig.put(item("a"))
        rig.put(item("b"))
        rig.close()
        assert rig.got(rig.get()) == ["a"]
        assert rig.got(rig.get()) == ["b"]
        assert isinstance(rig.answers[rig.get()], ev.End)

    def test_end_by_key(self, rig: Rig) -> None:
        rig.channel()
        rig.put(item("x", key="x"))
        rig.close()
        assert isinstance(rig.answers[rig.get(key="y")], ev.End)

    def test_put_after_close_is_refused(self, rig: Rig) -> None:
        rig.channel()
        rig.close()
        answer = rig.answers[rig.put(item("a"))]
        assert isinstance(answer, ev.PutRefused)
        assert "w[0]#0 has closed" in answer.reason


class TestCredit:
    def test_put_waits_for_credit_in_order(self, rig: Rig) -> None:
        rig.channel(max_items=2)
        first = rig.put(item("a"), item("b"))
        second, third = rig.put(item("c")), rig.put(item("d"))
        assert first in rig.answers
        assert second not in rig.answers
        rig.get()
        assert second in rig.answers
        assert third not in rig.answers
        assert rig.board.stats(C) == {"items": 2, "bytes": 0, "peak_items": 2, "beyond": 0, "pending": 1}

    def test_bytes_limit_and_the_lone_item(self, rig: Rig) -> None:
        rig.channel(max_bytes=10)
        assert rig.put(item("huge", nbytes=50)) in rig.answers, "alone in an empty channel"
        small = rig.put(item("small", nbytes=1))
        assert small not in rig.answers
        assert rig.got(rig.get()) == ["huge"]
        assert small in rig.answers
        assert rig.put(item("nine", nbytes=9)) in rig.answers
        assert rig.put(item("ten", nbytes=10)) not in rig.answers

    def test_nowait_is_all_or_nothing_and_does_not_overtake(self, rig: Rig) -> None:
        rig.channel(max_items=2)
        assert rig.answers[rig.put(item("a"), item("b"), item("c"), nowait=True)] == ev.PutRefused("q1", FULL)
        assert rig.board.stats(C)["items"] == 0
        rig.put(item("a"), item("b"))
        rig.put(item("c"))
        rig.get()
        rig.get()
        rig.put(item("d"), item("e"))
        assert isinstance(rig.answers[rig.put(item("f"), nowait=True)], ev.PutRefused)

    def test_nowait_does_not_overtake_what_waits(self, rig: Rig) -> None:
        rig.channel(max_bytes=10)
        rig.put(item("a", nbytes=5))
        rig.put(item("big", nbytes=8))
        assert isinstance(rig.answers[rig.put(item("small", nbytes=1), nowait=True)], ev.PutRefused)

    def test_a_shard_that_waits_for_its_rank_keeps_its_credit(self, rig: Rig) -> None:
        rig.channel(max_items=2, readers=(reader(ranks=2, collective=True, portion=2),))
        rig.put(item("0"), item("1"))
        assert rig.got(portion(rig, rank=0)) == ["0"]
        rig.put(item("2"))
        second, blocked = portion(rig, rank=0), rig.put(item("3"))
        assert blocked not in rig.answers, "rank 1 has still to come"
        assert rig.got(portion(rig, rank=1)) == ["1"]
        assert blocked in rig.answers
        assert rig.got(second) == ["2"]

    def test_an_item_counts_until_handed_to_all_groups(self, rig: Rig) -> None:
        rig.channel(max_items=1, readers=(reader(group="r"), reader(group="s")))
        rig.put(item("a"))
        second = rig.put(item("b"))
        rig.get(group="r")
        rig.get(group="r")
        assert second not in rig.answers, "s is at work: legitimate back-pressure"
        rig.get(group="s")
        assert second in rig.answers

    def test_spill_lifts_the_limits(self, rig: Rig) -> None:
        rig.channel(max_items=1, max_bytes=1, spill=True)
        assert all(rig.put(item(str(i), nbytes=5)) in rig.answers for i in range(9))

    def test_a_waiting_portion_larger_than_the_limit_is_not_a_deadlock(self, rig: Rig) -> None:
        rig.channel(max_items=2)
        waiting = portion(rig, 5)
        puts = [rig.put(item(str(i))) for i in range(7)]
        assert rig.got(waiting) == list("01234")
        assert all(req in rig.answers for req in puts)
        assert rig.board.stats(C)["beyond"] == 3

    def test_a_big_put_passes_in_parts(self, rig: Rig) -> None:
        rig.channel(max_items=2)
        big = rig.put(*(item(str(i)) for i in range(5)))
        assert big not in rig.answers
        assert [rig.got(rig.get())[0] for _ in range(5)] == list("01234")
        assert big in rig.answers

    def test_cancelled_put_says_what_is_in(self, rig: Rig) -> None:
        rig.channel(max_items=1)
        req = rig.put(item("a"), item("b"))
        rig.do(ev.CancelRequest(req))
        assert rig.answers[req] == ev.CancelDone(req, 1)
        rig.close()
        assert rig.got(rig.get()) == ["a"]
        assert isinstance(rig.answers[rig.get()], ev.End)


class TestPortions:
    def test_exactly_n_and_fewer_at_the_end(self, rig: Rig) -> None:
        rig.channel(readers=(reader(portion=2),))
        waiting = portion(rig)
        rig.put(item("a"))
        assert waiting not in rig.answers
        rig.put(item("b"), item("c"))
        assert rig.got(waiting) == ["a", "b"]
        rest = portion(rig)
        rig.close()
        assert rig.got(rest) == ["c"]
        assert isinstance(rig.answers[portion(rig)], ev.End)

    def test_none_is_everything(self, rig: Rig) -> None:
        rig.channel()
        waiting = portion(rig)
        rig.put(item("a"), item("b"))
        assert waiting not in rig.answers
        rig.close()
        assert rig.got(waiting) == ["a", "b"]

    def test_everything_for_ranks_that_work_alone_is_a_fair_part_each(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2),))
        rig.put(*(item(str(i)) for i in range(5)))
        rig.close()
        assert rig.got(portion(rig, rank=1)) == ["0", "2", "4"]
        assert rig.got(portion(rig, rank=0)) == ["1", "3"]
        assert isinstance(rig.answers[portion(rig, rank=1)], ev.End)

    def test_a_fair_part_is_one_of_weight(self, rig: Rig) -> None:
        """Behind a generator the long samples come last: by count the last rank would get them all."""
        rig.channel(readers=(reader(ranks=2),))
        rig.put(*(item(str(i), weight=w) for i, w in enumerate([1, 1, 1, 1, 1, 4, 5])))
        rig.close()
        assert rig.got(portion(rig, rank=0)) == ["0", "2", "4", "5"]
        assert rig.got(portion(rig, rank=1)) == ["1", "3", "6"]

    def test_by_weight(self, rig: Rig) -> None:
        rig.channel()
        waiting = rig.get(mode="weight", weight=10)
        rig.put(item("a", weight=4), item("b", weight=4))
        assert waiting not in rig.answers, "more may fit"
        rig.put(item("heavy", weight=40), item("c", weight=10), item("d", weight=1))
        assert rig.got(waiting) == ["a", "b"]
        assert rig.got(rig.get(mode="weight", weight=10)) == ["heavy"]
        assert rig.got(rig.get(mode="weight", weight=10)) == ["c"]
        rig.close()
        assert rig.got(rig.get(mode="weight", weight=10)) == ["d"]
        assert isinstance(rig.answers[rig.get(mode="weight", weight=10)], ev.End)

    def test_batch_barrier_is_one_delivery(self, rig: Rig) -> None:
        rig.channel(readers=(reader(barrier="batch", portion=2),))
        waiting = portion(rig)
        rig.put(*(item(str(i)) for i in range(5)))
        assert waiting not in rig.answers
        rig.close()
        assert rig.got(waiting) == list("01234")


class TestGroups:
    def test_only_complete_groups_rounded_up(self, rig: Rig) -> None:
        rig.channel(readers=(reader(barrier="group", portion=3),))
        waiting = portion(rig)
        rig.put(sample("a/0", 2), sample("b/0", 2), sample("b/1", 2))
        assert waiting not in rig.answers
        rig.put(sample("c/0", 2), sample("c/1", 2))
        assert rig.got(waiting) == ["b/0", "b/1", "c/0", "c/1"]
        rest = portion(rig)
        rig.put(sample("a/1", 2))
        rig.close()
        assert rig.got(rest) == ["a/0", "a/1"]

    def test_announced_drops_complete_a_group(self, rig: Rig) -> None:
        rig.channel(readers=(reader(barrier="group", portion=1),))
        rig.do(ev.Drop(("a/0",), "no answer", "w[0]", STEP))
        waiting = portion(rig)
        rig.put(sample("a/1", 3))
        assert waiting not in rig.answers
        rig.do(ev.Drop(("a/2",), "too long", "w[0]", STEP))
        assert rig.got(waiting) == ["a/1"]

    def test_a_drop_counts_only_downstream_of_who_dropped(self, rig: Rig) -> None:
        rig.channel(C, readers=(reader(C, group="r", barrier="group", portion=1), reader(C, group="s")))
        rig.channel(D, writers=("s[0]#0",), readers=(reader(D, group="t", barrier="group", portion=1),))
        upstream, down = portion(rig, group="r"), portion(rig, channel=D, group="t")
        rig.do(ev.Drop(("a/0",), "bad", "s[0]", STEP))
        rig.put(sample("a/1", 2))
        rig.put(sample("a/1", 2), channel=D, writer="s[0]#0")
        assert rig.got(down) == ["a/1"]
        assert upstream not in rig.answers, "r still gets a/0, which s dropped only for those after it"
        rig.put(sample("a/0", 2))
        assert rig.got(upstream) == ["a/1", "a/0"]

    def test_an_incomplete_group_at_the_end_fails_by_name(self, rig: Rig) -> None:
        rig.channel(readers=(reader(barrier="group"),))
        rig.put(sample("a/0", 3), sample("a/2", 3))
        waiting = portion(rig)
        rig.close()
        assert len(rig.failed) == 1
        assert "group 'a' has 2 of 3" in rig.failed[0].cause
        assert "a/0, a/2" in rig.failed[0].cause
        assert isinstance(rig.answers[waiting], ev.Poisoned)

    def test_a_sample_after_its_group_was_handed_out_fails(self, rig: Rig) -> None:
        rig.channel(readers=(reader(barrier="group", portion=1),))
        rig.put(sample("a/0", 2))
        rig.do(ev.Drop(("a/1",), "late", "w[0]", STEP))
        assert rig.got(portion(rig)) == ["a/0"]
        refused = rig.put(sample("a/1", 2))
        assert isinstance(rig.answers[refused], ev.PutRefused)
        assert "a/1 came for group 'a' after" in rig.failed[0].cause

    def test_a_prompt_counts_for_all_its_ids(self, rig: Rig) -> None:
        rig.channel(readers=(reader(barrier="group", portion=1),))
        rig.put(item("p", ids=("p/0", "p/1"), group="p", size=2))
        assert rig.got(portion(rig)) == ["p"]


class TestCollective:
    def test_a_portion_is_dealt_once_and_balanced(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2, collective=True, portion=4),))
        rig.put(*(item(name, weight=w) for name, w in (("a", 1), ("b", 1), ("c", 1), ("d", 3))))
        assert rig.got(portion(rig, rank=1)) == ["d"]
        waiting = portion(rig, rank=1)
        assert waiting not in rig.answers
        assert rig.got(portion(rig, rank=0)) == ["a", "b", "c"]
        rig.put(item("e"))
        rig.close()
        assert rig.got(waiting) == [], "an empty shard keeps the counts equal"
        assert rig.got(portion(rig, rank=0)) == ["e"]
        for rank in (0, 1):
            assert isinstance(rig.answers[portion(rig, rank=rank)], ev.End)

    def test_groups_stay_together(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2, collective=True, barrier="group"),))
        rig.put(*(sample(f"{g}/{i}", 3) for i in range(3) for g in "ba"))
        rig.close()
        assert rig.got(portion(rig, rank=0)) == ["a/0", "a/1", "a/2"]
        assert rig.got(portion(rig, rank=1)) == ["b/0", "b/1", "b/2"]

    def test_the_split_of_everything_does_not_depend_on_arrival(self, rig: Rig) -> None:
        shards = []
        for order in ("3102", "0123"):
            rig = Rig()
            rig.channel(readers=(reader(ranks=2, collective=True, barrier="batch"),))
            for name in order:
                rig.put(item(name, ids=(name,)))
            rig.close()
            shards.append([rig.got(portion(rig, rank=rank)) for rank in (0, 1)])
        assert shards[0] == shards[1] == [["0", "1"], ["2", "3"]]

    def test_by_weight_every_rank_gets_one(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2, collective=True),))
        rig.put(item("a", weight=3), item("b", weight=3), item("c", weight=3))
        waiting = rig.get(rank=1, mode="weight", weight=6)
        assert waiting not in rig.answers
        rig.close()
        assert rig.got(waiting) == ["c"]
        assert rig.got(rig.get(rank=0, mode="weight", weight=6)) == ["a", "b"]
        assert isinstance(rig.answers[rig.get(rank=0, mode="weight", weight=6)], ev.End)

    def test_single_items_are_refused(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2, collective=True),))
        answer = rig.answers[rig.get()]
        assert isinstance(answer, ev.Poisoned)
        assert "read with batches()" in answer.cause

    def test_ranks_that_ask_differently_are_refused(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2, collective=True),))
        rig.put(item("a"), item("b"))
        portion(rig, 2, rank=0)
        assert isinstance(rig.answers[portion(rig, 1, rank=1)], ev.Poisoned)
        assert "batches(n=2) and, rank 1, batches(n=1)" in rig.failed[0].cause

    def test_one_rank_may_read_as_it_likes(self, rig: Rig) -> None:
        rig.channel(readers=(reader(collective=True),))
        rig.put(item("a", key=1))
        assert rig.got(rig.get(key=1)) == ["a"]


class TestPoisonAndDeath:
    def test_poison_answers_everything_at_once(self, rig: Rig) -> None:
        rig.channel(max_items=1, readers=(reader(group="r"), reader(group="s")))
        rig.put(item("a"))
        put, get = rig.put(item("b")), rig.get(group="s", key="never")
        rig.do(ev.PoisonWriter(C, "w[0]#0", "w[0] raised ValueError"))
        assert rig.answers[get] == ev.Poisoned(get, "w[0] raised ValueError")
        assert "w[0] raised ValueError" in rig.answers[put].reason
        assert isinstance(rig.answers[rig.get()], ev.Poisoned), "no false clean end, even with items left"
        assert isinstance(rig.answers[rig.put(item("c"))], ev.PutRefused)
        assert not rig.failed

    def test_the_first_cause_stays(self, rig: Rig) -> None:
        rig.channel(writers=("w[0]#0", "w[1]#0"))
        rig.do(ev.PoisonWriter(C, "w[0]#0", "first"))
        rig.do(ev.PoisonWriter(C, "w[1]#0", "second"))
        assert rig.answers[rig.get()].cause == "first"

    def test_dead_producer(self, rig: Rig) -> None:
        rig.channel(writers=("w[0]#0", "w[1]#0"))
        rig.put(item("kept", ids=("k",)), writer="w[1]#0")
        rig.put(item("gone", ids=("g",)))
        waiting = rig.get(key="none")
        rig.do(ev.MemberDied("w[0]", "killed by signal 9"))
        assert rig.failed == [ev.StepFailed(STEP, "w[0] died: killed by signal 9")]
        assert isinstance(rig.answers[waiting], ev.Poisoned)
        account = rig.account()
        assert account.dropped == {"g": "its producer w[0] died: killed by signal 9"}
        assert list(account.lost) == ["k"]

    def test_a_fetched_item_outlives_its_producer(self, rig: Rig) -> None:
        rig.channel()
        rig.put(item("a", ids=("a",)))
        req = rig.get()
        rig.do(ev.Fetched((rig.answers[req].items[0].uid,), "r"))
        rig.do(ev.MemberDied("w[0]", "exit 1"))
        assert rig.account().dropped == {}

    def test_dead_reader_fails_the_step_and_gets_no_answer(self, rig: Rig) -> None:
        rig.channel(readers=(reader(ranks=2),))
        dead, alive = rig.get(rank=0), rig.get(rank=1)
        rig.do(ev.MemberDied("r[0]", "exit 3"))
        assert dead not in rig.answers
        assert isinstance(rig.answers[alive], ev.Poisoned)
        assert rig.failed[0].cause == "r[0] died: exit 3"

    def test_a_failed_step_poisons_channels_opened_later(self, rig: Rig) -> None:
        rig.channel()
        assert rig.do(ev.MemberDied("other[0]", "exit 0")) == [], "it has no part in this step"
        rig.do(ev.FailStep(STEP, "task raised"))
        rig.do(ev.FailStep(STEP, "second"))
        rig.channel(D)
        assert rig.answers[rig.get(D)] == ev.Poisoned("q1", "task raised")
        assert [f.cause for f in rig.failed] == ["task raised"]


class TestReleaseAndClose:
    def test_released_when_all_groups_have_fetched(self, rig: Rig) -> None:
        rig.channel(readers=(reader(group="r"), reader(group="s")))
        rig.put(item("a"))
        uid = rig.answers[rig.get(group="r")].items[0].uid
        rig.do(ev.Fetched((uid,), "r"))
        rig.do(ev.Fetched((uid,), "s"))
        assert rig.released == [], "s has not been handed it"
        rig.get(group="s")
        out = rig.do(ev.Fetched((uid,), "s"))
        assert out == [ev.Released("w[0]", ("a",))]
        assert rig.do(ev.Fetched((uid,), "s")) == []

    def test_close_step_frees_and_answers_everything(self, rig: Rig) -> None:
        rig.channel(max_items=1, readers=(reader(group="r"), reader(group="s")))
        rig.put(item("a"))
        put, get = rig.put(item("b")), rig.get(group="s", key="z")
        rig.do(ev.CloseStep(STEP))
        assert rig.released == ["a"]
        assert isinstance(rig.answers[put], ev.PutRefused)
        assert isinstance(rig.answers[get], ev.Poisoned)
        assert rig.board.steps() == ()
        for late in (ev.CloseWriter(C, "w[0]#0"), ev.CloseStep(STEP), ev.Drop(("x",), "", "w[0]", STEP)):
            assert rig.do(late) == []
        assert "not open" in rig.answers[rig.put(item("c"))].reason
        assert "not open" in rig.answers[rig.get()].cause

    def test_steps_are_separate(self, rig: Rig) -> None:
        rig.channel()
        rig.channel("train/1:c", step="train/1", readers=(reader("train/1:c"),))
        rig.do(ev.FailStep("train/1", "x"))
        rig.put(item("a"))
        assert rig.got(rig.get()) == ["a"]

    def test_cancelled_get_is_withdrawn(self, rig: Rig) -> None:
        rig.channel()
        req = rig.get()
        rig.do(ev.CancelRequest(req))
        assert isinstance(rig.answers[req], ev.CancelDone)
        rig.put(item("a"))
        assert rig.do(ev.CancelRequest(req)) == []
        assert rig.got(rig.get()) == ["a"]


class TestWords:
    def test_set_up_that_cannot_be_right(self, rig: Rig) -> None:
        rig.channel()
        with pytest.raises(ChannelError, match="open already"):
            rig.do(ev.OpenChannel(C, STEP))
        with pytest.raises(ChannelError, match="reads channel .* already"):
            rig.do(reader())
        with pytest.raises(ChannelError, match="after the seal"):
            rig.do(ev.AddWriter(C, "x[0]#0"))
        with pytest.raises(ChannelError, match="did you mean 'train/0:c'"):
            rig.do(ev.SealWriters("train/0:cc"))
        with pytest.raises(ChannelError, match="0 ranks"):
            rig.do(reader(group="s", ranks=0))
        rig.put(item("a"))
        with pytest.raises(ChannelError, match="after the first put"):
            rig.do(reader(group="s"))

    def test_a_writer_registered_twice(self, rig: Rig) -> None:
        rig.do(ev.OpenChannel(C, STEP))
        rig.do(ev.AddWriter(C, "w[0]#0"))
        with pytest.raises(ChannelError, match="registered already"):
            rig.do(ev.AddWriter(C, "w[0]#0"))

    def test_strangers_are_refused(self, rig: Rig) -> None:
        rig.channel()
        assert "not registered" in rig.answers[rig.put(item("a"), writer="x[0]#0")].reason
        assert "not read by group 'x'" in rig.answers[rig.get(group="x")].cause

    def test_explain(self, rig: Rig) -> None:
        rig.channel(max_items=1)
        rig.put(item("a"))
        rig.put(item("b"))
        req = rig.get(key="z")
        text = rig.board.explain_request(req)
        assert "still open for w[0]#0" in text
        assert "waiting: r[0]" in text
        assert rig.board.explain("nope") == "channel nope is not open"
        assert rig.board.explain_request("nope") == "the request is not waiting"
        rig.do(ev.PoisonWriter(C, "w[0]#0", "boom"))
        assert "poisoned: boom" in rig.board.explain(C)

    def test_describe_lost(self) -> None:
        text = describe_lost({f"s{i}": "reward[0] in train/0" for i in range(12)})
        assert text.startswith("s0 (last with reward[0] in train/0), s1")
        assert text.endswith("and 2 more")


def test_an_ordered_reader_gets_groups_as_they_entered_the_step_not_as_they_arrive() -> None:
    board = Board()
    for event in (
        ev.OpenChannel("s:fed", "s"),
        ev.AddReader("s:fed", "maker"),
        ev.AddWriter("s:fed", "driver#feed0"),
        ev.SealWriters("s:fed"),
        ev.OpenChannel("s:made", "s"),
        ev.AddReader("s:made", "actor", collective=True, barrier="group", portion=2, ordered=True),
        ev.AddWriter("s:made", "maker[0]#0"),
        ev.SealWriters("s:made"),
    ):
        board.handle(event)
    for n in range(4):
        ids = (f"p{n}/0", f"p{n}/1")
        board.handle(ev.Put(("driver", n), "driver#feed0", "s:fed", (ev.Item(None, ids=ids),)))
    board.handle(ev.Get(("maker[0]", 0), "s:fed", "maker", n=4))

    def put(n: int, i: int) -> list[ev.Instruction]:
        item = ev.Item(None, ids=(f"p{n}/{i}",), group=f"p{n}", group_size=2)
        return board.handle(ev.Put(("maker[0]", n, i), "maker[0]#0", "s:made", (item,)))

    board.handle(ev.Get(("actor[0]", 0), "s:made", "actor", mode="portion", n=ev.PLAN))
    delivered: list[ev.Instruction] = []
    for n, i in [(2, 0), (2, 1), (3, 0), (1, 1), (1, 0)]:
        delivered += [x for x in put(n, i) if isinstance(x, ev.Deliver)]
    assert delivered == [], "group p0 is still awaited"
    delivered += [x for x in (*put(0, 1), *put(0, 0)) if isinstance(x, ev.Deliver)]
    assert [item.ids for item in delivered[0].items] == [("p0/0",), ("p0/1",)]  # type: ignore[union-attr]
    (second,) = board.handle(ev.Get(("actor[0]", 1), "s:made", "actor", mode="portion", n=4))
    assert [item.ids[0] for item in second.items] == ["p1/0", "p1/1", "p2/0", "p2/1"]  # type: ignore[union-attr]
    board.handle(ev.Drop(("p3/1",), "no reward", "maker[0]", "s"))
    (third,) = (
        x
        for x in board.handle(ev.Get(("actor[0]", 2), "s:made", "actor", mode="portion", n=1))
        if isinstance(x, ev.Deliver)
    )
    assert [item.ids[0] for item in third.items] == ["p3/0"], "a dropped sample is not waited for"


@given(st.lists(st.floats(0.0, 100.0), max_size=40), st.integers(1, 6))
def test_fair_parts_are_balanced_and_keep_their_order(weights: list[float], parts: int) -> None:
    atoms = [(Entry(i, (), None, weight, (), None, 1),) for i, weight in enumerate(weights)]
    dealt = fair_parts(atoms, parts)
    assert sorted(atom[0].uid for part in dealt for atom in part) == list(range(len(weights)))
    totals = [sum(atom[0].weight for atom in part) for part in dealt]
    assert max(totals) <= sum(weights) / parts + (1 - 1 / parts) * max(weights, default=0.0) + 1e-6
    assert totals == sorted(totals, reverse=True) or max(totals) - min(totals) < 1e-6
    assert all([a[0].uid for a in part] == sorted(a[0].uid for a in part) for part in dealt)


def test_equal_weights_give_equal_counts() -> None:
    atoms = [(Entry(i, (), None, 1.0, (), None, 1),) for i in range(8)]
    assert [len(part) for part in fair_parts(atoms, 3)] == [3, 3, 2]
