"""Weights over communicators: two sources and two targets, in shared memory and over the network."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from weights_peers import SERVER, over_communicators, poll, receive_over_communicator, tensors_of

from rlinf_comm.arena import Arena
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.slots import unavailable
from rlinf_comm.weights import Layout, Receiver, Sender, Spec, TransferInterrupted, fsdp, split

SPECS = {"embed": Spec((40, 8)), "q": Spec((9, 8)), "scale": Spec(()), "steps": Spec((3,), "int64")}
SOURCE, TARGET = fsdp(SPECS, 2), split(SPECS, {"embed": 1, "q": 0}, 2, "balanced")
NETWORK = frozenset({"tcp"})
needs_memory = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there is shared memory")


@pytest.fixture
def ends(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    """Sources 0 and 1, targets 0 and 1."""
    capabilities = getattr(request, "param", None)
    window = 2048 if capabilities else 1 << 20  # small: those who wait for each other must not do so for ever
    directory = FileDirectory(tmp_path / "directory")
    made = [
        Communicator(name, b"secret", directory, timeout=20.0, window_bytes=window, capabilities=capabilities)
        for name in ("source 0", "source 1", "target 0", "target 1")
    ]
    yield made
    for communicator in made:
        communicator.close()


@pytest.mark.parametrize("ends", [pytest.param(None, marks=needs_memory), NETWORK], indirect=True, ids=["shm", "tcp"])
def test_versions_go_from_two_sources_to_two_targets(ends: list[Communicator]) -> None:
    arena = Arena(1 << 20)
    movers = over_communicators(ends, arena)
    own = [tensors_of(TARGET, rank, 0) for rank in range(2)]
    senders = [Sender(rank, SOURCE, TARGET, movers[rank], bucket_bytes=512, checksum="crc32") for rank in range(2)]
    receivers = [Receiver(rank, TARGET, movers[2 + rank], into=own[rank]) for rank in range(2)]
    with ThreadPoolExecutor(4) as pool:
        for version in (1, 2, 3):
            tasks = [pool.submit(s.send, version, tensors_of(SOURCE, r, version), 20.0) for r, s in enumerate(senders)]
            tasks += [pool.submit(receiver.receive, 20.0) for receiver in receivers]  # type: ignore[arg-type]
            assert [task.result(30) for task in tasks][2:] == [version, version]
            for rank in range(2):
                expected = tensors_of(TARGET, rank, version)
                assert all(torch.equal(own[rank][name], expected[name]) for name in expected)
    for sender in senders:
        sender.close(0.0)  # all has been read
    shared = ends[2].place.capabilities >= {"shm"}
    assert (arena.stats().puts > 0) == shared
    assert arena.stats().bytes_in_use == 0


@pytest.mark.parametrize("ends", [pytest.param(None, marks=needs_memory)], indirect=True, ids=["shm"])
def test_a_source_that_closes_is_there_until_the_slowest_target_has_read(
    ends: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(1 << 20)
    movers = over_communicators(ends, arena)
    senders = [Sender(rank, SOURCE, TARGET, movers[rank], bucket_bytes=512) for rank in range(2)]
    for rank, sender in enumerate(senders):
        sender.send(1, tensors_of(SOURCE, rank, 1), 20.0)
    looked, awaited = threading.Event(), arena.awaited

    def look() -> set[Hashable]:
        found = awaited()
        looked.set()
        return found

    monkeypatch.setattr(arena, "awaited", look)

    def end() -> None:
        for sender in senders:
            sender.close(20.0)
        arena.close()

    own = [tensors_of(TARGET, rank, 0) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end)
        assert looked.wait(20.0) and not ending.done()  # nobody has read anything
        for rank in range(2):
            assert Receiver(rank, TARGET, movers[2 + rank], into=own[rank]).receive(20.0) == 1
        ending.result(20.0)
    for rank in range(2):
        expected = tensors_of(TARGET, rank, 1)
        assert all(torch.equal(own[rank][name], expected[name]) for name in expected)


@pytest.mark.parametrize("ends", [pytest.param(None, marks=needs_memory)], indirect=True, ids=["shm"])
def test_a_source_that_closes_waits_no_longer_than_it_is_told(ends: list[Communicator]) -> None:
    target = fsdp(SPECS, 1)
    movers = over_communicators(ends, Arena(1 << 20))
    sender = Sender(0, target, target, movers[0], bucket_bytes=512)
    sender.close(0.0)  # nothing was sent
    sender.send(1, tensors_of(target, 0, 1), 20.0)
    own = tensors_of(target, 0, 0)
    with pytest.raises(TransferInterrupted, match=r"up to version 1 .* target rank 0: it has not read it within 0\.0"):
        sender.close(0.0)
    assert Receiver(0, target, movers[2], into=own).receive(20.0) == 1
    sender.close(0.0)
    assert torch.equal(own["embed"], tensors_of(target, 0, 1)["embed"])


@pytest.mark.parametrize("ends", [pytest.param(None, marks=needs_memory)], indirect=True, ids=["shm"])
def test_a_killed_target_is_named_and_the_other_gets_the_version(ends: list[Communicator], tmp_path: Path) -> None:
    target = fsdp(SPECS, 1)
    both = Layout(target.parameters, target.ranks * 2)
    movers = over_communicators([*ends[:1], *ends[1:2], ends[2]], Arena(1 << 20), {1: "victim"})
    mine, theirs = SERVER.Pipe()
    process = SERVER.Process(target=receive_over_communicator, args=(tmp_path / "directory", both, theirs))
    process.start()
    theirs.close()
    sender = Sender(0, target, both, movers[0], bucket_bytes=512)
    own = tensors_of(both, 0, 0)
    receiver = Receiver(0, both, movers[2], into=own)
    try:
        sender.send(1, tensors_of(target, 0, 1), 20.0)
        assert receiver.receive(20.0) == 1
        assert answer(mine) == "version 1"
        process.kill()
        process.join(20)
        with pytest.raises(TransferInterrupted, match="version 2: target rank 1 did not get it: .*victim"):
            sender.send(2, tensors_of(target, 0, 2), 20.0)
        assert receiver.receive(20.0) == 2
        assert torch.equal(own["embed"], tensors_of(both, 0, 2)["embed"])
    finally:
        process.kill()
        process.join(20)
        mine.close()


def answer(connection: Connection) -> str:
    return str(poll(connection, 30.0))
