"""Device tensors between communicators of two processes, by each way that there is (needs a GPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf_comm import devices
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory

gpus = 0 if devices.cuda_missing() else torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus < 1, reason=devices.cuda_missing() or "no GPU"),
]

ECHO = """
import json, sys, torch
from rlinf_comm.communicator import Communicator
from rlinf_comm.devices import visible_devices
from rlinf_comm.directory import FileDirectory
ways = frozenset(json.loads(sys.argv[2]))
directory = FileDirectory(sys.argv[1])
with Communicator("b", b"secret", directory, timeout=60, devices=visible_devices(), capabilities=ways) as comm:
    while (found := comm.recv("a")) is not None:
        comm.send({k: str(t.device.type) for k, t in found.items()}, "a")
        comm.send(found, "a")
"""


def moved(folder: Path, ways: set[str], environment: dict[str, str] | None = None) -> tuple[dict[str, str], set[str]]:
    """Send tensors there and back; returns where they were there, and the transports that this end used."""
    command = [sys.executable, "-c", ECHO, str(folder), json.dumps(sorted(ways))]
    child = subprocess.Popen(command, env={**os.environ, **(environment or {})})
    sent = {
        "host": torch.arange(100_000, dtype=torch.float32),
        "gpu": torch.arange(300_000, device="cuda", dtype=torch.bfloat16).reshape(3, -1),
        "turned": torch.arange(60_000, device="cuda").reshape(200, 300).T,
        "empty": torch.empty(0, 5, device="cuda"),
    }
    options = {"timeout": 60.0, "devices": devices.visible_devices(), "capabilities": frozenset(ways)}
    with Communicator("a", b"secret", FileDirectory(folder), **options) as comm:  # type: ignore[arg-type]
        comm.send(sent, "b")
        there = comm.recv("b")
        back = comm.recv("b")
        for name, tensor in sent.items():
            assert torch.equal(back[name].cpu(), tensor.cpu()) and back[name].dtype == tensor.dtype
        used = set(comm.stats()["b"].transports)
        comm.send(None, "b")
    assert child.wait(60) == 0
    return there, used


def test_one_gpu_takes_the_handle(tmp_path: Path) -> None:
    there, used = moved(tmp_path, {"tcp", "shm", "cuda_ipc"})
    assert used == {"shm", "cuda_ipc"}
    assert there == {"host": "cpu", "gpu": "cuda", "turned": "cuda", "empty": "cuda"}


def test_a_tensor_that_a_side_stream_still_makes_arrives_whole(tmp_path: Path) -> None:
    ways = frozenset({"tcp", "shm", "cuda_ipc"})
    child = subprocess.Popen([sys.executable, "-c", ECHO, str(tmp_path), json.dumps(sorted(ways))])
    with Communicator("a", b"secret", FileDirectory(tmp_path), timeout=60, capabilities=ways) as comm:
        x = torch.empty(1 << 22, device="cuda")
        for k in range(5):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(300):
                    x.fill_(-1.0)
                x.fill_(float(k))
                work = comm.isend({"x": x}, "b")
            work.wait(60)
            comm.recv("b")
            assert bool((comm.recv("b")["x"] == k).all())
        comm.send(None, "b")
    assert child.wait(60) == 0


def test_without_a_device_way_host_memory_carries_it(tmp_path: Path) -> None:
    there, used = moved(tmp_path, {"tcp", "shm"})
    assert used == {"shm"}
    assert there["host"] == "cpu"


@pytest.mark.skipif(gpus < 2, reason=f"needs two GPUs, there are {gpus}")
def test_two_gpus_take_nccl(tmp_path: Path) -> None:
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    there, used = moved(tmp_path, {"tcp", "shm", "nccl"}, {"CUDA_VISIBLE_DEVICES": second})
    assert used == {"shm", "nccl"}
    assert there["gpu"] == "cuda"
