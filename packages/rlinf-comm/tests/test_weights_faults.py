"""Processes that are killed while weights move: what the others still have, and that the next version works."""

from __future__ import annotations

import multiprocessing as mp
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch
from weights_peers import SERVER, Pipes, parameter, poll, receiver_process, sender_process, tensors_of, until

from rlinf_comm.arena import Arena
from rlinf_comm.slots import unavailable
from rlinf_comm.weights import ControlMover, Layout, Receiver, Sender, Spec, TransferInterrupted, fsdp, replicated

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there is shared memory")

SPECS = {"embed": Spec((40, 8)), "q": Spec((8, 8)), "steps": Spec((3,), "int64")}
SOURCE = replicated(SPECS, 1)
BUCKETS = 7


class Workers:
    """Processes of a test; none is left behind."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []

    def ids(self) -> dict[int, int]:
        return {rank: process.pid or 0 for rank, process in enumerate(self.processes)}

    def pipe(self) -> tuple[Connection, Connection]:
        a, b = SERVER.Pipe()
        self.pipes += [a, b]
        return a, b

    def start_sender(self, target: Layout, peers: dict[int, Connection]) -> Connection:
        mine, theirs = self.pipe()
        return self.start(sender_process, (SOURCE, target, peers, theirs), mine, [theirs, *peers.values()])

    def start_receiver(self, rank: int, target: Layout, peer: Connection) -> Connection:
        mine, theirs = self.pipe()
        return self.start(receiver_process, (rank, target, peer, theirs), mine, [theirs, peer])

    def start(
        self, target: object, arguments: tuple[object, ...], mine: Connection, given: list[Connection]
    ) -> Connection:
        process = SERVER.Process(target=target, args=arguments)  # type: ignore[arg-type]
        process.start()
        self.processes.append(process)
        for pipe in given:
            pipe.close()
            self.pipes.remove(pipe)
        return mine


@pytest.fixture
def workers() -> Iterator[Workers]:
    own = Workers()
    yield own
    for process in own.processes:
        process.kill()
        process.join(10)
    for pipe in own.pipes:
        pipe.close()
    assert mp.active_children() == []


def assert_version(places: dict[str, torch.Tensor], version: int) -> None:
    for name in SPECS:
        assert torch.equal(torch.as_tensor(places[name]), parameter(SOURCE, name, version)), name


@pytest.mark.parametrize("after", [0, 1, BUCKETS - 1])
def test_a_sender_killed_after_k_buckets_leaves_the_old_version_and_a_new_one_works(
    workers: Workers, after: int
) -> None:
    target = replicated(SPECS, 1)
    own = tensors_of(target, 0, 0)
    here, there = workers.pipe()
    orders = workers.start_sender(target, {0: there})
    pipes = Pipes({0: here})
    receiver = Receiver(0, target, ControlMover(pipes), into=own)
    orders.send((1, None))
    assert receiver.receive(20.0) == 1 and poll(orders) == "sent"
    orders.send((2, after))
    with pytest.raises(
        TransferInterrupted, match=rf"version 2 was interrupted after {after} of {BUCKETS} buckets of rank 0"
    ) as caught:
        receiver.receive(20.0)
    assert caught.value.elsewhere and pickle.loads(pickle.dumps(caught.value)).elsewhere
    assert receiver.version == 1
    assert_version(own, 1)
    here, there = workers.pipe()
    orders = workers.start_sender(target, {0: there})
    receiver.connect(ControlMover(Pipes({0: here})))
    orders.send((3, None))
    assert receiver.receive(20.0) == 3 and poll(orders) == "sent"
    assert_version(own, 3)


def test_a_killed_receiver_is_named_the_other_gets_its_version_and_nothing_stays_reserved(workers: Workers) -> None:
    target = replicated(SPECS, 2)
    arena = Arena(1 << 20)
    ends = [workers.pipe(), workers.pipe()]
    orders = [workers.start_receiver(rank, target, there) for rank, (_, there) in enumerate(ends)]
    pipes = Pipes({rank: here for rank, (here, _) in enumerate(ends)}, workers.ids())
    mover = ControlMover(pipes, arena)
    sender = Sender(0, SOURCE, target, mover, bucket_bytes=256)
    for order in orders:
        order.send(20.0)
    sender.send(1, tensors_of(SOURCE, 0, 1))
    for order in orders:
        outcome, places = poll(order)
        assert outcome == "version 1"
        assert_version(places, 1)
    orders[1].send("kill")
    workers.processes[1].join(20)
    orders[0].send(20.0)
    with pytest.raises(TransferInterrupted, match="version 2: target rank 1 did not get it"):
        sender.send(2, tensors_of(SOURCE, 0, 2))
    outcome, places = poll(orders[0])
    assert outcome == "version 2"
    assert_version(places, 2)
    assert until(lambda: arena.stats().bytes_in_use == 0), arena.stats()
    here, there = workers.pipe()
    again = workers.start_receiver(1, target, there)
    mover = ControlMover(Pipes({0: ends[0][0], 1: here}, {0: workers.ids()[0], 1: workers.ids()[2]}), arena)
    orders[0].send(20.0)
    again.send(20.0)
    Sender(0, SOURCE, target, mover, bucket_bytes=256).send(3, tensors_of(SOURCE, 0, 3))
    for order in (orders[0], again):
        outcome, places = poll(order)
        assert outcome == "version 3"
        assert_version(places, 3)


def test_a_receiver_killed_with_buckets_it_has_not_read_gives_their_memory_back(workers: Workers) -> None:
    target = replicated(SPECS, 1)
    arena = Arena(1 << 20)
    here, there = workers.pipe()
    orders = workers.start_receiver(0, target, there)
    sender = Sender(0, SOURCE, target, ControlMover(Pipes({0: here}, workers.ids()), arena), bucket_bytes=256)
    sender.send(1, tensors_of(SOURCE, 0, 1))  # it has not been told to read
    assert arena.stats().lingering == BUCKETS
    orders.send("kill")
    workers.processes[0].join(20)
    with pytest.raises(TransferInterrupted, match=r"target rank 0: its process \d+ has ended") as caught:
        sender.close(20.0)
    assert caught.value.elsewhere
    with pytest.raises(TransferInterrupted, match="version 2: target rank 0 did not get it"):
        sender.send(2, tensors_of(SOURCE, 0, 2))
    assert arena.stats().bytes_in_use == 0


def test_a_receiver_that_is_too_slow_loses_the_version_by_name_and_gets_the_next(workers: Workers) -> None:
    target = fsdp(SPECS, 1)
    here, there = workers.pipe()
    orders = workers.start_receiver(0, target, there)
    mover = ControlMover(Pipes({0: here}, workers.ids()), Arena(1 << 20))
    send, buckets = mover.send, 0

    def stuck(header: dict[str, object], *rest: object) -> object:
        nonlocal buckets
        buckets += header["kind"] == "bucket"
        return {} if buckets > 2 else send(header, *rest)  # type: ignore[arg-type]

    mover.send = stuck  # type: ignore[method-assign, assignment]
    sender = Sender(0, SOURCE, target, mover, bucket_bytes=256)
    orders.send(0.5)
    sender.send(1, tensors_of(SOURCE, 0, 1))
    outcome, places = poll(orders)
    assert outcome.startswith(f"TransferInterrupted: rank 0: version 1 was interrupted after 2 of {BUCKETS} buckets")
    assert "TimeoutError" in outcome and "version -1 stays in use" in outcome
    assert_version(places, 0)
    mover.send = send  # type: ignore[method-assign]
    orders.send(20.0)
    sender.send(2, tensors_of(SOURCE, 0, 2))
    outcome, places = poll(orders)
    assert outcome == "version 2"
    assert_version(places, 2)
