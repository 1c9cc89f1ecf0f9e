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
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_comm.slots import (
    ALIGN,
    AWAITED,
    CLOSED,
    GENERATION,
    HOLDERS,
    MAGIC,
    PAGE,
    REF,
    SEGMENT_HEADER,
    SLOT_HEADER,
    cut,
    mapped,
    node_id,
)

SEGMENT_BYTES = 256 << 20
"""Of address space: memory is taken for the slots alone."""
OWN_SEGMENT_BYTES = 64 << 20
"""A slot from this size on has a segment of its own."""
LOOKED_AT = 16
"""Released slots that a put looks at to see whether their holders are gone."""
LOOK_AGAIN_S = 0.01
"""An arena that is full of what consumers keep is not searched for room again before this has passed."""
WRITTEN_FROM = 256 << 10
"""Bytes from which fresh memory is filled by a write."""

_NOBODY = bytes(HOLDERS)
_PADDING = memoryview(bytes(ALIGN))
_MOST_PARTS = 1000
"""A single write takes 1,024 parts."""
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EINTR)


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
    used: int = SEGMENT_HEADER


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
    fresh: bool = False
    """Its memory has not been taken from the machine yet."""


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
        self._full_until = 0.0
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=partial(_close_in_child, weakref.ref(self)))

    def put(self, buffers: Sequence[memoryview], holders: Sequence[Hashable] = ()) -> Slot | None:
        """Copy ``buffers`` into a slot, or return ``None`` when there is no room. ``holders``: see ``reserve``."""
        written = sum(buffer.nbytes for buffer in buffers) >= WRITTEN_FROM and 2 * len(buffers) < _MOST_PARTS
        slot = self._reserve([buffer.nbytes for buffer in buffers], holders, not written)
        if slot is None:
            return None
        segment, at = slot.segment, slot.offset + SLOT_HEADER
        if slot.fresh:
            if _written(segment.fd, at, buffers):
                slot.fresh = False
                return slot
            self._abandon(slot)
            return None
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
        return self._reserve(sizes, holders, True)

    def _reserve(self, sizes: Sequence[int], holders: Sequence[Hashable], allocate: bool) -> Slot | None:
        if len(holders) > HOLDERS:
            raise ValueError(f"a slot has room for {HOLDERS} holders, got {len(holders)}")
        end = SLOT_HEADER + sum(-(-size // ALIGN) * ALIGN for size in sizes)
        with self._lock:
            room = self._take(_size_class(end), allocate)
            self._stats.puts += 1
            if room is None:
                self._stats.refused += 1
                return None
            self._generation += 1
            # A new object each time: a late second release of an earlier use must not free this one.
            slot = Slot(room.segment, room.offset, room.size, self._generation, holders=tuple(holders))
            slot.fresh = room.fresh
            self._used[slot.generation] = slot
            self._stats.bytes_in_use += slot.size
        segment, offset = slot.segment, slot.offset
        marks = bytes([AWAITED]) * len(holders) + bytes(HOLDERS - len(holders))
        segment.memory[offset : offset + SLOT_HEADER] = marks + GENERATION.pack(slot.generation)
        head = REF.pack(node_id(), self._pid, segment.fd, segment.size, offset, slot.generation, len(sizes))
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

    def awaited(self) -> set[Hashable]:
        """Holders that have not opened a slot yet which was made for them. They find nothing there once this process
        has ended or has called ``close``."""
        with self._lock:
            return {
                name
                for slot in self._used.values()
                for place, name in enumerate(slot.holders)
                if slot.segment.memory[slot.offset + place] == AWAITED
            }

    def read(self, slot: Slot) -> list[memoryview]:
        """The buffers of a slot of this arena, as views (for a peer that cannot map it)."""
        count = REF.unpack_from(slot.ref)[-1]
        sizes = struct.unpack_from(f"<{count}Q", slot.ref, REF.size)
        return cut(memoryview(slot.segment.memory), slot.offset, sizes)

    @property
    def limit(self) -> int:
        """The most memory that it takes, in bytes."""
        return self._limit

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
        mapped.forget(self._pid)

    def _held(self, slot: Slot) -> bool:
        return slot.segment.memory[slot.offset : slot.offset + HOLDERS] != _NOBODY

    def _abandon(self, slot: Slot) -> None:
        """The machine had no memory for a fresh slot."""
        with self._lock:
            del self._used[slot.generation]
            self._stats.bytes_in_use -= slot.size
            self._stats.bytes_reserved -= slot.size
            self._stats.refused += 1
            if slot.segment.own:
                self._segments.remove(slot.segment)
                self._unmap(slot.segment)
            else:
                self._punch(slot)

    def _recycle(self, slot: Slot) -> None:
        if self._used.pop(slot.generation, None) is not None:
            self._stats.bytes_in_use -= slot.size
            self._full_until = 0.0
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

    def _take(self, size: int, allocate: bool) -> Slot | None:
        if self._closed:
            return None
        self._sweep(LOOKED_AT)
        free = self._free.get(size)
        full = not free and self._stats.bytes_reserved + size > self._limit
        if full:
            began = time.monotonic()
            if began < self._full_until:
                return None
            self._sweep(len(self._lingering))
            free = self._free.get(size)
            if not free and not any(self._free.values()):
                now = time.monotonic()
                self._full_until = now + max(LOOK_AGAIN_S, 20 * (now - began))
        if free:
            return free.pop()
        if full:
            self._trim(self._stats.bytes_reserved + size - self._limit)
            if self._stats.bytes_reserved + size > self._limit:
                return None
        return self._carve(size, allocate)

    def _carve(self, size: int, allocate: bool) -> Slot | None:
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
                    made = segment = self._new_segment(SEGMENT_HEADER + size if own else SEGMENT_BYTES, own)
                room = Slot(segment, segment.used, size)
            if allocate:  # memory that the machine does not have is refused here; touching it would kill the process
                os.posix_fallocate(room.segment.fd, room.offset, size)
        except OSError as error:
            if error.errno not in _NO_MEMORY:
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
        return Slot(room.segment, room.offset, size, fresh=not allocate)

    def _new_segment(self, size: int, own: bool) -> _Segment:
        size = -(-size // PAGE) * PAGE
        fd = os.memfd_create("rlinf-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, SEGMENT_HEADER)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        memory[: len(MAGIC)] = MAGIC
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
                    self._punch(slot)

    def _punch(self, slot: Slot) -> None:
        """Give the memory of a place in a shared segment back; the place can be taken again."""
        first = -(-slot.offset // PAGE) * PAGE
        last = (slot.offset + slot.size) // PAGE * PAGE
        if last > first:
            slot.segment.memory.madvise(mmap.MADV_REMOVE, first, last - first)
        self._hollow.setdefault(slot.size, []).append(slot)

    @staticmethod
    def _unmap(segment: _Segment) -> None:
        segment.memory[CLOSED] = 1  # who has it mapped lets go of it
        os.close(segment.fd)
        segment.array = np.empty(0, np.uint8)
        # the mapping itself goes with the last view of it


def _close_in_child(reference: weakref.ref[Arena]) -> None:
    """A forked child shares the memory but not the accounts: it must not put anything there."""
    arena = reference()
    if arena is not None:
        arena._closed = True


def _written(fd: int, at: int, buffers: Sequence[memoryview]) -> bool:
    """Write buffers into fresh memory, each at a multiple of ``ALIGN``; ``False`` when the machine has none. A write
    costs about half as much as to take the pages, to map each and to copy into them."""
    parts: list[memoryview] = []
    for buffer in buffers:
        parts.append(buffer)
        if buffer.nbytes % ALIGN:
            parts.append(_PADDING[: ALIGN - buffer.nbytes % ALIGN])
    total = sum(part.nbytes for part in parts)
    try:
        done = os.pwritev(fd, parts, at)
        while 0 < done < total:  # Linux writes 2 GiB at once at most
            skipped, rest = 0, []
            for part in parts:
                if skipped + part.nbytes > done:
                    rest.append(part[max(0, done - skipped) :])
                skipped += part.nbytes
            more = os.pwritev(fd, rest, at + done)
            if more <= 0:
                return False
            done += more
    except OSError as error:
        if error.errno in _NO_MEMORY:
            return False
        raise
    return done == total
