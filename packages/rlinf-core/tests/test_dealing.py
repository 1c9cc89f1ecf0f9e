"""Balanced dequeue on the board: who gets which item, when a rank ends, and what is said when one does not read."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.board import ANY, PLAN, Board, Item
from rlinf_core.board import events as ev
from rlinf_core.board.dealing import DealtQueue
from rlinf_core.board.entries import Entry, Want
from rlinf_core.errors import ChannelError

C, D, STEP = "s:c", "s:d", "s"


class Rig:
    """One step; writers ``w[0]#0`` on c and on d; answers by request."""

    def __init__(self, *readers: ev.AddReader, max_items: int = 0) -> None:
        self.board = Board()
        self.answers: dict[Any, Any] = {}
        self.failed: list[str] = []
        self.accounts: list[ev.StepAccount] = []
        self.count = 0
        for name in dict.fromkeys(reader.channel for reader in readers):
            self.do(ev.OpenChannel(name, STEP, max_items))
            for reader in readers:
                if reader.channel == name:
                    self.do(reader)
            self.do(ev.AddWriter(name, "w[0]#0"))
            self.do(ev.SealWriters(name))

    def do(self, event: ev.Event) -> None:
        for out in self.board.handle(event):
            if isinstance(out, ev.StepFailed):
                self.failed.append(out.cause)
            elif isinstance(out, ev.StepAccount):
                self.accounts.append(out)
            elif not isinstance(out, ev.Released):
                assert out.req not in self.answers, "a request was answered twice"
                self.answers[out.req] = out

    def put(self, *items: Item, channel: str = C) -> int:
        self.count += 1
        self.do(ev.Put(self.count, "w[0]#0", channel, items))
        return self.count

    def get(self, rank: int, group: str = "r", **kw: Any) -> int:
        self.count += 1
        self.do(ev.Get(self.count, C, group, rank, **kw))
        return self.count

    def take(self, rank: int, group: str = "r", **kw: Any) -> list[object]:
        """What the rank gets now; ``["end"]`` at the end, ``[]`` when it would wait (and then it does not)."""
        answer = self.answers.get(self.get(rank, group, nowait=True, **kw))
        if isinstance(answer, ev.Deliver):
            return [item.descriptor for item in answer.items]
        if isinstance(answer, ev.End):
            return ["end"]
        assert isinstance(answer, ev.Empty), answer
        return []

    def close(self, channel: str = C) -> None:
        self.do(ev.CloseWriter(channel, "w[0]#0"))


def dealt(deal: ev.Deal, group: str = "r", ranks: int = 2, channel: str = C, **kw: Any) -> ev.AddReader:
    return ev.AddReader(channel, group, ranks, deal=deal, **kw)


def items(*weights: float, **kw: Any) -> list[Item]:
    return [Item(str(i), weight=weight, **kw) for i, weight in enumerate(weights)]


def member(name: str, size: int, **kw: Any) -> Item:
    return Item(name, ids=(name,), group=name.partition("/")[0], group_size=size, **kw)


class TestWhoGetsWhat:
    def test_round_robin_by_arrival_whoever_asks_first(self) -> None:
        rig = Rig(dealt("round_robin", ranks=3))
        early = rig.get(2)
        rig.put(*items(9, 1, 1, 1, 1, 1, 1))
        assert [i.descriptor for i in rig.answers[early].items] == ["2"]
        assert rig.take(2) == ["5"]
        assert rig.take(2) == []
        assert rig.take(0, n=9) == ["0", "3", "6"]
        assert rig.take(1, n=9) == ["1", "4"]

    def test_weight_goes_to_the_lightest_rank(self) -> None:
        rig = Rig(dealt("weight", ranks=3))
        rig.put(*items(5, 2, 2, 2, 1, 1, 1))  # loads 5 2 2, then 5 4 2, 5 4 3, 5 4 4, 5 5 4
        assert rig.take(0, n=9) == ["0"]
        assert rig.take(1, n=9) == ["1", "3", "6"]
        assert rig.take(2, n=9) == ["2", "4", "5"]

    def test_equal_weights_and_no_weights_are_round_robin(self) -> None:
        for weight in (1.0, 0.0):
            one, other = Rig(dealt("weight", ranks=3)), Rig(dealt("round_robin", ranks=3))
            for rig in (one, other):
                rig.put(*items(*[weight] * 8))
            assert [one.take(r, n=9) for r in range(3)] == [other.take(r, n=9) for r in range(3)]

    def test_taking_does_not_change_what_comes(self) -> None:
        """What a rank has taken still counts: the split depends on the items alone, not on timing."""
        slow, fast = Rig(dealt("weight")), Rig(dealt("weight"))
        got: dict[int, list[object]] = {0: [], 1: []}
        for item in items(4, 1, 1, 1, 3, 2):
            slow.put(item)
            fast.put(item)
            for rank in (1, 0):
                got[rank] += fast.take(rank)
        assert got == {rank: slow.take(rank, n=9) for rank in (0, 1)}

    def test_every_group_has_its_own_dealing(self) -> None:
        readers = (dealt("weight", "a"), dealt("round_robin", "b"), dealt("shared", "c"))
        rig = Rig(*readers, dealt("shared", "d", collective=True))
        rig.put(*items(3, 1, 1, 1))
        assert (rig.take(0, "a", n=9), rig.take(1, "a", n=9)) == (["0"], ["1", "2", "3"])
        assert (rig.take(0, "b", n=9), rig.take(1, "b", n=9)) == (["0", "2"], ["1", "3"])
        assert rig.take(1, "c", n=9) == ["0", "1", "2", "3"]
        rig.close()
        shards = [rig.take(rank, "d", mode="portion", n=None) for rank in (0, 1)]
        assert shards == [["0"], ["1", "2", "3"]]

    def test_one_rank_gets_everything(self) -> None:
        rig = Rig(dealt("weight", ranks=1))
        rig.put(*items(3, 1))
        assert rig.take(0, n=9) == ["0", "1"]

    def test_a_rank_that_is_not_there_is_refused(self) -> None:
        rig = Rig(dealt("weight", ranks=2))
        rig.put(*items(1))
        rig.get(2)
        assert rig.failed == ["channel s:c: rank 2 of group 'r' is not below 2"]


