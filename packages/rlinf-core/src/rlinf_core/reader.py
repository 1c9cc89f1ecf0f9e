"""The reading end of a channel (``In``), and matched pairs of two.

A rank that is alone with its input, and whose devices nobody else wants, asks for more before it needs it
(``rlinf_core.reserve``): while it works, the next items are on their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
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
        self._reserve: Reserve | None = endpoint.reserves.of(arg.channel) if arg.sole else None

    @property
    def portion(self) -> int | None:
        return self._portion

    # Single items

    def get(self, key: Any = ..., timeout: float | None = None) -> Any:
        wanted = _key(key)
        with self._endpoint.clock.counting("wait"):
            if self._reserve is None:
                return self._fetch(self._request(wanted, "items", 1, timeout=timeout))[0]
            if wanted is ev.ANY and self._endpoint.client.on_engine_thread():
                return self._next(self._reserve, timeout)
            item = self._reserve.take(wanted)
            if item is None and self._settle():
                item = self._reserve.take(wanted)
            if item is not None:
                return self._fetch([item])[0]
            return self._fetch(self._request(wanted, "items", 1, timeout=timeout))[0]

    def _next(self, reserve: Reserve, timeout: float | None) -> Any:
        """The oldest item, from what has come already or from what was asked for; asks for more while it is fetched."""
        if reserve.asked is not None and reserve.asked[0] != "items":
            self._settle()
        if not reserve.items:
            if reserve.pending is None:
                pending = self._send(ev.ANY, "items", reserve.size)
            else:
                pending, reserve.pending, reserve.asked = reserve.pending, None, None
                self._blocked(pending)
            reserve.received(tuple(self._items(wait(self._endpoint, pending, timeout))))
        item = reserve.items.popleft()
        if reserve.low():
            self._ask_ahead(reserve, "items", reserve.size)
        return self._fetch([item])[0]

    def get_nowait(self, key: Any = ...) -> Any:
        wanted = _key(key)
        with self._endpoint.clock.counting("wait"):
            item = self._reserved(wanted)
            if item is not None:
                return self._fetch([item])[0]
            return self._fetch(self._request(wanted, "items", 1, nowait=True))[0]

    async def get_async(self, key: Any = ..., timeout: float | None = None) -> Any:
        wanted = _key(key)
        item = self._reserved(wanted)
        if item is None:
            pending = self._send(wanted, "items", 1)
            answer = await asyncio.wait_for(awaited(self._endpoint, pending), timeout)
            (item,) = self._items(answer)
        return (await asyncio.get_running_loop().run_in_executor(None, self._fetch, [item]))[0]

    def _reserved(self, key: Hashable | None) -> ev.Item | None:
        """An item that is here already, or comes with the request that is on its way."""
        if self._reserve is None:
            return None
        item = self._reserve.take(key)
        if item is None and self._settle():
            item = self._reserve.take(key)
        return item

    # Several items

    def get_batch(self, weight: float, timeout: float | None = None) -> list[Any]:
        if not weight > 0:
            raise ChannelError(message_of(self.name, f"get_batch needs a weight > 0, got {weight!r}"))
        with self._endpoint.clock.counting("wait"):
            if self._reserve is not None:
                self._settle()
                if items := self._reserve.take_weight(weight):
                    return self._fetch(items)
            return self._fetch(self._request(ev.ANY, "weight", None, weight=weight, timeout=timeout))

    def batches(self, n: int | None = None) -> Iterator[list[Any]]:
        if n is not None and n < 1:
            raise ChannelError(message_of(self.name, f"batches() needs n >= 1, got {n}"))
        return self._until_end(lambda: self._next_portion(n))

    def _next_portion(self, n: int | None) -> list[Any]:
        with self._endpoint.clock.counting("wait"):
            wanted = ev.PLAN if n is None else n
            reserve = self._reserve
            if reserve is None or not self._endpoint.client.on_engine_thread():
                return self._fetch(self._request(ev.ANY, "portion", wanted))
            if reserve.asked != ("portion", wanted):
                self._settle()
            if reserve.items:
                return self._rest_of_portion(reserve, n)
            if reserve.pending is None:
                pending = self._send(ev.ANY, "portion", wanted)
            else:
                pending, reserve.pending, reserve.asked = reserve.pending, None, None
                self._blocked(pending)
            items = self._items(wait(self._endpoint, pending, None))
            self._ask_ahead(reserve, "portion", wanted)
            return self._fetch(items)

    def _rest_of_portion(self, reserve: Reserve, n: int | None) -> list[Any]:
        """A portion of which some items are here already: the task has read single ones before."""
        size = self._portion if n is None else n
        items = reserve.take_many(size)
        missing = None if size is None else size - len(items)
        if missing != 0:
            try:
                items += self._request(ev.ANY, "portion", missing)
            except EndOfChannel:
                pass  # what is here is the last portion
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

    def _ask_ahead(self, reserve: Reserve, mode: ev.Mode, n: int | None) -> None:
        reserve.pending = self._send(ev.ANY, mode, n, ahead=True)
        reserve.asked = (mode, n)

    def _blocked(self, pending: Pending) -> None:
        """From now on the task waits for what it had asked for ahead."""
        if not pending.done:
            self._endpoint.client.send(Blocked(pending.req))

    def _settle(self) -> bool:
        """Withdraw the request that is on its way; what was delivered before that comes into the reserve. Returns
        whether something may have."""
        reserve = self._reserve
        if reserve is None or reserve.pending is None or not self._endpoint.client.on_engine_thread():
            return False
        pending, reserve.pending, reserve.asked = reserve.pending, None, None
        client = self._endpoint.client
        if not pending.done:
            client.send(ev.CancelRequest(req=pending.req))
        answer = client.wait(pending)
        if isinstance(answer, ev.Deliver):
            reserve.items.extend(answer.items)
            return True
        return False  # withdrawn, or an end or a fault that the next request is told of again

    def settle(self) -> None:
        """The task has ended: nothing is on its way to it any more, and the hub knows what it has and has not read."""
        if self._reserve is not None:
            self._settle()
            if uids := self._reserve.all_fetched():
                self._endpoint.client.send_along(ev.Fetched(uids=uids, group=self._endpoint.group))
            if self._reserve.items:
                uids = tuple([item.uid for item in self._reserve.items])
                self._endpoint.client.send_along(ev.Kept(uids=uids, group=self._endpoint.group))
            self._endpoint.reserves.ended(self.name)

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
        e.clock.items += len(values)
        if self._reserve is None:
            uids = tuple([item.uid for item in items])
        else:
            uids = tuple([uid for item in items for uid in self._reserve.fetched(item)])
            if not self._reserve.items:
                uids += self._reserve.all_fetched()
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
