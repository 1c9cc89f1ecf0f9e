"""Items that a reader asks for before it needs them: order, ends, withdrawal, and the ways to read mixed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_core.board import events as ev
from rlinf_core.channel import Clock, Endpoint, Sections, Writer
from rlinf_core.errors import Cancelled, ChannelError, ChannelFull, ChannelPoisoned, EndOfChannel, WaitTimeout
from rlinf_core.hub import client as module
from rlinf_core.hub.client import TOGETHER, HubClient
from rlinf_core.hub.messages import DRIVER, ChannelArg, Hello
from rlinf_core.hub.server import HubServer
from rlinf_core.payload import PayloadFetcher, PayloadServer, PayloadStore
from rlinf_core.reader import Reader, join
from rlinf_core.reserve import MOST_BYTES, MOST_ITEMS, Reserve

SECRET = b"s" * 32
PATIENCE_S = 20.0
CHANNEL = "x/0:c"


def item(uid: int, key: Any = None, nbytes: int = 10, weight: float = 1.0) -> ev.Item:
    return ev.Item(object(), key, weight, nbytes, uid=uid)


class TestReserve:
    def test_asks_for_more_and_more_as_long_as_items_are_small(self) -> None:
        reserve = Reserve()
        sizes = []
        for uid in range(8):
            reserve.received((item(uid),))
            sizes.append(reserve.size)
        assert sizes == [2, 4, 8, 16, 32, MOST_ITEMS, MOST_ITEMS, MOST_ITEMS]
        reserve.received((item(9, nbytes=MOST_BYTES // 3),))
        assert reserve.size == 3
        reserve.received((item(10, nbytes=10 * MOST_BYTES),))
        assert reserve.size == 1

    def test_the_hub_is_told_of_fetched_items_in_bundles(self) -> None:
        reserve = Reserve()
        told = [reserve.fetched(item(uid)) for uid in range(40)]
        assert [len(uids) for uids in told if uids] == [32]
        assert reserve.all_fetched() == tuple(range(32, 40))
        assert reserve.fetched(item(41, nbytes=1 << 20)) == (41,)


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


def test_what_a_call_leaves_is_unread_and_takes_credit(rig: Rig) -> None:
    rig.put(*range(100))  # as many as the channel holds
    first = rig.reader()
    assert [first.get() for _ in range(10)] == list(range(10))
    first.settle()
    rig.endpoint.client.send()  # what was to go along
    rig.until_undelivered(90)
    assert rig.hub.call(lambda core: core.board._channels[CHANNEL].unread()) == 90
    rig.put(*range(100, 110))
    with pytest.raises(ChannelFull):
        rig.out.put_nowait(110)
    rig.out.close()
    assert list(rig.reader()) == list(range(10, 110))


def test_an_iterator_kept_over_calls_reads_on(rig: Rig) -> None:
    rig.put(*range(30))
    first = rig.reader()
    kept = iter(first)
    got = [next(kept) for _ in range(3)]
    first.settle()
    got += [next(kept) for _ in range(6)]
    rig.out.close()
    got += list(rig.reader())
    assert got == list(range(30))


def test_two_threads_that_read_miss_nothing(rig: Rig) -> None:
    rig.put(*range(60))
    rig.out.close()
    reader = rig.reader()
    got = [reader.get() for _ in range(10)]
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.extend(reader))
    thread.start()
    got += list(reader)
    thread.join(PATIENCE_S)
    reader.settle()
    assert sorted(got + others) == list(range(60))


def test_a_join_after_single_items_gets_the_rest(rig: Rig) -> None:
    other = "x/0:d"
    rig.driver.send(
        ev.OpenChannel(other, "x/0", 100, 0),
        ev.AddReader(other, "b"),
        ev.AddWriter(other, "a[0]#1"),
        ev.SealWriters(other),
    )
    rig.put("a", "b", "c", "d")
    rig.out.close()
    second = Writer(rig.out._endpoint, ChannelArg(other, "out", "a[0]#1"))
    for key in ("d", "c"):
        second.put(key, key=key, timeout=PATIENCE_S)
    second.close()
    reader = rig.reader()
    assert [reader.get(), reader.get()] == ["a", "b"]
    pairs = join(reader, Reader(rig.endpoint, ChannelArg(other, "in", sole=True)), by="key")
    assert sorted(pairs) == [("c", "c"), ("d", "d")]


def test_what_is_to_be_served_is_served_though_nothing_is_waited_for(rig: Rig) -> None:
    rig.put(*range(50))
    reader = rig.reader()
    client = rig.endpoint.client
    assert [reader.get() for _ in range(20)] == list(range(20))
    served: list[int] = []
    client.serve_offload = lambda: served.append(1)
    with client._condition:
        client._offload_wanted = True
    assert reader.get() == 20
    assert served == [1]
    client.cancelled = "the run is being stopped: as asked"
    with pytest.raises(Cancelled, match="as asked"):
        reader.get()


def test_a_get_that_is_cancelled_while_it_fetches_still_counts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(0, 1)
    reader = rig.reader()
    entered, go_on = threading.Event(), threading.Event()
    fetch = Reader._fetch

    def slow(self: Reader, items: Any) -> Any:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return fetch(self, items)

    async def main() -> list[Any]:
        monkeypatch.setattr(Reader, "_fetch", slow)
        getting = asyncio.ensure_future(reader.get_async())
        while not entered.is_set():
            await asyncio.sleep(0)
        getting.cancel()
        await asyncio.sleep(0)
        go_on.set()
        return [await getting, await reader.get_async()]

    assert asyncio.run(main()) == [0, 1]


def test_settling_withdraws_the_request_that_waits(rig: Rig) -> None:
    rig.put(*range(4))
    reader = rig.reader()
    assert [reader.get() for _ in range(4)] == [0, 1, 2, 3]
    assert reader._reserve is not None
    assert reader._reserve.pending is not None
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
    reader = rig.reader()
    assert [reader.get(), reader.get(), reader.get()] == [0, 1, 2]
    rig.out.close()
    assert list(reader.batches(4)) == [[3, 4, 5, 6], [7, 8, 9, 10]]


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
    with pytest.raises((ChannelPoisoned, Cancelled), match="as asked"):  # whichever it hears of first
        reader.get(timeout=PATIENCE_S)


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


def test_a_key_that_cannot_travel_is_refused_where_it_is_put(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK_S", 100.0)
    rig.out.put(1)
    with pytest.raises(ChannelError, match=r"the key .*lock.* cannot be sent"):
        rig.out.put(2, key=threading.Lock())
    rig.out.put(3)
    rig.out.close()
    assert list(rig.reader()) == [1, 3]


def test_a_put_that_is_given_up_keeps_nothing(rig: Rig) -> None:
    rig.put(*range(100))
    for _ in range(3):
        with pytest.raises(WaitTimeout):
            rig.out.put(bytes(50_000), timeout=0.01)
    assert len(rig.store) == 0
