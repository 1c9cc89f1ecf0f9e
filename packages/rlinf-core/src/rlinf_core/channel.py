"""What a task's ends of a channel have in common, how they wait, and the writing end (``Out``).

The state of a channel lives in the hub (``rlinf_core.board``); the ends turn calls into its events, move payloads
through ``rlinf_core.payload`` and wait. Waiting is counted, so that a task's own time is known. The reading end is
``rlinf_core.reader``.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlinf_core.board import events as ev
from rlinf_core.callstats import Releases
from rlinf_core.errors import ChannelClosed, ChannelError, ChannelFull, WaitTimeout, describe
from rlinf_core.hub.client import HubClient, Pending
from rlinf_core.hub.messages import DRIVER, Accepted, Blocked, ChannelArg
from rlinf_core.payload import INLINE_BYTES, Descriptor, Frame, PayloadFetcher, PayloadStore, encode
from rlinf_core.worker import Out


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
    taken: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Items that the running call has taken, and their weight, by channel."""
    began: float = 0.0
    aside_before: float = 0.0
    releases: Releases = field(default_factory=Releases)
    """Of the running call."""

    def start(self) -> None:
        """A call begins."""
        self.wait = self.lock = self.switch = 0.0
        self.releases = Releases()
        self.taken = {}
        self.aside_before = self.aside
        self.began = time.perf_counter()

    @contextmanager
    def another_call(self) -> Iterator[None]:
        """A call that is run in the middle of this one: its time is ``aside`` for this one."""
        began = time.perf_counter()
        mine = (self.wait, self.lock, self.switch, self.began, self.aside_before, self.releases, self.taken)
        try:
            yield
        finally:
            self.wait, self.lock, self.switch, self.began, self.aside_before, self.releases, self.taken = mine
            self.aside += time.perf_counter() - began

    def took(self, channel: str, items: int, weight: float) -> None:
        """The running call has taken so many items."""
        self.items += items
        before, weighed = self.taken.get(channel, (0, 0.0))
        self.taken[channel] = before + items, weighed + weight

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


def message_of(channel: str, cause: str) -> str:
    return f"channel {channel!r}: {cause}"


