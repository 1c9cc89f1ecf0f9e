"""How two ends of a new connection come to believe each other; no I/O in here.

    acceptor  -> MAGIC, nonce
    initiator -> nonce', HMAC(secret, "initiator", nonce, nonce')
    acceptor  -> HMAC(secret, "acceptor", nonce', nonce)
    initiator -> hello
    acceptor  -> verdict, hello
    initiator -> READY or READY_APART

Each hello names a slot of shared memory; the other end tries to open it and says whether it can, since two processes of
one machine need not reach each other's memory (other users, other containers). Only after READY do both use the
connection: an initiator that has given up before it was welcome leaves nothing behind.

Nothing that an end says is looked at before it has proved that it knows the secret, and what it may say before that has
a fixed size. Digests and nonces are those of the run's hub (``rlinf_core.hub.wire``), where one side asks;
here both ends do, since each is about to decode what the other sends.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from dataclasses import dataclass
from typing import Any

from rlinf_comm.errors import AuthenticationFailed
from rlinf_comm.transports.base import Place
from rlinf_core.hub.wire import AUTH_TIMEOUT_S, DIGEST_BYTES, NONCE_BYTES, proves

MAGIC = b"RLC1"
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = NONCE_BYTES + DIGEST_BYTES
HELLO_LIMIT = 64 << 10
LENGTH = struct.Struct("<BI")
"""Verdict and length, in front of a hello."""
HELLO, WELCOME, YIELD, BUSY, REFUSED, NO_FILES = range(6)
"""YIELD: both connect at once, and the other connection is the one that stays. BUSY: try again. NO_FILES: said in place
of the greeting by an acceptor without free file descriptors."""
READY, READY_APART = b"R", b"A"
WRONG = bytes(DIGEST_BYTES)
"""In place of the acceptor's proof: the initiator's was wrong."""
NO_FILES_NOTICE = b"RLC!" + bytes(NONCE_BYTES)

__all__ = ["AUTH_TIMEOUT_S", "GREETING_BYTES", "Hello", "Acceptor", "Initiator"]


@dataclass(frozen=True, slots=True)
class Hello:
    """What one end says of itself, once it is believed."""

    name: str
    to: str
    """Who it means to talk to."""
    uid: str
    """Of this communicator: another process under the same name has another."""
    key: str
    """Of this connection; the initiator's counts."""
    place: Place
    window: int
    """Bytes that this end takes before it has consumed any."""
    probe: bytes = b""
    """A slot of this end's shared memory."""
    apart: bool = False
    """This end cannot open the other's slot (said by the acceptor)."""

    def pack(self, verdict: int = HELLO) -> bytes:
        place = self.place
        facts = {
            "name": self.name,
            "to": self.to,
            "uid": self.uid,
            "key": self.key,
            "node": place.node,
            "pid": place.pid,
            "capabilities": sorted(place.capabilities),
            "devices": list(place.devices),
            "window": self.window,
            "probe": self.probe.hex(),
            "apart": self.apart,
        }
        return said(verdict, json.dumps(facts).encode())

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Raises AuthenticationFailed where it is none."""
        try:
            facts: dict[str, Any] = json.loads(data)
            place = Place(
                str(facts["node"]), int(facts["pid"]), frozenset(facts["capabilities"]), tuple(facts["devices"])
            )
            return cls(
                str(facts["name"]),
                str(facts["to"]),
                str(facts["uid"]),
                str(facts["key"]),
                place,
                int(facts["window"]),
                bytes.fromhex(facts["probe"]),
                bool(facts["apart"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise AuthenticationFailed(f"a peer introduced itself in a way that is not understood: {error}") from error


def said(verdict: int, body: bytes) -> bytes:
    return LENGTH.pack(verdict, len(body)) + body


def _digest(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + first + second, "sha256")


class _Side:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(NONCE_BYTES)
        self._received = bytearray()
        self.believed = False
        """The other end has proved itself."""

    def _take(self, size: int) -> bytes | None:
        if len(self._received) < size:
            return None
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _take_said(self) -> tuple[int, bytes] | None:
        if len(self._received) < LENGTH.size:
            return None
        verdict, size = LENGTH.unpack_from(self._received)
        if size > HELLO_LIMIT:
            raise AuthenticationFailed(f"a peer introduced itself with {size} bytes (the limit is {HELLO_LIMIT})")
        data = self._take(LENGTH.size + size)
        return None if data is None else (verdict, data[LENGTH.size :])

    def rest(self) -> int:
        """Bytes that the other end may still send before more is expected of it: never read more than that, what
        follows belongs to the stream."""
        raise NotImplementedError


class Acceptor(_Side):
    """The accepting side. Send ``greeting`` first; ``receive`` answers what to send; ``hello`` is there in the end."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.greeting = MAGIC + self._nonce
        self.hello: Hello | None = None

    def rest(self) -> int:
        if not self.believed:
            return PROOF_BYTES - len(self._received)
        return _rest_of_said(self._received)

    def receive(self, data: bytes) -> bytes:
        """What to send next (may be nothing). Raises AuthenticationFailed."""
        self._received += data
        answer = b""
        if not self.believed:
            proof = self._take(PROOF_BYTES)
            if proof is None:
                return answer
            theirs, digest = proof[:NONCE_BYTES], proof[NONCE_BYTES:]
            if not proves_role(digest, self._secret, b"initiator", self._nonce, theirs):
                raise AuthenticationFailed("a connection without the run's secret was refused")
            self.believed = True
            answer = _digest(self._secret, b"acceptor", theirs, self._nonce)
        found = self._take_said()
        if found is not None:
            self.hello = Hello.unpack(found[1])
        return answer


