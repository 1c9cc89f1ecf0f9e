"""The hub's sockets: who is let in, whole messages out of chunks, deaths, what cannot be read, and slow members."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_core.board import events as ev
from rlinf_core.hub import codec, connection, server, wire
from rlinf_core.hub.client import HubClient
from rlinf_core.hub.connection import Connection
from rlinf_core.hub.messages import DRIVER, Accepted, Blocked, Call, Cancel, Died, Failure, Goodbye, Hello, Log, Release
from rlinf_core.hub.server import HubServer
from rlinf_core.payload import Descriptor

SECRET = b"s" * 32
PATIENCE_S = 20.0


class Peer:
    """A member by hand: a socket that sends bytes and gets messages."""

    def __init__(self, hub: HubServer, member: str, greet: bool = True) -> None:
        self.member = member
        self.socket = wire.connect(hub.address, SECRET, PATIENCE_S)
        self.socket.settimeout(PATIENCE_S)
        self._frames = wire.Frames()
        self._got: list[Any] = []
        self.rest = b""
        if greet:
            self.send(Hello(member, 0, "", ("", 0)))

    def send(self, *messages: Any) -> None:
        self.socket.sendall(b"".join(codec.pack(m) for m in messages))

    def take(self, count: int) -> list[Any]:
        """The next ``count`` messages; fewer if the hub closes the connection."""
        while len(self._got) < count and (data := self.socket.recv(1 << 16)):
            self._got += [codec.unpack(body) for body in self._frames.feed(data)]
        taken, self._got = self._got[:count], self._got[count:]
        return taken

    def closed(self) -> bool:
        """Read on until the hub closes the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True


@pytest.fixture(name="open_hub")
def _open_hub() -> Iterator[Any]:
    servers: list[HubServer] = []

    def start(stall_timeout_s: float = 60.0) -> HubServer:
        made = HubServer("127.0.0.1", SECRET, stall_timeout_s)
        made.start()
        servers.append(made)
        return made

    yield start
    for started in servers:
        started.stop()


@pytest.fixture(name="hub")
def _hub(open_hub: Any) -> HubServer:
    made: HubServer = open_hub()
    return made


def members(hub: HubServer) -> list[str]:
    return sorted(hub.call(lambda core: list(core.members)))


def two(hub: HubServer) -> tuple[Peer, Peer]:
    """The driver and one worker, both known to the hub."""
    driver = Peer(hub, DRIVER)
    worker = Peer(hub, "a[0]")
    assert driver.take(1)[0].member == "a[0]"
    return driver, worker


def call(number: int, size: int = 0) -> Call:
    return Call(number, "a[0]", "task", "work", arguments=b"x" * size)


UNPICKLED: list[str] = []


