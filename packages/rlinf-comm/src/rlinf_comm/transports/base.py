"""What a transport is: it moves the buffers of one message between two processes.

Two processes that talk have one control stream. A message is a frame on it; the frame names, for each group of
buffers, the transport that moves them and a *ticket*, which is all that the transport's other half needs.

Order of calls, for each message and transport: ``offer`` at the sender, then the frame, then ``push`` at the sender and
``pull`` at the receiver at the same time. The calls of one side of one connection never overlap: ``offer`` and ``push``
run under the connection's send lock, ``pull`` in whichever thread reads the stream (not always the one that receives,
so a transport for accelerators sets its device itself). ``pull`` happens as soon as the frame is read, in the
order in which the messages were sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from rlinf_comm.directory import Directory
    from rlinf_comm.selection import Summary

Buffer: TypeAlias = "memoryview | torch.Tensor"
"""Host memory (flat, format ``B``, contiguous), or a contiguous tensor that is not on the CPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one end is; plain data, exchanged in the handshake and published in the directory."""

    node: str
    """Boot id and PID namespace: equal for processes that can share memory."""
    pid: int
    capabilities: frozenset[str]
    """Names of the transports that work there."""
    devices: tuple[str, ...] = ()
    """UUIDs of the accelerators, by local index."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """What the receiver knows of a buffer before it has it."""

    nbytes: int
    dtype: str = ""
    """``"float32"``, … of a device tensor; "" for host memory."""
    shape: tuple[int, ...] = ()
    device: str = ""
    """Of the sender's tensor, as torch writes it (``"cuda:0"``); "" for host memory."""


class RawStream(Protocol):
    """The control stream, for transports that use it themselves (``on_stream``). Both raise CommTimeout at the
    operation's deadline and PeerLost when the peer is gone."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Write all of the buffers, in order."""

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill all of the buffers. After CommTimeout a call with the same buffers goes on where it stopped."""


@dataclass(slots=True)
class Link:
    """A connection as its transports see it."""

    me: Place
    peer: Place
    my_name: str
    peer_name: str
    first: bool
    """Which end is rank 0: true at exactly one of the two."""
    stream: RawStream
    directory: Directory
    """For a rendezvous of the transport's own. Keys that start with ``key`` are this connection's."""
    key: str
    """The same at both ends, and new with each connection."""
    timeout: float
    """Seconds that a wait of the transport may take when ``remaining`` does not say less."""
    remaining: Callable[[], float]
    """Seconds until the deadline of the operation that is running in the calling thread."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Of the communicator, for what its transports share (the arena). Under ``closers`` it runs when that closes."""


class Transport(ABC):
    """One object per connection and transport, made when first used, at each end."""

    name: ClassVar[str]
    needs_release: ClassVar[bool] = False
    """The receiver says when it no longer uses what a ticket names; ``release`` is then called at the sender."""
    on_stream: ClassVar[bool] = False
    """``push`` writes exactly the bytes of the buffers to the stream, where they follow the frame."""
    prefer: ClassVar[bool] = False
    """Of one that another package brings: tried before the built-in ones, instead of when none of them is left."""

    @classmethod
    def suits(cls, source: Place, target: Place, summary: Summary) -> bool:
        """Of one that another package brings: whether it can carry a message of ``summary`` from ``source`` to
        ``target``. It is asked at the sender, and only when both ends have it; it gets buffers of host memory alone
        (those of an accelerator are copied there first). Quick, and without side effects."""
        return True

    @classmethod
    def unavailable(cls) -> str:
        """An empty string, or why it cannot work in this process. Cheap; imports nothing heavy."""
        return ""

    def __init__(self, link: Link) -> None:
        self.link = link

    @abstractmethod
    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        """Sender, before the frame goes: make the buffers reachable. Returns the ticket (at most 64 KiB).

        Raises NoRoom when it cannot just now: the next transport is taken. Any other error fails the message.
        """

    def push(self, buffers: Sequence[Buffer]) -> None:
        """Sender, right after the frame: this side's half of the move."""
        return None

    @abstractmethod
    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        """Receiver, on reading the frame: the buffers, which the receiver then owns. An error fails the message."""

    def release(self, ticket: bytes) -> None:
        """Sender: nobody uses what the ticket names. Also called when the frame of a ticket could not be sent."""
        return None

    def close(self, lost: bool) -> None:
        """The connection is over. ``lost``: the peer has died; free what was held for it."""
        return None
