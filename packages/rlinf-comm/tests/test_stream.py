"""Framing: in whatever pieces bytes travel and wherever a timeout cuts, messages come out whole or not at all."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf_comm import frames
from rlinf_comm.connection import Connection
from rlinf_comm.directory import LocalDirectory
from rlinf_comm.errors import CommTimeout, FrameError
from rlinf_comm.frames import Arrived, Packet
from rlinf_comm.handshake import Hello
from rlinf_comm.selection import Thresholds
from rlinf_comm.stream import Ended, Stream
from rlinf_comm.transports import load
from rlinf_comm.transports.base import Place


def connection(sock: socket.socket, name: str, other: str) -> Connection:
    """A connection without the rest of a communicator: tcp only, nobody else reads or writes it."""
    place = Place("node", 1, frozenset({"tcp"}))
    endpoint = SimpleNamespace(
        name=name,
        uid=name,
        thresholds=Thresholds(),
        directory=LocalDirectory(),
        timeout=1.0,
        shared={},
        transport_class=load,
        io=SimpleNamespace(want=lambda conn: None),
    )
    stats = SimpleNamespace(fallbacks=0, transports={})
    peer: Any = SimpleNamespace(endpoint=endpoint, name=other, stats=stats, cond=threading.Condition())
    peer.take_token = lambda conn: False
    mine = Hello(name, other, name, "key", place, 1 << 20)
    theirs = Hello(other, name, other, "key", place, 1 << 20)
    stream = Stream(sock, name, other)
    conn = Connection(peer, stream, mine, theirs)
    stream.blocked = stream.wait_writable
    return conn


def pair() -> tuple[Connection, Connection]:
    one, two = socket.socketpair()
    ends = connection(one, "a", "b"), connection(two, "b", "a")
    for end in (one, two):  # small, so that writes stop in the middle
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ends


def message(number: int, sizes: list[int]) -> Packet:
    buffers = [np.random.default_rng(number).integers(0, 256, size, np.uint8).data for size in sizes]
    return Packet(f"message {number}".encode(), list(buffers), b"meta" * (number % 3))


def same(packet: Packet, found: Arrived) -> bool:
    return (packet.skeleton, packet.meta) == (found.skeleton, found.meta) and [bytes(b) for b in packet.buffers] == [  # type: ignore[arg-type]
        bytes(b) for b in found.buffers
    ]


SIZES = st.lists(st.sampled_from([0, 1, 15, 16, 17, 1000, 8192, 8193, 30_000, 200_000]), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=5), st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_frames_cut_anywhere_come_out_whole(all_sizes: list[list[int]], cuts: list[int]) -> None:
    writer, tap = socket.socketpair()
    feed, reader = socket.socketpair()
    sender, receiver = connection(writer, "a", "b"), connection(reader, "b", "a")
    packets = [message(i, sizes) for i, sizes in enumerate(all_sizes)]
    least = sum(map(sum, all_sizes)) // 2000  # byte by byte, much would take a second

    def send() -> None:
        for i, packet in enumerate(packets):
            sender.transmit(packet, i + 1, time.monotonic() + 20)
        writer.shutdown(socket.SHUT_WR)

    def relay() -> None:
        pieces = deque(cuts)
        while data := tap.recv(max(pieces[0], least)):
            pieces.rotate()
            feed.sendall(data)
        feed.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=send), threading.Thread(target=relay)]
    for thread in threads:
        thread.start()
    try:
        for i, packet in enumerate(packets):
            while True:
                try:
                    found = receiver.read_frame(time.monotonic() + 0.001)
                    break
                except CommTimeout:
                    continue  # it goes on where it stopped
            assert isinstance(found, Arrived)
            assert found.seq == i + 1 and same(packet, found)
        with pytest.raises(Ended) as caught:
            receiver.read_frame(time.monotonic() + 20)
        assert caught.value.clean
    finally:
        for thread in threads:
            thread.join(20)
        for sock in (writer, tap, feed, reader):
            sock.close()


class Cut(RuleBasedStateMachine):
    """Sends that give up at their deadline in the middle of a frame, controls in between, reads that give up too: what
    is received is exactly what was sent with success, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sender, self.receiver = pair()
        self.sent: deque[Packet] = deque()
        self.controls: deque[int] = deque()
        self.number = 0

    @rule(sizes=SIZES)
    def send(self, sizes: list[int]) -> None:
        self.number += 1
        packet = message(self.number, sizes)
        try:
            self.sender.transmit(packet, self.number, time.monotonic() + 0.002)
            self.sent.append(packet)
        except CommTimeout:
            pass  # then nothing of it may arrive

    @rule()
    def control(self) -> None:
        self.number += 1
        self.controls.append(self.number)
        self.sender.control(frames.header(frames.CREDIT, self.number))

    @rule(count=st.integers(1, 20))
    def read(self, count: int) -> None:
        for _ in range(count):
            try:
                found = self.receiver.read_frame(0.0)
            except CommTimeout:
                self.sender.flush_controls()
                continue
            self.judge(found)

    def judge(self, found: tuple[int, int, bytes] | Arrived | None) -> None:
        if isinstance(found, Arrived):
            assert same(self.sent.popleft(), found)
        elif found is not None:
            assert found[:2] == (frames.CREDIT, self.controls.popleft())

    @precondition(lambda self: self.sent)
    @invariant()
    def nothing_is_reordered(self) -> None:
        assert len(self.sent) <= self.number

    def teardown(self) -> None:
        deadline = time.monotonic() + 20
        while (self.sent or self.controls or self.sender.owes) and time.monotonic() < deadline:
            self.sender.flush_controls()
            try:
                self.judge(self.receiver.read_frame(0.0))
            except CommTimeout:
                continue
        assert not self.sent and not self.controls and not self.sender.owes
        for conn in (self.sender, self.receiver):
            conn.stream.close()


TestCut = Cut.TestCase
TestCut.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_what_is_no_frame_is_refused() -> None:
    one, two = socket.socketpair()
    receiver = connection(two, "b", "a")
    one.sendall(b"\0" * 100)
    with pytest.raises(FrameError, match="what came from a is no frame"):
        receiver.read_frame(time.monotonic() + 5)
    one.close()
    two.close()


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_a_malformed_table_is_refused(table: bytes, inline: bytes) -> None:
    try:
        buffers, parts, _, _ = frames.unpack_table(table, memoryview(inline))
    except FrameError:
        return
    assert len(buffers) >= sum(len(part.specs) for part in parts)
