"""Items that a reader asks for before it needs them: order, ends, withdrawal, and the ways to read mixed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_core.board import events as ev
from rlinf_core.channel import Clock, Endpoint, Sections, Writer
from rlinf_core.errors import ChannelPoisoned, EndOfChannel, WaitTimeout
from rlinf_core.hub import client as module
from rlinf_core.hub.client import TOGETHER, HubClient
from rlinf_core.hub.messages import DRIVER, ChannelArg, Hello
from rlinf_core.hub.server import HubServer
from rlinf_core.payload import PayloadFetcher, PayloadServer, PayloadStore
from rlinf_core.reader import Reader
from rlinf_core.reserve import MOST_BYTES, MOST_ITEMS, Reserve, Reserves

SECRET = b"s" * 32
PATIENCE_S = 20.0
CHANNEL = "x/0:c"


def item(uid: int, key: Any = None, nbytes: int = 10, weight: float = 1.0) -> ev.Item:
    return ev.Item(object(), key, weight, nbytes, uid=uid)


class TestReserve:
    def test_asks_for_more_and_more_as_long_as_items_are_small(self) -> None:
        reserve = Reserve("c")
        sizes = []
        for uid in range(8):
            reserve.received((item(uid),))
            sizes.append(reserve.size)
        assert sizes == [2, 4, 8, 16, 32, MOST_ITEMS, MOST_ITEMS, MOST_ITEMS]
        reserve.received((item(9, nbytes=MOST_BYTES // 3),))
        assert reserve.size == 3
        reserve.received((item(10, nbytes=10 * MOST_BYTES),))
        assert reserve.size == 1

    def test_a_key_is_taken_in_its_own_order(self) -> None:
        reserve = Reserve("c")
        reserve.received((item(0, "a"), item(1, "b"), item(2, "a")))
        taken = [reserve.take("b"), reserve.take("b"), reserve.take("a"), reserve.take(ev.ANY), reserve.take(ev.ANY)]
        assert [None if one is None else one.uid for one in taken] == [1, None, 0, 2, None]

    def test_a_weight_is_filled_and_a_heavier_head_comes_alone(self) -> None:
        reserve = Reserve("c")
        reserve.received(tuple(item(uid, weight=weight) for uid, weight in enumerate([2, 2, 9, 1])))
        assert [one.uid for one in reserve.take_weight(5)] == [0, 1]
        assert [one.uid for one in reserve.take_weight(5)] == [2]
        assert [one.uid for one in reserve.take_weight(5)] == [3]
        assert reserve.take_weight(5) == []

    def test_the_hub_is_told_of_fetched_items_in_bundles(self) -> None:
        reserve = Reserve("c")
        told = [reserve.fetched(item(uid)) for uid in range(40)]
        assert [len(uids) for uids in told if uids] == [32]
        assert reserve.all_fetched() == tuple(range(32, 40))
        assert reserve.fetched(item(41, nbytes=1 << 20)) == (41,)

    def test_only_so_many_channels_are_kept(self) -> None:
        reserves = Reserves()
        for number in range(Reserves.KEPT + 5):
            reserves.of(f"c{number}").received((item(0),))
        assert len(reserves._of) == Reserves.KEPT
        assert "c0" not in reserves._of


class Rig:
    """A hub, a writer and a reader on one thread, which is the engine thread of both."""

    def __init__(self) -> None:
        self.hub = HubServer("127.0.0.1", SECRET, 60.0)
        self.hub.start()
        self.driver = HubClient(self.hub.address, SECRET, Hello(DRIVER, 0, "", ("", 0)))
        self.driver.send(
            ev.OpenChannel(CHANNEL, "x/0", 100, 0),
            ev.AddReader(CHANNEL, "b"),
            ev.AddWriter(CHANNEL, "a[0]#0"),
            ev.SealWriters(CHANNEL),
        )
        self.store = PayloadStore()
        self.server = PayloadServer(self.store, SECRET, "127.0.0.1")
        self.clients = [self.driver]
        self.out = Writer(self.end("a", self.store, self.store.release), ChannelArg(CHANNEL, "out", "a[0]#0"))
        self.endpoint = self.end("b", PayloadStore(), None)

    def end(self, group: str, store: PayloadStore, on_release: Any) -> Endpoint:
        client = HubClient(self.hub.address, SECRET, Hello(f"{group}[0]", 0, "", ("", 0)), on_release=on_release)
        self.clients.append(client)
        fetcher = PayloadFetcher(SECRET, store, f"{group}[0]")
        return Endpoint(client, store, fetcher, self.server.address, group, 0, Clock(), Sections())

    def reader(self, portion: int | None = None) -> Reader:
        return Reader(self.endpoint, ChannelArg(CHANNEL, "in", portion=portion, sole=True))

    def put(self, *values: Any) -> None:
        """All of them are on the channel when it returns."""
        for value in values:
            self.out.put(value, key=value if isinstance(value, str) else None, timeout=PATIENCE_S)

    def until_undelivered(self, count: int) -> None:
        """Ask the hub until so many items are left on the channel."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.hub.call(lambda core: core.board.stats(CHANNEL)["items"])) != count:
            assert time.monotonic() < deadline, f"{left} items are left"

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        self.hub.stop()


