"""Weights that are on a GPU at both ends, in two processes (needs a GPU)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf_comm import devices
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.weights import CommunicatorControl, ControlMover, Sender, Spec, fsdp, replicated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(devices.cuda_missing()), reason=devices.cuda_missing() or "there is a GPU"),
]

RECEIVER = """
import sys, torch
from rlinf_comm.communicator import Communicator
from rlinf_comm.devices import visible_devices
from rlinf_comm.directory import FileDirectory
from rlinf_comm.weights import CommunicatorControl, ControlMover, Receiver, Spec, replicated
target = replicated({"w": Spec((300, 200), "bfloat16"), "steps": Spec((3,), "int64")})
directory = FileDirectory(sys.argv[1])
with Communicator("target", b"secret", directory, timeout=60, devices=visible_devices()) as communicator:
    mover = ControlMover(CommunicatorControl(communicator, lambda rank: "source"))
    found = {}
    receiver = Receiver(0, target, mover, install=lambda version, tensors: found.update(tensors))
    for _ in range(2):
        receiver.receive(60)
        communicator.send({name: tensor.cpu() for name, tensor in found.items()}, "source")
"""


def test_weights_go_from_gpu_to_gpu(tmp_path: Path) -> None:
    specs = {"w": Spec((300, 200)), "steps": Spec((3,), "int64")}
    goal = replicated({**specs, "w": Spec((300, 200), "bfloat16")})
    process = subprocess.Popen([sys.executable, "-c", RECEIVER, str(tmp_path)])
    directory = FileDirectory(tmp_path)
    with Communicator("source", b"secret", directory, timeout=60, devices=devices.visible_devices()) as communicator:
        mover = ControlMover(CommunicatorControl(communicator, lambda rank: "target"))
        sender = Sender(0, fsdp(specs, 1), goal, mover, bucket_bytes=1 << 14)
        for version in (1, 2):
            own = {"w": torch.randn(300, 200, device="cuda"), "steps": torch.full((3,), version, device="cuda")}
            sender.send(version, own, 60)
            back = communicator.recv("target")
            assert torch.equal(back["w"], own["w"].to(torch.bfloat16).cpu())
            assert torch.equal(back["steps"], own["steps"].cpu())
    assert process.wait(60) == 0
