"""What gloo and nccl share: buffers move through process groups of two, which belong to the connection alone.

Never the default group of ``torch.distributed``, and no store that listens: the two ends meet through the connection's
directory. Each direction has a group of its own, which its sender names (``ticket``): when a move fails, both ends give
that group up, and the next message brings a new one. So a failure in one direction leaves the other alone.

The sockets of these libraries do not know the run's secret (neither gloo nor NCCL has a place for it); the addresses
are in the directory alone, and each group lives between two processes that have proved it to each other before.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from rlinf_comm.errors import CommError, CommTimeout, PeerLost
from rlinf_comm.transports.base import Buffer, BufferSpec, Link, Transport

if TYPE_CHECKING:
    import torch

    from rlinf_comm.directory import Directory

SENDER, RECEIVER = 0, 1
NONCE_BYTES = 8


@cache
def _store_class() -> type:
    """Defined late, because its base class is torch's."""
    import torch.distributed as dist

    class DirectoryStore(dist.Store):
        """The part of a store that process groups use to find each other, over a directory."""

        def __init__(self, directory: Directory, prefix: str, timeout: float) -> None:
            super().__init__()
            self._directory = directory
            self._prefix = prefix
            self._timeout = timeout

        def set(self, key: str, value: Any) -> None:
            self._directory.publish(f"{self._prefix}/{key}", value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return self._directory.lookup(f"{self._prefix}/{key}", self._timeout)

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            seconds = self._timeout if timeout is None else timeout.total_seconds()
            for key in keys:
                self._directory.lookup(f"{self._prefix}/{key}", seconds)

        def check(self, keys: Sequence[str]) -> bool:
            try:
                self.wait(keys, timedelta(0))
            except TimeoutError:
                return False
            return True

    return DirectoryStore


def store_over(directory: Directory, prefix: str, timeout: float) -> Any:
    """A torch.distributed store whose keys are entries of the directory below ``prefix``."""
    return _store_class()(directory, prefix, timeout)


def essence(error: BaseException) -> str:
    """What a library's error says, without the place in its source and its advice."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". This is typically")[0]


class GroupTransport(Transport):
    """A subclass says how a group is made and how a tensor goes through it."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._nonce = b""
        self._out: Any = None
        self._in: Any = None
        self._in_nonce = b""
        self._seconds = link.timeout

    @abstractmethod
    def make_group(self, store: Any, rank: int, timeout: float) -> Any:
        """A process group of two; rank 0 sends."""

    @abstractmethod
    def to_send(self, buffer: Buffer) -> torch.Tensor:
        """The buffer as a flat tensor of bytes that the group can send."""

    @abstractmethod
    def inbox(self, spec: BufferSpec) -> tuple[torch.Tensor, Buffer]:
        """Room for a buffer: what the group receives into, and the same memory as it is handed over."""

    @abstractmethod
    def finish(self, works: Sequence[Any], timeout: float) -> None:
        """Wait until all is moved. Raises TimeoutError, or RuntimeError as the library does."""

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        if self._out is None:
            self._nonce = os.urandom(NONCE_BYTES)
        return self._nonce

    def push(self, buffers: Sequence[Buffer]) -> None:
        try:
            tensors = [self.to_send(b) for b in buffers]
            with self._named("sending to"):
                if self._out is None:
                    self._out = self._meet(self._nonce, SENDER)
                works = [self._out.send([t], RECEIVER, tag) for tag, t in enumerate(tensors) if t.numel()]
                self.finish(works, self._patience())
        except BaseException:
            # Whatever it was, what the other end has received of this message is unknown.
            self._give_up(self._out)
            self._out = None
            raise

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        try:
            with self._named("receiving from"):
                if ticket != self._in_nonce or self._in is None:
                    self._give_up(self._in)
                    self._in, self._in_nonce = None, ticket
                    self._in = self._meet(ticket, RECEIVER)
            boxes = self._boxes(specs)
            with self._named("receiving from"):
                works = [self._in.recv([t], SENDER, tag) for tag, (t, _) in enumerate(boxes) if t.numel()]
                self.finish(works, self._patience())
            return [buffer for _, buffer in boxes]
        except BaseException:
            self._give_up(self._in)
            self._in = None
            raise

    def _boxes(self, specs: Sequence[BufferSpec]) -> list[tuple[torch.Tensor, Buffer]]:
        try:
            return [self.inbox(spec) for spec in specs]
        except (RuntimeError, MemoryError) as error:  # torch has no memory for it
            total = sum(spec.nbytes for spec in specs)
            raise CommError(f"{self.link.my_name} has no memory for {total} bytes: {essence(error)}") from error

    def close(self, lost: bool) -> None:
        for group in (self._out, self._in):
            self._give_up(group)
        self._out = self._in = None

    def _patience(self) -> float:
        self._seconds = max(0.001, min(self.link.timeout, self.link.remaining()))
        return self._seconds

    def _meet(self, nonce: bytes, rank: int) -> Any:
        if len(nonce) != NONCE_BYTES:
            raise CommError(f"{len(nonce)} bytes are no ticket of {self.name}", peer=self.link.peer_name)
        timeout = self._patience()
        store = store_over(self.link.directory, f"{self.link.key}/{self.name}/{nonce.hex()}", timeout)
        try:
            return self.make_group(store, rank, timeout)
        except TimeoutError as error:
            me, peer = self.link.my_name, self.link.peer_name
            what = f"{peer} to open its end of the {self.name} connection"
            message = f"{me}: waited {timeout:g} s for {what}"
            raise CommTimeout(message, me=me, peer=peer, what=what, seconds=timeout) from error

    def _give_up(self, group: Any) -> None:
        """End a group. What it complains about then is of no use to anybody."""
        if group is not None:
            try:
                group.abort()
            except RuntimeError:
                pass  # its sockets are gone already

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """The library's errors as ours, with both ends; what is ours already goes on as it is."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, CommError):
                raise
            me, peer, text = self.link.my_name, self.link.peer_name, essence(error)
            what = f"{doing} {peer} by {self.name}"
            if isinstance(error, TimeoutError) or "timed out" in text.lower() or "timeout" in text.lower():
                message = f"{me}: {what} took longer than {self._seconds:g} s: {text}"
                raise CommTimeout(message, me=me, peer=peer, what=what, seconds=self._seconds) from error
            raise PeerLost(f"{me}: {what} failed: {text}", me=me, peer=peer) from error
