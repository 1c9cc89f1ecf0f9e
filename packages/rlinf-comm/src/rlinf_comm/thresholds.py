"""Thresholds of the selection as data: built in, or measured on this machine and kept in the user's cache.

The file (``$XDG_CACHE_HOME/rlinf/comm.json``) is written by ``rlinf doctor --measure`` and stamped with the machine: on
another one it does not count. A file that cannot be read or does not fit is not used, and ``load()`` says so; it is
never an error.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlinf_comm.selection import Thresholds

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One size, and the median time per message in microseconds, by both ways."""

    nbytes: int
    stream_us: float
    shm_us: float


@cache
def machine() -> str:
    """What the figures depend on, as text: two machines that differ here have their own."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the name above does
    return f"{platform.node()}, {model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlinf" / "comm.json"


@cache
def thresholds() -> Thresholds:
    """What this process selects by, read once."""
    return load()[0]


def load(path: Path | None = None) -> tuple[Thresholds, str]:
    """(the thresholds of this machine, why a file that is there was not used or an empty string)."""
    path = cache_file() if path is None else path
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Thresholds(), ""
    except (OSError, UnicodeDecodeError) as error:
        return Thresholds(), f"{path} cannot be read: {error}"
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            return Thresholds(), f"{path} has the format {found['format']}, not {FORMAT}"
        if found["machine"] != machine():
            return Thresholds(), f"{path} was measured on another machine ({found['machine']})"
        shm_from, gloo_from = found["shm_from"], found["gloo_from"]
        if type(shm_from) is not int or type(gloo_from) not in (int, type(None)):
            raise ValueError("sizes must be whole numbers of bytes")
        return Thresholds(shm_from, gloo_from, f"measured {found['when']}"), ""
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Thresholds(), f"{path} is damaged: {type(error).__name__}: {error}"


def save(table: Thresholds, points: Sequence[Point], path: Path | None = None) -> Path:
    """Keep the thresholds for this machine. Raises OSError where the cache cannot be written."""
    path = cache_file() if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "machine": machine(),
        "when": time.strftime("%Y-%m-%d"),
        "shm_from": table.shm_from,
        "gloo_from": table.gloo_from,
        "curve": [[p.nbytes, round(p.stream_us, 1), round(p.shm_us, 1)] for p in points],
    }
    # Two processes may measure at once: each writes a file of its own and puts it in place whole.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".comm-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def crossing(points: Sequence[Point]) -> int:
    """The size from which shared memory is taken: the one that loses the least against the faster way at each size.

    One of the measured sizes, or twice the largest when the stream wins throughout. One noisy point moves it little.
    """

    def lost(start: int) -> float:
        chosen = ((p.shm_us if p.nbytes >= start else p.stream_us) / min(p.shm_us, p.stream_us) for p in points)
        return sum(chosen)

    return min([p.nbytes for p in points] + [points[-1].nbytes * 2], key=lost)
