"""Shared memory of one process: memfd segments, in which it puts buffers that processes of the same machine map.

A segment has no name: it lives as long as a descriptor or a mapping of it does, so that nothing stays behind after
``kill -9``. Peers open it through ``/proc/<pid>/fd/<n>``, which the kernel allows to processes of the same user; a
sealed size keeps a mapping from being cut short.

Whoever opens a slot with a holder's place marks it by a byte in the slot's own header and clears that byte when the
last view of it is garbage collected: giving memory back costs no message. The producer uses a slot again when it has
released it and no byte is set.

Linux only; elsewhere ``unavailable()`` says so and other transports are taken.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
SEGMENT_BYTES = 256 << 20
"""Of address space: memory is taken for the slots alone."""
OWN_SEGMENT_BYTES = 64 << 20
"""A slot from this size on has a segment of its own."""
KEPT_SEGMENTS = 64
"""Segments of others that a process keeps mapped."""
LOOKED_AT = 16
"""Released slots that a put looks at to see whether their holders are gone."""
AWAITED, OPENED = 1, 2
"""A holder's byte: it has not opened the slot yet; it has. 0: it is done with it."""

_MAGIC = b"rlinf-a1"
_SEGMENT_HEADER = PAGE
_CLOSED = 24
_REF = struct.Struct("<16sIIQQQI")
_GENERATION = struct.Struct("<Q")
_NOBODY = bytes(HOLDERS)


class SlotGone(RLinfError):
    """The slot that a reference names cannot be reached: its process has ended, is of another machine or user, or has
    used the memory for something else since."""


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


def default_limit() -> int:
    """A quarter of the memory that this process may use (bytes)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total // 4


def _classes() -> list[int]:
    sizes, size = [], 512
    while size < 1 << 48:
        sizes += [size, size + size // 4, size + size // 2, size + 3 * size // 4]
        size *= 2
    return sizes


_CLASSES = _classes()


def _size_class(nbytes: int) -> int:
    """The size that a slot of ``nbytes`` takes: at most a quarter more, so that slots can be used again."""
    size = _CLASSES[bisect_left(_CLASSES, nbytes)]
    grain = ALIGN if size < PAGE else PAGE
    return -(-size // grain) * grain


@dataclass(eq=False)
class _Segment:
    fd: int
    memory: mmap.mmap
    array: np.ndarray[Any, Any]
    size: int
    own: bool
    used: int = _SEGMENT_HEADER


@dataclass(eq=False, slots=True)
class Slot:
    """Memory that holds one item's buffers. ``ref``: what a peer needs to open it."""

    segment: _Segment
    offset: int
    size: int
    generation: int = 0
    ref: bytes = b""
    holders: tuple[Hashable, ...] = ()
    released: bool = False


@dataclass
class ArenaStats:
    """``bytes_reserved``: memory taken from the machine, free slots included; ``refused``: puts without room."""

    bytes_reserved: int = 0
    bytes_in_use: int = 0
    puts: int = 0
    refused: int = 0
    segments: int = 0
    lingering: int = 0
    """Slots that are released but that somebody still looks at."""