class Bomb:
    """Says when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return UNPICKLED.append, ("gone off",)


def frame(body: bytes) -> bytes:
    return wire.LENGTH.pack(len(body)) + body


# ------------------------------------------------------------------ who is let in


@pytest.mark.parametrize("answer", [b"\0" * wire.DIGEST_BYTES, b"GET / HTTP/1.1\r\nHost: here.example\r\n\r\n"])
def test_a_stranger_is_turned_away_before_anything_is_unpickled(hub: HubServer, answer: bytes) -> None:
    UNPICKLED.clear()
    with socket.create_connection(hub.address, PATIENCE_S) as stranger:
        stranger.settimeout(PATIENCE_S)
        assert len(wire.recv_exactly(stranger, wire.NONCE_BYTES)) == wire.NONCE_BYTES
        stranger.sendall(answer + frame(pickle.dumps(Bomb())))
        try:
            assert stranger.recv(100) == b"", "no welcome"
        except ConnectionError:
            pass  # closed with our bytes unread
    assert members(hub) == [] and not UNPICKLED
    driver, _ = two(hub)
    driver.send(ev.EndStep("train/0"))
    assert driver.take(1)[0].step == "train/0", "the hub serves on"


def test_a_proof_in_pieces_with_the_first_messages_behind_it(hub: HubServer) -> None:
    with socket.create_connection(hub.address, PATIENCE_S) as peer:
        nonce = bytes(wire.recv_exactly(peer, wire.NONCE_BYTES))
        data = wire._digest(SECRET, nonce) + codec.pack(Hello(DRIVER, 0, "", ("", 0))) + codec.pack(ev.EndStep("x/0"))
        for at in range(len(data)):
            peer.sendall(data[at : at + 1])
        assert bytes(wire.recv_exactly(peer, len(wire.WELCOME))) == wire.WELCOME
        (size,) = wire.LENGTH.unpack(wire.recv_exactly(peer, wire.LENGTH.size))
        assert codec.unpack(wire.recv_exactly(peer, size)).step == "x/0"


@pytest.mark.parametrize("proves", [False, True])
def test_whoever_says_nothing_is_dropped(open_hub: Any, proves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "AUTH_TIMEOUT_S", 0.2)
    hub = open_hub()
    if proves:
        assert Peer(hub, "a[0]", greet=False).closed()
    else:
        with socket.create_connection(hub.address, PATIENCE_S) as mute:
            mute.settimeout(PATIENCE_S)
            wire.recv_exactly(mute, wire.NONCE_BYTES)
            assert mute.recv(1) == b""
    driver, worker = two(hub)
    driver.send(call(1))
    assert worker.take(1)[0].call_id == 1, "those who have greeted are not on the clock"


def test_a_name_is_taken_only_once(hub: HubServer) -> None:
    driver, worker = two(hub)
    assert Peer(hub, "a[0]").closed()
    first = Peer(hub, "b[0]", greet=False)
    first.send(Goodbye("b[0]"))
    assert first.closed(), "the first message is a greeting"
    driver.send(call(1))
    assert worker.take(1)[0].call_id == 1
    assert members(hub) == ["a[0]", DRIVER]


# ------------------------------------------------------------------ chunks


def test_messages_keep_their_order_however_they_are_cut(hub: HubServer) -> None:
    driver, worker = two(hub)
    driver.send(*(call(i) for i in range(300)))
    assert [c.call_id for c in worker.take(300)] == list(range(300))
    data = b"".join(codec.pack(call(i, size=i)) for i in range(20))
    for at in range(0, len(data), 7):
        driver.socket.sendall(data[at : at + 7])
    assert [(c.call_id, len(c.arguments)) for c in worker.take(20)] == [(i, i) for i in range(20)]
    driver.send(call(1, size=5_000_000), call(2))
    assert [len(c.arguments) for c in worker.take(2)] == [5_000_000, 0]


class Transport:
    """Counts writes."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def is_closing(self) -> bool:
        return False


def test_what_a_chunk_causes_is_one_write(hub: HubServer) -> None:
    made = Connection(hub, SECRET)
    made._transport = transport = Transport()  # type: ignore[assignment]
    for text in (b"one", b"two", b"three"):
        made.queue(text)
    made.flush()
    made.flush()
    assert transport.writes == [b"onetwothree"]


def test_frames() -> None:
    data = b"".join(frame(bytes([i]) * i) for i in range(6))
    for size in range(1, len(data) + 1):
        frames = wire.Frames()
        found = [body for at in range(0, len(data), size) for body in frames.feed(data[at : at + size])]
        assert found == [bytes([i]) * i for i in range(6)], size
    with pytest.raises(wire.FrameError, match="1001 bytes"):
        wire.Frames(limit=1000).feed(wire.LENGTH.pack(1001)).__next__()


def put_ahead(worker: Peer, number: int) -> tuple[str, int]:
    req = ("a[0]", number)
    item = ev.Item(Descriptor("a[0]", ("", 0), -number, 0))
    worker.send(ev.Put(req, "a[0]#0", "x/0:c", (item,), ahead=True))
    return req