class TestPortions:
    def test_a_portion_is_filled_from_the_own_share(self) -> None:
        rig = Rig(dealt("round_robin", portion=2))
        rig.put(*items(1, 1, 1))
        assert rig.take(1, mode="portion", n=PLAN) == []
        assert rig.take(0, mode="portion", n=PLAN) == ["0", "2"]
        rig.put(Item("3"))
        assert rig.take(1, mode="portion", n=PLAN) == ["1", "3"]

    def test_everything_is_the_own_share(self) -> None:
        rig = Rig(dealt("weight"))
        rig.put(*items(4, 1, 1, 1))
        assert rig.take(0, mode="portion", n=None) == [], "more may come"
        rig.close()
        assert rig.take(0, mode="portion", n=None) == ["0"]
        assert rig.take(0, mode="portion", n=None) == ["end"]
        assert rig.take(1, mode="portion", n=None) == ["1", "2", "3"]

    def test_get_batch_counts_within_the_own_share(self) -> None:
        rig = Rig(dealt("round_robin"))
        rig.put(*items(2, 9, 2, 9, 2))
        assert rig.take(0, mode="weight", weight=4) == ["0", "2"]
        assert rig.take(1, mode="weight", weight=4) == ["1"], "a heavier head comes alone"

    def test_in_a_cycle_a_portion_is_what_the_rank_has(self) -> None:
        rig = Rig(dealt("round_robin", portion=8, eager=True))
        rig.put(*items(1))
        assert rig.take(1, mode="portion", n=PLAN) == []
        assert rig.take(0, mode="portion", n=PLAN) == ["0"]


