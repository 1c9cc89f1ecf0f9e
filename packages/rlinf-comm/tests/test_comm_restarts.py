"""Peers that begin again under their name, and what is kept of those that have ended."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from comm_peer import make
from comm_support import other, until

from rlinf_comm import frames, slots
from rlinf_comm.arena import Arena
from rlinf_comm.codec import CodecError
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import LocalDirectory
from rlinf_comm.errors import CommError, CommTimeout, PeerLost, RemoteError, ResourceLimit
from rlinf_comm.weights.movers import ControlMover
from rlinf_comm.work import Work

MIB = 1 << 20


@pytest.fixture
def comm(tmp_path: Path) -> Iterator[Communicator]:
    with make(str(tmp_path), "here", timeout=30.0) as own:
        yield own


@pytest.fixture
def directory() -> LocalDirectory:
    return LocalDirectory()


def mapped(pid: int) -> int:
    return sum(key[0] == pid for key in slots.mapped._maps)


@pytest.mark.parametrize("nbytes", [0, MIB])
def test_nothing_of_a_killed_peer_stays_mapped(comm: Communicator, tmp_path: Path, nbytes: int) -> None:
    with other("produce", tmp_path, "there", "here", 3, nbytes) as there:
        comm.recv("there")
        there.kill()
        peer = comm._endpoint.peer("there")
        until(lambda: peer.conn is None)
        assert isinstance(peer.lost, PeerLost)
        assert mapped(there.pid) == 0


def test_what_is_mapped_without_a_connection_goes_with_the_communicator(tmp_path: Path) -> None:
    with make(str(tmp_path), "here") as own, other("produce", tmp_path, "there", "here", 1, 0) as there:
        own.recv("there")
        there.expect("sent")
        peer = own._endpoint.peer("there")
        until(lambda: peer.conn is None)
        slots.mapped._maps[there.pid, 0, 0] = np.zeros(64, np.uint8)  # as by a reference that came in a message
        own.close()
        assert mapped(there.pid) == 0


def test_a_bucket_of_a_lost_sender_does_not_stay_mapped() -> None:
    slots.mapped.forget(os.getpid())  # of other tests
    arena = Arena(MIB)
    slot = arena.put([memoryview(bytes(64))], ("target",))
    assert slot is not None

    class Control:
        """One bucket, and then the sender is gone."""

        messages: ClassVar[list[Any]] = [({}, (slot.ref, 0))]

        def receive(self, source: int, timeout: float) -> Any:
            if not self.messages:
                raise PeerLost("gone")
            return self.messages.pop()

    control: Any = Control()
    mover = ControlMover(control)
    assert mover.receive(0, 1.0).packed is not None
    assert mapped(os.getpid()) == 1
    with pytest.raises(PeerLost):
        mover.receive(0, 1.0)
    assert mapped(os.getpid()) == 0
    arena.close()


def test_messages_of_the_dead_are_not_confirmed_to_who_has_its_name(comm: Communicator, tmp_path: Path) -> None:
    peer = comm._endpoint.peer("there")
    with other("produce", tmp_path, "there", "here", 4, 0) as there:
        until(lambda: len(peer.inbox) == 4, 60)
        there.kill()
        until(lambda: peer.conn is None)
    with other("produce", tmp_path, "there", "here", 3, 0) as there:
        until(lambda: len(peer.inbox) == 7 and bool(peer.flushes), 60)
        assert [comm.recv("there") for _ in range(4)] == [0, 1, 2, 3]
        assert (peer.consumed, peer.decoded, len(peer.flushes)) == (0, 0, 1)
        assert [comm.recv("there") for _ in range(3)] == [0, 1, 2]
        there.expect("sent")


def test_a_failure_on_a_message_of_the_dead_is_not_told(directory: LocalDirectory) -> None:
    with Communicator("a", b"s", directory) as a, Communicator("b", b"s", directory) as b:
        a.send(1, "b")
        peer = b._endpoint.peer("a")
        message = peer.receive(math.inf)
        peer.uid, uid = "of another process", peer.uid
        peer.consumed_one(message, "it cannot be decoded")
        assert (peer.consumed, peer.unfinished) == (0, 0)
        peer.uid = uid
        b.send(2, "a")
        assert a.recv("b") == 2  # the failure would have come before
        assert not a._endpoint.peer("b").failures


def test_who_waits_for_the_confirmation_of_the_dead_is_told(directory: LocalDirectory) -> None:
    with Communicator("a", b"s", directory) as a, Communicator("b", b"s", directory):
        a.send(1, "b")
        peer = a._endpoint.peer("b")
        with pytest.raises(PeerLost, match="a has lost b, which has begun again"):
            peer.await_answer(frames.ACK, 1, "of another process", math.inf, "")


def broadcast(group: dict[str, Communicator], members: list[str], obj: Any, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def call(name: str, comm: Communicator) -> None:
        try:
            found[name] = comm.broadcast(obj, source=members[0], members=members, timeout=seconds)
        except CommError as error:
            found[name] = error

    threads = [threading.Thread(target=call, args=item) for item in group.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.fixture
def group(directory: LocalDirectory) -> Iterator[dict[str, Communicator]]:
    made = {n: Communicator(n, b"s", directory, timeout=10.0, window_bytes=MIB) for n in "abc"}
    yield made
    for comm in made.values():
        comm.close()


def test_a_group_works_again_after_a_member_has_begun_again(
    group: dict[str, Communicator], directory: LocalDirectory
) -> None:
    names = list(group)
    for victim in ("c", "a"):
        for number in range(2):
            assert broadcast(group, names, number, 10.0) == dict.fromkeys(names, number)
        group[victim].close()
        group[victim] = Communicator(victim, b"s", directory, timeout=10.0, window_bytes=MIB)
        broadcast(group, names, "while it is found again", 1.0)
        assert broadcast(group, names, 5, 10.0) == dict.fromkeys(names, 5)


def test_a_group_works_again_after_a_member_has_missed_one(group: dict[str, Communicator]) -> None:
    names = list(group)
    missed = broadcast({n: group[n] for n in "ab"}, names, 1, 0.5)
    assert all(isinstance(error, RemoteError) and "from c" in str(error) for error in missed.values())
    for number in range(2):
        assert broadcast(group, names, number, 10.0) == dict.fromkeys(names, number)


def test_a_broadcast_that_nobody_takes_blocks_nothing(directory: LocalDirectory) -> None:
    only = frozenset({"tcp"})
    made = {n: Communicator(n, b"s", directory, window_bytes=MIB, capabilities=only) for n in "ab"}
    try:
        big = np.zeros(MIB, np.uint8)
        assert isinstance(broadcast({"a": made["a"]}, ["a", "b"], big, 0.5)["a"], RemoteError)
        work = made["b"].irecv("a")
        made["a"].send(big, "b", timeout=20)
        assert work.wait(20).nbytes == MIB
        made["b"].send("done", "a")
        made["a"].recv("b")
        assert len(made["b"]._endpoint.peer("a").collective) == 0
    finally:
        for comm in made.values():
            comm.close()


class Bad:
    def __reduce__(self) -> Any:
        return (int, ("x",))


def test_an_earlier_failure_is_not_that_of_a_broadcast(group: dict[str, Communicator]) -> None:
    names = list(group)
    group["a"].send(Bad(), "c")
    with pytest.raises(CodecError):
        group["c"].recv("a")
    peer = group["a"]._endpoint.peer("c")
    until(lambda: len(peer.failures) == 1)
    found = broadcast(group, names, np.ones(4 * MIB, np.uint8), 10.0)
    assert all(found[n].nbytes == 4 * MIB for n in names)
    del found
    gc.collect()
    until(lambda: group["a"]._endpoint.arena.stats().bytes_in_use < 4096)
    with pytest.raises(RemoteError, match="invalid literal"):
        group["a"].flush("c")


def test_a_slot_is_released_when_a_broadcast_stops_half_way(
    group: dict[str, Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(group)
    assert broadcast(group, names, 1, 10.0) == dict.fromkeys(names, 1)
    endpoint = group["a"]._endpoint

    def stops(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint.peer("b"), "send", stops)
    with pytest.raises(KeyboardInterrupt):
        group["a"].broadcast(np.ones(4 * MIB, np.uint8), source="a", members=names)
    assert endpoint.arena.stats().bytes_in_use < 4096


def test_a_message_that_the_other_end_would_not_read_is_refused(
    directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Communicator("a", b"s", directory) as a, Communicator("b", b"s", directory) as b:
        monkeypatch.setattr(frames, "MAX_PART", 1000)
        with pytest.raises(CodecError, match=r"takes \d+ bytes beside its tensors and arrays; 1000 is the most"):
            a.send(list(range(2000)), "b")
        with pytest.raises(RemoteError, match="1000 is the most"):
            b.recv("a")
        with pytest.raises(CodecError, match="1000 is the most"):
            a.broadcast(list(range(2000)), source="a", members=["a", "b"])
        with pytest.raises(RemoteError, match="1000 is the most"):
            b.broadcast(None, source="a", members=["a", "b"])
        a.send(1, "b")
        assert b.recv("a") == 1


def test_a_thread_that_cannot_start_is_an_error_that_passes(
    directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Communicator("a", b"s", directory) as a, Communicator("b", b"s", directory) as b:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            with pytest.raises(ResourceLimit, match="no more threads"):
                a.isend(1, "b")
            with pytest.raises(ResourceLimit, match="no more threads"):
                Communicator("c", b"s", directory)
        a.isend(2, "b").wait(20)
        a.send(3, "b")
        assert [b.recv("a"), b.recv("a")] == [2, 3]


def test_waiting_for_messages_keeps_no_connection_from_another(directory: LocalDirectory) -> None:
    others = [Communicator(f"b{i}", b"s", directory, timeout=20.0) for i in range(3)]
    hub = Communicator("hub", b"s", directory, timeout=20.0, max_connections=2)
    try:
        for comm in others[:2]:
            comm.send("first", "hub")
            assert hub.recv(comm.name) == "first"
        waiting = [hub.irecv(comm.name) for comm in others[:2]]
        hub.send(1, "b2")
        assert others[2].recv("hub") == 1
        for comm in others[:2]:
            comm.send("second", "hub")
        assert [work.wait(20) for work in waiting] == ["second", "second"]
    finally:
        for comm in [hub, *others]:
            comm.close()


def test_who_holds_the_connections_is_named(directory: LocalDirectory) -> None:
    made = [Communicator(n, b"s", directory, timeout=20.0) for n in ("b0", "b1")]
    hub = Communicator("hub", b"s", directory, timeout=20.0, max_connections=1)
    try:
        made[0].send(1, "hub")
        peer = hub._endpoint.peer("b0")
        until(lambda: bool(peer.inbox))  # which nobody takes: it is busy
        with pytest.raises(CommTimeout, match=r"hub has waited 0\.[34]\d* s: .*max_connections\) are in use, by b0"):
            hub.send(1, "b1", timeout=0.3)
    finally:
        for comm in [hub, *made]:
            comm.close()


def test_a_wait_may_be_for_ever_and_must_be_a_time(directory: LocalDirectory) -> None:
    with Communicator("a", b"s", directory, timeout=math.inf) as a, Communicator("b", b"s", directory) as b:
        work = b.irecv("a", timeout=math.inf)
        a.send(1, "b", timeout=math.inf)
        assert work.wait(math.inf) == 1
        for wrong in (math.nan, -1.0, -math.inf):
            for operation in (
                lambda t: a.send(1, "b", timeout=t),
                lambda t: a.recv("b", timeout=t),
                lambda t: a.broadcast(1, source="a", members=["a"], timeout=t),
                lambda t: Work("").wait(t),
                lambda t: Communicator("c", b"s", directory, timeout=t),
            ):
                with pytest.raises(CommError, match=rf"timeout={wrong!r}: it must be a number of seconds"):
                    operation(wrong)


def test_no_shared_memory_at_the_first_contact_does_not_mean_none_for_ever(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, other("echo", tmp_path, "there", "here") as there:
        patch.setattr(comm._endpoint.arena, "put", lambda *_: None)
        there.expect("ready")
        comm.send(1, "there")
        assert comm.recv("there") == 1
        patch.undo()
        comm.send(np.ones(MIB, np.uint8), "there")
        assert comm.recv("there").nbytes == MIB
        assert comm.stats()["there"].transports == {"shm": 1}
