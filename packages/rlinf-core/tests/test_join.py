"""Join by id of two channels for one reading group."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.board import Board, Item
from rlinf_core.board import events as ev

STEP = "s"
A, B = "s:a", "s:b"


class Rig:
    """Writers ``x[0]#0`` on a and ``y[0]#0`` on b; group ``t`` joins them."""

    def __init__(self, max_items: int = 0, **reader: Any) -> None:
        self.board = Board()
        self.answers: dict[Any, Any] = {}
        self.released: list[object] = []
        self.failed: list[str] = []
        self._req = 0
        for name, writer in ((A, "x[0]#0"), (B, "y[0]#0")):
            self.do(ev.OpenChannel(name, STEP, max_items=max_items))
            self.do(ev.AddReader(name, "t", **reader))
            self.do(ev.AddWriter(name, writer))
            self.do(ev.SealWriters(name))

    def do(self, event: ev.Event) -> None:
        for out in self.board.handle(event):
            if isinstance(out, ev.Released):
                self.released.extend(out.descriptors)
            elif isinstance(out, ev.StepFailed):
                self.failed.append(out.cause)
            elif not isinstance(out, ev.StepAccount):
                assert out.req not in self.answers
                self.answers[out.req] = out

    def put(self, channel: str, *names: str, **kw: Any) -> int:
        self._req += 1
        writer = "x[0]#0" if channel == A else "y[0]#0"
        items = tuple(Item(f"{channel[-1]}:{n}", ids=(n,), group=n.partition("/")[0], **kw) for n in names)
        self.do(ev.Put(self._req, writer, channel, items))
        return self._req

    def join(self, rank: int = 0, **kw: Any) -> int:
        self._req += 1
        self.do(ev.JoinReader(self._req, "t", rank, A, B, **kw))
        return self._req

    def got(self, req: object) -> list[tuple[object, object]]:
        answer = self.answers[req]
        assert isinstance(answer, ev.DeliverJoined), answer
        return [(a.descriptor, b.descriptor) for a, b in answer.pairs]

    def close(self) -> None:
        self.do(ev.CloseWriter(A, "x[0]#0"))
        self.do(ev.CloseWriter(B, "y[0]#0"))


def test_matches_by_id_in_any_order() -> None:
    rig = Rig()
    rig.put(A, "1", "2")
    rig.put(B, "2")
    assert rig.got(rig.join()) == [("a:2", "b:2")]
    waiting = rig.join()
    rig.put(B, "1")
    assert rig.got(waiting) == [("a:1", "b:1")]
    rig.close()
    assert isinstance(rig.answers[rig.join()], ev.End)


def test_a_drop_on_one_side_drops_on_the_other() -> None:
    rig = Rig()
    waiting = rig.join()
    rig.put(A, "1", "2")
    rig.do(ev.Drop(("1",), "bad", "y[0]", STEP))
    assert rig.released == ["a:1"]
    rig.do(ev.Drop(("3",), "bad", "y[0]", STEP))
    rig.put(A, "3")
    rig.put(B, "2")
    rig.close()
    assert rig.got(waiting) == [("a:2", "b:2")]
    assert isinstance(rig.answers[rig.join()], ev.End)
    assert rig.failed == []


def test_drops_announced_before_the_join_count() -> None:
    rig = Rig()
    rig.put(A, "1")
    rig.do(ev.Drop(("1",), "bad", "y[0]", STEP))
    rig.close()
    assert isinstance(rig.answers[rig.join()], ev.End)


def test_unmatched_at_the_end_fails_by_name() -> None:
    rig = Rig()
    rig.put(A, "1", "2")
    rig.put(B, "1")
    first, second = rig.join(), rig.join()
    rig.close()
    assert rig.got(first) == [("a:1", "b:1")]
    assert isinstance(rig.answers[second], ev.Poisoned)
    assert "2 came on s:a without a partner on s:b" in rig.failed[0]


def test_first_asked_after_the_end() -> None:
    rig = Rig()
    rig.put(B, "1")
    rig.close()
    assert isinstance(rig.answers[rig.join()], ev.Poisoned)
    assert "1 came on s:b" in rig.failed[0]


def test_portions_groups_and_ranks() -> None:
    rig = Rig(ranks=2, collective=True, barrier="group", portion=2)
    first = rig.join(rank=0, mode="portion", n=ev.PLAN)
    rig.put(A, "g/0", "h/0", "g/1", group_size=2)
    rig.put(B, "g/0", "h/0", group_size=2)
    assert first not in rig.answers
    rig.put(B, "g/1", group_size=2)
    assert first not in rig.answers, "two items are the portion, but then one of the two ranks would have no group"
    rig.put(A, "h/1", group_size=2)
    rig.put(B, "h/1", group_size=2)
    assert rig.got(first) == [("a:g/0", "b:g/0"), ("a:g/1", "b:g/1")]
    assert rig.got(rig.join(rank=1, mode="portion", n=ev.PLAN)) == [("a:h/0", "b:h/0"), ("a:h/1", "b:h/1")]


def test_nowait_and_cancel() -> None:
    rig = Rig()
    assert isinstance(rig.answers[rig.join(nowait=True)], ev.Empty)
    req = rig.join()
    rig.do(ev.CancelRequest(req))
    assert isinstance(rig.answers[req], ev.CancelDone)
    assert "join of channel s:a" in rig.board.explain_request(rig.join())