WINDOW_ITEMS = 64
WINDOW_BYTES = 16 << 20
"""A task goes on while no more items than this that it put on a channel, and no more bytes, are unanswered."""


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
        self._sole = arg.sole
        self._closed = False
        self._unanswered: deque[tuple[Pending, list[ev.Item]]] = deque()
        self._unanswered_items = self._unanswered_bytes = 0

    def _descriptors(self, frame: Frame, keys: int) -> list[Descriptor]:
        """Where the payload of an item lies, for each of the keys it is put under."""
        e = self._endpoint
        member, nbytes = e.client.member, sum(len(b) for b in frame)
        if len(frame) == 1 and nbytes <= INLINE_BYTES:
            return [Descriptor(member, e.address, -1, nbytes, bytes(frame[0]))] * keys
        stored, ticket = e.store.add(frame, keys, keys if self._sole else 0)
        # Who is alone with an item may have the producer's own memory; several would see each other's changes.
        holders = range(keys) if self._sole else [-1] * keys
        return [Descriptor(member, e.address, stored, nbytes, None, ticket, holder, keys > 1) for holder in holders]

    def _send(self, items: tuple[ev.Item, ...], nowait: bool) -> Pending:
        return self._endpoint.client.request(
            lambda req: ev.Put(req, self._writer, self.name, items, nowait), f"credit to put on channel {self.name!r}"
        )

    def _send_ahead(self, items: tuple[ev.Item, ...]) -> None:
        pending = self._endpoint.client.put_ahead(
            self,
            items,
            lambda req, together: ev.Put(req, self._writer, self.name, together, ahead=True),
            f"credit to put on channel {self.name!r}",
        )
        if self._unanswered and self._unanswered[-1][0] is pending:
            self._unanswered[-1][1].extend(items)
        else:
            self._unanswered.append((pending, list(items)))
        self._unanswered_items += len(items)
        self._unanswered_bytes += sum(item.nbytes for item in items)

    def _prepare(self, item: Any, keys: tuple[Hashable, ...], weight: float) -> tuple[ev.Item, ...]:
        if self._closed:
            raise ChannelClosed(message_of(self.name, "put after this task closed it"))
        if self._unanswered and self._endpoint.client.on_engine_thread():
            self._settle(WINDOW_ITEMS, WINDOW_BYTES)  # what was refused is said before more is sent
        if not weight >= 0:
            raise ChannelError(message_of(self.name, f"weight must be a number >= 0, got {weight!r}"))
        for key in keys:
            _check_key(self.name, key)
        ids = getattr(item, "account_ids", None)
        counted = tuple(ids()) if callable(ids) else ()
        group = getattr(item, "group", None)
        group = group if isinstance(group, str) else None
        size = int(getattr(item, "group_size", 1))
        weight = float(weight)
        return tuple(
            ev.Item(descriptor, key, weight, descriptor.nbytes, counted, group, size)
            for key, descriptor in zip(keys, self._descriptors(encode(item), len(keys)), strict=True)
        )

    def _answer(self, answer: Any, items: Sequence[ev.Item]) -> None:
        if isinstance(answer, ev.PutDone | Accepted):
            return
        self._let_go(items)
        if isinstance(answer, ev.PutRefused):
            if answer.reason == "full":
                raise ChannelFull(message_of(self.name, "no credit now"))
            raise ChannelError(message_of(self.name, answer.reason))
        raise ChannelError(message_of(self.name, f"unexpected answer {answer!r}"))

    def _withdrawn(self, pending: Pending, items: Sequence[ev.Item]) -> None:
        """A put was given up: what did not come onto the channel is not kept for anybody."""
        if isinstance(pending.value, ev.CancelDone):
            self._let_go(items[pending.value.admitted :])

    def _let_go(self, items: Sequence[ev.Item]) -> None:
        self._endpoint.store.release([i.descriptor.key for i in items])  # type: ignore[attr-defined]

    def put(self, item: Any, key: Hashable = None, weight: float = 1.0, timeout: float | None = None) -> None:
        self._put(self._prepare(item, (key,), weight), timeout)

    def _put(self, items: tuple[ev.Item, ...], timeout: float | None) -> None:
        e = self._endpoint
        with e.clock.counting("wait"):
            if timeout is None and e.client.member != DRIVER and e.client.on_engine_thread():
                self._send_ahead(items)
                self._settle(WINDOW_ITEMS, WINDOW_BYTES)
                e.client.serve(aside=not e.sections.inside())  # as a wait would have done
            else:
                pending = self._send(items, nowait=False)
                try:
                    answer = wait(e, pending, timeout)
                except WaitTimeout:
                    self._withdrawn(pending, items)
                    raise
                self._answer(answer, items)
        self._note(items)

    def _settle(self, count: int, size: int) -> None:
        """Look at the answers that have come, and wait until at most ``count`` items and ``size`` bytes have none."""
        client = self._endpoint.client
        while self._unanswered:
            pending, items = self._unanswered[0]
            if not pending.done and self._unanswered_items <= count and self._unanswered_bytes <= size:
                return
            self._unanswered.popleft()
            self._unanswered_items -= len(items)
            self._unanswered_bytes -= sum(item.nbytes for item in items)
            if not pending.done:
                client.send(Blocked(pending.req))
            self._answer(wait(self._endpoint, pending, None), items)

    def _note(self, items: tuple[ev.Item, ...]) -> None:
        clock = self._endpoint.clock
        clock.releases.add([item.group for item in items], clock.worked())

    def put_many(
        self, items: Sequence[Any], keys: Sequence[Hashable] | None = None, weights: Sequence[float] | None = None
    ) -> None:
        keys = [None] * len(items) if keys is None else keys
        weights = [1.0] * len(items) if weights is None else weights
        entries: list[ev.Item] = []
        try:
            for item, key, weight in zip(items, keys, weights, strict=True):
                entries += self._prepare(item, (key,), weight)
        except BaseException:  # none of them is put, so nobody would ever let go of the ones before
            self._let_go(entries)
            raise
        if entries:
            self._put(tuple(entries), None)

    def put_nowait(self, item: Any, key: Hashable = None, weight: float = 1.0) -> None:
        items = self._prepare(item, (key,), weight)
        self._answer(self._endpoint.client.wait(self._send(items, nowait=True)), items)
        self._note(items)

    async def put_async(self, item: Any, key: Hashable = None, weight: float = 1.0) -> None:
        items = self._prepare(item, (key,), weight)
        pending = self._send(items, nowait=False)
        try:
            answer = await awaited(self._endpoint, pending)
        except asyncio.CancelledError:
            self._withdrawn(pending, items)
            raise
        self._answer(answer, items)
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


def _check_key(channel: str, key: Hashable) -> None:
    """A key travels with other items: one that cannot is refused here, where it is put."""
    hash(key)
    if key is None or type(key) in (str, int):
        return
    try:
        pickle.dumps(key)
    except Exception as error:  # a user's class may raise anything
        raise ChannelError(message_of(channel, f"the key {key!r} cannot be sent: {describe(error)}")) from error


def wait(endpoint: Endpoint, pending: Pending, timeout: float | None) -> Any:
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


async def awaited(endpoint: Endpoint, pending: Pending) -> Any:
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
