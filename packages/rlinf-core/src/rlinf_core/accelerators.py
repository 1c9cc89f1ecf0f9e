"""Whether this machine has an accelerator, told from its files alone: standard library only."""

from __future__ import annotations

import os
from pathlib import Path

# Files that a driver of an accelerator makes: NVIDIA's, AMD's, that of Windows' Linux.
FILES = ("nvidia[0-9]*", "kfd", "dxg")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def accelerator_here(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has an accelerator that is not hidden from this process."""
    hidden = any(os.environ.get(name) in ("", "-1", "NoDevFiles") for name in HIDING)
    return not hidden and any(next(devices.glob(name), None) is not None for name in FILES)
