"""Broadcast: one slot for a machine, a tree between machines, one outcome for all."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from comm_support import PROBE
from hypothesis import given
from hypothesis import strategies as st

from rlinf_comm.broadcast import tree_of
from rlinf_comm.codec import CodecError
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import LocalDirectory
from rlinf_comm.errors import CommError, CommTimeout, PeerLost, RemoteError

NAMES = [f"m{i}" for i in range(7)]
SHARED = frozenset({"shm", "tcp"})
APART = frozenset({"tcp"})


@pytest.fixture(params=["one machine", "seven machines", "mixed"])
def group(request: pytest.FixtureRequest) -> Iterator[dict[str, Communicator]]:
    """What cannot share memory counts as a machine of its own."""
    directory = LocalDirectory()
    apart = {"one machine": 0, "seven machines": 7, "mixed": 3}[request.param]
    made = {
        name: Communicator(
            name, b"s", directory, timeout=20.0, capabilities=APART if i < apart else SHARED, window_bytes=1 << 20
        )
        for i, name in enumerate(NAMES)
    }
    yield made
    for comm in made.values():
        comm.close()


def all_call(group: dict[str, Communicator], obj: Any, source: str = "m4", **options: Any) -> dict[str, Any]:
    """What each member's call came to."""
    found: dict[str, Any] = {}

    def call(name: str) -> None:
        try:
            value = obj if name == source else None
            found[name] = group[name].broadcast(value, source=source, members=list(group), **options)
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=call, args=(name,)) for name in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


class Picky:
    """Can be read by some members only."""

    refused_by: str = ""

    def __init__(self) -> None:
        self.x = 1

    def __setstate__(self, state: dict[str, int]) -> None:
        if Picky.refused_by in threading.current_thread().name:
            raise ValueError("not here")


@given(st.integers(1, 40), st.data())
def test_the_tree_reaches_everybody_once(count: int, data: st.DataObject) -> None:
    members = [f"m{i}" for i in range(count)]
    machine = {m: data.draw(st.sampled_from(["x", "y", "z", m])) for m in members}
    source = data.draw(st.sampled_from(members))
    trees = {m: tree_of(m, source, members, machine) for m in members}
    children = [child for tree in trees.values() for child in tree.children]
    assert sorted([*children, source]) == sorted(members)
    assert trees[source].parent == ""
    for member, tree in trees.items():
        assert all(trees[child].parent == member for child in tree.children)
        assert all(machine[child] == machine[member] for child in tree.near)
        assert len(tree.far) <= len(set(machine.values())).bit_length()

    def depth(member: str) -> int:
        return 1 + max((depth(c) for c in trees[member].children), default=0)

    assert depth(source) <= len(set(machine.values())).bit_length() + 2


def test_all_have_it_and_the_next_one_works(group: dict[str, Communicator]) -> None:
    for size in (3, 200_000):
        for source in ("m4", "m0"):
            found = all_call(group, np.full(size, size), source)
            assert all((found[name] == size).all() and len(found[name]) == size for name in NAMES)


def test_one_slot_for_a_machine(group: dict[str, Communicator]) -> None:
    found = all_call(group, np.ones(200_000))
    arenas = [comm._endpoint.arena.stats() for comm in group.values()]
    machines = len({tree_key(comm) for comm in group.values()})
    puts = sum(stats.puts for stats in arenas) - sum(comm._endpoint._probe_slot is not None for comm in group.values())
    assert puts == (0 if machines == 7 else 1)
    found.clear()
    gc.collect()
    assert all(comm._endpoint.arena.stats().bytes_in_use < PROBE for comm in group.values())


def tree_key(comm: Communicator) -> str:
    return comm.place.node if "shm" in comm.place.capabilities else comm.name


def test_what_cannot_be_sent_raises_everywhere(group: dict[str, Communicator]) -> None:
    found = all_call(group, {"fault": (i for i in ())})
    assert isinstance(found.pop("m4"), CodecError)
    assert all(isinstance(e, RemoteError) and "['fault']" in str(e) for e in found.values())
    assert set(all_call(group, 5).values()) == {5}


def test_what_one_cannot_read_raises_everywhere(
    group: dict[str, Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(Picky, "refused_by", "thread of m2")

    def call(name: str) -> None:
        try:
            found[name] = group[name].broadcast(Picky() if name == "m4" else None, source="m4", members=NAMES)
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=call, args=(name,), name=f"thread of {name}") for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert isinstance(found.pop("m2"), CodecError)
    assert all(isinstance(e, RemoteError) and "m2" in str(e) and "not here" in str(e) for e in found.values())
    assert set(all_call(group, 5).values()) == {5}


def test_who_is_not_there_is_named_and_the_next_one_works(group: dict[str, Communicator]) -> None:
    without = {name: comm for name, comm in group.items() if name != "m2"}
    found: dict[str, Any] = {}

    def call(name: str) -> None:
        try:
            found[name] = without[name].broadcast(1, source="m4", members=NAMES, timeout=1.0)
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=call, args=(name,)) for name in without]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert isinstance(found["m4"], RemoteError) and "m2" in str(found["m4"])
    assert all(isinstance(error, (RemoteError, CommTimeout)) for error in found.values())
    # The one that was late counts on its own; the others go on together.
    assert set(all_call(without, 6).values()) == {6}


def test_a_member_that_is_gone_is_named(group: dict[str, Communicator]) -> None:
    assert set(all_call(group, 5).values()) == {5}
    group["m6"].close()
    found = all_call({n: c for n, c in group.items() if n != "m6"} | {"m6": group["m6"]}, 6, timeout=3.0)
    assert isinstance(found["m4"], (RemoteError, PeerLost)) and "m6" in str(found["m4"])
    assert all(isinstance(error, CommError) for error in found.values())


def test_messages_and_broadcasts_do_not_mix(group: dict[str, Communicator]) -> None:
    group["m4"].send("before", "m5")
    assert set(all_call(group, 5).values()) == {5}
    assert group["m5"].recv("m4") == "before"


def test_members_must_make_sense(group: dict[str, Communicator]) -> None:
    for source, members in (("m4", ["m0", "m1"]), ("m0", ["m0", "m0"]), ("m1", ["m1", "m2"])):
        with pytest.raises(CommError, match="needs members"):
            group["m0"].broadcast(1, source=source, members=members)