def test_limits_hold_up_neither_side_for_ever() -> None:
    """The sides come in opposite orders and are longer than the limit."""
    rig = Rig(max_items=2)
    names = [str(i) for i in range(6)]
    waiting = [rig.join() for _ in names]
    puts = [rig.put(A, name) for name in names] + [rig.put(B, name) for name in reversed(names)]
    assert all(req in rig.answers for req in puts)
    assert sorted(pair[0] for req in waiting for pair in rig.got(req)) == [f"a:{name}" for name in names]


def test_credit_comes_back_when_pairs_are_handed_out() -> None:
    rig = Rig(max_items=1)
    second = rig.put(A, "1", "2")
    assert second not in rig.answers
    rig.put(B, "1")
    assert rig.got(rig.join()) == [("a:1", "b:1")]
    assert second in rig.answers


def test_a_pair_frees_credit_on_both_sides() -> None:
    rig = Rig(max_items=2)
    rig.do(ev.OpenChannel("s:c", STEP, max_items=2))
    for group in ("t", "u"):
        rig.do(ev.AddReader("s:c", group))
    rig.do(ev.AddWriter("s:c", "z[0]#0"))
    rig.do(ev.JoinReader("j", "t", 0, "s:c", B))
    for name in "123":
        rig.do(ev.Put(name, "z[0]#0", "s:c", (Item(name, ids=(name,)),)))
        if name == "1":
            rig.do(ev.Get("g", "s:c", "u"))
    assert "3" not in rig.answers, "u is at work and has 2 to take"
    rig.put(B, "1")
    assert rig.got("j") == [("1", "b:1")]
    assert "3" in rig.answers, "1 went to both groups"


@pytest.mark.parametrize(("by", "text"), [("id", "no sample id"), ("group", "no group")])
def test_an_item_that_cannot_be_matched(by: str, text: str) -> None:
    rig = Rig()
    rig.join(by=by)
    rig.do(ev.Put("p", "x[0]#0", A, (Item("bare"),)))
    assert text in rig.failed[0]


def test_by_key_and_by_group() -> None:
    for by in ("key", "group"):
        rig = Rig()
        waiting = rig.join(by=by)
        rig.do(ev.Put("p", "x[0]#0", A, (Item("left", key="k", group="k"),)))
        rig.do(ev.Put("q", "y[0]#0", B, (Item("right", key="k", group="k"),)))
        assert rig.got(waiting) == [("left", "right")]
    rig.do(ev.Put("r", "x[0]#0", A, (Item("again", key="k", group="k"),)))
    assert "came twice on s:a" in rig.failed[0]


def test_misuse_is_refused_by_name() -> None:
    rig = Rig()
    rig.join()
    rig.do(ev.Get("g", A, "t"))
    assert "through join()" in rig.answers["g"].cause
    assert "by 'id' already" in rig.answers[rig.join(by="key")].cause
    rig.do(ev.JoinReader("j", "t", 0, A, A))
    assert "needs two channels" in rig.answers["j"].cause
    rig.do(ev.JoinReader("k", "t", 0, B, A))
    assert "another join already" in rig.answers["k"].cause
    rig.do(ev.JoinReader("l", "u", 0, A, B))
    assert "not read by group 'u'" in rig.answers["l"].cause
    rig.do(ev.JoinReader("m", "t", 0, A, "s:x"))
    assert "not open" in rig.answers["m"].cause
    other = Rig()
    other.do(ev.Get("g", A, "t"))
    assert "waits on channel s:a directly" in other.answers[other.join()].cause


def test_a_poisoned_side_poisons_the_join() -> None:
    rig = Rig()
    waiting = rig.join()
    rig.do(ev.PoisonWriter(B, "y[0]#0", "boom"))
    assert rig.answers[waiting] == ev.Poisoned(waiting, "boom")
    assert isinstance(rig.answers[rig.join()], ev.Poisoned)


def test_a_dead_producer_takes_its_pairs_along() -> None:
    rig = Rig()
    rig.join(nowait=True)
    rig.put(A, "1", "2")
    rig.put(B, "1")
    rig.do(ev.MemberDied("x[0]", "exit 1"))
    assert rig.failed == ["x[0] died: exit 1"]
    assert isinstance(rig.answers[rig.join()], ev.Poisoned)
    rig.do(ev.CloseStep(STEP))
    assert rig.released == ["b:1"], "the dead one is not told to free anything"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_interleaving_gives_every_pair_once(data: st.DataObject) -> None:
    names = [str(i) for i in range(data.draw(st.integers(0, 7), label="count"))]
    dropped = data.draw(st.sets(st.sampled_from(names)) if names else st.just(set()), label="dropped by y")
    rig = Rig(max_items=data.draw(st.integers(0, 3), label="limit"))
    ops = [("put", A, n) for n in data.draw(st.permutations(names))]
    other = [("drop" if n in dropped else "put", B, n) for n in data.draw(st.permutations(names))]
    asks = [("join", "", "")] * (len(names) - len(dropped) + 1)
    lanes = [ops, other, asks]
    reqs = []
    while any(lanes):
        kind, channel, name = data.draw(st.sampled_from([lane for lane in lanes if lane])).pop(0)
        if kind == "put":
            rig.put(channel, name)
        elif kind == "drop":
            rig.do(ev.Drop((name,), "bad", "y[0]", STEP))
        else:
            reqs.append(rig.join())
    rig.close()
    assert rig.failed == []
    pairs = [pair for req in reqs[:-1] for pair in rig.got(req)]
    assert sorted(pairs) == [(f"a:{n}", f"b:{n}") for n in sorted(set(names) - dropped)]
    assert isinstance(rig.answers[reqs[-1]], ev.End)
