"""A task's ends of a channel: what ``In`` and ``Out`` parameters are bound to in a worker process.

The state of a channel lives in the hub (``rlinf_core.board``); these objects turn calls into its events, move
payloads through ``rlinf_core.payload`` and wait. Waiting is counted, so that a task's own time is known.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlinf_core.board import events as ev
from rlinf_core.callstats import Releases
from rlinf_core.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ChannelPoisoned,
    EndOfChannel,
    WaitTimeout,
)
from rlinf_core.hub.client import HubClient, Pending
from rlinf_core.hub.messages import DRIVER, Accepted, AtSafePoint, Blocked, ChannelArg
from rlinf_core.payload import Descriptor, Frame, PayloadFetcher, PayloadStore, encode
from rlinf_core.worker import In, Out


@dataclass
class Clock:
    """Seconds that the running call has spent waiting (and not working)."""

    wait: float = 0.0
    lock: float = 0.0
    switch: float = 0.0
    switch_between: float = 0.0
    """Switching since the last call ended."""
    aside: float = 0.0
    """Spent in other calls that were served while this one waited."""
    items: int = 0
    """Items taken so far, over all calls."""
    began: float = 0.0
    aside_before: float = 0.0
    releases: Releases = field(default_factory=Releases)
    """Of the running call."""

    def start(self) -> None:
        """A call begins."""
        self.wait = self.lock = self.switch = 0.0
        self.releases = Releases()
        self.aside_before = self.aside
        self.began = time.perf_counter()

    @contextmanager
    def another_call(self) -> Iterator[None]:
        """A call that is run in the middle of this one: its time is ``aside`` for this one."""
        began = time.perf_counter()
        mine = (self.wait, self.lock, self.switch, self.began, self.aside_before, self.releases)
        try:
            yield
        finally:
            self.wait, self.lock, self.switch, self.began, self.aside_before, self.releases = mine
            self.aside += time.perf_counter() - began

    def worked(self) -> float:
        """Seconds of its own work that the running call has done."""
        aside = self.aside - self.aside_before
        return time.perf_counter() - self.began - self.wait - self.lock - self.switch - aside

    @contextmanager
    def counting(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        switch_before, aside_before = self.switch, self.aside
        try:
            yield
        finally:
            spent = time.perf_counter() - start - (self.aside - aside_before)
            if what != "switch":
                spent -= self.switch - switch_before  # an offload served inside a wait is booked as switching
            setattr(self, what, getattr(self, what) + spent)


class Sections:
    """What a wait must know of device sections; a process without devices has none."""

    def inside(self) -> bool:
        """Whether the running task is in a section now."""
        return False

    def yields(self) -> bool:
        """Whether a wait now would let others have the devices: in a section, of devices that others use too."""
        return False

    def regain(self) -> None:
        """Have the devices again after a wait inside a section that ended without an answer."""

    def reload(self) -> None:
        """Onload what was offloaded during a wait inside a section."""


@dataclass
class Endpoint:
    """What both ends share: the process's hub client, its payloads and the running call's clock."""

    client: HubClient
    store: PayloadStore
    fetcher: PayloadFetcher
    address: tuple[str, int]
    group: str
    rank: int
    clock: Clock
    sections: Sections


def _message(channel: str, cause: str) -> str:
    return f"channel {channel!r}: {cause}"


WINDOW_PUTS = 8
WINDOW_BYTES = 1 << 20
"""A task goes on while no more puts than this on a channel, and no more bytes, are unanswered."""


class Writer(Out[Any]):
    """A bound ``Out``.

    The engine thread of a worker does not wait for the answer of each put, but for the oldest ones once there are more
    unanswered than the window allows, and for all of them in ``close``. What is refused is raised there too. The hub
    takes puts in their order either way.
    """

    def __init__(self, endpoint: Endpoint, arg: ChannelArg) -> None:
        self.name = arg.channel
        self._endpoint = endpoint
        self._writer = arg.writer
        self._closed = False
        self._unanswered: deque[tuple[Pending, tuple[ev.Item, ...], int]] = deque()
        self._unanswered_bytes = 0

    def _item(self, frame: Frame, references: int, item: Any, key: Hashable, weight: float) -> ev.Item:
        e = self._endpoint
        nbytes = sum(len(b) for b in frame)
        stored = e.store.add(frame, references)
        ids = getattr(item, "account_ids", None)
        group = getattr(item, "group", None)
        return ev.Item(
            descriptor=Descriptor(e.client.member, e.address, stored, nbytes),
            key=key,
            weight=float(weight),
            nbytes=nbytes,
            ids=tuple(ids()) if callable(ids) else (),
            group=group if isinstance(group, str) else None,
            group_size=int(getattr(item, "group_size", 1)),
        )

    def _send(self, items: tuple[ev.Item, ...], nowait: bool, ahead: bool = False) -> Pending:
        return self._endpoint.client.request(
            lambda req: ev.Put(req, self._writer, self.name, items, nowait, ahead),
            f"credit to put on channel {self.name!r}",
            ahead=ahead,
        )

    def _prepare(self, item: Any, keys: tuple[Hashable, ...], weight: float) -> tuple[ev.Item, ...]:
        if self._closed:
            raise ChannelClosed(_message(self.name, "put after this task closed it"))
        if self._unanswered and self._endpoint.client.on_engine_thread():
            self._settle(WINDOW_PUTS, WINDOW_BYTES)  # what was refused is said before more is sent
        if not weight >= 0:
            raise ChannelError(_message(self.name, f"weight must be a number >= 0, got {weight!r}"))
        for key in keys:
            hash(key)
        frame = encode(item)
        first = self._item(frame, len(keys), item, keys[0], weight)
        rest = (
            ev.Item(first.descriptor, k, first.weight, first.nbytes, first.ids, first.group, first.group_size)
            for k in keys[1:]
        )
        return (first, *rest)

    def _answer(self, answer: Any, items: tuple[ev.Item, ...]) -> None:
        if isinstance(answer, ev.PutDone | Accepted):
            return
        self._endpoint.store.release([i.descriptor.key for i in items])  # type: ignore[attr-defined]
        if isinstance(answer, ev.PutRefused):
            if answer.reason == "full":
                raise ChannelFull(_message(self.name, "no credit now"))
            raise ChannelError(_message(self.name, answer.reason))
        raise ChannelError(_message(self.name, f"unexpected answer {answer!r}"))

    def put(self, item: Any, key: Hashable = None, weight: float = 1.0, timeout: float | None = None) -> None:
        self._put(self._prepare(item, (key,), weight), timeout)

    def _put(self, items: tuple[ev.Item, ...], timeout: float | None) -> None:
        e = self._endpoint
        with e.clock.counting("wait"):
            if timeout is None and e.client.member != DRIVER and e.client.on_engine_thread():
                pending = self._send(items, nowait=False, ahead=True)
                size = sum(item.nbytes for item in items)
                self._unanswered.append((pending, items, size))
                self._unanswered_bytes += size
                self._settle(WINDOW_PUTS, WINDOW_BYTES)
                e.client.serve(aside=not e.sections.inside())  # as a wait would have done
            else:
                pending = self._send(items, nowait=False)
                self._answer(_wait(e, pending, timeout), items)
        self._note(items)

    def _settle(self, puts: int, size: int) -> None:
        """Look at the answers that have come, and wait until at most ``puts`` puts and ``size`` bytes have none."""
        client = self._endpoint.client
        while self._unanswered:
            pending, items, its_size = self._unanswered[0]
            if not pending.done and len(self._unanswered) <= puts and self._unanswered_bytes <= size:
                return
            self._unanswered.popleft()
            self._unanswered_bytes -= its_size
            if not pending.done:
                client.send(Blocked(pending.req))
            self._answer(_wait(self._endpoint, pending, None), items)

    def _note(self, items: tuple[ev.Item, ...]) -> None:
        clock = self._endpoint.clock
        clock.releases.add([item.group for item in items], clock.worked())

    def put_many(
        self, items: Sequence[Any], keys: Sequence[Hashable] | None = None, weights: Sequence[float] | None = None
    ) -> None:
        keys = [None] * len(items) if keys is None else keys
        weights = [1.0] * len(items) if weights is None else weights
        rows = zip(items, keys, weights, strict=True)
        entries = tuple(entry for item, key, weight in rows for entry in self._prepare(item, (key,), weight))
        if entries:
            self._put(entries, None)

    def put_nowait(self, item: Any, key: Hashable = None, weight: float = 1.0) -> None:
        items = self._prepare(item, (key,), weight)
        self._answer(self._endpoint.client.wait(self._send(items, nowait=True)), items)
        self._note(items)

    async def put_async(self, item: Any, key: Hashable = None, weight: float = 1.0) -> None:
        items = self._prepare(item, (key,), weight)
        self._answer(await _awaited(self._endpoint, self._send(items, nowait=False)), items)
        self._note(items)

    def broadcast(self, item: Any, keys: Iterable[Hashable]) -> None:
        distinct = tuple(keys)
        if distinct:
            self._put(self._prepare(item, distinct, 1.0), None)

    def close(self) -> None:
        if not self._closed:
            with self._endpoint.clock.counting("wait"):
                self._settle(0, 0)
            self._closed = True
            self._endpoint.client.send(ev.CloseWriter(channel=self.name, writer=self._writer))


class Reader(In[Any]):
    """A bound ``In``."""

    def __init__(self, endpoint: Endpoint, arg: ChannelArg) -> None:
        self.name = arg.channel
        self._portion = arg.portion
        self._endpoint = endpoint

    @property
    def portion(self) -> int | None:
        return self._portion

    def _send(self, key: Any, mode: ev.Mode, n: int | None, weight: float, nowait: bool) -> Pending:
        e = self._endpoint

        def event(req: tuple[str, int]) -> Any:
            get = ev.Get(
                req=req,
                channel=self.name,
                group=e.group,
                rank=e.rank,
                key=key,
                mode=mode,
                n=n,
                weight=weight,
                nowait=nowait,
            )
            return AtSafePoint(get) if e.sections.yields() else get

        return e.client.request(event, f"an item of channel {self.name!r}")

    def _answer(self, answer: Any) -> list[Any]:
        if isinstance(answer, ev.Deliver):
            return self._fetch([item.descriptor for item in answer.items], [item.uid for item in answer.items])
        if isinstance(answer, ev.DeliverJoined):
            flat = [item for pair in answer.pairs for item in pair]
            values = self._fetch([i.descriptor for i in flat], [i.uid for i in flat])
            return [(values[k], values[k + 1]) for k in range(0, len(values), 2)]
        if isinstance(answer, ev.End):
            raise EndOfChannel(_message(self.name, "ended"))
        if isinstance(answer, ev.Poisoned):
            poisoned = ChannelPoisoned(_message(self.name, answer.cause))
            poisoned.by_hub = True
            raise poisoned
        if isinstance(answer, ev.Empty):
            raise ChannelEmpty(_message(self.name, "nothing to take now"))
        if isinstance(answer, ev.PutRefused):
            raise ChannelError(_message(self.name, answer.reason))
        raise ChannelError(_message(self.name, f"unexpected answer {answer!r}"))

    def _fetch(self, descriptors: list[Any], uids: list[int]) -> list[Any]:
        if not descriptors:
            return []
        values = self._endpoint.fetcher.fetch(descriptors)
        self._endpoint.clock.items += len(values)
        self._endpoint.client.send_along(ev.Fetched(uids=tuple(uids), group=self._endpoint.group))
        return values

    def _take(
        self,
        key: Any,
        mode: ev.Mode,
        n: int | None = 1,
        weight: float = 0.0,
        timeout: float | None = None,
        nowait: bool = False,
    ) -> list[Any]:
        with self._endpoint.clock.counting("wait"):
            pending = self._send(key, mode, n, weight, nowait)
            return self._answer(_wait(self._endpoint, pending, timeout))

    def get(self, key: Any = ..., timeout: float | None = None) -> Any:
        return self._take(_key(key), "items", timeout=timeout)[0]

    def get_nowait(self, key: Any = ...) -> Any:
        return self._take(_key(key), "items", nowait=True)[0]

    async def get_async(self, key: Any = ..., timeout: float | None = None) -> Any:
        pending = self._send(_key(key), "items", 1, 0.0, False)
        answer = await asyncio.wait_for(_awaited(self._endpoint, pending), timeout)
        return (await asyncio.get_running_loop().run_in_executor(None, self._answer, answer))[0]

    def get_batch(self, weight: float, timeout: float | None = None) -> list[Any]:
        if not weight > 0:
            raise ChannelError(_message(self.name, f"get_batch needs a weight > 0, got {weight!r}"))
        return self._take(ev.ANY, "weight", weight=weight, timeout=timeout)

    def batches(self, n: int | None = None) -> Iterator[list[Any]]:
        if n is not None and n < 1:
            raise ChannelError(_message(self.name, f"batches() needs n >= 1, got {n}"))
        return self._until_end(lambda: self._take(ev.ANY, "portion", n=ev.PLAN if n is None else n))

    @staticmethod
    def _until_end(take: Callable[[], list[Any]]) -> Iterator[list[Any]]:
        while True:
            try:
                portion = take()
            except EndOfChannel:
                return
            yield portion

    def __iter__(self) -> Iterator[Any]:
        for (item,) in self._until_end(lambda: self._take(ev.ANY, "items")):
            yield item

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.get_async()
            except EndOfChannel:
                return
            yield item


class Joined:
    """Matched items of two channels: iterate for single pairs, or ``batches()`` for lists of them."""

    def __init__(self, a: Reader, b: Reader, by: ev.JoinBy) -> None:
        self._a = a
        self._b = b
        self._by: ev.JoinBy = by

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while pairs := self._take("items", 1):
            yield from pairs

    def batches(self, n: int | None = None) -> Iterator[list[tuple[Any, Any]]]:
        """Lists of ``n`` pairs (the plan's portion of the first channel by default), as ``In.batches``: the only way
        for the ranks of a collective group, some of whose lists may be empty."""
        if n is not None and n < 1:
            raise ChannelError(f"join(…).batches() needs n >= 1, got {n}")
        while (pairs := self._take("portion", ev.PLAN if n is None else n)) is not None:
            yield pairs

    def _take(self, mode: ev.Mode, n: int) -> list[tuple[Any, Any]] | None:
        """The next pairs; ``None`` at the end."""
        a, b, e = self._a, self._b, self._a._endpoint

        def event(req: tuple[str, int]) -> Any:
            pair = ev.JoinReader(req=req, group=e.group, rank=e.rank, a=a.name, b=b.name, by=self._by, mode=mode, n=n)
            return AtSafePoint(pair) if e.sections.yields() else pair

        with e.clock.counting("wait"):
            pending = e.client.request(event, f"a matching pair of channels {a.name!r} and {b.name!r}")
            try:
                return a._answer(_wait(e, pending, None))
            except EndOfChannel:
                return None


def join(a: In[Any], b: In[Any], by: ev.JoinBy = "id") -> Joined:
    """Matched items of two channels as ``(item of a, item of b)``, in the order in which matches complete.

    Matching is by account id (``by="id"``) or by channel key (``by="key"``) and happens in the hub, so several
    ranks of the reading group share the pairs. What is dropped on one side drops on the other; an item left
    without partner at the end, with no drop announced, fails the step by name.
    """
    if not isinstance(a, Reader) or not isinstance(b, Reader):
        raise ChannelError("join() takes two channels that the task was given as In[...] parameters")
    if by not in ("id", "key", "group"):
        raise ChannelError(f"join() matches by 'id', 'key' or 'group', got {by!r}")
    return Joined(a, b, by)


def _key(key: Any) -> Any:
    if key is ...:
        return ev.ANY
    hash(key)
    return key


def _wait(endpoint: Endpoint, pending: Pending, timeout: float | None) -> Any:
    client, sections = endpoint.client, endpoint.sections
    try:
        value = client.wait(pending, timeout, aside=not sections.inside())
    except WaitTimeout:
        # The answer may be on its way: it counts, or its item would be lost. The hub says which of the two it is.
        client.send(ev.CancelRequest(req=pending.req))
        value = client.wait(pending)
        if isinstance(value, ev.CancelDone):
            if sections.yields():
                sections.regain()
            raise
    except BaseException:
        client.forget(pending)
        if client.cancelled is None and not pending.done:
            client.send(ev.CancelRequest(req=pending.req))
        raise
    if sections.inside():
        sections.reload()
    return value


async def _awaited(endpoint: Endpoint, pending: Pending) -> Any:
    client, sections = endpoint.client, endpoint.sections
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    wake = partial(_wake, loop, ready)
    client.on_done(pending, wake)
    client.on_offload(wake)  # an offload request is served in an asynchronous wait too
    withdrawn: asyncio.CancelledError | None = None
    try:
        while not pending.done and client.cancelled is None:
            try:
                await ready.wait()
            except asyncio.CancelledError as error:  # a timeout, say: as in ``_wait``
                if withdrawn is None:
                    client.send(ev.CancelRequest(req=pending.req))
                withdrawn = error
            ready.clear()
            client.offload_if_wanted()
    finally:
        client.off_offload(wake)
    if not pending.done:
        client.check()
    if withdrawn is not None and isinstance(pending.value, ev.CancelDone):
        if sections.yields():
            sections.regain()
        raise withdrawn
    if sections.inside():
        sections.reload()
    return pending.value


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        if not loop.is_closed():  # a closed loop has nobody left who waits
            raise