@pytest.fixture(name="rig")
def _rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_items_come_in_order_and_are_asked_for_ahead(rig: Rig) -> None:
    rig.put(*range(40))
    reader = rig.reader()
    assert [reader.get(timeout=PATIENCE_S) for _ in range(3)] == [0, 1, 2]
    rig.until_undelivered(33)  # 3 are taken and 4 more on their way
    rig.out.close()
    assert list(reader) == list(range(3, 40))
    with pytest.raises(EndOfChannel):
        reader.get()
    reader.settle()
    assert rig.endpoint.reserves._of == {}


def test_what_was_asked_for_ahead_is_there_for_a_later_call(rig: Rig) -> None:
    rig.put(*range(20))
    first = rig.reader()
    got = [first.get() for _ in range(5)]
    first.settle()
    second = rig.reader()
    rig.put(*range(20, 25))
    rig.out.close()
    got += list(second)
    assert got == list(range(25))


def test_what_a_call_leaves_counts_as_unread_and_takes_credit(rig: Rig) -> None:
    rig.put(*range(100))  # as many as the channel holds
    first = rig.reader()
    assert [first.get() for _ in range(10)] == list(range(10))
    first.settle()
    kept = len(rig.endpoint.reserves.of(CHANNEL).items)
    assert kept > 0
    rig.endpoint.client.send()  # what was to go along
    rig.until_undelivered(90)
    assert rig.hub.call(lambda core: core.board._channels[CHANNEL].unread()) == 90
    rig.put(*range(100, 110))
    more = rig.out._endpoint.client.request(
        lambda req: ev.Put(req, "a[0]#0", CHANNEL, rig.out._prepare(110, (None,), 1.0)), "credit"
    )
    second = rig.reader()
    assert [second.get() for _ in range(kept)] == list(range(10, 10 + kept))
    rig.endpoint.client.send()
    rig.out._endpoint.client.wait(more, PATIENCE_S)  # what was kept gave its credit back when it was read
    rig.out.close()
    assert list(second) == list(range(10 + kept, 111))
    second.settle()
    rig.endpoint.client.send()
    rig.until_undelivered(0)


def test_settling_withdraws_the_request_that_waits(rig: Rig) -> None:
    rig.put(*range(4))
    reader = rig.reader()
    assert [reader.get() for _ in range(4)] == [0, 1, 2, 3]
    assert rig.endpoint.reserves.of(CHANNEL).pending is not None
    reader.settle()
    assert rig.hub.call(lambda core: dict(core.members["b[0]"].beside)) == {}
    rig.put(4)
    assert rig.reader().get() == 4


