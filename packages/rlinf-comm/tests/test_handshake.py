"""The handshake without sockets: both sides prove the secret before anything is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_comm import handshake
from rlinf_comm.errors import AuthenticationFailed
from rlinf_comm.handshake import Acceptor, Hello, Initiator
from rlinf_comm.transports.base import Place

PLACE = Place("node", 7, frozenset({"shm", "tcp"}), ("GPU-1",))


def hello(name: str, to: str) -> Hello:
    return Hello(name, to, "uid", "key", PLACE, 1 << 20)


def run(acceptor: Acceptor, initiator: Initiator, cut: int) -> None:
    """Pass what they say to each other in pieces of ``cut`` bytes."""
    to_initiator, to_acceptor = acceptor.greeting, b""
    while to_initiator or to_acceptor:
        if to_initiator:
            size = min(cut, initiator.rest())
            piece, to_initiator = to_initiator[:size], to_initiator[size:]
            to_acceptor += initiator.receive(piece)
        if to_acceptor:
            size = min(cut, acceptor.rest())
            piece, to_acceptor = to_acceptor[:size], to_acceptor[size:]
            had = acceptor.hello
            to_initiator += acceptor.receive(piece)
            if acceptor.hello is not None and had is None:
                to_initiator += hello("b", acceptor.hello.name).pack(handshake.WELCOME)


@given(st.integers(1, 200))
def test_two_with_one_secret_believe_each_other(cut: int) -> None:
    acceptor, initiator = Acceptor(b"secret"), Initiator(b"secret", hello("a", "b"))
    run(acceptor, initiator, cut)
    assert initiator.verdict == handshake.WELCOME
    assert acceptor.hello == hello("a", "b") and initiator.hello == hello("b", "a")


def test_another_secret_is_refused_by_the_acceptor() -> None:
    acceptor, initiator = Acceptor(b"secret"), Initiator(b"other", hello("a", "b"))
    with pytest.raises(AuthenticationFailed, match="without the run's secret"):
        run(acceptor, initiator, 1000)
    assert not acceptor.believed and acceptor.hello is None


def test_an_acceptor_without_the_secret_is_refused_by_the_initiator() -> None:
    initiator = Initiator(b"secret", hello("a", "b"))
    assert initiator.receive(handshake.MAGIC + bytes(32))
    with pytest.raises(AuthenticationFailed, match="does not know the secret"):
        initiator.receive(b"\1" * 32)


def test_what_one_side_said_does_not_serve_as_the_proof_of_the_other() -> None:
    """Who only repeats what it hears (to the same or to another connection) proves nothing."""
    acceptor = Acceptor(b"secret")
    victim = Initiator(b"secret", hello("a", "b"))
    said = victim.receive(acceptor.greeting)
    mirrored = Initiator(b"secret", hello("a", "b"))
    mirrored.receive(handshake.MAGIC + said[:32])
    with pytest.raises(AuthenticationFailed):
        mirrored.receive(said[32:])


def test_an_introduction_has_a_limit_and_a_form() -> None:
    for said in (handshake.LENGTH.pack(handshake.HELLO, 1 << 30), handshake.said(handshake.HELLO, b"{}")):
        acceptor, initiator = Acceptor(b"secret"), Initiator(b"secret", hello("a", "b"))
        acceptor.receive(initiator.receive(acceptor.greeting))
        with pytest.raises(AuthenticationFailed, match="introduced itself"):
            acceptor.receive(said)


@given(st.binary(max_size=300))
def test_bytes_of_a_stranger_are_refused_or_waited_for(data: bytes) -> None:
    acceptor = Acceptor(b"secret")
    try:
        assert acceptor.receive(data) == b""
    except AuthenticationFailed:
        assert len(data) >= handshake.PROOF_BYTES
    assert acceptor.hello is None and not acceptor.believed
