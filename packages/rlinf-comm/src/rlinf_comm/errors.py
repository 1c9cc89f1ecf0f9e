"""Errors of the communicator, by what can be done about them.

Each names both ends and carries its facts as attributes. All survive pickling, so that a worker's failure can be told
to the driver.
"""

from __future__ import annotations

from typing import Any

from rlinf_core.errors import RLinfError


class CommError(RLinfError):
    """Base class. ``me`` and ``peer`` are the names of the two ends ("" where there is none)."""

    def __init__(self, message: str, *, me: str = "", peer: str = "") -> None:
        super().__init__(message)
        self.me = me
        self.peer = peer

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[CommError], args: tuple[Any, ...], facts: dict[str, Any]) -> CommError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class PeerLost(CommError):
    """The peer's process or node is gone, or its connection broke: every waiting and later operation on it says so."""

    elsewhere = True


class PeerClosed(PeerLost):
    """The peer has closed its communicator in good order and there is nothing left to receive from it."""


class CommTimeout(CommError, TimeoutError):
    """``what`` did not happen within ``seconds``. The connection goes on: what comes later is still received."""

    def __init__(self, message: str, *, me: str = "", peer: str = "", what: str = "", seconds: float = 0.0) -> None:
        super().__init__(message, me=me, peer=peer)
        self.what = what
        self.seconds = seconds


class RemoteError(CommError):
    """The other end failed on a message; ``text`` is what it said. The next message works."""

    elsewhere = True

    def __init__(self, message: str, *, me: str = "", peer: str = "", text: str = "") -> None:
        super().__init__(message, me=me, peer=peer)
        self.text = text


class NoRoom(CommError):
    """A transport has no room for a message just now (shared memory is used up): the next transport takes it."""


class NoRoute(CommError):
    """No transport that both ends have can move a message between them."""


class AuthenticationFailed(CommError):
    """The other end of a connection does not know the secret, or speaks another protocol."""


class ResourceLimit(CommError):
    """The process or the machine has run out of something that a connection needs; names the limit."""


class FrameError(CommError):
    """What came on a stream is no frame: the connection cannot be believed any more."""


class CommClosed(CommError):
    """The communicator was closed by this process, which then used it."""
