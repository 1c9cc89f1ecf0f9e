"""What happens when the other process dies, stops, forks, or is a stranger: nothing hangs, everything is named."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from comm_peer import SECRET, make
from comm_support import PROBE, Other, other, sockets_and_segments, until

from rlinf_comm import handshake, slots
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.endpoint import Record, key_of
from rlinf_comm.errors import AuthenticationFailed, CommTimeout, PeerClosed, PeerLost, RemoteError, ResourceLimit
from rlinf_comm.transports.shm import ShmTransport

MIB = 1 << 20


@pytest.fixture
def comm(tmp_path: Path):
    with make(str(tmp_path), "here", timeout=30.0) as own:
        yield own


def test_a_peer_that_never_appears_is_named(comm: Communicator) -> None:
    for operation in (lambda: comm.send(1, "nobody", timeout=0.2), lambda: comm.recv("nobody", timeout=0.2)):
        begun = time.monotonic()
        with pytest.raises(CommTimeout, match=r"here has waited .*nobody has not appeared") as caught:
            operation()
        assert time.monotonic() - begun < 5
        assert (caught.value.me, caught.value.peer) == ("here", "nobody")


def test_a_peer_that_is_killed_is_lost_to_waiting_and_later_operations(comm: Communicator, tmp_path: Path) -> None:
    with other("sleep", tmp_path, "there", "here") as there:
        assert comm.recv("there") == "hello"
        there.expect("ready")
        work = comm.irecv("there")
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                comm.recv("there")
            except PeerLost as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        there.kill()
        begun = time.monotonic()
        thread.join(10)
        with pytest.raises(PeerLost, match="here has lost there"):
            work.wait(10)
        assert time.monotonic() - begun < 5
        assert len(errors) == 1
        for later in (lambda: comm.recv("there"), lambda: comm.send(1, "there"), lambda: comm.flush("there")):
            with pytest.raises(PeerLost, match="there"):
                later()


def test_an_idle_peer_that_is_killed_is_noticed_by_itself(comm: Communicator, tmp_path: Path) -> None:
    with other("sleep", tmp_path, "there", "here") as there:
        assert comm.recv("there") == "hello"
        there.expect("ready")
        there.kill()
        until(lambda: comm._endpoint.peer("there").lost is not None, 5)


def test_a_sender_that_is_killed_in_the_middle_of_a_message(comm: Communicator, tmp_path: Path) -> None:
    with other("half_frame", tmp_path, "there", "here") as there:
        assert comm.recv("there") == "hello"
        there.expect("half")
        with pytest.raises(CommTimeout):
            comm.recv("there", timeout=0.2)
        there.kill()
        with pytest.raises(PeerLost, match="in the middle of a message"):
            comm.recv("there")


def test_whoever_dies_before_the_handshake_leaves_nothing(comm: Communicator, tmp_path: Path) -> None:
    with other("knock", tmp_path, "there", "here") as there:
        there.expect("knocked")
        until(lambda: len(comm._endpoint.io._strangers) == 1)
        there.kill()
        until(lambda: not comm._endpoint.io._strangers)
        assert comm._endpoint.peer("there").conn is None


@pytest.mark.parametrize("nbytes", [4, 64 << 10, MIB])
def test_killing_a_sender_at_any_moment_delivers_a_prefix(comm: Communicator, tmp_path: Path, nbytes: int) -> None:
    with other("produce", tmp_path, "there", "here", 10**6, nbytes) as there:
        there.expect("ready")
        got = 0
        while True:
            try:
                value = comm.recv("there")
            except PeerLost:
                break
            assert (value if nbytes < 8 else value[-1]) == got  # in order, none lost or doubled
            got += 1
            if got == 50:
                there.kill()
        assert got >= 50


def test_a_receiver_that_is_killed_frees_the_slots_that_it_held(comm: Communicator, tmp_path: Path) -> None:
    with other("hold", tmp_path, "there", "here", 5) as there:
        for number in range(5):
            comm.send(np.full(MIB // 8, number), "there")
        assert there.expect("holding") == "holding 5 10"
        memory = comm._endpoint.arena
        assert memory.stats().bytes_in_use >= 5 * MIB
        assert comm.stats()["there"].transports == {"shm": 5}
        there.kill()
        until(lambda: memory.stats().bytes_in_use < PROBE, 5, "the slots' end")
        with pytest.raises(PeerLost):
            comm.send(np.zeros(MIB), "there")
        assert memory.stats().bytes_in_use < PROBE


def test_a_receiver_that_is_killed_while_a_sender_is_blocked(comm: Communicator, tmp_path: Path) -> None:
    with other("sleep", tmp_path, "there", "here") as there:
        comm.recv("there")
        there.expect("ready")
        error: list[BaseException] = []

        def fill() -> None:
            try:
                while True:
                    comm.send(bytes(20000), "there")
            except PeerLost as lost:
                error.append(lost)

        thread = threading.Thread(target=fill)
        thread.start()
        peer = comm._endpoint.peer("there")
        seen = [-1]

        def stands() -> bool:
            before, seen[0] = seen[0], peer.sent
            return before == peer.sent > 0

        until(stands)
        there.kill()
        thread.join(10)
        assert len(error) == 1


# The longer time is beyond what the kernel's probes of an idle connection take to find nobody there (17 s).
@pytest.mark.parametrize("seconds", [1.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_a_stopped_peer_is_not_lost_and_loses_nothing(tmp_path: Path, seconds: float) -> None:
    with make(str(tmp_path), "here", timeout=90.0) as comm, other("echo", tmp_path, "there", "here") as there:
        there.expect("ready")
        comm.send(-1, "there")
        assert comm.recv("there") == -1
        stop(there)
        sent = 0

        def send() -> None:
            nonlocal sent
            for number in range(3000):
                comm.send(number if number % 100 else np.full(40000, number), "there")
                sent += 1

        thread = threading.Thread(target=send)
        thread.start()
        with pytest.raises(CommTimeout):
            comm.recv("there", timeout=seconds)
        os.kill(there.pid, signal.SIGCONT)
        for number in range(3000):
            value = comm.recv("there")
            assert (value if number % 100 else int(value[-1])) == number
        thread.join(30)
        assert sent == 3000


def test_a_peer_that_is_stopped_before_the_handshake_answers_later(tmp_path: Path) -> None:
    with make(str(tmp_path), "here", timeout=60.0) as comm, other("echo", tmp_path, "there", "here") as there:
        there.expect("ready")
        until(lambda: comm._endpoint.peer("there").conn is not None)
        with other("sleep", tmp_path, "third") as third:
            third.expect("ready")
            stop(third)
            with pytest.raises(CommTimeout, match="third"):
                comm.send(1, "third", timeout=0.3)
            work = comm.isend(2, "third")
            os.kill(third.pid, signal.SIGCONT)
            work.wait(20)


def test_a_forked_child_holds_no_socket_and_is_told_so(comm: Communicator, tmp_path: Path) -> None:
    with other("fork", tmp_path, "there", "here") as there:
        assert comm.recv("there") == "hello"
        assert "child needs a communicator of its own" in there.expect("child:", 10)
        assert there.expect("sockets in the child") == "sockets in the child: 0"
        child = int(there.expect("forked").split()[1])
        try:
            there.kill()
            with pytest.raises(PeerLost):  # although the child lives
                comm.recv("there", timeout=10)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def stop(process: Other) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")


def _address(comm: Communicator, tmp_path: Path) -> tuple[str, int]:
    record = Record.unpack(FileDirectory(tmp_path).lookup(key_of("here"), 1.0))
    return record.host, record.port


def test_a_stranger_is_refused_before_anything_of_it_is_read(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "AUTH_TIMEOUT_S", 0.5)
    for word in (bytes(64), b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(1 << 16)):
        with socket.create_connection(_address(comm, tmp_path)) as sock:
            sock.settimeout(10)
            assert sock.recv(100).startswith(handshake.MAGIC)
            sock.sendall(word)
            heard = b""
            try:
                while piece := sock.recv(100):
                    heard += piece
            except ConnectionResetError:
                pass  # what it wrote was not read
            assert heard in (b"", handshake.WRONG)
    with socket.create_connection(_address(comm, tmp_path)) as silent:
        silent.settimeout(10)
        begun = time.monotonic()
        while silent.recv(100):
            pass
        assert time.monotonic() - begun < 5  # within the deadline
    assert not comm._endpoint.peers()


def test_many_strangers_exhaust_nothing(comm: Communicator, tmp_path: Path) -> None:
    from rlinf_comm.iothread import MAX_STRANGERS

    before = sockets_and_segments()["fds"]
    strangers = [socket.create_connection(_address(comm, tmp_path)) for _ in range(MAX_STRANGERS + 50)]
    try:
        until(lambda: sockets_and_segments()["fds"] <= before + len(strangers) + MAX_STRANGERS)
        with make(str(tmp_path), "friend") as friend:
            friend.send("through", "here")
            assert comm.recv("friend") == "through"
        assert len(comm._endpoint.io._strangers) <= MAX_STRANGERS
    finally:
        for sock in strangers:
            sock.close()


def test_another_secret_is_an_error_at_who_connects(comm: Communicator, tmp_path: Path) -> None:
    with Communicator("wrong", b"another", FileDirectory(tmp_path), timeout=10) as wrong:
        with pytest.raises(AuthenticationFailed, match="here refuses wrong"):
            wrong.send(1, "here")
        with pytest.raises(AuthenticationFailed, match="wrong refuses here"):
            comm.send(1, "wrong")


def test_an_impostor_at_the_address_is_not_believed(comm: Communicator, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = comm.place
        record = Record("uid", place, "", "127.0.0.1", listener.getsockname()[1])
        FileDirectory(tmp_path).publish(key_of("impostor"), record.pack())

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(handshake.MAGIC + bytes(32))
                sock.recv(64)
                sock.sendall(os.urandom(32))
                sock.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AuthenticationFailed, match="address of impostor does not know the secret"):
            comm.send("confidential", "impostor")
        thread.join(5)


def test_exhausted_file_descriptors_are_named_and_pass(tmp_path: Path) -> None:
    with (
        make(str(tmp_path), "here", timeout=20.0) as comm,
        make(str(tmp_path), "third", timeout=20.0) as third,
        other("few_files", tmp_path, "there", "here") as there,
    ):
        assert comm.recv("there") == "hello"
        there.expect("ready")
        there.tell("use up")
        there.expect("used up")
        with pytest.raises(ResourceLimit, match=r"there cannot accept third.*RLIMIT_NOFILE"):
            third.send(1, "there")
        there.tell("dial third")
        assert "there cannot connect to third: this process has no file descriptor left (limit" in there.expect("Res")
        there.tell("still here")
        assert comm.recv("there") == "still here"  # the connection that was there goes on
        there.tell("free")
        there.expect("freed")
        third.send(2, "there")
        there.tell("dial third")
        assert there.expect("dialed")
        assert third.recv("there") == "dialed"


def test_shared_memory_that_cannot_be_opened_fails_the_message_and_is_not_leaked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = frozenset({"shm", "tcp"})
    with make(str(tmp_path), "a", capabilities=only) as a, make(str(tmp_path), "b", capabilities=only) as b:
        a.send(1, "b")
        assert b.recv("a") == 1

        def fails(ref: bytes, holder: int | None = None) -> list[memoryview]:
            raise slots.SlotGone("too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(ShmTransport, "pull", lambda self, ticket, specs: fails(ticket))
            a.send(np.ones(MIB), "b")
            with pytest.raises(slots.SlotGone, match="too many open files"):
                b.recv("a")
        with pytest.raises(RemoteError, match="too many open files"):
            a.flush("b")
        until(lambda: a._endpoint.arena.stats().bytes_in_use < PROBE)
        a.send(np.ones(MIB), "b")
        assert b.recv("a").sum() == MIB


def test_a_message_whose_sender_has_ended_since_is_its_peers_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = frozenset({"shm", "tcp"})
    with make(str(tmp_path), "a", capabilities=only) as a, make(str(tmp_path), "b", capabilities=only) as b:
        a.send(1, "b")
        assert b.recv("a") == 1

        def gone(ref: bytes, holder: int | None = None, *, private: bool = False) -> list[memoryview]:
            raise slots.OwnerGone("process 1 has ended, or has closed its shared memory")

        with monkeypatch.context() as patch:
            patch.setattr(slots, "open_slot", gone)
            a.send(np.ones(MIB), "b")
            with pytest.raises(PeerLost, match="process 1 has ended") as caught:
                b.recv("a")
        assert caught.value.elsewhere and caught.value.peer == "a"


def test_the_end_of_a_communicator_leaves_nothing(tmp_path: Path) -> None:
    before = what_is_open()
    with make(str(tmp_path), "a") as a, make(str(tmp_path), "b") as b, other("echo", tmp_path, "c", "a") as c:
        c.expect("ready")
        a.send(np.ones(MIB), "c")
        echoed = a.recv("c")
        b.isend(np.ones(MIB), "a").wait(20)
        received = a.irecv("b").wait(20)
        assert echoed.sum() == received.sum() == MIB
        assert sockets_and_segments()["segments"] > before["segments"]
        c.kill()
        with pytest.raises(PeerLost):
            a.recv("c")
    del echoed, received
    until(lambda: what_is_open() == before, 10, f"what was open before ({before}; now {what_is_open()})")


def what_is_open() -> dict[str, int]:
    """Without mappings that are kept for further use."""
    slots.mapped._maps.clear()
    gc.collect()
    return sockets_and_segments()


def test_closing_is_announced_after_all_that_was_sent(comm: Communicator, tmp_path: Path) -> None:
    with other("produce", tmp_path, "there", "here", 100, MIB) as there:
        total = sum(int(comm.recv("there")[0]) for _ in range(100))
        assert total == sum(range(100))
        there.expect("sent")
        with pytest.raises(PeerClosed, match="there has closed"):
            comm.recv("there")
        assert there.process.wait(20) == 0


def test_a_process_that_comes_again_under_its_name(comm: Communicator, tmp_path: Path) -> None:
    for _ in range(2):
        with other("sleep", tmp_path, "there", "here") as there:
            until(lambda: bool(comm._endpoint.peer("there").inbox) or _arrived(comm), 30)
            assert comm.recv("there") == "hello"
            there.expect("ready")
            there.kill()
            with pytest.raises(PeerLost):
                comm.recv("there")


def _arrived(comm: Communicator) -> bool:
    peer = comm._endpoint.peer("there")
    return peer.conn is not None and peer.lost is None


__all__ = ["SECRET", "Other"]
