"""The wire form of messages: everything that travels comes back as it was; what is no message is named."""

from __future__ import annotations

import dataclasses
import pickle
import typing
from typing import Any

import pytest

from rlinf_core.board import events as ev
from rlinf_core.hub import codec
from rlinf_core.hub import messages as ms
from rlinf_core.payload import Descriptor

REQ = ("a[0]", -3)
ITEM = ev.Item(Descriptor("a[0]", ("127.0.0.1", 4000), 7, 100), ("k", 1), 0.5, 100, ("g/1",), "g", 2, 5)
PLAIN = ev.Item(Descriptor("a[0]", ("127.0.0.1", 4000), 8, 0))

FULL: list[Any] = [
    ev.Put(REQ, "a[0]#1", "x/0:c", (ITEM, PLAIN), True, True),
    ev.Put(REQ, "a[0]#1", "x/0:c", ()),
    ev.Get(REQ, "x/0:c", "b", 1),
    ev.Get(REQ, "x/0:c", "b", 1, None, "portion", None, 2.5, True),
    ev.Get(REQ, "x/0:c", "b", key=(None,)),
    ev.JoinReader(REQ, "b", 1, "x/0:c", "x/0:d", "key", "portion", ev.PLAN),
    ev.CancelRequest(REQ),
    ev.Fetched((1, 2), "b"),
    ev.Return((1, 2), "g"),
    ev.Fetched((), "b"),
    ev.Return((1, 2), "g"),
    ev.CloseWriter("x/0:c", "a[0]#1"),
    ev.Drop(("g/1",), "why", "a[0]", "x/0"),
    ev.Trained(("g/1", "g/2"), "a[0]", "x/0"),
    ev.PutDone(REQ),
    ev.PutRefused(REQ, "full", 2),
    ev.Deliver(REQ, (ITEM,)),
    ev.DeliverJoined(REQ, ((ITEM, PLAIN), (PLAIN, ITEM))),
    ev.DeliverJoined(REQ, ()),
    ev.End(REQ),
    ev.Poisoned(REQ, "cause"),
    ev.Empty(REQ),
    ev.CancelDone(REQ, 1),
    ms.Acquire(REQ, "a[0]", True),
    ms.Granted(REQ, "no"),
    ms.ReleaseDevices("a[0]"),
    ms.Offloaded("a[0]"),
    ms.Release((1, 2, 3)),
    ms.Log("a[0]", "stdout", "text"),
    ms.Accepted(REQ),
    ms.Blocked(REQ),
    ms.AtSafePoint(ev.Get(REQ, "x/0:c", "b", 1)),
    ms.AtSafePoint(ev.JoinReader(REQ, "b", 1, "x/0:c", "x/0:d")),
    ITEM,
    ITEM.descriptor,
]
OTHERS: list[Any] = [
    ms.Hello("a[0]", 1, "host", ("127.0.0.1", 1)),
    ms.Call(1, "a[0]", "task", "work", outputs=(ms.ChannelArg("x/0:c", "out", "a[0]#1"),)),
    ms.CallResult(1, "a[0]", True, b"", ms.CallTimes(0.0, 1.0)),
    ms.Cancel("why"),
    ms.Offload(),
    ev.Carry(("g/1",), "x/1", "a[0]", "x/0"),
    ev.StepAccount("x/0", (), {}, {}, {}),
]


def body(message: Any) -> bytes:
    return codec.pack(message)[codec.LENGTH.size :]


@pytest.mark.parametrize("message", FULL + OTHERS, ids=lambda m: type(m).__name__)
def test_what_is_sent_arrives(message: Any) -> None:
    again = codec.unpack(body(message))
    assert again == message and type(again) is type(message)
    assert not isinstance(message, ev.Get) or (again.key is ev.ANY) == (message.key is ev.ANY)


def test_every_hot_class_is_looked_at_here() -> None:
    assert {type(m) for m in FULL} == set(codec._BY_CLASS)


def test_hot_messages_hold_no_object_of_ours_but_plain_data() -> None:
    """Else the pickle would name its class, which costs what the tuples save."""
    for message in FULL:
        assert b"rlinf" not in body(message), message


def test_a_key_may_be_anything_that_can_be_pickled() -> None:
    for key in (None, (), (None,), (3, "a"), frozenset({1}), 0, "any"):
        assert codec.unpack(body(ev.Get(REQ, "x/0:c", "b", key=key))).key == key
        assert codec.unpack(body(ev.Put(REQ, "w", "x/0:c", (dataclasses.replace(ITEM, key=key),)))).items[0].key == key


def test_all_requests_and_their_answers_of_the_board_are_hot() -> None:
    """A new kind of request is thought of here: those come once an item or once a portion."""
    asked = {kind for kind in typing.get_args(ev.Event) if "req" in {f.name for f in dataclasses.fields(kind)}}
    answers = {kind for kind in typing.get_args(ev.Instruction) if "req" in {f.name for f in dataclasses.fields(kind)}}
    assert asked | answers <= set(codec._BY_CLASS)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ((), "no message has the tag None"),
        ((10_000,), "no message has the tag 10000"),
        ((-1, 2), "no message has the tag -1"),
        ((True, 2), "no message has the tag True"),
        (("Put", 2), "no message has the tag 'Put'"),
        ((*codec.to_tuple(ev.PutDone(REQ)), 1), r"PutDone came with 2 fields, not 1 \(req\)"),
        (codec.to_tuple(ev.Put(REQ, "w", "c", ()))[:-1], r"Put came with 5 fields, not 6 \(req, writer, channel"),
    ],
)
def test_what_is_no_message_is_named(data: Any, why: str) -> None:
    with pytest.raises(codec.MessageError, match=why):
        codec.unpack(pickle.dumps(data))


def test_a_broken_item_within_a_message_is_named() -> None:
    good = codec.to_tuple(ev.Deliver(REQ, (ITEM,)))
    with pytest.raises(codec.MessageError, match="Item came with 7 fields, not 8"):
        codec.unpack(pickle.dumps((*good[:2], (good[2][0][:-1],))))
