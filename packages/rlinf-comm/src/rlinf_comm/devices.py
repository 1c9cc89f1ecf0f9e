"""Accelerators of this process: which it sees, and why it sees none. Imports torch only when there may be some."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


def cuda_missing() -> str:
    """Why this process cannot use a CUDA device, or an empty string. Looks at files and settings alone until torch is
    loaded, and at what torch finds from then on."""
    try:
        build = version("torch")
    except PackageNotFoundError:
        return "torch is not installed"
    if "+cpu" in build:
        return f"torch {build} is a build for CPUs"
    if not any(os.path.exists(path) for path in DRIVER_FILES):
        return "no NVIDIA driver on this machine"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "no device is visible to this process (CUDA_VISIBLE_DEVICES)"
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        return "torch finds no device that it can use"
    return ""


@cache
def visible_devices() -> tuple[str, ...]:
    """UUIDs of the devices that this process sees, by torch's index; empty without CUDA."""
    if cuda_missing():
        return ()
    import torch

    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))


def work_on(buffers: Iterable[Any]) -> tuple[tuple[Any, Any], ...]:
    """(device, event) for each CUDA device that a buffer is on: what this thread's current streams have been given.

    Whoever reads the buffers in another thread, on another stream, waits for it first (``wait_for``).
    """
    devices = {b.device for b in buffers if not isinstance(b, memoryview) and b.device.type == "cuda"}
    if not devices:
        return ()
    import torch

    return tuple((device, torch.cuda.current_stream(device).record_event()) for device in devices)


def wait_for(work: Iterable[tuple[Any, Any]]) -> None:
    """Let the current streams of this thread wait for the work."""
    for device, event in work:
        import torch

        torch.cuda.current_stream(device).wait_event(event)