class Initiator(_Side):
    """The connecting side. ``verdict`` is there in the end, and ``hello`` when that is WELCOME (else ``reason``)."""

    def __init__(self, secret: bytes, hello: Hello) -> None:
        super().__init__(secret)
        self._mine = hello
        self._greeted = False
        self._theirs = b""
        self.verdict: int | None = None
        self.hello: Hello | None = None
        self.reason = ""

    def rest(self) -> int:
        if not self._greeted:
            return GREETING_BYTES - len(self._received)
        if not self.believed:
            return DIGEST_BYTES - len(self._received)
        return _rest_of_said(self._received)

    def receive(self, data: bytes) -> bytes:
        self._received += data
        if not self._greeted:
            greeting = self._take(GREETING_BYTES)
            if greeting is None:
                return b""
            if greeting == NO_FILES_NOTICE:
                self.verdict = NO_FILES
                return b""
            if not greeting.startswith(MAGIC):
                raise AuthenticationFailed(f"{self._mine.to} does not speak this protocol")
            self._greeted = True
            self._theirs = greeting[len(MAGIC) :]
            return self._nonce + _digest(self._secret, b"initiator", self._theirs, self._nonce)
        if not self.believed:
            digest = self._take(DIGEST_BYTES)
            if digest is None:
                return b""
            if digest == WRONG:
                raise AuthenticationFailed(f"{self._mine.to} refuses {self._mine.name}: they have different secrets")
            if not proves_role(digest, self._secret, b"acceptor", self._nonce, self._theirs):
                raise AuthenticationFailed(f"who answers at the address of {self._mine.to} does not know the secret")
            self.believed = True
            return self._mine.pack()
        found = self._take_said()
        if found is not None:
            self.verdict = found[0]
            if self.verdict == WELCOME:
                self.hello = Hello.unpack(found[1])
            else:
                self.reason = found[1].decode(errors="replace")
        return b""


def proves_role(digest: bytes, secret: bytes, role: bytes, first: bytes, second: bytes) -> bool:
    return proves(digest, secret, role + first + second)


def _rest_of_said(received: bytearray) -> int:
    if len(received) < LENGTH.size:
        return LENGTH.size - len(received)
    return LENGTH.size + int(LENGTH.unpack_from(received)[1]) - len(received)
