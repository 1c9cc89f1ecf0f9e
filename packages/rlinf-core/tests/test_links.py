"""Links: chosen by name, loaded when needed, and what happens where one is missing, full or out of reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from rlinf_core import links
from rlinf_core.errors import ChannelError, ConfigError
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

    def open(self, ticket: bytes, holder: int, private: bool) -> list[memoryview] | None:
        if not self.reach:
            return None
        parts = self.slots[ticket]
        return [memoryview(b if holder >= 0 and not private else bytearray(b)) for b in parts]

    def close(self) -> None:
        self.closed = True


class Short:
    """No link: it cannot ``open`` or ``release``."""

    closed = 0
    release = None

    def __init__(self, limit_bytes: int) -> None:
        pass

    def put(self, buffers: Sequence[memoryview], holders: int) -> None: ...

    def read(self, slot: Any) -> None: ...

    def close(self) -> None:
        type(self).closed += 1


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


def inner(loader: LinkLoader) -> Memory:
    """The link itself, within what tells of its having no room."""
    link = loader.get()
    assert isinstance(link, links._Telling)
    assert isinstance(link.link, Memory)
    return link.link


def test_names() -> None:
    assert wrong_name(AUTO) == wrong_name(SOCKET) == wrong_name("memory") == ""
    for name, meant in (("memroy", "memory"), ("sockets", SOCKET), ("Auto", AUTO)):
        said = wrong_name(name)
        assert said.startswith(f"no link {name!r} is installed (did you mean {meant!r}?)")
        assert "always there: auto, socket" in said
    assert "did you mean" not in wrong_name("zzz")


def test_a_link_is_made_once_and_only_when_needed() -> None:
    loader = LinkLoader(AUTO, 7)
    assert Memory.made == 0
    link = inner(loader)
    assert link.limit == 7
    assert inner(loader) is link
    loader.close()
    assert link.closed
    assert LinkLoader(SOCKET).get() is None
    assert Memory.made == 1


def test_one_that_fails_is_left_out_and_said_when_it_was_asked_for(
    installed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    installed["broken"] = Broken
    with caplog.at_level(logging.WARNING, "rlinf"):
        inner(LinkLoader(AUTO))
        assert not caplog.records
        assert LinkLoader("broken").get() is None
    assert "link 'broken' cannot be used: RuntimeError: no such memory here" in caplog.text


@pytest.mark.parametrize("first", ["a_short", "shm"])
def test_auto_takes_shared_memory_first_and_passes_over_what_is_no_link(
    installed: dict[str, Any], caplog: pytest.LogCaptureFixture, first: str
) -> None:
    installed["a_short"] = Short
    installed["shm"] = Short if first == "shm" else Memory
    loader, Short.closed = LinkLoader(AUTO), 0
    with caplog.at_level(logging.DEBUG, "rlinf"):
        inner(loader)
    assert loader.used == ("memory" if first == "shm" else "shm")
    passed = [record.getMessage() for record in caplog.records]
    names = ["shm", "a_short"] if first == "shm" else []
    assert passed == [
        f"link {name!r} cannot be used: x:y of z is no link: it has no method release, open" for name in names
    ]
    assert Short.closed == len(names)
    assert {record.levelno for record in caplog.records} <= {logging.DEBUG}


def test_a_plugin_asked_for_by_name_that_is_no_link_is_refused(installed: dict[str, Any]) -> None:
    installed["short"] = Short
    for look in (LinkLoader("short").get, lambda: links.said_at_start("short")):
        with pytest.raises(ConfigError, match=r"channels\.link=short: x:y of z is no link: .* release, open$"):
            look()


def test_what_is_used_is_said_at_the_start(installed: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    begin = "items between workers of one machine: "
    assert links.said_at_start(AUTO) == f"{begin}link 'memory' (z)"
    assert links.said_at_start(SOCKET) == f"{begin}sockets (channels.link=socket)"
    installed["shm"] = Memory
    assert links.said_at_start(AUTO) == f"{begin}shared memory (rlinf-comm)"
    installed["shm"] = Broken
    del installed["memory"]
    with caplog.at_level(logging.INFO, "rlinf"):
        for name in (AUTO, "shm"):
            assert links.said_at_start(name).endswith(
                "sockets; link 'shm' cannot be used: RuntimeError: no such memory here"
            )
    assert not caplog.records  # the line says it
    installed.clear()
    assert links.said_at_start(AUTO).startswith(f"{begin}sockets; rlinf-comm brings shared memory: ")


def test_what_is_said_at_the_start_leaves_no_link_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Memory] = []
    monkeypatch.setattr(Memory, "close", lambda link: closed.append(link))
    links.said_at_start(AUTO)
    assert len(closed) == Memory.made == 1


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
    link = inner(pair.store._link)
    assert link.holders == [1, 0]


def test_who_cannot_reach_it_fetches_it(pair: Pair) -> None:
    descriptor = pair.put(ARRAY)
    link = inner(pair.far._link)
    link.reach = False
    (got,) = pair.fetcher.fetch([descriptor])
    assert np.array_equal(got, ARRAY)
    pair.store.release([descriptor.key])
    assert Memory.slots == {}
    with pytest.raises(ChannelError, match="no longer has"):
        pair.fetcher.fetch([descriptor])


def test_without_room_it_stays_with_its_producer(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(limit=1000)
    pair.put(ARRAY[:10])
    assert not caplog.records
    pair.put(ARRAY)
    descriptor = pair.put(ARRAY)
    assert [record.getMessage() for record in caplog.records] == [
        "no room in link 'memory' (channels.link_bytes=1000): items go over sockets"
    ]
    assert descriptor.ticket is None
    (got,) = pair.fetcher.fetch([descriptor])
    assert np.array_equal(got, ARRAY)
    pair.close()
