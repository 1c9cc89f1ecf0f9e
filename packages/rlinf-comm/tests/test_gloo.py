"""Gloo between two ends: bytes come as they went, failures are named, and the next message works."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlinf_comm.directory import FileDirectory
from rlinf_comm.errors import CommError, CommTimeout, PeerLost
from rlinf_comm.transports.base import BufferSpec, Link, Place
from rlinf_comm.transports.gloo import GlooTransport
from rlinf_comm.transports.groups import essence

TIMEOUT = 20.0


def link(path: Path, name: str, peer: str, timeout: float = TIMEOUT) -> Link:
    place = Place("n", 1, frozenset({"gloo"}))
    nowhere: Any = None
    return Link(
        place, place, name, peer, name < peer, nowhere, FileDirectory(path), "link/a-b", timeout, lambda: timeout
    )


def ends(path: Path, timeout: float = TIMEOUT) -> tuple[GlooTransport, GlooTransport]:
    return GlooTransport(link(path, "a", "b", timeout)), GlooTransport(link(path, "b", "a", timeout))


def specs(buffers: Sequence[memoryview]) -> list[BufferSpec]:
    return [BufferSpec(b.nbytes) for b in buffers]


def transfer(source: GlooTransport, target: GlooTransport, buffers: list[memoryview]) -> list[bytes]:
    ticket = source.offer(buffers)
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(target.pull, ticket, specs(buffers))
        source.push(buffers)
        found = pulled.result(TIMEOUT)
    assert all(isinstance(b, memoryview) and not b.readonly and b.format == "B" for b in found)
    return [bytes(b) for b in found if isinstance(b, memoryview)]


def push_until_it_fails(transport: GlooTransport) -> None:
    for _ in range(100):  # what fits into the sockets' buffers leaves without the peer
        transport.offer([])
        transport.push([memoryview(bytes(1 << 20))])


def test_buffers_of_any_size_come_as_they_went_in_both_directions(tmp_path: Path) -> None:
    a, b = ends(tmp_path)
    sent = [b"", b"x", bytes(range(256)) * 5000, b"", b"yz"]
    views = [memoryview(s) for s in sent]  # read-only memory, too
    for _ in range(3):
        assert transfer(a, b, views) == sent
        assert transfer(b, a, views[::-1]) == sent[::-1]
    assert transfer(a, b, []) == []
    a.close(False)
    b.close(False)


def test_many_messages_keep_their_order(tmp_path: Path) -> None:
    a, b = ends(tmp_path)
    messages = [[memoryview(bytes([i % 256]) * (1 + 37 * i)), memoryview(bytes([i % 251]))] for i in range(200)]
    tickets: list[bytes] = []
    offered = threading.Semaphore(0)

    def send() -> None:
        for buffers in messages:
            tickets.append(a.offer(buffers))
            offered.release()
            a.push(buffers)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for i, buffers in enumerate(messages):
            assert offered.acquire(timeout=TIMEOUT)
            assert b.pull(tickets[i], specs(buffers)) == buffers
        sending.result(TIMEOUT)
    a.close(False)
    b.close(False)


def test_a_late_sender_times_out_by_name_and_the_next_message_works(tmp_path: Path) -> None:
    a, b = ends(tmp_path)
    first = [memoryview(b"first")]
    assert transfer(a, b, first) == [b"first"]
    ticket = a.offer(first)
    b.link.remaining = lambda: 0.2
    with pytest.raises(CommTimeout, match=r"b: receiving from a by gloo took longer than 0\.2 s") as caught:
        b.pull(ticket, specs(first))
    assert (caught.value.me, caught.value.peer, caught.value.seconds) == ("b", "a", 0.2)
    b.link.remaining = lambda: TIMEOUT
    # The sender learns of it with the message that was late, and the one after has a new group.
    with pytest.raises(PeerLost, match="a: sending to b by gloo failed"):
        push_until_it_fails(a)
    assert transfer(a, b, [memoryview(b"next")]) == [b"next"]
    a.close(False)
    b.close(False)


def test_a_peer_that_never_comes_is_named(tmp_path: Path) -> None:
    a, _ = ends(tmp_path, timeout=0.3)
    buffers = [memoryview(b"x")]
    a.offer(buffers)
    with pytest.raises(CommError, match="a: waited 0.3 s for b to open its end of the gloo connection"):
        a.push(buffers)


def test_a_ticket_of_something_else_is_refused(tmp_path: Path) -> None:
    _, b = ends(tmp_path)
    with pytest.raises(CommError, match="3 bytes are no ticket of gloo"):
        b.pull(b"abc", [])


RECEIVE_AND_DIE = """
import os, sys
from rlinf_comm.directory import FileDirectory
from rlinf_comm.transports.base import BufferSpec, Link, Place
from rlinf_comm.transports.gloo import GlooTransport
here = Place("n", 2, frozenset({"gloo"}))
link = Link(here, here, "b", "a", False, None, FileDirectory(sys.argv[1]), "link/a-b", 20.0, lambda: 20.0)
found = GlooTransport(link).pull(bytes.fromhex(sys.argv[2]), [BufferSpec(5)])
os._exit(7 if found == [b"hello"] else 1)
"""


def test_the_death_of_the_receiver_is_noticed_in_seconds(tmp_path: Path) -> None:
    a = GlooTransport(link(tmp_path, "a", "b"))
    ticket = a.offer([])
    child = subprocess.Popen([sys.executable, "-c", RECEIVE_AND_DIE, str(tmp_path), ticket.hex()])
    a.push([memoryview(b"hello")])
    assert child.wait(TIMEOUT) == 7
    start = time.monotonic()
    with pytest.raises(PeerLost, match="a: sending to b by gloo failed: ") as caught:
        push_until_it_fails(a)
    assert time.monotonic() - start < 5
    assert (caught.value.me, caught.value.peer) == ("a", "b")
    a.close(True)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("[/src/gloo/pair.cc:5] Connection reset by peer. This is typically caused by …", "Connection reset by peer"),
        ("plain\nsecond line", "plain"),
        ("", "RuntimeError"),
    ],
)
def test_what_a_library_says_is_cut_to_its_essence(text: str, kept: str) -> None:
    assert essence(RuntimeError(text)) == kept