class TestKeys:
    def test_a_key_takes_the_oldest_of_it_whosever_it_is(self) -> None:
        rig = Rig(dealt("round_robin"))
        rig.put(*(Item(str(i), key="xy"[i // 2 % 2]) for i in range(6)))
        assert rig.take(1, key="x") == ["0"]
        assert rig.take(1, key="x") == ["1"]
        assert rig.take(0) == ["2"], "its own, the first is gone"
        assert rig.take(0, key="z") == []
        rig.close()
        assert rig.take(1, key="y") == ["3"]
        assert rig.take(1, key="y") == ["end"]
        assert rig.take(1) == ["5"]
        assert rig.take(0) == ["4"]

    def test_a_waiting_key_is_served_from_any_share(self) -> None:
        rig = Rig(dealt("round_robin"))
        waiting = rig.get(1, key="x")
        rig.put(Item("a", key="x"))
        assert rig.answers[waiting].items[0].descriptor == "a"


class TestGroups:
    """Whole groups are dealt, when they are complete."""

    def test_a_group_stays_together_and_weighs_as_a_whole(self) -> None:
        rig = Rig(dealt("weight", barrier="group", portion=1))
        rig.put(member("g/0", 2), member("h/0", 2, weight=3), member("h/1", 2), member("g/1", 2))
        rig.put(member("k/0", 1), member("l/0", 1))  # h weighs 4, g 2, then k and l 1 each
        ask: dict[str, Any] = {"mode": "portion", "n": PLAN}
        assert rig.take(0, **ask) == ["h/0", "h/1"]
        assert [rig.take(1, **ask) for _ in range(4)] == [["g/0", "g/1"], ["k/0"], ["l/0"], []]

    def test_a_drop_completes_and_deals_a_group(self) -> None:
        rig = Rig(dealt("round_robin", barrier="group"))
        ask: dict[str, Any] = {"mode": "portion", "n": 1}
        rig.put(member("g/0", 2))
        waiting = rig.get(0, **ask)
        assert rig.take(1, **ask) == []
        rig.do(ev.Drop(("g/1",), "bad", "w[0]", STEP))
        assert rig.answers[waiting].items[0].descriptor == "g/0"

    def test_an_incomplete_group_fails_by_name(self) -> None:
        rig = Rig(dealt("round_robin", barrier="group"))
        rig.put(member("g/0", 2))
        rig.close()
        assert "group 'g' has 1 of 2 samples" in rig.failed[0]


class TestEnd:
    def test_a_rank_ends_when_its_own_share_is_drained(self) -> None:
        rig = Rig(dealt("round_robin"))
        rig.put(*items(1))
        waiting = rig.get(1)
        rig.close()
        assert isinstance(rig.answers[waiting], ev.End), "what is left is another rank's"
        assert rig.take(0) == ["0"]
        assert rig.take(0) == ["end"]

    def test_no_end_before_all_writers_closed(self) -> None:
        rig = Rig(dealt("round_robin"))
        waiting = rig.get(1)
        rig.put(*items(1, 1))
        assert rig.answers[waiting].items[0].descriptor == "1"
        assert rig.take(1) == []


class TestReady:
    def test_ready_is_about_the_own_share(self) -> None:
        rig = Rig(dealt("weight"))
        assert not rig.board.ready(C, "r", 0)
        rig.put(*items(1))
        assert rig.board.ready(C, "r", 0)
        assert not rig.board.ready(C, "r", 1)
        rig.take(0)
        assert not rig.board.ready(C, "r", 0)

    def test_groups_count_once_complete(self) -> None:
        rig = Rig(dealt("round_robin", barrier="group"))
        rig.put(member("g/0", 2))
        assert not rig.board.ready(C, "r", 0)
        rig.put(member("g/1", 2))
        assert rig.board.ready(C, "r", 0)


class TestBackPressure:
    def test_a_rank_that_does_not_read_is_named(self) -> None:
        rig = Rig(dealt("round_robin"), max_items=2)
        rig.put(*items(1, 1, 1, 1, 1, 1))
        assert rig.take(1) == ["1"]
        waiting = rig.get(1)
        assert waiting not in rig.answers, "the limit holds: the other rank is at work"
        assert rig.board.stats(C) == {"items": 2, "bytes": 0, "peak_items": 2, "beyond": 0, "pending": 1}
        assert rig.board.explain(C) == (
            "channel s:c: 2 items (limit 2); still open for w[0]#0; w[0] waiting for credit; "
            "r: 2 undelivered, 2 dealt to r[0], which asks for nothing, waiting: r[1]"
        )
        assert rig.take(0) == ["0"]
        assert rig.answers[waiting].items[0].descriptor == "3"

    def test_the_limit_yields_when_all_ranks_wait(self) -> None:
        """Each waits for more of its own than the limit lets in: only more items can help."""
        rig = Rig(dealt("round_robin", portion=3), max_items=3)
        waiting = [rig.get(rank, mode="portion", n=PLAN) for rank in (0, 1)]
        rig.put(*items(1, 1, 1, 1, 1, 1))
        assert [[i.descriptor for i in rig.answers[req].items] for req in waiting] == [["0", "2", "4"], ["1", "3", "5"]]
        assert rig.board.stats(C)["beyond"] > 0

    def test_what_nobody_took_is_named_at_the_end_of_the_step(self) -> None:
        rig = Rig(dealt("round_robin", ranks=3))
        rig.put(*items(1, 1, 1, 1, 1, 1))
        rig.take(1, n=9)
        rig.do(ev.EndStep(STEP))
        assert rig.accounts[0].unread == {C: 4}
        assert rig.accounts[0].untaken == {C: "2 dealt to r[0], 2 dealt to r[2]"}


class TestDeath:
    @pytest.mark.parametrize("victim", ["r[0]", "w[0]"])
    def test_a_death_fails_the_step_and_answers_all(self, victim: str) -> None:
        rig = Rig(dealt("round_robin", ranks=3))
        waiting = rig.get(2)
        rig.put(*items(1, 1))
        rig.do(ev.MemberDied(victim, "killed"))
        assert rig.failed == [f"{victim} died: killed"]
        assert isinstance(rig.answers[waiting], ev.Poisoned)
        assert isinstance(rig.answers[rig.get(0)], ev.Poisoned)


class TestRefusals:
    @pytest.mark.parametrize(
        ("spec", "fault"),
        [
            ({"deal": "wieght"}, "'wieght' is not a way of dealing"),
            ({"deal": "weight", "collective": True}, "compute together and are dealt whole portions"),
            ({"deal": "round_robin", "barrier": "batch"}, "takes everything at once"),
        ],
    )
    def test_what_cannot_be_dealt(self, spec: dict[str, Any], fault: str) -> None:
        board = Board()
        board.handle(ev.OpenChannel(C, STEP))
        with pytest.raises(ChannelError, match=fault) as caught:
            board.handle(ev.AddReader(C, "r", 2, **spec))
        assert "channel s:c, group 'r'" in str(caught.value)


class TestJoin:
    def join(self, rig: Rig, rank: int) -> list[object]:
        rig.count += 1
        rig.do(ev.JoinReader(rig.count, "r", rank, C, D, n=9, nowait=True))
        answer = rig.answers[rig.count]
        return [(a.descriptor, b.descriptor) for a, b in answer.pairs] if isinstance(answer, ev.DeliverJoined) else []

    def pairs(self, rig: Rig) -> None:
        for name, weight in (("a", 3), ("b", 1), ("c", 1)):
            rig.put(Item(f"{name}1", ids=(name,), weight=weight))
            rig.put(Item(f"{name}2", ids=(name,)), channel=D)

    def test_pairs_are_dealt_as_the_first_channel_is(self) -> None:
        rig = Rig(dealt("weight"), dealt("shared", channel=D))
        self.join(rig, 0)
        self.pairs(rig)
        assert self.join(rig, 0) == [("a1", "a2")]
        assert self.join(rig, 1) == [("b1", "b2"), ("c1", "c2")]

    def test_items_that_came_before_the_join_are_dealt_as_pairs(self) -> None:
        rig = Rig(dealt("weight"), dealt("weight", channel=D))
        self.pairs(rig)
        assert self.join(rig, 1) == [("b1", "b2"), ("c1", "c2")]

    def test_a_second_channel_dealt_otherwise_is_refused(self) -> None:
        rig = Rig(dealt("shared"), dealt("weight", channel=D))
        self.join(rig, 0)
        assert "give that to the first one" in rig.answers[rig.count].cause


def reference(deal: str, weights: list[float], ranks: int) -> list[list[int]]:
    """The rule said plainly: by walking over all ranks for each item."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i, _ in enumerate(weights):
        loads = [(sum(weights[k] for k in share), len(share), rank) for rank, share in enumerate(shares)]
        shares[i % ranks if deal == "round_robin" else min(loads)[2]].append(i)
    return shares


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["round_robin", "weight"]),
    st.integers(1, 5),
    st.lists(st.integers(0, 9).map(float), max_size=30),
    st.integers(0, 2**31),
)
def test_shares_follow_the_rule_whatever_the_order_of_the_gets(
    deal: Any, ranks: int, weights: list[float], seed: int
) -> None:
    rng = random.Random(seed)
    queue = DealtQueue("c", "r", ranks, deal, "item", None)
    got: list[list[int]] = [[] for _ in range(ranks)]
    ended: set[int] = set()
    todo = list(enumerate(weights))
    req = 0
    while len(ended) < ranks:
        if todo and rng.random() < 0.5:
            uid, weight = todo.pop(0)
            queue.add(Entry(uid, (), None, weight, (), None, 1))
            if not todo:
                queue.finish()
        elif not todo and not queue.ended:
            queue.finish()
        rank, req = rng.randrange(ranks), req + 1
        taken = queue.take(Want(req, rank, "items", rng.randint(1, 3), key=ANY))
        if isinstance(taken, tuple):
            got[rank] += [entry.uid for entry in taken]
        elif taken is not None:
            ended.add(rank)
    assert got == reference(deal, weights, ranks)
    assert len(queue) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.floats(0.1, 50.0), min_size=1, max_size=60))
def test_no_rank_gets_more_than_the_mean_and_one_item(ranks: int, weights: list[float]) -> None:
    """Graham's bound for list scheduling, which the documentation states."""
    queue = DealtQueue("c", "r", ranks, "weight", "item", None)
    for uid, weight in enumerate(weights):
        queue.add(Entry(uid, (), None, weight, (), None, 1))
    shares = [list(queue._uids(Want(rank, rank))) for rank in range(ranks)]
    heaviest = max(sum(weights[i] for i in share) for share in shares)
    assert heaviest <= sum(weights) / ranks + max(weights) * (1 - 1 / ranks) + 1e-9