def test_keys_weights_and_portions_after_single_items(rig: Rig) -> None:
    rig.put("a", "b", "a", "c", "a", "b", "d")
    rig.out.close()
    reader = rig.reader()
    assert [reader.get(), reader.get()] == ["a", "b"]
    assert reader.get(key="c") == "c"
    assert reader.get_nowait(key="a") == "a"
    assert reader.get_nowait() == "a"
    assert [value for _ in range(2) for value in reader.get_batch(1)] == ["b", "d"]
    with pytest.raises(EndOfChannel):
        reader.get_nowait()


def test_portions_are_exact_also_when_some_items_were_taken_before(rig: Rig) -> None:
    rig.put(*range(11))
    reader = rig.reader(portion=4)
    assert [reader.get(), reader.get(), reader.get()] == [0, 1, 2]
    rig.out.close()
    assert list(reader.batches()) == [[3, 4, 5, 6], [7, 8, 9, 10]]


def test_the_next_portion_is_on_its_way_while_one_is_worked_on(rig: Rig) -> None:
    rig.put(*range(7))
    portions = rig.reader().batches(3)
    assert next(portions) == [0, 1, 2]
    rig.until_undelivered(1)  # the second portion is handed out while the first is worked on
    rig.out.close()
    assert list(portions) == [[3, 4, 5], [6]]


def test_a_portion_left_unread_is_read_by_the_next_call(rig: Rig) -> None:
    rig.put(*range(6))
    first = rig.reader()
    assert next(first.batches(2)) == [0, 1]
    first.settle()
    rig.out.close()
    assert list(rig.reader().batches(3)) == [[2, 3, 4], [5]]


def test_a_get_that_times_out_loses_nothing(rig: Rig) -> None:
    rig.put(0, 1)
    reader = rig.reader()
    assert [reader.get(), reader.get()] == [0, 1]
    with pytest.raises(WaitTimeout):
        reader.get(timeout=0.05)
    rig.put(2, 3)
    assert [reader.get(timeout=PATIENCE_S), reader.get(timeout=PATIENCE_S)] == [2, 3]


def test_a_fault_of_the_step_reaches_a_reader_that_had_asked_ahead(rig: Rig) -> None:
    rig.put(0, 1, 2)
    reader = rig.reader()
    assert [reader.get() for _ in range(3)] == [0, 1, 2]
    rig.driver.send(ev.FailStep("x/0", "as asked"))
    with pytest.raises(ChannelPoisoned, match="as asked"):
        reader.get(timeout=PATIENCE_S)
    reader.settle()


def test_puts_in_quick_succession_travel_together_and_in_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK_S", 100.0)
    sent: list[int] = []
    write = HubClient._write

    def count(self: HubClient, frames: list[bytes]) -> None:
        if self is rig.out._endpoint.client:
            sent.append(1)
        write(self, frames)

    monkeypatch.setattr(HubClient, "_write", count)
    rig.out._endpoint.client._last_put = module.time.monotonic()
    for value in range(3 * TOGETHER):
        rig.out.put(value)
    rig.out.close()
    assert len(sent) < TOGETHER, "most of them went with others"
    assert list(rig.reader()) == list(range(3 * TOGETHER))


def test_a_single_put_arrives_though_nothing_follows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK_S", 100.0)
    rig.out._endpoint.client._last_put = module.time.monotonic()
    rig.out.put("alone")
    assert rig.reader().get(timeout=PATIENCE_S) == "alone"


def test_other_messages_do_not_overtake_puts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK_S", 100.0)
    monkeypatch.setattr(module, "GATHER_S", 100.0)
    rig.out._endpoint.client._last_put = module.time.monotonic()
    rig.out.put("first")
    rig.out._endpoint.client.send(ev.CloseWriter(channel=CHANNEL, writer="a[0]#0"))
    assert list(rig.reader()) == ["first"]
