"""Links: chosen by name, loaded when needed, and what happens where one is missing, full or out of reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from rlinf_core import links
from rlinf_core.errors import ChannelError
from rlinf_core.links import AUTO, SOCKET, LinkLoader, wrong_name
from rlinf_core.payload import Descriptor, PayloadFetcher, PayloadServer, PayloadStore, encode
from rlinf_core.registry import Entry, Registry

SECRET = b"s" * 32


class Memory:
    """A link whose "shared memory" is a dictionary of the process."""

    made = 0
    slots: ClassVar[dict[bytes, list[bytearray]]] = {}

    def __init__(self, limit_bytes: int = 0) -> None:
        type(self).made += 1
        self.limit = limit_bytes
        self.reach = True
        self.holders: list[int] = []
        self.closed = False

    def put(self, buffers: Sequence[memoryview], holders: int) -> tuple[Any, bytes] | None:
        self.holders.append(holders)
        if self.limit and sum(b.nbytes for b in buffers) > self.limit:
            return None
        ticket = b"%d" % len(self.slots)
        self.slots[ticket] = [bytearray(b) for b in buffers]
        return ticket, ticket

    def read(self, slot: bytes) -> list[memoryview]:
        return [memoryview(b) for b in self.slots[slot]]

    def release(self, slot: bytes) -> None:
        del self.slots[slot]

    def open(self, ticket: bytes, holder: int) -> list[memoryview] | None:
        if not self.reach:
            return None
        parts = self.slots[ticket]
        return [memoryview(b if holder >= 0 else bytearray(b)) for b in parts]

    def close(self) -> None:
        self.closed = True


class Broken:
    def __init__(self, limit_bytes: int) -> None:
        raise RuntimeError("no such memory here")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The links that are installed, by name."""
    found: dict[str, Any] = {"memory": Memory}
    Memory.made, Memory.slots = 0, {}

    class Fake(Registry):
        def names(self) -> list[str]:
            return sorted(found)

        def entry(self, name: str) -> Entry:
            if name in found:
                return Entry(self.group, name, "x:y", "z")
            return super().entry(name)

        def load(self, name: str) -> Any:
            return found[name]

    monkeypatch.setattr(links, "Registry", Fake)
    return found


def test_names() -> None:
    assert wrong_name(AUTO) == wrong_name(SOCKET) == wrong_name("memory") == ""
    assert "no link 'memroy' is installed" in wrong_name("memroy")


def test_a_link_is_made_once_and_only_when_needed() -> None:
    loader = LinkLoader(AUTO, 7)
    assert Memory.made == 0
    link = loader.get()
    assert isinstance(link, Memory)
    assert link.limit == 7
    assert loader.get() is link
    loader.close()
    assert link.closed
    assert LinkLoader(SOCKET).get() is None
    assert Memory.made == 1


def test_one_that_fails_is_left_out_and_said_when_it_was_asked_for(
    installed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    installed["broken"] = Broken
    with caplog.at_level(logging.WARNING, "rlinf"):
        assert isinstance(LinkLoader(AUTO).get(), Memory)
        assert not caplog.records
        assert LinkLoader("broken").get() is None
    assert "link 'broken' cannot be used: RuntimeError: no such memory here" in caplog.text


class Pair:
    """A producer and a consumer in one process, each with its own link."""

    def __init__(self, limit: int = 0) -> None:
        self.store = PayloadStore(LinkLoader(AUTO, limit))
        self.server = PayloadServer(self.store, SECRET, "127.0.0.1")
        self.far = PayloadStore(LinkLoader(AUTO))
        self.fetcher = PayloadFetcher(SECRET, self.far, "c[0]")

    def put(self, item: object, holders: int = 1) -> Descriptor:
        key, ticket = self.store.add(encode(item), 1, holders)
        return Descriptor("a[0]", self.server.address, key, 0, None, ticket, 0 if holders else -1)

    def close(self) -> None:
        self.fetcher.close()
        self.server.close()


@pytest.fixture(name="pair")
def _pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


ARRAY = np.arange(10_000, dtype=np.float32)


def test_a_sole_consumer_shares_the_memory_and_others_get_copies(pair: Pair) -> None:
    sole, many = pair.put(ARRAY), pair.put(ARRAY, holders=0)
    for descriptor, shared in ((sole, True), (many, False)):
        (got,) = pair.fetcher.fetch([descriptor])
        assert np.array_equal(got, ARRAY)
        got[:] = -1
        (again,) = pair.fetcher.fetch([descriptor])
        assert np.array_equal(again, got) is shared
    link = pair.store._link.get()
    assert isinstance(link, Memory)
    assert link.holders == [1, 0]


def test_who_cannot_reach_it_fetches_it(pair: Pair) -> None:
    descriptor = pair.put(ARRAY)
    link = pair.far._link.get()
    assert isinstance(link, Memory)
    link.reach = False
    (got,) = pair.fetcher.fetch([descriptor])
    assert np.array_equal(got, ARRAY)
    pair.store.release([descriptor.key])
    assert Memory.slots == {}
    with pytest.raises(ChannelError, match="no longer has"):
        pair.fetcher.fetch([descriptor])


def test_without_room_it_stays_with_its_producer() -> None:
    pair = Pair(limit=1000)
    descriptor = pair.put(ARRAY)
    assert descriptor.ticket is None
    (got,) = pair.fetcher.fetch([descriptor])
    assert np.array_equal(got, ARRAY)
    pair.close()
