"""Accelerators of this process: which it sees, and why it sees none. Imports torch only when there may be some."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version

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
