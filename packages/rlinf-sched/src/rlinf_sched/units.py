"""Numbers for people: bytes, counts, and places to write to."""

from __future__ import annotations

import os
from pathlib import Path

from rlinf_sched.graph import SchedError


def size(count: float) -> str:
    """Bytes with a unit: ``40 B``, ``1.5 KiB``, ``43.8 GiB``."""
    scale, unit = 1.0, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 * scale:
            break
        scale, unit = scale * 1024, larger
    value = count / scale
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def counted(count: int, what: str) -> str:
    """``1 device``, ``2 devices``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def writable(path: Path, option: str) -> Path:
    """The path of a file to write; missing folders are made. Raises SchedError when it cannot be written, so that this
    shows before a long computation and not after it."""
    if path.is_dir():
        raise SchedError(f"{option} {path}: this is a folder; give the name of a file")
    folder(path.parent, option)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SchedError(f"{option} {path}: may not be written")
    return path


def folder(path: Path, option: str) -> Path:
    """A folder to write into, made when it is missing. Raises SchedError when it cannot be."""
    if path.exists() and not path.is_dir():
        raise SchedError(f"{option} {path}: this is a file; give a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SchedError(f"{option} {path}: cannot be made: {error.strerror or error}") from error
    return path