class Arena:
    """The slots of this process. Thread-safe. ``limit_bytes``: most memory that it takes from the machine."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = default_limit() if limit_bytes is None else limit_bytes
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._bump: _Segment | None = None
        self._free: dict[int, list[Slot]] = {}
        self._hollow: dict[int, list[Slot]] = {}
        """Places in segments whose memory was given back to the machine."""
        self._used: dict[int, Slot] = {}
        self._lingering: deque[Slot] = deque()
        self._stats = ArenaStats()
        self._generation = int.from_bytes(os.urandom(4), "little") << 16
        self._closed = False
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=partial(_close_in_child, weakref.ref(self)))

    def put(self, buffers: Sequence[memoryview], holders: Sequence[Hashable] = ()) -> Slot | None:
        """Copy ``buffers`` into a slot, or return ``None`` when there is no room. ``holders``: see ``reserve``."""
        slot = self.reserve([buffer.nbytes for buffer in buffers], holders)
        if slot is None:
            return None
        segment, at = slot.segment, slot.offset + SLOT_HEADER
        for buffer in buffers:
            size = buffer.nbytes
            if size:
                # numpy lets other threads run while it copies
                segment.array[at : at + size] = np.frombuffer(buffer, np.uint8)
            at += -(-size // ALIGN) * ALIGN
        return slot

    def reserve(self, sizes: Sequence[int], holders: Sequence[Hashable] = ()) -> Slot | None:
        """A slot for buffers of these sizes, which the caller fills (``read`` gives them as writable views) before it
        hands on the slot's ``ref``; ``None`` when there is no room.

        ``holders`` marks the slot as used by these from the start; the holder at place i opens it with ``holder=i``.
        What remains to be done by the caller is ``release``, once it does not need the slot itself, and ``forget`` if
        it turns out that a holder will not open it.
        """
        if len(holders) > HOLDERS:
            raise ValueError(f"a slot has room for {HOLDERS} holders, got {len(holders)}")
        end = SLOT_HEADER + sum(-(-size // ALIGN) * ALIGN for size in sizes)
        with self._lock:
            room = self._take(_size_class(end))
            self._stats.puts += 1
            if room is None:
                self._stats.refused += 1
                return None
            self._generation += 1
            # A new object each time: a late second release of an earlier use must not free this one.
            slot = Slot(room.segment, room.offset, room.size, self._generation, holders=tuple(holders))
            self._used[slot.generation] = slot
            self._stats.bytes_in_use += slot.size
        segment, offset = slot.segment, slot.offset
        marks = bytes([AWAITED]) * len(holders) + bytes(HOLDERS - len(holders))
        segment.memory[offset : offset + SLOT_HEADER] = marks + _GENERATION.pack(slot.generation)
        head = _REF.pack(node_id(), self._pid, segment.fd, segment.size, offset, slot.generation, len(sizes))
        slot.ref = head + struct.pack(f"<{len(sizes)}Q", *sizes)
        return slot

    def release(self, slot: Slot) -> None:
        """The owner does not need the slot any more; it is used again when no holder does either. Idempotent."""
        with self._lock:
            if slot.released:
                return
            slot.released = True
            if self._held(slot):
                self._lingering.append(slot)
            else:
                self._recycle(slot)

    def forget(self, slot: Slot) -> None:
        """Nobody will open the slot any more; who has opened it keeps it. Releases it too. Idempotent."""
        with self._lock:
            if self._used.get(slot.generation) is slot:
                at, memory = slot.offset, slot.segment.memory
                for place in range(len(slot.holders)):
                    if memory[at + place] == AWAITED:
                        memory[at + place] = 0
        self.release(slot)

    def withdraw(self, slot: Slot, holder: Hashable) -> None:
        """``holder`` was not told of the slot after all and will not open it."""
        with self._lock:
            if self._used.get(slot.generation) is slot and holder in slot.holders:
                slot.segment.memory[slot.offset + slot.holders.index(holder)] = 0

    def drop(self, holder: Hashable) -> int:
        """``holder`` is gone: what it held is not held by it any more. Returns how many slots that were."""
        dropped = 0
        with self._lock:
            for slot in self._used.values():
                for place, name in enumerate(slot.holders):
                    if name == holder and slot.segment.memory[slot.offset + place]:
                        slot.segment.memory[slot.offset + place] = 0
                        dropped += 1
            self._sweep(len(self._lingering))
        return dropped

    def read(self, slot: Slot) -> list[memoryview]:
        """The buffers of a slot of this arena, as views (for a peer that cannot map it)."""
        count = _REF.unpack_from(slot.ref)[-1]
        sizes = struct.unpack_from(f"<{count}Q", slot.ref, _REF.size)
        return _cut(memoryview(slot.segment.memory), slot.offset, sizes)

    def stats(self) -> ArenaStats:
        with self._lock:
            self._sweep(len(self._lingering))
            self._stats.lingering = len(self._lingering)
            self._stats.segments = len(self._segments)
            return ArenaStats(**vars(self._stats))

    def close(self) -> None:
        """Give all memory back; who has a slot open keeps it."""
        with self._lock:
            self._closed = True
            for segment in self._segments:
                self._unmap(segment)
            self._segments.clear()
            self._free.clear()
            self._hollow.clear()
            self._used.clear()
            self._lingering.clear()
            self._bump = None
        _mapped.forget(self._pid)

    def _held(self, slot: Slot) -> bool:
        return slot.segment.memory[slot.offset : slot.offset + HOLDERS] != _NOBODY

    def _recycle(self, slot: Slot) -> None:
        if self._used.pop(slot.generation, None) is not None:
            self._stats.bytes_in_use -= slot.size
            self._free.setdefault(slot.size, []).append(slot)

    def _sweep(self, count: int) -> None:
        """Take back released slots that nobody looks at any more; looks at ``count`` of them at most, oldest first."""
        held = 0
        for _ in range(min(count, len(self._lingering))):
            slot = self._lingering.popleft()
            if not self._held(slot):
                self._recycle(slot)
                continue
            self._lingering.append(slot)
            held += 1
            if held == 2 and count == LOOKED_AT:
                return  # those that came later are likely in use too

    def _take(self, size: int) -> Slot | None:
        if self._closed:
            return None
        self._sweep(LOOKED_AT)
        free = self._free.get(size)
        if not free and self._lingering and self._stats.bytes_reserved + size > self._limit:
            self._sweep(len(self._lingering))
            free = self._free.get(size)
        if free:
            return free.pop()
        if self._stats.bytes_reserved + size > self._limit:
            self._trim(self._stats.bytes_reserved + size - self._limit)
            if self._stats.bytes_reserved + size > self._limit:
                return None
        return self._carve(size)

    def _carve(self, size: int) -> Slot | None:
        """A place with memory of its own, or ``None`` when the machine has none to give."""
        hollow = self._hollow.get(size)
        own = size >= OWN_SEGMENT_BYTES
        made = None
        try:
            if hollow:
                room = hollow[-1]
            else:
                segment = None if own else self._bump
                if segment is None or segment.used + size > segment.size:
                    made = segment = self._new_segment(_SEGMENT_HEADER + size if own else SEGMENT_BYTES, own)
                room = Slot(segment, segment.used, size)
            # Memory that the machine does not have is refused here; touching it later would kill the process.
            os.posix_fallocate(room.segment.fd, room.offset, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EINTR):
                raise
            if made is not None and own:
                self._segments.remove(made)
                self._unmap(made)
            return None
        if hollow:
            hollow.pop()
        else:
            room.segment.used += size
        self._stats.bytes_reserved += size
        return room

    def _new_segment(self, size: int, own: bool) -> _Segment:
        size = -(-size // PAGE) * PAGE
        fd = os.memfd_create("rlinf-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, _SEGMENT_HEADER)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        memory[: len(_MAGIC)] = _MAGIC
        segment = _Segment(fd, memory, np.frombuffer(memory, np.uint8), size, own)
        self._segments.append(segment)
        if not own:
            self._bump = segment
        return segment

    def _trim(self, needed: int) -> None:
        """Give the machine back the memory of free slots, the largest first, at least ``needed`` bytes if there are."""
        for size in sorted(self._free, reverse=True):
            slots = self._free[size]
            while slots and needed > 0 and size >= PAGE:
                slot = slots.pop()
                self._stats.bytes_reserved -= size
                needed -= size
                if slot.segment.own:
                    self._segments.remove(slot.segment)
                    self._unmap(slot.segment)
                else:
                    first = -(-slot.offset // PAGE) * PAGE
                    last = (slot.offset + slot.size) // PAGE * PAGE
                    if last > first:
                        slot.segment.memory.madvise(mmap.MADV_REMOVE, first, last - first)
                    self._hollow.setdefault(size, []).append(slot)

    @staticmethod
    def _unmap(segment: _Segment) -> None:
        segment.memory[_CLOSED] = 1  # who has it mapped lets go of it
        os.close(segment.fd)
        segment.array = np.empty(0, np.uint8)
        # the mapping itself goes with the last view of it


def _close_in_child(reference: weakref.ref[Arena]) -> None:
    """A forked child shares the memory but not the accounts: it must not put anything there."""
    arena = reference()
    if arena is not None:
        arena._closed = True


def _cut(memory: memoryview, offset: int, sizes: Sequence[int]) -> list[memoryview]:
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
            if array is not None and not array[_CLOSED]:
                self._maps.move_to_end(key)
                return array
            for other in [k for k, a in self._maps.items() if a[_CLOSED]]:
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
        path = f"/proc/{pid}/fd/{number}"
        try:
            if "memfd:rlinf-arena" not in os.readlink(path):
                raise SlotGone(f"{path} is no shared memory of ours: process {pid} has closed it")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SlotGone(f"the shared memory of process {pid} cannot be opened: {error.strerror}") from error
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size:
                raise SlotGone(f"{path} is another segment than the one that the reference names")
            memory = mmap.mmap(fd, size)
        except OSError as error:
            raise SlotGone(f"the shared memory of process {pid} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        if memory[: len(_MAGIC)] != _MAGIC:
            raise SlotGone(f"{path} holds no arena")
        return np.frombuffer(memory, np.uint8)


_mapped = _Mapped()


def reaches(ref: bytes) -> bool:
    """Whether the slot lies on this machine."""
    return ref[:16] == node_id()


def open_slot(ref: bytes, holder: int | None = None) -> list[memoryview]:
    """The buffers of a slot as writable views of shared memory; nothing is copied.

    ``holder``: the slot is marked as used under this place until the last view is garbage collected. ``None``: private
    copies, for who has no place. Raises ``SlotGone``.
    """
    try:
        node, pid, fd, size, offset, generation, count = _REF.unpack_from(ref)
        sizes = struct.unpack_from(f"<{count}Q", ref, _REF.size)
    except struct.error as error:
        raise SlotGone(f"{len(ref)} bytes are no reference to a slot") from error
    if node != node_id():
        raise SlotGone(f"the slot is in the memory of another machine (process {pid} there)")
    needed = SLOT_HEADER + sum(-(-s // ALIGN) * ALIGN for s in sizes)
    if offset < _SEGMENT_HEADER or offset + needed > size or offset % ALIGN:
        raise SlotGone("the reference names memory outside its segment")
    array = _mapped.get(pid, fd, size)
    if _generation(array, offset) != generation:
        _mapped.forget(pid)  # the process may have closed this segment and opened another under the same number
        array = _mapped.get(pid, fd, size)
    if holder is not None:
        array[offset + holder] = OPENED
    if _generation(array, offset) != generation:
        raise SlotGone(f"process {pid} has used the slot for something else since")
    if holder is None:
        return [view.copy().data for view in _cut_array(array, offset, sizes)]
    # Every view refers to this array, whose end is the end of the hold. Its base is no array: numpy lets a view of a view
    # refer to the innermost array, past this one.
    lent = np.frombuffer(array.data[offset : offset + needed], np.uint8)
    weakref.finalize(lent, _let_go, array, offset + holder).atexit = False
    memory = lent.data
    return _cut(memory, 0, sizes)


def _generation(array: np.ndarray[Any, Any], offset: int) -> int:
    return int(_GENERATION.unpack_from(array.data, offset + HOLDERS)[0])


def _cut_array(array: np.ndarray[Any, Any], offset: int, sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    views, at = [], offset + SLOT_HEADER
    for size in sizes:
        views.append(array[at : at + size])
        at += -(-size // ALIGN) * ALIGN
    return views


def _let_go(array: np.ndarray[Any, Any], at: int) -> None:
    array[at] = 0
