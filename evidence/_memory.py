"""Resident memory of a process and its children."""

from __future__ import annotations

import subprocess
import threading

import psutil

MIB = 1 << 20


class PeakMemory:
    """Largest memory of a process and all its descendants, looked at every ``interval_s``.

    Of each process its proportional set size: what several processes share counts once in their sum.
    """

    def __init__(self, process: subprocess.Popen[bytes], interval_s: float = 2.0) -> None:
        self.mib = 0.0
        self._process = process
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> float:
        """End watching; returns the peak in MiB."""
        self._done.set()
        self._thread.join()
        return self.mib

    def _watch(self) -> None:
        while not self._done.wait(self._interval_s):
            self.mib = max(self.mib, family_mib(self._process.pid))


def family_mib(pid: int) -> float:
    """Memory of a process and its descendants now, in MiB, each by its proportional set size."""
    return sum(map(_unshared, _family(pid))) / MIB


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _unshared(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
