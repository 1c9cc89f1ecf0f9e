"""Ends for tests of weight transfer: messages through queues or pipes, and processes that send or receive."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import queue
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlinf_comm.arena import Arena
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.local import dtype_of
from rlinf_comm.weights.movers import CommunicatorControl, ControlMover
from rlinf_comm.weights.receiver import Receiver
from rlinf_comm.weights.sender import Sender

SERVER = mp.get_context("forkserver")
"""Forks from a process that has loaded torch and has no threads."""
SERVER.set_forkserver_preload(["torch", "rlinf_comm.weights.receiver"])


class Queues:
    """Control between threads of one process: a queue for each pair."""

    def __init__(self, near: bool = True) -> None:
        self._near = near
        self._pairs: dict[tuple[int, int], queue.Queue[bytes]] = {}

    def pair(self, source: int, target: int) -> queue.Queue[bytes]:
        return self._pairs.setdefault((source, target), queue.Queue())

    def end(self, rank: int) -> QueueEnd:
        return QueueEnd(self, rank, self._near)


class QueueEnd:
    def __init__(self, queues: Queues, rank: int, near: bool) -> None:
        self._queues = queues
        self._rank = rank
        self._near = near
        self.tamper: Any = None

    def send(self, obj: Any, target: int, timeout: float) -> None:
        if self.tamper is not None:
            obj = self.tamper(obj)
        self._queues.pair(self._rank, target).put(pickle.dumps(obj), timeout=timeout)

    def receive(self, source: int, timeout: float) -> Any:
        try:
            return pickle.loads(self._queues.pair(source, self._rank).get(timeout=timeout))
        except queue.Empty:
            raise TimeoutError(f"nothing within {timeout:.1f} s") from None

    def process(self, target: int) -> int | None:
        return os.getpid() if self._near else None


class Pipes:
    """Control between processes: a pipe for each peer. ``processes``: ids of those that share memory."""

    def __init__(self, peers: dict[int, Connection], processes: dict[int, int] | None = None) -> None:
        self._peers = peers
        self._processes = processes or {}

    def send(self, obj: Any, target: int, timeout: float) -> None:
        self._peers[target].send_bytes(pickle.dumps(obj))

    def receive(self, source: int, timeout: float) -> Any:
        peer = self._peers[source]
        if not peer.poll(timeout):
            raise TimeoutError(f"nothing within {timeout:.1f} s")
        return pickle.loads(peer.recv_bytes())

    def process(self, target: int) -> int | None:
        return self._processes.get(target)


def tensors_of(layout: Layout, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Places filled so that every element of a parameter depends on seed, parameter and place in it alone."""
    held = layout.ranks[rank]
    places = {n: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype)) for n, spec in held.places.items()}
    for part in held.parts:
        sizes = [high - low for low, high in part.box]
        values = parameter(layout, part.parameter, seed)[tuple(slice(*r) for r in part.box)]
        places[part.place].as_strided(sizes, part.strides, part.offset).copy_(values)
    return places


def parameter(layout: Layout, name: str, seed: int) -> torch.Tensor:
    spec = layout.parameters[name]
    generator = torch.Generator().manual_seed(seed * 1000 + sorted(layout.parameters).index(name))
    if dtype_of(spec.dtype).is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(dtype_of(spec.dtype))
    return torch.randint(0, 100, spec.shape, generator=generator).to(dtype_of(spec.dtype))


def sender_process(source: Layout, target: Layout, peers: dict[int, Connection], orders: Connection) -> None:
    """Send the versions that are ordered, as ``(version, die after so many buckets or None)``, until told ``None``."""
    mover = ControlMover(Pipes(peers, dict.fromkeys(peers, os.getppid())), Arena(64 << 20))
    sender = Sender(0, source, target, mover, bucket_bytes=256, checksum="crc32")
    while (order := orders.recv()) is not None:
        version, fatal = order
        if fatal is not None:
            send, sent = mover.send, 0

            def send_some(header: Any, *rest: Any, send: Any = send, fatal: int = fatal) -> Any:
                nonlocal sent
                if header["kind"] == "bucket":
                    if sent == fatal:
                        signal.raise_signal(signal.SIGKILL)
                    sent += 1
                return send(header, *rest)

            mover.send = send_some  # type: ignore[method-assign]
        try:
            sender.send(version, tensors_of(source, 0, version), timeout=10.0)
            orders.send("sent")
        except Exception as error:
            orders.send(f"{type(error).__name__}: {error}")


def receiver_process(rank: int, layout: Layout, peer: Connection, orders: Connection) -> None:
    """Receive a version whenever ordered (with a timeout); report what came of it and what is installed."""
    own = tensors_of(layout, rank, 0)
    receiver = Receiver(rank, layout, ControlMover(Pipes({0: peer})), into=own)
    while (timeout := orders.recv()) is not None:
        if timeout == "kill":
            signal.raise_signal(signal.SIGKILL)
        try:
            outcome = f"version {receiver.receive(timeout)}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        orders.send((outcome, {name: tensor.clone().numpy() for name, tensor in own.items()}))


def poll(connection: Connection, seconds: float = 20.0) -> Any:
    if not connection.poll(seconds):
        raise TimeoutError("the process did not answer")
    return connection.recv()


def until(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def over_communicators(
    ends: list[Communicator], arena: Arena, other_names: dict[int, str] | None = None
) -> list[ControlMover]:
    """Movers of ``source i`` and ``target i``; ``other_names``: targets that go by another name."""
    movers = []
    for end in ends:
        names = dict(other_names or {}) if end.name.startswith("source") else {}
        far = "target" if end.name.startswith("source") else "source"
        control = CommunicatorControl(end, lambda rank, names=names, far=far: names.get(rank, f"{far} {rank}"))  # type: ignore[misc]
        movers.append(ControlMover(control, arena))
    return movers


def receive_over_communicator(directory: Path, layout: Layout, orders: Connection) -> None:
    """Be target rank 1 under the name ``victim``: receive versions until killed."""
    own = tensors_of(layout, 1, 0)
    with Communicator("victim", b"secret", FileDirectory(directory), timeout=30.0) as communicator:
        control = CommunicatorControl(communicator, lambda rank: f"source {rank}")
        receiver = Receiver(1, layout, ControlMover(control), into=own)
        while True:
            orders.send(f"version {receiver.receive(30.0)}")