def test_what_nobody_waits_for_goes_with_the_next_message(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, worker = two(hub)
    driver.send(ev.OpenChannel("x/0:c", "x/0"), ev.AddReader("x/0:c", "a"), ev.AddWriter("x/0:c", "a[0]#0"))
    driver.send(ev.SealWriters("x/0:c"), ev.EndStep("x/0"))
    driver.take(1)
    monkeypatch.setattr(server, "LATER_S", 1000.0)
    first = put_ahead(worker, -1)
    worker.send(ev.Get(("a[0]", 2), "x/0:c", "a"))
    accepted, delivered = worker.take(2)
    assert accepted == Accepted(first) and isinstance(delivered, ev.Deliver)
    worker.send(ev.Fetched((delivered.items[0].uid,), "a"))  # causes a Release
    second = put_ahead(worker, -3)
    worker.send(Blocked(second))
    assert worker.take(2) == [Release((1,)), Accepted(second)], "who waits gets it at once"


def test_or_alone_after_a_moment(hub: HubServer) -> None:
    driver, worker = two(hub)
    driver.send(ev.OpenChannel("x/0:c", "x/0"), ev.AddWriter("x/0:c", "a[0]#0"), ev.EndStep("x/0"))
    driver.take(1)
    req = put_ahead(worker, -1)
    assert worker.take(2) == [Accepted(req), Release((1,))]


# ------------------------------------------------------------------ ends


def test_an_end_without_goodbye_is_a_death(hub: HubServer) -> None:
    driver, worker = two(hub)
    other = Peer(hub, "b[0]")
    driver.take(1)
    worker.socket.sendall(codec.pack(Log("a[0]", "stdout", "half"))[:-3])
    worker.socket.close()
    died, failure = driver.take(2)
    assert isinstance(died, Died) and died.member == "a[0]"
    assert isinstance(failure, Failure) and failure.member == "a[0]"
    assert isinstance(other.take(1)[0], Cancel)


def test_after_goodbye_the_end_means_nothing(hub: HubServer) -> None:
    driver, worker = two(hub)
    worker.send(Log("a[0]", "stdout", "last words"), Goodbye("a[0]"))
    worker.socket.close()
    assert driver.take(1)[0].text == "last words"
    assert members(hub) in ([DRIVER], ["a[0]", DRIVER])
    driver.send(ev.EndStep("x/0"))
    assert isinstance(driver.take(1)[0], ev.StepAccount)
    assert hub.call(lambda core: core.failure) is None


def test_a_member_declared_dead_is_lost_although_its_connection_stands(hub: HubServer) -> None:
    driver, worker = two(hub)
    hub.declare_dead("a[0]")
    hub.declare_dead("a[0]")
    died, failure = driver.take(2)
    assert (died.member, failure.member) == ("a[0]", "a[0]")
    assert worker.closed()
    driver.send(ev.EndStep("x/0"))
    assert isinstance(driver.take(1)[0], ev.StepAccount), "and that once only"


def test_the_end_of_the_hub_closes_every_connection(open_hub: Any) -> None:
    hub = open_hub()
    driver, worker = two(hub)
    hub.stop()
    assert driver.closed() and worker.closed()
    with pytest.raises(OSError):
        socket.create_connection(hub.address, 1.0)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(b"no pickle"), "UnpicklingError"),
        (frame(pickle.dumps((999, 1))), "MessageError: no message has the tag 999"),
        (wire.LENGTH.pack(1 << 60), "FrameError: a message of 1152921504606846976 bytes"),
    ],
)
def test_what_cannot_be_read_stops_the_run_by_name(hub: HubServer, sent: bytes, why: str) -> None:
    driver, worker = two(hub)
    worker.socket.sendall(codec.pack(Log("a[0]", "stdout", "before")) + sent + codec.pack(Log("a[0]", "stdout", "no")))
    log, failure, died = driver.take(3)
    assert log.text == "before"
    assert failure.member == "a[0]" and failure.message.startswith(
        "a[0] sent what cannot be read by the driver: " + why
    )
    assert isinstance(died, Died)
    assert worker.closed()


