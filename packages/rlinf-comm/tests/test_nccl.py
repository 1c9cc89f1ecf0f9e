"""NCCL between two devices: what it refuses and how its waits end, here; the moves themselves need two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_comm import devices
from rlinf_comm.directory import FileDirectory
from rlinf_comm.errors import CommError, PeerLost
from rlinf_comm.transports.base import BufferSpec, Link, Place
from rlinf_comm.transports.nccl import NcclTransport

gpus = 0 if devices.cuda_missing() else torch.cuda.device_count()


def transport(path: Path, name: str, peer: str, timeout: float = 60.0) -> NcclTransport:
    here = Place("n", 1, frozenset({"nccl"}), devices.visible_devices())
    nowhere: Any = None
    return NcclTransport(
        Link(here, here, name, peer, name < peer, nowhere, FileDirectory(path), "k", timeout, lambda: timeout)
    )


class Work:
    """A move of the library: done after some looks, or never, or failed."""

    def __init__(self, looks: int, failure: str = "") -> None:
        self.looks = looks
        self.failure = failure

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def exception(self) -> Exception | None:
        return RuntimeError(self.failure) if self.failure else None


def test_waits_end_at_their_deadline_or_with_the_failure(tmp_path: Path) -> None:
    a = transport(tmp_path, "a", "b")
    a.finish([Work(0), Work(3)], 5.0)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="2 tensors are not all moved after 0.05 s"):
        a.finish([Work(0), Work(1 << 40)], 0.05)
    assert time.monotonic() - start < 2.0
    with pytest.raises(RuntimeError, match="remote process exited"):
        a.finish([Work(1, "remote process exited")], 5.0)


def test_host_memory_is_refused(tmp_path: Path) -> None:
    a = transport(tmp_path, "a", "b")
    with pytest.raises(CommError, match="not host memory"):
        a.to_send(memoryview(b"x"))
    with pytest.raises(CommError, match="on 0 devices"):
        a.push([memoryview(b"x")])


@pytest.mark.skipif(gpus > 0, reason="there are GPUs")
def test_it_says_why_it_is_not_available() -> None:
    assert NcclTransport.unavailable() == devices.cuda_missing() != ""


RECEIVE = """
import os, sys, torch
from rlinf_comm.devices import visible_devices
from rlinf_comm.directory import FileDirectory
from rlinf_comm.transports.base import BufferSpec, Link, Place
from rlinf_comm.transports.nccl import NcclTransport
directory = FileDirectory(sys.argv[1])
here = Place("n", 2, frozenset({"nccl"}), visible_devices())
b = NcclTransport(Link(here, here, "b", "a", False, None, directory, "k", 60.0, lambda: 60.0))
specs = [BufferSpec(4 << 20, "float32", (1024, 1024)), BufferSpec(0, "int64", (0, 2)), BufferSpec(6, "bfloat16", (3,))]
for k in range(5):
    x, empty, y = b.pull(directory.lookup(f"ticket/{k}", 60.0), specs)
    assert x.is_cuda and float(x.sum()) == k * 1024 * 1024, x.sum()
    assert y.tolist() == [1.0, 2.0, 3.0] and empty.shape == (0, 2)
os._exit(7)
"""


@pytest.mark.gpu
@pytest.mark.skipif(gpus < 2, reason=f"needs two GPUs, there are {gpus}")
def test_between_two_real_gpus_and_the_receivers_death(tmp_path: Path) -> None:
    directory = FileDirectory(tmp_path)
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": second}
    child = subprocess.Popen([sys.executable, "-c", RECEIVE, str(tmp_path)], env=environment)
    a = transport(tmp_path, "a", "b")
    x, y = torch.empty(1024, 1024, device="cuda:0"), torch.tensor([1.0, 2.0, 3.0], device="cuda:0").bfloat16()
    empty = torch.empty(0, 2, dtype=torch.int64, device="cuda:0")
    stream = torch.cuda.Stream()
    for k in range(5):
        with torch.cuda.stream(stream):
            for _ in range(200):
                x.fill_(-1.0)
            x.fill_(float(k))
            ticket = a.offer([x, empty, y])
        directory.publish(f"ticket/{k}", ticket)
        a.push([x, empty, y])
    assert child.wait(60) == 7
    start = time.monotonic()
    a.offer([x])
    a.link.remaining = lambda: 5.0
    with pytest.raises((PeerLost, TimeoutError)):
        a.push([x])
    assert time.monotonic() - start < 10
    a.close(True)


@pytest.mark.gpu
@pytest.mark.skipif(gpus < 1, reason=devices.cuda_missing() or "no GPU")
def test_a_group_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    a = transport(tmp_path, "a", "b", timeout=2.0)
    x = torch.ones(1, device="cuda")
    a.offer([x])
    with pytest.raises(CommError):
        a.push([x])  # nobody is there to receive it
    assert dict(os.environ) == before


def test_specs_are_checked_before_anything_is_received() -> None:
    from rlinf_comm.transports.cuda_ipc import empty_like

    assert empty_like(BufferSpec(8, "bfloat16", (2, 2)), "cpu").shape == (2, 2)
    with pytest.raises(CommError, match="does not have 9 bytes"):
        empty_like(BufferSpec(9, "bfloat16", (2, 2)), "cpu")
