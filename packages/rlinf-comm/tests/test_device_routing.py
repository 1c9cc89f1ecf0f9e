"""What a communicator does with device tensors, with a stand-in for ``cuda_ipc`` that moves no bytes.

Tensors on torch's ``meta`` device play those of an accelerator: they have everything but contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlinf_comm import transports
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import LocalDirectory
from rlinf_comm.errors import NoRoom, RemoteError
from rlinf_comm.transports.base import Buffer, BufferSpec, Transport

GPU = "GPU-of-both"
TIMEOUT = 20.0


class StandIn(Transport):
    """Counts what is offered, pulled and released."""

    name: ClassVar[str] = "cuda_ipc"
    needs_release: ClassVar[bool] = True
    held: ClassVar[dict[bytes, list[tuple[int, ...]]]] = {}
    offered: ClassVar[list[bytes]] = []
    specs: ClassVar[list[BufferSpec]] = []
    room: ClassVar[bool] = True

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        if not StandIn.room:
            raise NoRoom("none")
        assert all(isinstance(b, torch.Tensor) and b.is_contiguous() for b in buffers)
        ticket = f"ticket {len(StandIn.offered)}".encode()
        StandIn.offered.append(ticket)
        StandIn.held[ticket] = [tuple(b.shape) for b in buffers]
        return ticket

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        StandIn.specs += specs
        return [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in specs]

    def release(self, ticket: bytes) -> None:
        StandIn.held.pop(ticket, None)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Communicator, Communicator]]:
    load = transports.load
    monkeypatch.setattr(transports, "load", lambda name: StandIn if name == "cuda_ipc" else load(name))
    StandIn.held.clear()
    StandIn.offered.clear()
    StandIn.specs.clear()
    monkeypatch.setattr(StandIn, "room", True)
    directory = LocalDirectory()
    options: dict[str, Any] = {
        "timeout": TIMEOUT,
        "devices": (GPU,),
        "capabilities": frozenset({"tcp", "shm", "cuda_ipc"}),
    }
    with Communicator("a", b"s", directory, **options) as a, Communicator("b", b"s", directory, **options) as b:
        yield a, b


def test_device_and_host_parts_of_one_message_go_each_its_own_way(pair: tuple[Communicator, Communicator]) -> None:
    a, b = pair
    on_device = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    sent = {"d": on_device, "t": torch.empty(5, 2, device="meta").T, "h": np.arange(1 << 18), "small": b"x" * 100}
    a.send(sent, "b")
    found = b.recv("a")
    assert a.stats()["b"].transports == {"shm": 1, "cuda_ipc": 1}
    assert found["d"].device.type == "meta" and found["d"].shape == (3, 4) and found["d"].dtype == torch.bfloat16
    assert found["t"].shape == (2, 5) and found["t"].stride() == (1, 2)
    np.testing.assert_array_equal(found["h"], sent["h"])
    assert found["small"] == b"x" * 100
    assert all(spec.device == "meta" for spec in StandIn.specs)


def test_the_sender_is_told_when_the_receiver_is_done_with_a_ticket(pair: tuple[Communicator, Communicator]) -> None:
    a, b = pair
    for k in range(3):
        a.send({"d": torch.empty(k + 1, device="meta")}, "b", confirm=False)
    for k in range(3):
        assert b.recv("a")["d"].shape == (k + 1,)
    b.send("seen", "a")
    assert a.recv("b") == "seen"
    # What b has released was said before that.
    assert len(StandIn.offered) == 3 and StandIn.held == {}


def test_a_pull_that_fails_releases_too_and_the_next_message_works(
    pair: tuple[Communicator, Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair

    def fail(self: StandIn, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        raise RuntimeError("the device has no memory")

    with monkeypatch.context() as patch:
        patch.setattr(StandIn, "pull", fail)
        a.send({"d": torch.empty(3, device="meta")}, "b")
        with pytest.raises(RuntimeError, match="the device has no memory"):
            b.recv("a")
    b.send("seen", "a")
    with pytest.raises(RemoteError, match="the device has no memory"):
        a.recv("b")
    assert a.recv("b") == "seen"
    assert StandIn.held == {}
    a.send({"d": torch.empty(4, device="meta")}, "b")
    assert b.recv("a")["d"].shape == (4,)


def test_an_end_without_the_transport_is_no_end_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy to host memory is asked for; ``meta`` has no contents to copy, which is as far as this can go here."""
    asked: list[tuple[int, ...]] = []

    def to_host(buffer: Buffer) -> memoryview:
        assert isinstance(buffer, torch.Tensor)
        asked.append(tuple(buffer.shape))
        return memoryview(bytes(buffer.nbytes))

    monkeypatch.setattr("rlinf_comm.routing.to_host", to_host)
    directory = LocalDirectory()
    ways = frozenset({"tcp", "shm"})
    with (
        Communicator("a", b"s", directory, timeout=TIMEOUT, devices=(GPU,), capabilities=ways) as a,
        Communicator("b", b"s", directory, timeout=TIMEOUT, capabilities=ways) as b,
    ):
        a.send({"d": torch.empty(2, 3, device="meta")}, "b")
        found = b.recv("a")["d"]
    assert asked and found.device.type == "cpu" and found.shape == (2, 3)


def test_no_room_on_the_device_falls_back_to_host_memory(
    pair: tuple[Communicator, Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr(StandIn, "room", False)
    monkeypatch.setattr("rlinf_comm.routing.to_host", lambda buffer: memoryview(bytes(buffer.nbytes)))
    a.send({"d": torch.empty(2, 3, device="meta")}, "b")
    assert b.recv("a")["d"].shape == (2, 3)
    assert a.stats()["b"].fallbacks == 1 and "cuda_ipc" not in a.stats()["b"].transports
