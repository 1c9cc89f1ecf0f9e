"""Framing and authentication of the run's sockets.

Every connection proves that it knows the run's secret (HMAC-SHA256 over a nonce) before a single byte of it is
unpickled. Messages (``rlinf_core.hub.codec``) have their length in front.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Iterator

NONCE_BYTES = 32
DIGEST_BYTES = 32
AUTH_TIMEOUT_S = 10.0
LENGTH = struct.Struct("<Q")
"""In front of each message: the bytes of its body."""
MAX_FRAME_BYTES = 1 << 36
RECEIVE_BYTES = 1 << 16
WELCOME = b"RLIN"


class AuthenticationError(ConnectionError):
    """The peer does not know the run's secret."""


class FrameError(ConnectionError):
    """What came is no frame."""


def _digest(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


def proves(answer: bytes, secret: bytes, nonce: bytes) -> bool:
    """Whether the answer to a nonce could only be given with the secret."""
    return hmac.compare_digest(answer, _digest(secret, nonce))


def recv_exactly(sock: socket.socket, size: int) -> bytearray:
    """Read ``size`` bytes or raise ``EOFError``."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    got = 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            raise EOFError("connection closed by the peer")
        got += n
    return buffer


def authenticate_incoming(sock: socket.socket, secret: bytes) -> None:
    """Check a new connection; leaves the socket blocking. Raises ``AuthenticationError``."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(AUTH_TIMEOUT_S)
    nonce = os.urandom(NONCE_BYTES)
    sock.sendall(nonce)
    answer = recv_exactly(sock, DIGEST_BYTES)
    if not proves(bytes(answer), secret, nonce):
        raise AuthenticationError("a connection without the run's secret was refused")
    sock.sendall(WELCOME)
    sock.settimeout(None)


def connect(address: tuple[str, int], secret: bytes, timeout: float) -> socket.socket:
    """Connect and authenticate. The returned socket blocks without limit: its owner watches the peer by EOF."""
    sock = socket.create_connection(address, timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = recv_exactly(sock, NONCE_BYTES)
        sock.sendall(_digest(secret, bytes(nonce)))
        if bytes(recv_exactly(sock, len(WELCOME))) != WELCOME:
            raise AuthenticationError(f"{address} does not speak this protocol")
    except (OSError, EOFError):
        sock.close()
        raise
    sock.settimeout(None)
    return sock


class Frames:
    """Cuts what arrives in pieces into the bodies of whole frames. ``limit``: the longest body that is believed."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._needed = LENGTH.size
        """Bytes that must be here before the next frame can be looked at."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that ``data`` completes, in order; to be taken to the last. Raises ``FrameError`` where a length
        cannot be one; nothing may be fed after that."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        self._needed = LENGTH.size
        at = 0
        while len(data) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(data, at)
            if size > self._limit:
                raise FrameError(f"a message of {size} bytes (the limit is {self._limit}): no message is that long")
            after = at + LENGTH.size + size
            if len(data) < after:
                self._needed = after - at
                break
            yield data[at + LENGTH.size : after]
            at = after
        if at < len(data):
            self._rest += data[at:]
