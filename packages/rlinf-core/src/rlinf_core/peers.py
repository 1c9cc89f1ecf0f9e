"""How a worker finds the others of its run: a name, an address, a secret, and a directory that all of them share.

Core only hands these out; ``rlinf_comm`` makes connections of them.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Protocol

from rlinf_core.errors import WaitTimeout
from rlinf_core.hub.client import HubClient
from rlinf_core.hub.messages import Lookup, Publish, Withdraw


class Directory(Protocol):
    """A small table that all processes of a run write and read."""

    def publish(self, key: str, value: bytes) -> None:
        """Write a value, in place of an earlier one."""

    def lookup(self, key: str, timeout: float) -> bytes:
        """The value, once there is one. Raises ``WaitTimeout`` after ``timeout`` seconds."""


@dataclass(frozen=True)
class Peer:
    """What a process needs to talk to the others of its run. ``name`` is its own, such as ``actor[0]``; ``host`` the
    address of its node; ``secret`` what connections between workers prove (not the one of the hub)."""

    name: str
    host: str
    secret: bytes
    directory: Directory


class HubDirectory:
    """The directory of a run, kept by its hub. Usable from any thread."""

    def __init__(self, client: HubClient) -> None:
        self._client = client

    def publish(self, key: str, value: bytes) -> None:
        self._client.send(Publish(key, bytes(value)))

    def lookup(self, key: str, timeout: float) -> bytes:
        pending = self._client.request(lambda req: Lookup(req, key), f"{key!r} in the run's directory")
        try:
            found = self._client.wait(pending, timeout)
        except WaitTimeout:
            self._client.send(Withdraw(pending.req))
            found = self._client.wait(pending)  # it may have come meanwhile
            if found.value is None:
                raise
        value: bytes = found.value
        return value


def peer_secret(secret: bytes) -> bytes:
    """The secret of connections between workers, made from the run's."""
    return hmac.digest(secret, b"rlinf peers", "sha256")
