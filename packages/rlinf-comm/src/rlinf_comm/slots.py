"""Slots of shared memory as other processes see them: the form of a reference, and opening one.

A segment is a memfd of the process that made it (``rlinf_comm.arena``), which peers open through
``/proc/<pid>/fd/<n>``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_core.errors import RLinfError

ALIGN = 64
"""Buffers begin at multiples of this (a cache line)."""
PAGE = mmap.PAGESIZE
SLOT_HEADER = 64
"""At the start of a slot: one byte for each holder, then the slot's generation."""
HOLDERS = 56
"""Holders that a slot has room for."""
KEPT_SEGMENTS = 64
"""Segments of others that a process keeps mapped."""
PRIVATE_FROM = 256 << 10
"""A slot from this size on is mapped anew for a holder that wants it for itself; a smaller one is copied."""
AWAITED, OPENED = 1, 2
"""A holder's byte: it has not opened the slot yet; it has. 0: it is done with it."""
MAGIC = b"rlinf-a1"
SEGMENT_HEADER = PAGE
CLOSED = 24
REF = struct.Struct("<16sIIQQQI")
GENERATION = struct.Struct("<Q")


class SlotGone(RLinfError):
    """The slot that a reference names cannot be reached: its process has ended, is of another machine or user, or has
    used the memory for something else since."""


class OwnerGone(SlotGone):
    """The process that a slot belongs to has ended or has closed its memory."""

    elsewhere = True


@cache
def unavailable() -> str:
    """Why this process cannot share memory in this way; empty when it can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return "memfd needs Linux 3.17 or newer and a Python that has os.memfd_create"
    try:
        fd = os.memfd_create("rlinf-check", os.MFD_CLOEXEC)
    except OSError as error:
        return f"memfd_create fails: {error.strerror}"
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/proc/<pid>/fd cannot be opened: {error.strerror}"
    finally:
        os.close(fd)
    return ""


@cache
def node_id() -> bytes:
    """16 bytes that are equal in processes which can map each other's memory: the same boot, the same process table."""
    import hashlib

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        table = os.readlink("/proc/self/ns/pid")
    except OSError:
        import uuid

        boot, table = f"{uuid.getnode():x}", sys.platform
    return hashlib.sha256(f"{boot} {table}".encode()).digest()[:16]


def cut(memory: memoryview, offset: int, sizes: Sequence[int]) -> list[memoryview]:
    views, at = [], offset + SLOT_HEADER
    for size in sizes:
        views.append(memory[at : at + size])
        at += -(-size // ALIGN) * ALIGN
    return views


class _Mapped:
    """Segments of other processes (or of this one) that are mapped here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: OrderedDict[tuple[int, int, int], np.ndarray[Any, Any]] = OrderedDict()

    def get(self, pid: int, fd: int, size: int) -> np.ndarray[Any, Any]:
        key = (pid, fd, size)
        with self._lock:
            array = self._maps.get(key)
            if array is not None and not array[CLOSED]:
                self._maps.move_to_end(key)
                return array
            for other in [k for k, a in self._maps.items() if a[CLOSED]]:
                del self._maps[other]
            array = self._maps[key] = self._map(pid, fd, size)
            while len(self._maps) > KEPT_SEGMENTS:
                self._maps.popitem(last=False)
            return array

    def forget(self, pid: int) -> None:
        """Drop what is mapped of a process that has ended."""
        with self._lock:
            for key in [k for k in self._maps if k[0] == pid]:
                del self._maps[key]

    @staticmethod
    def _map(pid: int, number: int, size: int) -> np.ndarray[Any, Any]:
        memory = _memory(pid, number, size, 0, size, mmap.MAP_SHARED)
        if memory[: len(MAGIC)] != MAGIC:
            raise SlotGone(f"/proc/{pid}/fd/{number} holds no arena")
        return np.frombuffer(memory, np.uint8)


def _memory(pid: int, number: int, size: int, at: int, length: int, flags: int) -> mmap.mmap:
    """Map ``length`` bytes, from the page ``at`` on, of a segment of ``size`` bytes."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        if "memfd:rlinf-arena" not in os.readlink(path):
            raise OwnerGone(f"{path} is no shared memory of ours: process {pid} has closed it")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise OwnerGone(f"process {pid} has ended, or has closed its shared memory") from error
    except OSError as error:
        raise SlotGone(f"the shared memory of process {pid} cannot be opened: {error.strerror}") from error
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size:
            raise SlotGone(f"{path} is another segment than the one that the reference names")
        return mmap.mmap(fd, length, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=at)
    except OSError as error:
        raise SlotGone(f"the shared memory of process {pid} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)


mapped = _Mapped()


def reaches(ref: bytes) -> bool:
    """Whether the slot lies on this machine."""
    return ref[:16] == node_id()


def open_slot(ref: bytes, holder: int | None = None, *, private: bool = False) -> list[memoryview]:
    """The buffers of a slot as writable views of shared memory; nothing is copied.

    ``holder``: the slot is marked as used under this place until the last view is garbage collected. ``None``: private
    copies, for who has no place. ``private``: what is written to a view is seen by nobody else; a page is copied when
    it is first written to (a small slot as a whole, now). Raises ``SlotGone``.

    A child made by ``fork`` shares the views with its parent, and does not hold the slot.
    """
    try:
        node, pid, fd, size, offset, generation, count = REF.unpack_from(ref)
        sizes = struct.unpack_from(f"<{count}Q", ref, REF.size)
    except struct.error as error:
        raise SlotGone(f"{len(ref)} bytes are no reference to a slot") from error
    if node != node_id():
        raise SlotGone(f"the slot is in the memory of another machine (process {pid} there)")
    needed = SLOT_HEADER + sum(-(-s // ALIGN) * ALIGN for s in sizes)
    if offset < SEGMENT_HEADER or offset + needed > size or offset % ALIGN:
        raise SlotGone("the reference names memory outside its segment")
    array = mapped.get(pid, fd, size)
    if _generation(array, offset) != generation:
        mapped.forget(pid)  # the process may have closed this segment and opened another under the same number
        array = mapped.get(pid, fd, size)
    if holder is not None:
        array[offset + holder] = OPENED
    if _generation(array, offset) != generation:
        raise SlotGone(f"process {pid} has used the slot for something else since")
    if holder is None or (private and needed < PRIVATE_FROM):
        copies = [np.array(view).data for view in cut(array.data, offset, sizes)]
        if holder is not None:
            array[offset + holder] = 0
        return copies
    # Every view refers to this array, whose end is the end of the hold. Its base is no array: numpy lets a view of a
    # view refer to the innermost array, past this one.
    if private:
        page = offset // mmap.PAGESIZE * mmap.PAGESIZE
        whole = _memory(pid, fd, size, page, offset + needed - page, mmap.MAP_PRIVATE)
        lent = np.frombuffer(memoryview(whole)[offset - page :], np.uint8)
    else:
        lent = np.frombuffer(array.data[offset : offset + needed], np.uint8)
    weakref.finalize(lent, _let_go, array, offset + holder, _forks).atexit = False
    memory = lent.data
    return cut(memory, 0, sizes)


_forks = 0
"""How often the line of processes that leads here has been forked."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def _generation(array: np.ndarray[Any, Any], offset: int) -> int:
    return int(GENERATION.unpack_from(array.data, offset + HOLDERS)[0])


def _let_go(array: np.ndarray[Any, Any], at: int, forks: int) -> None:
    if forks == _forks:  # the hold is the parent's: what a child throws away the parent may still look at
        array[at] = 0
