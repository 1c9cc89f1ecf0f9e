"""Sending and receiving: order, errors at both ends, back-pressure, metadata, threads and asyncio."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comm_peer import make
from comm_support import PROBE, other, until

from rlinf_comm import errors
from rlinf_comm.codec import CodecError
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory, LocalDirectory, StoreDirectory
from rlinf_comm.endpoint import Endpoint
from rlinf_comm.errors import CommClosed, CommError, CommTimeout, PeerClosed, RemoteError
from rlinf_comm.selection import Thresholds

MIB = 1 << 20
ALL = frozenset({"inproc", "shm", "tcp"})


class Pair:
    def __init__(self, a: Communicator, b: Communicator) -> None:
        self.a, self.b = a, b


@pytest.fixture(params=["inproc", "shm", "tcp"])
def ways(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two ends for each transport."""
    yield from two(capabilities=frozenset({request.param, "tcp"}))


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield from two()


def two(**options: Any) -> Iterator[Pair]:
    directory = LocalDirectory()
    made = [Communicator(name, b"secret", directory, **{"timeout": 20.0, **options}) for name in "ab"]
    try:
        yield Pair(*made)
    finally:
        for comm in made:
            comm.close()


class Opaque:
    """Something that only pickle knows, and that can refuse to be unpickled."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["value"] < 0:
            raise ValueError("negative values cannot be read")
        self.__dict__.update(state)


def test_objects_arrive_as_they_went(ways: Pair) -> None:
    sent = {
        "tokens": torch.arange(100_000).reshape(100, 1000).t(),
        "nested": [(1, None, "text"), {"bytes": b"x" * 50_000, "empty": torch.zeros(0, 3)}],
        "half": torch.ones(70_000, dtype=torch.bfloat16),
        "small": np.arange(3.0),
        "object": Opaque(3),
    }
    ways.a.send(sent, "b", meta={"step": 3, "weights": np.ones(30_000)})
    found = ways.b.recv_message("a", timeout=10)
    got = found.obj
    assert found.source == "a" and found.meta["step"] == 3 and found.meta["weights"].sum() == 30_000
    assert torch.equal(got["tokens"], sent["tokens"]) and got["tokens"].stride() == sent["tokens"].stride()
    assert got["nested"][0] == (1, None, "text") and got["nested"][1]["bytes"] == b"x" * 50_000
    assert got["half"].dtype == torch.bfloat16 and got["half"].sum() == 70_000
    assert got["object"].value == 3 and got["nested"][1]["empty"].shape == (0, 3)


def test_what_was_sent_may_change_afterwards(ways: Pair) -> None:
    tensor = torch.zeros(MIB)
    ways.a.send(tensor, "b")
    tensor.fill_(1)
    assert ways.b.recv("a").sum() == 0


def test_the_transport_is_the_one_of_the_place(ways: Pair, request: pytest.FixtureRequest) -> None:
    ways.a.send(np.zeros(MIB, np.uint8), "b")
    ways.a.send(1, "b")
    ways.b.recv("a"), ways.b.recv("a")
    stats = ways.a.stats()["b"]
    assert stats.transports == {request.node.callspec.params["ways"]: 1}
    assert (stats.sent, stats.fallbacks) == (2, 0) and stats.sent_bytes > MIB
    assert ways.b.stats()["a"].received == 2


def test_one_order_over_all_ways_of_sending_and_receiving(ways: Pair) -> None:
    works = []
    for i in range(0, 60, 3):
        works.append(ways.a.isend((i, np.zeros(40_000 if i % 2 else 4)), "b"))
        ways.a.send((i + 1, None), "b")
        works.append(ways.a.isend((i + 2, None), "b"))
    got = []
    for _ in range(0, 60, 3):
        works.append(ways.b.irecv("a"))
        got.append(ways.b.recv("a")[0])
        got[-1:-1] = [works[-1].result()[0]]
        got.append(ways.b.recv("a")[0])
    assert got == list(range(60))
    for work in works:
        work.wait(5)


def test_many_threads_on_one_pair(pair: Pair) -> None:
    per, threads = 300, 8
    got: list[tuple[int, int]] = []

    def send(sender: int) -> None:
        for i in range(per):
            pair.a.send((sender, i), "b")

    def receive() -> None:
        for _ in range(per):
            got.append(pair.b.recv("a"))

    running = [threading.Thread(target=send, args=(n,)) for n in range(threads)]
    running += [threading.Thread(target=receive) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert len(set(got)) == per * threads == len(got)


def test_both_send_before_either_receives() -> None:
    for pair in two(capabilities=frozenset({"tcp"})):
        big = np.ones(12 * MIB)
        threads = [
            threading.Thread(target=pair.a.send, args=(big, "b")),
            threading.Thread(target=pair.b.send, args=(big, "a")),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert pair.a.recv("b").sum() == pair.b.recv("a").sum() == 12 * MIB


def test_a_ring_of_blocked_senders_goes_on() -> None:
    directory = LocalDirectory()
    names = ["x", "y", "z"]
    options: dict[str, Any] = {"timeout": 30.0, "capabilities": frozenset({"tcp"})}
    ring = {name: Communicator(name, b"s", directory, **options) for name in names}
    big = np.ones(3 * MIB)
    threads = [threading.Thread(target=ring[n].send, args=(big, names[i - 2])) for i, n in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for i, name in enumerate(names):
        assert ring[name].recv(names[i - 1]).sum() == 3 * MIB
    for comm in ring.values():
        comm.close()


def test_both_connect_at_once_and_one_connection_stays() -> None:
    for _ in range(25):
        for pair in two():
            start = threading.Barrier(2)
            failed: list[BaseException] = []

            def run(me: Communicator, to: str, start: threading.Barrier = start, failed: Any = failed) -> None:
                try:
                    start.wait()
                    me.send(me.name, to)
                    assert me.recv(to) == to
                except BaseException as error:
                    failed.append(error)

            threads = [
                threading.Thread(target=run, args=(pair.a, "b")),
                threading.Thread(target=run, args=(pair.b, "a")),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert not failed
            assert pair.a.stats()["b"].connections == pair.b.stats()["a"].connections == 1


def test_an_object_that_cannot_be_sent_raises_at_both_ends(ways: Pair) -> None:
    with pytest.raises(CodecError, match=r"\['fault'\]"):
        ways.a.send({"fault": (i for i in ())}, "b")
    ways.a.send("next", "b")
    with pytest.raises(RemoteError, match=r"a failed .*\['fault'\]") as caught:
        ways.b.recv("a")
    assert (caught.value.me, caught.value.peer) == ("b", "a")
    assert ways.b.recv("a") == "next"


def test_an_object_that_cannot_be_decoded_raises_at_both_ends(ways: Pair) -> None:
    ways.a.send((np.zeros(MIB), Opaque(-1)), "b")
    ways.a.send("next", "b")
    with pytest.raises(CodecError, match="negative values cannot be read"):
        ways.b.recv("a")
    assert ways.b.recv("a") == "next"
    with pytest.raises(RemoteError, match=r"b failed .*negative values cannot be read"):
        ways.a.flush("b")  # it comes at once, or with the answer
    ways.a.send("again", "b")
    assert ways.b.recv("a") == "again"
    ways.a.flush("b")


def test_confirm_waits_for_the_receiver_and_has_its_error(pair: Pair) -> None:
    work = pair.a.isend(1, "b", confirm=True)
    with pytest.raises(CommTimeout):
        work.wait(0.1)
    assert pair.b.recv("a") == 1
    work.wait(5)
    work = pair.a.isend(Opaque(-1), "b", confirm=True)
    with pytest.raises(CodecError):
        pair.b.recv("a")
    with pytest.raises(RemoteError, match="negative"):
        work.wait(5)
    with pytest.raises(CommTimeout, match="b has not confirmed"):
        pair.a.send(2, "b", confirm=True, timeout=0.1)
    assert pair.b.recv("a") == 2  # only the answer was late


def test_a_request_that_cannot_be_decoded_ends_the_wait_for_its_answer(pair: Pair) -> None:
    pair.a.send(Opaque(-1), "b")
    answer = pair.a.irecv("b")
    with pytest.raises(CodecError):
        pair.b.recv("a")
    with pytest.raises(RemoteError, match="negative"):
        answer.wait(5)


def test_without_pickle_only_what_the_codec_knows_goes() -> None:
    for pair in two(allow_pickle=False):
        with pytest.raises(CodecError):
            pair.a.send(Opaque(1), "b")
        with pytest.raises(RemoteError):
            pair.b.recv("a")


def test_a_timeout_loses_nothing(ways: Pair) -> None:
    with pytest.raises(CommTimeout, match=r"b has waited .*nothing has come from a") as caught:
        ways.b.recv("a", timeout=0.05)
    assert caught.value.peer == "a" and caught.value.seconds < 5
    ways.a.send(np.ones(MIB), "b")
    assert ways.b.recv("a").sum() == MIB
    work = ways.b.irecv("a", timeout=0.05)
    with pytest.raises(CommTimeout):
        work.wait(5)
    ways.a.send("kept", "b")
    assert ways.b.recv("a") == "kept"


def test_a_send_that_times_out_is_not_delivered_and_the_next_ones_are() -> None:
    for pair in two(capabilities=frozenset({"tcp"}), window_bytes=256 << 10):
        sent = []
        for number in range(200):
            try:
                pair.a.send((number, np.full(9000 + number * 300, number)), "b", timeout=0.02)
                sent.append(number)
            except CommTimeout:
                if number % 3 == 0:
                    assert pair.b.recv("a", timeout=5)[0] == sent.pop(0)
        assert len(sent) < 195
        pair.a.isend("end", "b")
        for number in sent:
            found, values = pair.b.recv("a", timeout=5)
            assert found == number and (values == number).all()
        assert pair.b.recv("a") == "end"


def test_a_slow_consumer_stops_the_producer(ways: Pair) -> None:
    for pair in two(window_bytes=MIB, capabilities=ways.a.place.capabilities):
        thread = threading.Thread(
            target=lambda comm: [comm.send(np.full(100_000, n, np.uint8), "b") for n in range(200)], args=(pair.a,)
        )
        thread.start()
        peer = pair.a._endpoint.peer("b")
        until(lambda peer=peer: peer.sent > 5 and peer.active > 0)  # type: ignore[misc]
        assert peer.sent < 40  # it waits for the window, with more than ten messages unconsumed
        for number in range(200):
            assert pair.b.recv("a")[0] == number
        thread.join(20)
        assert peer.sent == 200


def test_an_item_larger_than_the_window_goes_alone(ways: Pair) -> None:
    for pair in two(window_bytes=64 << 10, capabilities=ways.a.place.capabilities):
        for _ in range(3):
            pair.a.send(np.ones(MIB), "b")
            assert pair.b.recv("a").sum() == MIB


def test_views_of_shared_memory_are_not_copies_and_come_back() -> None:
    for pair in two(capabilities=frozenset({"shm", "tcp"})):
        arena = pair.a._endpoint.arena
        for _ in range(30):
            pair.a.send(torch.ones(MIB), "b")
            view = pair.b.recv("a")[10:20]
            assert arena.stats().bytes_in_use > 4 * MIB and view.sum() == 10
            del view
        gc.collect()
        assert arena.stats().bytes_in_use < PROBE
        assert arena.stats().bytes_reserved < 20 * MIB  # the same memory each time
        held = []
        for number in range(5):
            pair.a.send(np.full(MIB, number), "b")
            held.append(pair.b.recv("a"))
        assert [int(h.sum()) // MIB for h in held] == list(range(5))


def test_exhausted_shared_memory_falls_back_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    for pair in two(capabilities=frozenset({"shm", "tcp"}), shm_limit_bytes=5 * MIB):
        with caplog.at_level(logging.WARNING, "rlinf.comm"):
            held = []
            for number in range(10):
                pair.a.send(np.full(MIB, number % 100, np.uint8), "b")
                held.append(pair.b.recv("a"))
        assert [int(h[-1]) for h in held] == list(range(10))
        stats = pair.a.stats()["b"]
        assert stats.fallbacks >= 5 and stats.transports["tcp"] == stats.fallbacks
        assert caplog.text.count("no room for") == 1
        assert f"(the limit is {5 * MIB} bytes: shm_limit_bytes); the message goes another way" in caplog.text
        held.clear()
        gc.collect()
        pair.a.send(np.zeros(MIB, np.uint8), "b")
        assert pair.a.stats()["b"].transports["shm"] == stats.transports["shm"] + 1


def test_memory_that_the_other_cannot_open_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Endpoint._opens
    monkeypatch.setattr(Endpoint, "_opens", lambda self, theirs: self.name != "b" and opens(self, theirs))
    for dialed_by in ("a", "b"):
        for pair in two(capabilities=frozenset({"shm", "tcp"})):
            first = pair.a if dialed_by == "a" else pair.b
            first.send(0, "b" if first is pair.a else "a")
            pair.a.send(np.ones(MIB), "b")
            pair.b.send(np.ones(MIB), "a")
            if first is pair.a:
                assert pair.b.recv("a") == 0
            else:
                assert pair.a.recv("b") == 0
            assert pair.b.recv("a").sum() == pair.a.recv("b").sum() == MIB
            assert pair.a.stats()["b"].transports == {"tcp": 1}
            assert pair.b.stats()["a"].transports == {"shm": 1}


def test_handles_in_asyncio_do_not_block_the_loop(pair: Pair) -> None:
    async def run() -> tuple[list[Any], int]:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(turn())
        receiving = [pair.b.irecv("a") for _ in range(20)]
        async with asyncio.timeout(10):
            while turns < 5:  # the loop goes on while twenty receives wait
                await asyncio.sleep(0)
        for number in range(20):
            await pair.a.isend(np.full(20_000, number), "b")
        got = [int((await work)[0]) for work in receiving]
        ticking.cancel()
        with pytest.raises(CommTimeout):
            await pair.b.irecv("a", timeout=0.01)
        return got, turns

    got, turns = asyncio.run(run())
    assert got == list(range(20)) and turns > 5


def test_connections_are_bounded_and_given_up_without_loss() -> None:
    directory = LocalDirectory()
    hub = Communicator("hub", b"s", directory, timeout=20.0, max_connections=3)
    others = [Communicator(f"peer{i}", b"s", directory, timeout=20.0) for i in range(8)]
    try:
        for turn in range(3):
            for i, comm in enumerate(others):
                hub.send((turn, i), comm.name)
                hub.send(np.full(50_000, i), comm.name)
                assert sum(p.conn is not None for p in hub._endpoint.peers()) <= 3
            for i, comm in enumerate(others):
                assert comm.recv("hub") == (turn, i)
                assert comm.recv("hub")[0] == i
                comm.send(i, "hub")
            for i, comm in enumerate(others):
                assert hub.recv(comm.name) == i
        assert all(comm._endpoint.peer("hub").lost is None for comm in others)
        assert sum(s.connections for s in hub.stats().values()) > 8
    finally:
        for comm in [hub, *others]:
            comm.close()


def test_a_receiver_whose_connection_was_given_up_waits_for_the_next(pair: Pair) -> None:
    pair.a.send(1, "b")
    assert pair.b.recv("a") == 1
    waiting = pair.b.irecv("a")
    until(lambda: pair.b._endpoint.peer("a").active > 0)
    until(lambda: pair.a._endpoint.peer("b").leave())
    until(lambda: pair.b._endpoint.peer("a").conn is None)
    assert not waiting.done()
    pair.a.send(2, "b", confirm=True)
    assert waiting.wait(5) == 2
    assert pair.a.stats()["b"].connections == 2


def test_closed_ends(pair: Pair) -> None:
    pair.a.send("last", "b")
    pair.a.close()
    pair.a.close()
    for operation in (lambda: pair.a.send(1, "b"), lambda: pair.a.recv("b"), lambda: pair.a.isend(1, "b")):
        with pytest.raises(CommClosed, match="a is closed"):
            operation()
    assert pair.b.recv("a") == "last"
    with pytest.raises(PeerClosed, match="a has closed"):
        pair.b.recv("a")
    with pytest.raises(PeerClosed):
        pair.b.send(1, "a")


def test_closing_ends_waits_in_other_threads(pair: Pair) -> None:
    pair.a.send(1, "b")
    pair.b.recv("a")
    work = pair.b.irecv("a")
    until(lambda: pair.b._endpoint.peer("a").active > 0)
    pair.b.close()
    with pytest.raises(CommClosed):
        work.wait(5)


def test_a_consumer_that_raises_between_receives_loses_nothing(pair: Pair) -> None:
    work = [pair.a.isend((number, np.full(5000, number)), "b") for number in range(40)]
    got: list[int] = []
    while len(got) < 40:
        try:
            while len(got) < 40:
                number, values = pair.b.recv("a")
                assert (values == number).all()
                got.append(number)
                if number % 7 == 3:
                    raise KeyError(number)
        except KeyError:
            continue
    assert got == list(range(40))
    for one in work:
        one.wait(5)


def test_misuse_is_refused(pair: Pair) -> None:
    with pytest.raises(CommError, match="a cannot send to itself"):
        pair.a.send(1, "a")
    for options in ({"timeout": 0.0}, {"window_bytes": 0}, {"max_connections": 0}):
        with pytest.raises(CommError, match="more than 0"):
            Communicator("c", b"s", LocalDirectory(), **options)  # type: ignore[arg-type]
    with pytest.raises(CommError, match="a name and a secret"):
        Communicator("c", b"", LocalDirectory())
    with pytest.raises(CommError, match="c: the secret must be bytes, not str"):
        Communicator("c", "secret", LocalDirectory())  # type: ignore[arg-type]
    with pytest.raises(CommError, match="cannot listen on 203"):
        Communicator("c", b"s", LocalDirectory(), host="203.0.113.1")


def test_tcp_between_nodes_that_only_look_alike() -> None:
    """Where the unix socket is not reachable (another network namespace) the other address is used."""
    for pair in two(capabilities=frozenset({"tcp"})):
        record = pair.b._endpoint._record
        from dataclasses import replace

        from rlinf_comm.endpoint import key_of

        pair.a._endpoint.directory.publish(key_of("b"), replace(record, unix="nobody-here").pack())
        pair.a.send(np.ones(MIB), "b")
        assert pair.b.recv("a").sum() == MIB
        conn = pair.a._endpoint.peer("b").conn
        assert conn is not None and conn.stream.is_tcp


@pytest.mark.parametrize("kind", ["file", "store"])
def test_directories(kind: str, tmp_path: Path) -> None:
    directory: Any = FileDirectory(tmp_path) if kind == "file" else StoreDirectory(torch.distributed.HashStore())
    with pytest.raises(TimeoutError, match="'some/key'"):
        directory.lookup("some/key", 0.05)
    threading.Timer(0.05, directory.publish, ("some/key", b"\x00\xffvalue")).start()
    assert directory.lookup("some/key", 10) == b"\x00\xffvalue"
    directory.publish("some/key", b"newer")
    assert directory.lookup("some/key", 0) == b"newer"


@pytest.mark.parametrize("name", [n for n in dir(errors) if isinstance(getattr(errors, n), type)])
def test_errors_survive_pickling(name: str) -> None:
    cls = getattr(errors, name)
    if not issubclass(cls, CommError):
        return
    special = {CommTimeout: {"what": "w", "seconds": 2.0}, RemoteError: {"text": "t"}}.get(cls, {})
    error = cls("message", me="a", peer="b", **special)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls and str(again) == "message"
    assert (again.me, again.peer) == ("a", "b")
    assert all(getattr(again, key) == value for key, value in special.items())
    assert again.__notes__ == ["a note"]


def test_importing_the_communicator_loads_neither_torch_nor_ray() -> None:
    code = "import sys, rlinf_comm.communicator; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_small_items(tmp_path: Path, count: int) -> None:
    with make(str(tmp_path), "here") as comm, other("produce", tmp_path, "there", "here", count, 4):
        for number in range(count):
            assert comm.recv("there") == number
        assert comm.stats()["there"].received == count


def test_a_hundred_producers_and_one_consumer(tmp_path: Path) -> None:
    names = [f"p{i}" for i in range(100)]
    with make(str(tmp_path), "here") as comm:
        halves = names[:50], names[50:]
        with (
            other("produce_many", tmp_path, "first", ",".join(halves[0]), "here", 20),
            other("produce_many", tmp_path, "second", ",".join(halves[1]), "here", 20),
        ):
            for number in range(20):
                for name in names:
                    assert comm.recv(name) == (name, number)


@pytest.mark.slow
def test_a_hundred_producers_and_a_hundred_consumers(tmp_path: Path) -> None:
    producers, consumers = [f"p{i}" for i in range(100)], [f"c{i}" for i in range(100)]
    failed: list[BaseException] = []
    counts: list[int] = []

    def consume(name: str) -> None:
        try:
            with make(str(tmp_path), name) as comm:
                got = [comm.recv(producer) for _ in range(2) for producer in producers]
                assert got == [(producer, number) for number in range(2) for producer in producers]
                counts.append(len(got))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=consume, args=(name,)) for name in consumers]
    for thread in threads:
        thread.start()
    with other("produce_many", tmp_path, "starter", ",".join(producers), ",".join(consumers), 2) as there:
        there.expect("sent", 200)
        for thread in threads:
            thread.join(120)
    assert not failed and counts == [200] * 100


def test_thresholds_decide() -> None:
    for pair in two(capabilities=frozenset({"shm", "tcp"}), thresholds=Thresholds(shm_from=MIB)):
        pair.a.send(np.zeros(MIB - 1, np.uint8), "b")
        pair.a.send(np.zeros(MIB, np.uint8), "b")
        assert pair.b.recv("a").nbytes + 1 == pair.b.recv("a").nbytes == MIB
        assert pair.a.stats()["b"].transports == {"tcp": 1, "shm": 1}