def test_a_fault_of_the_hub_is_named(hub: HubServer) -> None:
    driver, worker = two(hub)
    worker.send(ev.AddReader("x/0:nowhere", "a"))
    (failure,) = driver.take(1)
    assert failure.member == "hub" and "failed on AddReader of a[0]" in failure.message


# ------------------------------------------------------------------ slow members


def fill(driver: Peer, size: int) -> int:
    """Send calls until the hub reads no more; how many went whole."""
    driver.socket.settimeout(1.0)
    data = codec.pack(call(7, size))
    for count in range(4000):
        sent = 0
        try:
            while sent < len(data):
                sent += driver.socket.send(data[sent:])
        except TimeoutError:
            driver.rest = data[sent:]
            return count
    raise AssertionError("the hub takes whatever comes")


def test_a_slow_member_holds_up_those_who_send_to_it(open_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACKLOG_BYTES", 1 << 18)
    hub = open_hub()
    driver, worker = two(hub)
    other = Peer(hub, "b[0]")
    driver.take(1)
    count = fill(driver, 1 << 17)
    other.send(Log("b[0]", "stdout", "meanwhile"))
    assert driver.take(1)[0].text == "meanwhile", "others go on"
    waiting = hub.call(lambda core: hub._connections["a[0]"].backlog())
    assert waiting < 4 << 20, "bounded by the mark and one chunk, not by what is sent"
    got = worker.take(count)
    assert len(got) == count
    driver.socket.settimeout(PATIENCE_S)
    driver.socket.sendall(driver.rest)
    assert len(worker.take(1)) == 1, "and everything arrives"
    assert hub.call(lambda core: core.failure) is None


def test_nobody_waits_for_a_slow_member_that_is_lost(open_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACKLOG_BYTES", 1 << 18)
    hub = open_hub()
    driver, _worker = two(hub)
    fill(driver, 1 << 17)
    hub.declare_dead("a[0]")
    driver.socket.settimeout(PATIENCE_S)
    driver.socket.sendall(driver.rest)
    driver.send(ev.EndStep("x/0"))
    assert [type(m).__name__ for m in driver.take(3)] == ["Died", "Failure", "StepAccount"]


def test_a_member_that_takes_nothing_fails_the_run_by_name(open_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACKLOG_BYTES", 1 << 18)
    driver, _worker = two(open_hub(stall_timeout_s=1.0))
    fill(driver, 1 << 17)
    driver.socket.settimeout(PATIENCE_S)
    (failure,) = driver.take(1)
    assert failure.member == "a[0]" and "a[0] has taken nothing for" in failure.message


# ------------------------------------------------------------------ the client


class Recorder:
    """A socket that keeps what is sent in one go."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.sent: list[list[Any]] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append([codec.unpack(body) for body in wire.Frames().feed(data)])
        self._socket.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def test_what_goes_along_leaves_with_the_next_message_or_when_a_wait_begins(hub: HubServer) -> None:
    client = HubClient(hub.address, SECRET, Hello(DRIVER, 0, "", ("", 0)))
    client._socket = recorder = Recorder(client._socket)  # type: ignore[assignment]
    one, two_, three = (ev.Fetched((i,), "a") for i in range(3))
    client.send_along(one)
    client.send_along(two_)
    assert recorder.sent == []
    pending = client.request(lambda req: ev.Get(req, "x/0:c", "a"), "an item")
    assert [type(m).__name__ for m in recorder.sent[0]] == ["Fetched", "Fetched", "Get"]
    assert recorder.sent[0][:2] == [one, two_]
    assert isinstance(client.wait(pending), ev.Poisoned)
    client.send_along(three)
    never = HubClient.request(client, lambda req: Goodbye(DRIVER), "nothing")
    assert recorder.sent[1] == [three, Goodbye(DRIVER)]
    client.send_along(one)
    with pytest.raises(TimeoutError):
        client.wait(never, 0.01)
    assert recorder.sent[2] == [one]
    client.close()
