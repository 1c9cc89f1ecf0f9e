"""Two nodes on one machine: two network namespaces with a cable between them, each with a process table of its own.

What the processes say to each other must cross the cable, whose counters are read; the cable is pulled, and both ends
notice.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
UNSHARE = shutil.which("unshare") or ""
PEER = Path(__file__).parent / "peers" / "node_peer.py"
HOSTS = ("10.213.77.1", "10.213.77.2")
MEGABYTE = 1 << 20


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


@dataclass
class Nodes:
    """Namespaces ``names``, each with its end of the cable; processes that were started in them."""

    names: tuple[str, str]
    ends: tuple[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, program: str, folder: Path) -> list[subprocess.Popen[str]]:
        """The program on both nodes, as ``a`` and ``b``."""
        started = []
        for name, other, namespace, host in zip("ab", "ba", self.names, HOSTS, strict=True):
            inside = [UNSHARE, "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, str(PEER)]
            command = [IP, "netns", "exec", namespace, *inside, program, name, other, host, str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        self.processes += started
        return started

    def moved(self) -> tuple[int, int]:
        """Bytes that have gone out of, and come into, the first node over the cable."""
        (found,) = json.loads(_run(IP, "-n", self.names[0], "-s", "-j", "link", "show", "dev", self.ends[0]))
        return found["stats64"]["tx"]["bytes"], found["stats64"]["rx"]["bytes"]

    def pull_the_cable(self) -> None:
        _run(IP, "-n", self.names[0], "link", "set", "dev", self.ends[0], "down")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
        for name in self.names:
            subprocess.run([IP, "netns", "del", name], capture_output=True, timeout=20, check=False)


def _why_not() -> str:
    if not IP or not UNSHARE:
        return "ip (iproute2) or unshare (util-linux) is not installed"
    name = f"rlinf-try-{os.getpid()}"
    made = subprocess.run([IP, "netns", "add", name], capture_output=True, text=True, timeout=20, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    inside = [IP, "netns", "exec", name, UNSHARE, "--pid", "--fork", "--mount-proc", "true"]
    tried = subprocess.run(inside, capture_output=True, text=True, timeout=20, check=False)
    subprocess.run([IP, "netns", "del", name], capture_output=True, timeout=20, check=False)
    return f"no process table of its own can be made: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if reason := _why_not():
        pytest.skip(reason)
    tag = f"{os.getpid() % 100_000}"
    found = Nodes((f"rlinf-a-{tag}", f"rlinf-b-{tag}"), (f"rla{tag}", f"rlb{tag}"))
    try:
        for name in found.names:
            _run(IP, "netns", "add", name)
        first, second = found.names
        pair = ["type", "veth", "peer", "name", found.ends[1], "netns", second]
        try:
            _run(IP, "-n", first, "link", "add", found.ends[0], *pair)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no cable can be laid between namespaces: {error.stderr.strip()}")
        for name, end, host in zip(found.names, found.ends, HOSTS, strict=True):
            _run(IP, "-n", name, "addr", "add", f"{host}/24", "dev", end)
            _run(IP, "-n", name, "link", "set", "dev", end, "up")
            _run(IP, "-n", name, "link", "set", "dev", "lo", "up")
        yield found
    finally:
        found.close()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next thing that the process says; its end without a word is a failure."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process has ended with {process.wait(10)} and said nothing more"
    found: dict[str, Any] = json.loads(line)
    return found


def test_tcp_crosses_between_nodes(nodes: Nodes, tmp_path: Path) -> None:
    out, come = nodes.moved()
    a, b = nodes.start("talk", tmp_path)
    first, second = said(a), said(b)
    assert first["node"] != second["node"]
    for end in (first, second):
        assert end["transports"] == {"tcp": 2}
        assert end["sent"] > 16 * MEGABYTE and end["received"] > 16 * MEGABYTE
    assert [p.wait(30) for p in (a, b)] == [0, 0]
    out_now, come_now = nodes.moved()
    assert out_now - out > 16 * MEGABYTE and come_now - come > 16 * MEGABYTE


@pytest.mark.slow
def test_a_pulled_cable_is_noticed_at_both_ends(nodes: Nodes, tmp_path: Path) -> None:
    a, b = nodes.start("wait", tmp_path)
    said(a)
    said(b)
    nodes.pull_the_cable()
    pulled = time.monotonic()
    for process, peer in ((a, "b"), (b, "a")):
        lost = said(process)
        assert (lost["error"], lost["peer"]) == ("PeerLost", peer), lost
        assert peer in lost["text"]
    assert time.monotonic() - pulled < 25
    assert [p.wait(30) for p in (a, b)] == [0, 0]


@pytest.mark.parametrize("program", ["gloo", "gather"])
def test_gloo_takes_the_nodes_own_address(nodes: Nodes, tmp_path: Path, program: str) -> None:
    """The machine's name resolves to an address that does not exist in these namespaces."""
    out, come = nodes.moved()
    a, b = nodes.start(program, tmp_path)
    first, second = said(a), said(b)
    if program == "gloo":
        assert first["transports"] == second["transports"] == {"gloo": 2}
    else:
        assert first == second == {"found": ["a", "b"], "right": True}
    assert [p.wait(30) for p in (a, b)] == [0, 0]
    out_now, come_now = nodes.moved()
    assert out_now - out > 8 * MEGABYTE and come_now - come > 8 * MEGABYTE
