"""Framing and authentication of the run's sockets.

Every connection proves that it knows the run's secret (HMAC-SHA256 over a nonce) before a single byte of it is
unpickled. Messages are length-prefixed pickles.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import pickle
import socket
import struct
from typing import Any

NONCE_BYTES = 32
DIGEST_BYTES = 32
AUTH_TIMEOUT_S = 10.0
_LENGTH = struct.Struct("<Q")
_WELCOME = b"RLIN"


class AuthenticationError(ConnectionError):
    """The peer does not know the run's secret."""


def _digest(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


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
    if not hmac.compare_digest(bytes(answer), _digest(secret, nonce)):
        raise AuthenticationError("a connection without the run's secret was refused")
    sock.sendall(_WELCOME)
    sock.settimeout(None)


def connect(address: tuple[str, int], secret: bytes, timeout: float) -> socket.socket:
    """Connect and authenticate. The returned socket blocks without limit: its owner watches the peer by EOF."""
    sock = socket.create_connection(address, timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = recv_exactly(sock, NONCE_BYTES)
        sock.sendall(_digest(secret, bytes(nonce)))
        if bytes(recv_exactly(sock, len(_WELCOME))) != _WELCOME:
            raise AuthenticationError(f"{address} does not speak this protocol")
    except (OSError, EOFError):
        sock.close()
        raise
    sock.settimeout(None)
    return sock


def pack(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


def recv_message(sock: socket.socket) -> Any:
    (size,) = _LENGTH.unpack(recv_exactly(sock, _LENGTH.size))
    return pickle.loads(recv_exactly(sock, size))


async def accept_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """``authenticate_incoming`` for asyncio streams."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = os.urandom(NONCE_BYTES)
    writer.write(nonce)
    answer = await asyncio.wait_for(reader.readexactly(DIGEST_BYTES), AUTH_TIMEOUT_S)
    if not hmac.compare_digest(answer, _digest(secret, nonce)):
        raise AuthenticationError("a connection without the run's secret was refused")
    writer.write(_WELCOME)


async def read_message(reader: asyncio.StreamReader) -> Any:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))
