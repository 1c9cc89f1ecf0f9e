"""The reading end of a channel (``In``), and matched pairs of two.

A rank that is alone with its input, and whose devices nobody else wants, asks for more before it needs it
(``rlinf_core.reserve``): while it works, the next items are on their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast

from rlinf_core.board import events as ev
from rlinf_core.channel import Endpoint, awaited, message_of, wait
from rlinf_core.errors import ChannelEmpty, ChannelError, ChannelPoisoned, EndOfChannel
from rlinf_core.hub.client import Pending
from rlinf_core.hub.messages import AtSafePoint, Blocked, ChannelArg
from rlinf_core.payload import Descriptor
from rlinf_core.reserve import Reserve
from rlinf_core.worker import In


class Reader(In[Any]):
    """A bound ``In``."""

    def __init__(self, endpoint: Endpoint, arg: ChannelArg) -> None:
        self.name = arg.channel
        self._portion = arg.portion
        self._endpoint = endpoint
        self._reserve = Reserve() if arg.sole else None

    @property
    def portion(self) -> int | None:
        return self._portion

    # Single items

    def get(self, key: Any = ..., timeout: float | None = None) -> Any:
        wanted = _key(key)
        with self._endpoint.clock.counting("wait"):
            reserve = self._reserve
            if reserve is not None and wanted is ev.ANY and self._endpoint.client.on_engine_thread():
                return self._next(reserve, timeout)
            self._give_back()
            return self._fetch(self._request(wanted, "items", 1, timeout=timeout))[0]

    def _next(self, reserve: Reserve, timeout: float | None) -> Any:
        """The oldest item, from what has come already or was asked for; asks for more while it is fetched."""
        self._safe_point()
        if reserve.asked is not None and reserve.asked[0] != "items":
            self._give_back()
        with reserve.lock:
            item = reserve.items.popleft() if reserve.items else None
        if item is None:
            pending = self._asked_for("items", reserve.size)
            items = self._items(wait(self._endpoint, pending, timeout))
            with reserve.lock:
                reserve.received(tuple(items))
                item = reserve.items.popleft()
        if reserve.low():
            self._ask_ahead(reserve, "items", reserve.size)
        return self._fetch([item])[0]

    def get_nowait(self, key: Any = ...) -> Any:
        wanted = _key(key)
        with self._endpoint.clock.counting("wait"):
            self._give_back()
            return self._fetch(self._request(wanted, "items", 1, nowait=True))[0]

    async def get_async(self, key: Any = ..., timeout: float | None = None) -> Any:
        wanted = _key(key)
        self._give_back()
        pending = self._send(wanted, "items", 1)
        items = self._items(await asyncio.wait_for(awaited(self._endpoint, pending), timeout))
        fetching = asyncio.get_running_loop().run_in_executor(None, self._fetch, items)
        try:
            return (await asyncio.shield(fetching))[0]
        except asyncio.CancelledError:
            return (await fetching)[0]  # it has been handed to us: it counts, as an answer that is on its way does

    # Several items

    def get_batch(self, weight: float, timeout: float | None = None) -> list[Any]:
        if not weight > 0:
            raise ChannelError(message_of(self.name, f"get_batch needs a weight > 0, got {weight!r}"))
        with self._endpoint.clock.counting("wait"):
            self._give_back()
            return self._fetch(self._request(ev.ANY, "weight", None, weight=weight, timeout=timeout))

    def batches(self, n: int | None = None) -> Iterator[list[Any]]:
        if n is not None and n < 1:
            raise ChannelError(message_of(self.name, f"batches() needs n >= 1, got {n}"))
        return self._until_end(lambda: self._next_portion(ev.PLAN if n is None else n))

    def _next_portion(self, n: int) -> list[Any]:
        with self._endpoint.clock.counting("wait"):
            reserve = self._reserve
            if reserve is None or not self._endpoint.client.on_engine_thread():
                self._give_back()
                return self._fetch(self._request(ev.ANY, "portion", n))
            self._safe_point()
            if reserve.items or reserve.asked != ("portion", n):
                self._give_back()
            items = self._items(wait(self._endpoint, self._asked_for("portion", n), None))
            self._ask_ahead(reserve, "portion", n)
            return self._fetch(items)

    @staticmethod
    def _until_end(take: Callable[[], list[Any]]) -> Iterator[list[Any]]:
        while True:
            try:
                portion = take()
            except EndOfChannel:
                return
            yield portion

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                item = self.get()
            except EndOfChannel:
                return
            yield item

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.get_async()
            except EndOfChannel:
                return
            yield item

    # Requests

    def _send(
        self,
        key: Any,
        mode: ev.Mode,
        n: int | None,
        weight: float = 0.0,
        nowait: bool = False,
        *,
        ahead: bool = False,
    ) -> Pending:
        e = self._endpoint
        safe = not ahead and e.sections.yields()

        def event(req: tuple[str, int]) -> Any:
            get = ev.Get(req, self.name, e.group, e.rank, key, mode, n, weight, nowait, ahead)
            return AtSafePoint(get) if safe else get

        return e.client.request(event, f"an item of channel {self.name!r}", ahead=ahead)

    def _request(
        self,
        key: Any,
        mode: ev.Mode,
        n: int | None,
        weight: float = 0.0,
        timeout: float | None = None,
        nowait: bool = False,
    ) -> list[ev.Item]:
        return self._items(wait(self._endpoint, self._send(key, mode, n, weight, nowait), timeout))

    # Ahead of the task

    def _safe_point(self) -> None:
        """What a wait would do first: notice that the run is being stopped, serve what only this thread may."""
        client = self._endpoint.client
        client.check()
        client.serve(aside=not self._endpoint.sections.inside())

    def _ask_ahead(self, reserve: Reserve, mode: ev.Mode, n: int | None) -> None:
        pending = self._send(ev.ANY, mode, n, ahead=True)
        with reserve.lock:
            reserve.pending, reserve.asked = pending, (mode, n)

    def _asked_for(self, mode: ev.Mode, n: int | None) -> Pending:
        """The request that was made ahead, which the task now waits for, or a new one."""
        reserve = self._reserve
        assert reserve is not None
        with reserve.lock:
            pending, reserve.pending, reserve.asked = reserve.pending, None, None
        if pending is None:
            return self._send(ev.ANY, mode, n)
        if not pending.done:
            self._endpoint.client.send(Blocked(pending.req))
        return pending

    def _give_back(self) -> None:
        """Whatever was asked for ahead goes back to the channel, before anything else is asked of it: another way to
        read has another meaning, and another thread takes part."""
        reserve, client = self._reserve, self._endpoint.client
        if reserve is None:
            return
        if not client.on_engine_thread():
            self._reserve = None  # two threads read: neither may keep what the other could have
        with reserve.lock:
            pending, reserve.pending, reserve.asked = reserve.pending, None, None
            items = [*reserve.items]
            reserve.items.clear()
        if pending is not None:
            if not pending.done:
                client.send(ev.CancelRequest(req=pending.req))
            answer = client.wait(pending)
            if isinstance(answer, ev.Deliver):  # an end or a fault is told again
                items += answer.items
        if uids := reserve.all_fetched():
            client.send_along(ev.Fetched(uids=uids, group=self._endpoint.group))
        if items:
            client.send_along(ev.Return(uids=tuple([item.uid for item in items]), group=self._endpoint.group))

    def settle(self) -> None:
        """The task has ended: what it asked for and did not read goes back. Whoever reads on does so item by item."""
        self._give_back()
        self._reserve = None

    # Answers

    def _items(self, answer: Any) -> list[ev.Item]:
        """The items of an answer, or the error that it is."""
        if isinstance(answer, ev.Deliver):
            return list(answer.items)
        if isinstance(answer, ev.DeliverJoined):
            return [item for pair in answer.pairs for item in pair]
        if isinstance(answer, ev.End):
            raise EndOfChannel(message_of(self.name, "ended"))
        if isinstance(answer, ev.Poisoned):
            poisoned = ChannelPoisoned(message_of(self.name, answer.cause))
            poisoned.by_hub = True
            raise poisoned
        if isinstance(answer, ev.Empty):
            raise ChannelEmpty(message_of(self.name, "nothing to take now"))
        if isinstance(answer, ev.PutRefused):
            raise ChannelError(message_of(self.name, answer.reason))
        raise ChannelError(message_of(self.name, f"unexpected answer {answer!r}"))

    def _fetch(self, items: Sequence[ev.Item]) -> list[Any]:
        if not items:
            return []
        e = self._endpoint
        descriptors = [cast(Descriptor, item.descriptor) for item in items]
        values = e.fetcher.fetch(descriptors)
        e.clock.took(self.name, len(values), sum(item.weight for item in items))
        reserve = self._reserve
        if reserve is None or not e.client.on_engine_thread():
            uids = tuple([item.uid for item in items])
        else:
            uids = tuple([uid for item in items for uid in reserve.fetched(item)])
            if not reserve.items:
                uids += reserve.all_fetched()
        if uids:
            e.client.send_along(ev.Fetched(uids=uids, group=e.group))
        return values


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
            a._give_back()
            b._give_back()
            pending = e.client.request(event, f"a matching pair of channels {a.name!r} and {b.name!r}")
            try:
                values = a._fetch(a._items(wait(e, pending, None)))
            except EndOfChannel:
                return None
            return [(values[k], values[k + 1]) for k in range(0, len(values), 2)]


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
