"""One of two nodes of the tests with network namespaces: ``node_peer.py PROGRAM NAME OTHER HOST FOLDER``.

Prints one JSON object for each thing that the test waits for.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.errors import CommError

SECRET = b"of the two nodes"
MEGABYTES = 8


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def message(k: int) -> dict[str, Any]:
    rng = np.random.default_rng(k)
    return {"k": k, "big": rng.integers(0, 255, MEGABYTES << 20, np.uint8), "small": (None, b"xyz", [1.5])}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["k"] == b["k"] and bool((a["big"] == b["big"]).all()) and a["small"] == b["small"]


def exchange(comm: Communicator, other: str, first: bool) -> None:
    """Two messages there and two back, each compared with what it must be."""
    for k in range(2):
        if first:
            comm.send(message(k), other)
        if not same(comm.recv(other), message(k)):
            raise SystemExit(f"message {k} came changed")
        if not first:
            comm.send(message(k), other)
    stats = comm.stats()[other]
    say(node=comm.place.node, transports=stats.transports, sent=stats.sent_bytes, received=stats.received_bytes)


def until_lost(comm: Communicator, other: str) -> None:
    """Wait for a message that never comes."""
    start = time.monotonic()
    try:
        comm.recv(other, timeout=100)
    except CommError as error:
        say(error=type(error).__name__, text=str(error), peer=error.peer, seconds=time.monotonic() - start)


def talk(program: str, name: str, other: str, host: str, folder: str) -> None:
    directory = FileDirectory(folder)
    only = frozenset({"gloo"}) if program == "gloo" else None
    with Communicator(name, SECRET, directory, host=host, timeout=30, capabilities=only) as comm:
        exchange(comm, other, name < other)
        if program == "wait":
            until_lost(comm, other)
        else:
            comm.send("done", other)
            comm.recv(other)


def gather(name: str, other: str, host: str, folder: str) -> None:
    from rlinf_comm.collectives import Collectives

    group = Collectives("two nodes", sorted([name, other]), name, FileDirectory(folder), host=host, timeout=30)
    big = np.full(MEGABYTES << 20, 7, np.uint8)
    found = group.all_gather({"from": name, "big": big})
    group.barrier()
    say(found=[o["from"] for o in found], right=all(bool((o["big"] == 7).all()) for o in found))
    group.close()


if __name__ == "__main__":
    program, arguments = sys.argv[1], sys.argv[2:]
    if program == "gather":
        gather(*arguments)
    else:
        talk(program, *arguments)
