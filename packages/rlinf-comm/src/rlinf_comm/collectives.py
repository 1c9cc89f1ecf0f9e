"""Collectives of host memory among named members, over a gloo group of their own: barrier, broadcast, all_gather.

Each member makes one ``Collectives`` with the same name and the same list of members, and all call the same operations
in the same order; a member that calls another one is an error, by name, at all of them. Objects go through the codec,
so that buffers are not pickled. Every operation has a deadline, and says at its end who has not come.

An object that cannot be encoded fails the operation at all members and the next one works. A deadline that passes, or a
member that dies, ends the group: gloo cannot go on then. Make a new one, under another name.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlinf_comm.codec import CodecError, decode, encode
from rlinf_comm.errors import CommClosed, CommError, CommTimeout, PeerLost, RemoteError
from rlinf_comm.transports.gloo import LOCALHOST, flat_tensor, gloo_group
from rlinf_comm.transports.groups import essence, store_over
from rlinf_comm.work import seconds_of

if TYPE_CHECKING:
    import torch

    from rlinf_comm.directory import Directory

_HEADER = struct.Struct("<Q16sqqq")
"""Operation's number and name, source's rank, bytes of the skeleton, number of buffers."""
FAILED = -1
"""In place of the skeleton's bytes: this member's object cannot be encoded."""


class Collectives:
    """``host``: this node's own address, on which gloo listens. ``timeout``: seconds for an operation without its own.

    ``name`` must be new in the directory for each group.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[str],
        me: str,
        directory: Directory,
        *,
        host: str = LOCALHOST,
        timeout: float = 120.0,
    ) -> None:
        self.name = name
        self.members = tuple(members)
        if len(set(self.members)) != len(self.members) or not self.members:
            raise CommError(f"group {name!r} needs members, each once: {', '.join(self.members) or 'none'}")
        if me not in self.members:
            raise CommError(f"{me} is not one of group {name!r} ({', '.join(self.members)})")
        self.me = me
        self.rank = self.members.index(me)
        self._directory = directory
        self._host = host
        self._timeout = seconds_of(timeout, f"group {name!r}: timeout")
        self._group: Any = None
        self._count = 0
        self._over = ""

    def barrier(self, timeout: float | None = None) -> None:
        """Return when all members are here. Raises CommTimeout naming those who are not."""
        with self._operation("barrier", timeout) as left:
            self._headers("barrier", -1, 0, 0, left)

    def broadcast(self, obj: Any, *, source: str, timeout: float | None = None) -> Any:
        """The source's object at every member (at the source the very same); what others give is not looked at."""
        root = self._rank_of(source)
        with self._operation("broadcast", timeout) as left:
            mine = self._encode(obj) if root == self.rank else (b"", [], "")
            headers = self._headers("broadcast", root, *_lengths(mine), left)
            found = self._from(root, headers[root], mine, left)
        return obj if root == self.rank else found()

    def all_gather(self, obj: Any, timeout: float | None = None) -> list[Any]:
        """The objects of all members, in their order; one's own is the very same."""
        with self._operation("all_gather", timeout) as left:
            mine = self._encode(obj)
            headers = self._headers("all_gather", -1, *_lengths(mine), left)
            self._check_encoded(headers, mine[2])
            found = [self._from(rank, header, mine, left) for rank, header in enumerate(headers)]
        return [obj if rank == self.rank else decoded() for rank, decoded in enumerate(found)]

    def close(self) -> None:
        """End the group here. Others that still wait for this member fail."""
        self._end("it was closed")

    # The group

    def _end(self, reason: str) -> None:
        self._over = self._over or reason
        group, self._group = self._group, None
        if group is not None:
            try:
                group.abort()
            except RuntimeError:
                pass  # its sockets are gone already

    @contextmanager
    def _operation(self, what: str, timeout: float | None) -> Iterator[Callable[[], float]]:
        """Count it, note in the directory that this member is here, and give errors names."""
        if self._over:
            raise CommClosed(f"group {self.name!r} is over at {self.me}: {self._over}", me=self.me)
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        deadline = time.monotonic() + seconds
        self._count += 1
        self._directory.publish(self._mark(self.rank), self._count.to_bytes(8, "little"))

        def left() -> float:
            return max(0.001, deadline - time.monotonic())

        try:
            if self._group is None:
                store = store_over(self._directory, f"rlinf-collectives/{self.name}/gloo", left())
                self._group = gloo_group(store, self.rank, len(self.members), left(), self._host)
            yield left
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, CommError):
                raise
            raise self._named(error, what, seconds, time.monotonic() >= deadline) from error

    def _mark(self, rank: int) -> str:
        return f"rlinf-collectives/{self.name}/at/{rank}"

    def _late(self) -> list[str]:
        """Members that have not begun the operation that this one is in."""
        found = []
        for rank, member in enumerate(self.members):
            try:
                at = int.from_bytes(self._directory.lookup(self._mark(rank), 0.0), "little")
            except TimeoutError:
                at = 0
            if at < self._count:
                found.append(member)
        return found

    def _named(self, error: BaseException, what: str, seconds: float, over: bool) -> CommError:
        late = self._late()
        who = ", ".join(late) or f"one of {', '.join(m for m in self.members if m != self.me)}"
        text = essence(error)
        where = f"{what} number {self._count} of group {self.name!r}"
        if over or isinstance(error, TimeoutError) or "timed out" in text.lower():
            said = "has not come" if len(late) < 2 else "have not come"
            message = f"{self.me} waited {seconds:g} s in {where}: {who} {said}"
            named: CommError = CommTimeout(message, me=self.me, peer=who, what=f"{who} in {where}", seconds=seconds)
        else:
            named = PeerLost(f"{self.me} lost {who} in {where}: {text}", me=self.me, peer=who)
        self._end(str(named))
        return named

    # One operation

    def _rank_of(self, member: str) -> int:
        if member not in self.members:
            raise CommError(f"{member} is not one of group {self.name!r} ({', '.join(self.members)})", me=self.me)
        return self.members.index(member)

    def _encode(self, obj: Any) -> tuple[bytes, list[memoryview], str]:
        """(skeleton, buffers, why the object cannot be sent)."""
        try:
            skeleton, buffers = encode(obj)
        except CodecError as error:
            return b"", [], str(error)
        host = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
        if len(host) != len(buffers):
            return b"", [], "it holds tensors of an accelerator: move them to the CPU first"
        return bytes(skeleton), host, ""

    def _headers(
        self, what: str, root: int, skeleton: int, buffers: int, left: Callable[[], float]
    ) -> list[tuple[int, int]]:
        """Exchange what each member is doing: (bytes of its skeleton, number of its buffers). All must agree."""
        import torch

        mine = _HEADER.pack(self._count, what.encode(), root, skeleton, buffers)
        tensors = [torch.empty(_HEADER.size, dtype=torch.uint8) for _ in self.members]
        own = flat_tensor(memoryview(mine))
        self._group.allgather([tensors], [own], _options("AllgatherOptions", left())).wait()
        found = [_HEADER.unpack(bytes(t.numpy())) for t in tensors]
        for member, (count, name, its_root, *_) in zip(self.members, found, strict=True):
            if (count, name.rstrip(b"\0").decode(), its_root) != (self._count, what, root):
                other = f"{name.rstrip(bytes(1)).decode()} number {count}" + self._source(its_root)
                message = f"{self.me} is in {what} number {self._count}{self._source(root)}, {member} in {other}"
                self._end(message)
                raise CommError(f"group {self.name!r} does different things: {message}", me=self.me, peer=member)
        return [(entry[3], entry[4]) for entry in found]

    def _source(self, root: int) -> str:
        return f" from {self.members[root]}" if 0 <= root < len(self.members) else ""

    def _check_encoded(self, headers: Sequence[tuple[int, int]], mine: str) -> None:
        if mine:
            raise CodecError(mine)
        for member, (size, _) in zip(self.members, headers, strict=True):
            if size == FAILED:
                text = "its object cannot be encoded"
                raise RemoteError(f"{member} failed in group {self.name!r}: {text}", me=self.me, peer=member, text=text)

    def _from(
        self,
        root: int,
        header: tuple[int, int],
        mine: tuple[bytes, list[memoryview], str],
        left: Callable[[], float],
    ) -> Callable[[], Any]:
        """Move the object of ``root``; what is returned decodes it."""
        skeleton, buffers, fault = mine if root == self.rank else (b"", [], "")
        if header[0] == FAILED:
            headers = [header if rank == root else (0, 0) for rank in range(len(self.members))]
            self._check_encoded(headers, fault)
        if root == self.rank:
            table = skeleton + b"".join(b.nbytes.to_bytes(8, "little") for b in buffers)
            self._move([memoryview(table), *buffers], root, left)
            return lambda: None
        import torch

        box = torch.empty(header[0] + 8 * header[1], dtype=torch.uint8)
        self._move_tensors([box], root, left)
        table = bytes(box.numpy())
        sizes = [int.from_bytes(table[at : at + 8], "little") for at in range(header[0], len(table), 8)]
        boxes = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._move_tensors(boxes, root, left)
        return lambda: decode(table[: header[0]], [b.numpy().data for b in boxes])

    def _move(self, buffers: Sequence[memoryview], root: int, left: Callable[[], float]) -> None:
        self._move_tensors([flat_tensor(b) for b in buffers], root, left)

    def _move_tensors(self, tensors: Sequence[torch.Tensor], root: int, left: Callable[[], float]) -> None:
        for tensor in tensors:
            if tensor.numel():
                options = _options("BroadcastOptions", left())
                options.rootRank = root
                self._group.broadcast([tensor], options).wait()


def _options(kind: str, seconds: float) -> Any:
    from torch.distributed import distributed_c10d

    options = getattr(distributed_c10d, kind)()
    options.timeout = timedelta(seconds=seconds)
    return options


def _lengths(encoded: tuple[bytes, list[memoryview], str]) -> tuple[int, int]:
    skeleton, buffers, fault = encoded
    return (FAILED if fault else len(skeleton)), len(buffers)
