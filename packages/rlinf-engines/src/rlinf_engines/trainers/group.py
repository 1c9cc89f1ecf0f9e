"""The ranks of a trainer, and what they tell each other.

Only trainer backends use torch.distributed's default group, and only through this module. With one rank no group is
opened and every call answers at once.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.types import ParallelInfo

if TYPE_CHECKING:
    import torch

# How often each rank of this process has opened a group at each rendezvous.
_openings: Counter[tuple[str, int]] = Counter()


class RankGroup:
    """torch.distributed's default group seen from one rank: gloo on a CPU; nccl on a GPU, with gloo for objects."""

    def __init__(self, place: ParallelInfo, device: torch.device) -> None:
        self.place = place
        self._device = device
        self._joined = False
        self._store: Any = None

    def join(self) -> None:
        """Meet the other ranks and open the group. A peer that does not come in time is an error that names it."""
        import torch
        import torch.distributed as dist

        place = self.place
        if place.world_size == 1:
            return
        if not place.init_method:
            raise ConfigError(f"trainer: {place.world_size} ranks need parallel.init_method (file:// or tcp://)")
        if dist.is_initialized():
            raise RLinfError(
                "trainer: this process is already in a torch.distributed group. Every rank needs a process of its own: "
                "close() the trainer before, put each trainer with several ranks into a worker group of its own, and "
                "with cluster.debug=true give the trainer one rank"
            )
        cuda = self._device.type == "cuda"
        if cuda and self._device.index is not None:
            torch.cuda.set_device(self._device)
        wait = timedelta(seconds=place.timeout_s)
        missing: list[int] = []
        try:
            store = _store(place, wait)
            store.set(f"here/{place.rank}", "1")
            keys = [f"here/{rank}" for rank in range(place.world_size)]
            try:
                store.wait(keys, wait)
            except RuntimeError:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=dist.PrefixStore("group", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=wait,
            )
        except (RuntimeError, ValueError) as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            who = f": rank {', '.join(map(str, missing))} did not come" if missing else ""
            raise elsewhere(
                f"{self._me()}: joining the other ranks through {place.init_method} failed within "
                f"{place.timeout_s:g} s{who}: {error}"
            ) from error
        self._joined, self._store = True, store
        _openings[place.init_method, place.rank] += 1

    def leave(self) -> None:
        """Close the group if this object opened it."""
        if not self._joined:
            return
        import torch.distributed as dist

        self._joined = False
        if dist.is_initialized():
            dist.destroy_process_group()
        with _one_at_a_time(self.place):
            self._store = None

    def barrier(self, what: str = "waiting for the other ranks") -> None:
        """Wait for all ranks."""
        self.everyone(None, what)

    def everyone(self, value: Any, what: str = "exchanging values", group: Any = None) -> list[Any]:
        """The (picklable) values of all ranks, or of those of ``group``, in rank order. Collective."""
        if self.place.world_size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size(group)
        with self.talking(what):
            dist.all_gather_object(found, value, group=group)
        return found

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """Around a collective of torch.distributed: when it fails, say what failed and that a peer is the cause."""
        try:
            yield
        except RuntimeError as error:
            raise self.peer_error(what, error) from error

    def peer_error(self, what: str, error: BaseException) -> RLinfError:
        """The error to raise when ``what`` failed because another rank is gone or late."""
        return elsewhere(f"{self._me()}: {what} failed, a peer is gone or late: {error}")

    def _me(self) -> str:
        return f"trainer rank {self.place.rank} of {self.place.world_size}"


def elsewhere(text: str) -> RLinfError:
    """An error whose cause is most likely in another process."""
    error = RLinfError(text)
    error.elsewhere = True
    return error


def is_peer_failure(error: BaseException) -> bool:
    """Whether a ``RuntimeError`` comes from a collective and not from this rank's own computation."""
    import torch.distributed as dist

    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text


def _file(place: ParallelInfo) -> str:
    """The path of ``file://PATH``, taken as it is (a folder's name may have # or ? in it); else empty."""
    return place.init_method.removeprefix("file://") if place.init_method.startswith("file://") else ""


@contextmanager
def _one_at_a_time(place: ParallelInfo) -> Iterator[None]:
    """Around the closing of a rank's store: two ranks that close at once would each leave the file to the other.

    torch counts the ranks that have finished and those that hold the file in two steps. Where the directory can't be
    locked (some network file systems), the file may stay.
    """
    with ExitStack() as held:
        if path := _file(place):
            with suppress(OSError):
                directory = os.open(os.path.dirname(path), os.O_RDONLY)
                held.callback(os.close, directory)
                fcntl.flock(directory, fcntl.LOCK_EX)
        yield


def _store(place: ParallelInfo, wait: timedelta) -> Any:
    """The rendezvous store of ``file://PATH`` or ``tcp://HOST:PORT`` (rank 0 serves it).

    A file is used for one opening: torch removes it when the last rank closes it, and until then a rank that opens the
    next group would read there what the last one wrote. All ranks open equally often, so they count to the same name.
    """
    import torch.distributed as dist

    if path := _file(place):
        opening = _openings[place.init_method, place.rank]
        store = dist.FileStore(f"{path}.{opening}", place.world_size)
        store.set_timeout(wait)
        return store
    url = urlsplit(place.init_method)
    if url.scheme == "tcp" and url.hostname and url.port:
        return dist.TCPStore(
            url.hostname, url.port, place.world_size, place.rank == 0, timeout=wait, wait_for_workers=False
        )
    raise ConfigError(f"trainer: parallel.init_method {place.init_method!r} is neither file://PATH nor tcp://HOST:PORT")
