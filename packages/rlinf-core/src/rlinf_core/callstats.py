"""What a profile needs to know of a call beside its time: when its results left, and the device memory it had."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from typing import Any

QUANTILES = 16
"""At most so many points of a release curve go to the driver."""


class Releases:
    """When a call has put what it made, in seconds of its own work.

    A group of samples counts once, when the last one of it that this call makes has been put: what comes after may
    need it whole. Items without a group count each.
    """

    def __init__(self) -> None:
        self.puts = 0
        self._groups: dict[str, float] = {}
        self._single: list[float] = []

    def add(self, groups: Iterable[str | None], seconds: float) -> None:
        """Items of these groups (``None``: of none) were put at ``seconds``."""
        for group in groups:
            self.puts += 1
            if group is None:
                self._single.append(seconds)
            else:
                self._groups[group] = seconds

    def curve(self) -> tuple[float, ...]:
        """Rising times at which 1/k, 2/k, … of what was made was out; empty when nothing was put."""
        times = sorted([*self._single, *self._groups.values()])
        k = min(QUANTILES, len(times))
        return tuple(times[-(-(part + 1) * len(times) // k) - 1] for part in range(k))


class DeviceMemory:
    """Bytes that this process has on its devices: of the accelerator's allocator where there is one in use, else, on a
    CPU slot, its private anonymous memory (Linux; 0 elsewhere). The peak since ``restart`` is exact for an accelerator
    and, on a CPU slot, of all the process's memory less what is not private now."""

    def in_use(self) -> int:
        cuda = _cuda()
        return int(cuda.memory_allocated()) if cuda is not None else _status("RssAnon")[0]

    def capacity(self) -> int:
        """Bytes of the smallest of its accelerators; 0 on a CPU slot."""
        cuda = _cuda()
        return min(int(cuda.mem_get_info(i)[1]) for i in range(cuda.device_count())) if cuda is not None else 0

    def restart(self) -> None:
        """Begin a new peak."""
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
            return
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            return  # the peak is then that of the process's life: never too low

    def peak(self) -> int:
        cuda = _cuda()
        if cuda is not None:
            return int(cuda.max_memory_allocated())
        highest, files, shared = _status("VmHWM", "RssFile", "RssShmem")
        if highest:
            return max(0, highest - files - shared)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cuda() -> Any:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # torch may be half imported by another thread
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None


def _status(*keys: str) -> list[int]:
    """Lines of /proc/self/status, in bytes; 0 where there is none."""
    found: dict[str, int] = {}
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as file:
            for line in file:
                key, _, rest = line.partition(":")
                if key in keys:
                    found[key] = int(rest.split()[0]) * 1024
    return [found.get(key, 0) for key in keys]
