"""Barrier, broadcast and all_gather among members: results, and who is named when somebody fails to come."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_comm.codec import CodecError
from rlinf_comm.collectives import Collectives
from rlinf_comm.directory import FileDirectory, LocalDirectory
from rlinf_comm.errors import CommClosed, CommError, CommTimeout, PeerLost, RemoteError

NAMES = ("a", "b", "c")
TIMEOUT = 20.0


def together(program: Callable[[Collectives], Any], names: tuple[str, ...] = NAMES) -> list[Any]:
    """Run the program of each member in a thread of its own; an exception is its result."""
    directory = LocalDirectory()

    def run(name: str) -> Any:
        group = Collectives("g", names, name, directory, timeout=TIMEOUT)
        try:
            return program(group)
        except CommError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(len(names)) as pool:
        return [f.result(60) for f in [pool.submit(run, name) for name in names]]


def test_all_gather_gives_everyones_objects_in_order() -> None:
    def program(group: Collectives) -> Any:
        big = torch.full((1000 * (group.rank + 1),), group.rank, dtype=torch.bfloat16)
        own = {"who": group.me, "x": np.arange(group.rank), "big": big, "none": (None, b"")}
        first = group.all_gather(own)
        assert first[group.rank] is own
        return first, group.all_gather(group.rank)

    for objects, ranks in together(program):
        assert ranks == [0, 1, 2]
        assert [o["who"] for o in objects] == list(NAMES)
        for rank, found in enumerate(objects):
            np.testing.assert_array_equal(found["x"], np.arange(rank))
            assert found["big"].dtype == torch.bfloat16 and found["big"].shape == (1000 * (rank + 1),)
            assert bool((found["big"] == rank).all()) and found["none"] == (None, b"")


@pytest.mark.parametrize("source", NAMES)
def test_broadcast_gives_the_sources_object(source: str) -> None:
    def program(group: Collectives) -> Any:
        mine = {"from": group.me, "t": torch.arange(5)}
        found = group.broadcast(mine if group.me == source else object(), source=source)
        return found["from"], found["t"].tolist(), found is mine

    assert together(program) == [(source, [0, 1, 2, 3, 4], name == source) for name in NAMES]


def test_nobody_leaves_a_barrier_before_all_have_come() -> None:
    entered, lock = [], threading.Lock()

    def program(group: Collectives) -> int:
        for _ in range(3):
            with lock:
                entered.append(group.rank)
            group.barrier()
        with lock:
            return len(entered)

    assert together(program) == [9, 9, 9]


def test_a_group_of_one_is_alone() -> None:
    assert together(lambda g: (g.barrier(), g.all_gather(5), g.broadcast(6, source="a")), ("a",)) == [(None, [5], 6)]


def test_the_deadline_of_a_barrier_names_the_late_and_ends_the_group() -> None:
    waiting = threading.Barrier(3)

    def program(group: Collectives) -> Any:
        group.barrier()
        if group.me != "c":
            try:
                group.barrier(timeout=0.3)
            except CommTimeout as error:
                waiting.wait(TIMEOUT)
                with pytest.raises(CommClosed, match="group 'g' is over"):
                    group.barrier()
                return str(error), error.peer
        waiting.wait(TIMEOUT)
        group.barrier()
        return "came"

    a, b, c = together(program)
    for name, found in (("a", a), ("b", b)):
        assert found == (f"{name} waited 0.3 s in barrier number 2 of group 'g': c has not come", "c")
    assert isinstance(c, PeerLost) and str(c).startswith("c lost one of a, b in barrier number 2 of group 'g': ")


def test_a_member_that_never_comes_is_named() -> None:
    start = time.monotonic()
    group = Collectives("g", NAMES, "a", LocalDirectory())
    with pytest.raises(CommTimeout, match="a waited 0.3 s in barrier number 1 of group 'g': b, c have not come"):
        group.barrier(timeout=0.3)
    assert time.monotonic() - start < 5


def test_what_cannot_be_encoded_fails_everywhere_and_the_next_works() -> None:
    def program(group: Collectives) -> Any:
        kinds = []
        for _ in range(2):
            try:
                group.all_gather((lambda: None) if group.me == "b" else 1)
            except (CodecError, RemoteError) as error:
                kinds.append(type(error))
            try:
                group.broadcast((lambda: None) if group.me == "b" else 1, source="b")
            except (CodecError, RemoteError) as error:
                kinds.append(type(error))
        return kinds, group.all_gather(group.me)

    a, b, c = together(program)
    assert a == c == ([RemoteError] * 4, list(NAMES))
    assert b == ([CodecError] * 4, list(NAMES))


def test_members_that_do_different_things_are_told_so() -> None:
    def program(group: Collectives) -> Any:
        return group.broadcast(1, source="a") if group.me == "c" else group.barrier()

    for found in together(program):
        assert isinstance(found, CommError) and "group 'g' does different things" in str(found)
        assert "barrier number 1" in str(found) and "broadcast number 1 from a" in str(found)


def test_wrong_members_are_refused() -> None:
    directory = LocalDirectory()
    with pytest.raises(CommError, match="x is not one of group 'g' \\(a, b\\)"):
        Collectives("g", ("a", "b"), "x", directory)
    with pytest.raises(CommError, match="each once"):
        Collectives("g", ("a", "a"), "a", directory)
    with pytest.raises(CommError, match="each once: none"):
        Collectives("g", (), "a", directory)
    with pytest.raises(CommError, match="z is not one of group"):
        Collectives("g", ("a",), "a", directory).broadcast(1, source="z")


DIE = """
import os, sys
from rlinf_comm.collectives import Collectives
from rlinf_comm.directory import FileDirectory
group = Collectives("g", ("a", "b"), "b", FileDirectory(sys.argv[1]), timeout=30)
group.barrier()
os._exit(7)
"""


def test_the_death_of_a_member_is_noticed_in_seconds(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", DIE, str(tmp_path)])
    group = Collectives("g", ("a", "b"), "a", FileDirectory(tmp_path), timeout=30)
    group.barrier()
    assert child.wait(TIMEOUT) == 7
    start = time.monotonic()
    with pytest.raises(PeerLost, match="a lost b in barrier number 2 of group 'g': ") as caught:
        group.barrier()
    assert time.monotonic() - start < 5 and caught.value.peer == "b"
