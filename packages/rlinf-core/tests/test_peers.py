"""The run's directory: values are found once they are published, waits end, and both are seen in reports."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import drive

from rlinf_core import In, Out, Worker, task
from rlinf_core.errors import Cancelled, WaitTimeout
from rlinf_core.hub.client import HubClient
from rlinf_core.hub.core import HubCore
from rlinf_core.hub.messages import DRIVER, Cancel, Hello
from rlinf_core.hub.server import HubServer
from rlinf_core.peers import HubDirectory, peer_secret

SECRET = b"s" * 32
PATIENCE_S = 20.0


class Rig:
    def __init__(self) -> None:
        self.hub = HubServer("127.0.0.1", SECRET, 60.0)
        self.hub.start()
        self.clients = {
            name: HubClient(self.hub.address, SECRET, Hello(name, 0, "", ("", 0))) for name in (DRIVER, "a[0]", "b[0]")
        }

    def directory(self, name: str) -> HubDirectory:
        return HubDirectory(self.clients[name])

    def until_waiting(self, name: str) -> str:
        """The first thing that the member waits for, once it waits."""
        deadline = time.monotonic() + PATIENCE_S
        while not (waits := self.hub.call(lambda core: self._waits(core, name))):
            assert time.monotonic() < deadline
        return str(waits[0])

    @staticmethod
    def _waits(core: HubCore, name: str) -> list[str]:
        member = core.members.get(name)  # its client may have sent its greeting without the hub having read it
        return list(member.waits.values()) if member else []

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.hub.stop()


@pytest.fixture(name="rig")
def _rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_values_are_found_and_replaced(rig: Rig) -> None:
    rig.directory("a[0]").publish("key", b"1")
    assert rig.directory("a[0]").lookup("key", PATIENCE_S) == b"1"
    assert rig.directory("b[0]").lookup("key", PATIENCE_S) == b"1"
    rig.directory("b[0]").publish("key", b"")
    assert rig.directory("b[0]").lookup("key", PATIENCE_S) == b""


def test_a_lookup_waits_for_the_value_and_says_so(rig: Rig) -> None:
    found: list[bytes] = []

    def look() -> None:
        client = HubClient(rig.hub.address, SECRET, Hello("c[0]", 0, "", ("", 0)))
        rig.clients["c[0]"] = client
        started.set()
        found.append(HubDirectory(client).lookup("late", PATIENCE_S))

    started = threading.Event()
    thread = threading.Thread(target=look)
    thread.start()
    assert started.wait(PATIENCE_S)
    assert rig.until_waiting("c[0]") == "'late' in the run's directory"
    assert "c[0]" in rig.hub.call(lambda core: core.report())
    rig.directory("a[0]").publish("late", b"here")
    thread.join(PATIENCE_S)
    assert found == [b"here"]
    assert rig.hub.call(lambda core: (dict(core._lookups), dict(core.members["c[0]"].waits))) == ({}, {})


def test_a_lookup_that_takes_too_long_is_named_and_leaves_nothing(rig: Rig) -> None:
    with pytest.raises(WaitTimeout, match="'never' in the run's directory did not come within 0.05 s"):
        rig.directory("a[0]").lookup("never", 0.05)
    assert rig.hub.call(lambda core: dict(core._lookups)) == {}


def test_a_run_that_is_stopped_ends_the_wait(rig: Rig) -> None:
    timer = threading.Timer(0.05, lambda: rig.clients[DRIVER].send(Cancel("as asked")))
    timer.start()
    with pytest.raises(Cancelled, match="as asked"):
        rig.directory("a[0]").lookup("never", PATIENCE_S)


def test_a_lost_member_leaves_no_lookup(rig: Rig) -> None:
    def look() -> None:
        with contextlib.suppress(Cancelled):
            rig.directory("a[0]").lookup("x", PATIENCE_S)

    thread = threading.Thread(target=look)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not rig.hub.call(lambda core: dict(core._lookups)):
        assert time.monotonic() < deadline
    rig.clients["a[0]"].close()
    while rig.hub.call(lambda core: dict(core._lookups)):
        assert time.monotonic() < deadline
    thread.join(PATIENCE_S)


def test_the_secret_between_workers_is_not_the_hubs() -> None:
    assert peer_secret(SECRET) == peer_secret(SECRET) != SECRET


class Speaker(Worker):
    device = False

    @task
    def speak(self, out: Out[int]) -> None:
        self.peer.directory.publish(f"{self.peer.name} says", self.peer.host.encode())
        out.put(int.from_bytes(self.peer.directory.lookup("listener[0] says", PATIENCE_S), "big"))


class Listener(Worker):
    device = False

    @task
    def listen(self, items: In[int]) -> dict[str, float]:
        host = self.peer.directory.lookup("speaker[0] says", PATIENCE_S)
        self.peer.directory.publish("listener[0] says", len(host).to_bytes(1, "big"))
        return {"length": items.get(), "host": len(host)}


def test_workers_of_a_flow_find_each_other(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        speaker, listener = flow.group("speaker", Speaker), flow.group("listener", Listener)
        for step in flow.steps(1):
            items = step.channels("items")
            speaker.speak(items)
            step.report(listener.listen(items))
            step.join()

    (metrics,) = drive(program, None, tmp_path).metrics
    assert metrics["length"] == metrics["host"] > 0
