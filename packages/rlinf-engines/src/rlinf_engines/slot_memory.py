"""Context switching on a CPU slot of Linux: private memory is the device, shared memory the host.

A CPU slot has no device memory of its own, so two kinds of the process's memory stand for the two places. What is
loaded lies in private memory (``RssAnon`` of ``/proc/self/status``); what is offloaded lies in an unnamed file of
``/dev/shm`` that dies with the process, and its private pages are given back to the system. Addresses never change:
tensors, views and pointers inside libraries stay valid, and memory that cannot be resized (weights mapped from a
checkpoint) is moved like any other.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rlinf_core.errors import RLinfError

if TYPE_CHECKING:
    import torch

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
# Bytes copied at once: pages that the kernel has just cleared are still in the cache when they are filled.
PIECE = 2 << 20
# Free memory that the C library may keep.
KEPT_FREE = 256 << 20

# Linux's numbers; Python's mmap module lacks the last.
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23

Span = tuple[int, int]
"""(address, bytes) of whole pages."""


class SlotMemory:
    """Moves storages of one engine between private memory and an arena of shared memory.

    Whole pages are moved; the part of a storage that shares its first and last page with others stays. Memory that is
    shared with other processes is not this slot's to give back and is left alone.
    """

    def __init__(self, name: str, threads: int = 1, arena: Arena | None = None) -> None:
        self._name = name
        self._threads = threads
        self._arena = arena or Arena()
        self._held: Sequence[torch.UntypedStorage] = ()
        self._spans: list[Span] = []

    def move_out(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy out and give the pages back. On an error everything is loaded as before."""
        spans = whole_pages((s.data_ptr(), s.nbytes()) for s in storages if not s.is_shared())
        need = sum(size for _, size in spans)
        try:
            self._arena.reserve(need)
        except ArenaFull as error:
            raise RLinfError(f"{self._name}: cannot be offloaded and stays loaded: {error}") from error
        self._each_piece(spans, lambda own, host, size: ctypes.memmove(host, own, size))
        try:
            for address, size in spans:
                _advise(address, size, MADV_DONTNEED)
        except BaseException as error:
            self._each_piece(spans, _fill)
            if isinstance(error, OSError):
                raise RLinfError(
                    f"{self._name}: cannot be offloaded and stays loaded: the system does not take its memory back "
                    f"({error.strerror}); is it locked?"
                ) from error
            raise
        # Freed storages would leave their addresses to others, whom the copy back would overwrite.
        self._held, self._spans = storages, spans
        _trim()

    def move_back(self) -> None:
        """Copy everything back to where it was."""
        for address, size in self._spans:
            start = -(-address // HUGE_PAGE) * HUGE_PAGE
            _hint(start, (address + size) // HUGE_PAGE * HUGE_PAGE - start, MADV_HUGEPAGE)
        self._each_piece(self._spans, _fill)
        self._held, self._spans = (), []

    def close(self) -> None:
        """Give the host memory back; what is offloaded is lost."""
        self._held, self._spans = (), []
        self._arena.close()

    def _each_piece(self, spans: Sequence[Span], copy: Callable[[int, int, int], object]) -> None:
        """Call ``copy(private address, arena address, bytes)`` for pieces of all spans, with the slot's threads."""
        pieces, host = [], self._arena.address
        for address, size in spans:
            for start in range(0, size, PIECE):
                length = min(PIECE, size - start)
                pieces.append((address + start, host, length))
                host += length
        if self._threads == 1 or len(pieces) == 1:
            for piece in pieces:
                copy(*piece)
            return
        with ThreadPoolExecutor(self._threads) as pool:  # copying releases Python's lock
            for _ in pool.map(lambda piece: copy(*piece), pieces):
                pass


class ArenaFull(Exception):
    """Host memory is short; the message says what is needed and what is left."""


class Arena:
    """Shared memory of this process: an unnamed file in ``directory``, mapped, grown as needed and kept.

    It has no name, so nothing is left behind however the process ends. Where ``directory`` does not exist or cannot
    hold such files, the kernel's own (``memfd``) is used, which only the machine's memory bounds.
    """

    def __init__(self, directory: str = "/dev/shm") -> None:
        self._directory = directory
        self._map: mmap.mmap | None = None
        self._close: Callable[[], object] = lambda: None
        self._file = -1
        self.address = 0
        self.size = 0

    def reserve(self, nbytes: int) -> None:
        """Have room for ``nbytes`` at ``address``. Raises ``ArenaFull``; what was there stays then."""
        if nbytes <= self.size:
            return
        if self._file < 0:
            self._open()
        more, left = nbytes - self.size, self._left()
        if more > left:
            raise ArenaFull(self._short(more, left))
        try:
            # Pages are claimed here: without, a full file system would show as a signal at the first write.
            os.posix_fallocate(self._file, self.size, more)
            mapped = mmap.mmap(self._file, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise ArenaFull(self._short(more, self._left())) from error
        if self._map is not None:
            self._map.close()
        self._map, self.size = mapped, nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        _hint(self.address, nbytes, MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Give the memory back. The arena can be used again."""
        if self._map is not None:
            self._map.close()
        self._close()
        self._map, self._file, self.address, self.size = None, -1, 0, 0

    def _open(self) -> None:
        try:
            file = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # not there, read-only, or a file system without unnamed files
            self._directory = ""
            file = os.memfd_create("rlinf-offload")
        self._file = file
        self._close = weakref.finalize(self, os.close, file)

    def _left(self) -> int:
        left = _available_memory()
        if self._directory:
            found = os.fstatvfs(self._file)
            left = min(left, found.f_bavail * found.f_frsize)
        return left

    def _short(self, more: int, left: int) -> str:
        where = self._directory or "memory"
        held = f" besides the {self.size} bytes held" if self.size else ""
        return (
            f"{more} bytes of host memory are needed in {where}{held} and {left} are left; make room there "
            "(in a container: a larger --shm-size), use a smaller model, or keep the stage resident"
        )


def discard(tensors: Iterable[torch.Tensor]) -> None:
    """Give the memory of tensors back to the system, contents and all. They read as zeros (but for page ends) and can
    be written again."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    for address, size in whole_pages((s.data_ptr(), s.nbytes()) for s in storages if not s.is_shared()):
        _advise(address, size, MADV_DONTNEED)
    _trim()


def whole_pages(blocks: Iterable[Span]) -> list[Span]:
    """The whole pages inside each block of (address, bytes), sorted, blocks that overlap or touch merged."""
    found: list[Span] = []
    for address, size in sorted(blocks):
        start, end = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
        if found and start <= sum(found[-1]):
            start, end = found[-1][0], max(sum(found[-1]), end)
            found.pop()
        if end > start:
            found.append((start, end - start))
    return found


def _fill(own: int, host: int, size: int) -> None:
    """Copy from the arena into pages that have been given back: taken again at once, not fault by fault."""
    _hint(own, size, MADV_POPULATE_WRITE)
    ctypes.memmove(own, host, size)


def _available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RLinfError("/proc/meminfo does not say how much memory is available")


_libc = ctypes.CDLL(None, use_errno=True)


def _advise(address: int, size: int, advice: int) -> None:
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _hint(address: int, size: int, advice: int) -> None:
    """Advice that only makes things faster; kernels that do not know it change nothing."""
    if size > 0:
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice))


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _trim() -> None:
    """Let the C library give its free memory back, as an accelerator's cache is emptied.

    Not when that is little: the engine's next turn would take it again page by page, a millisecond a MiB on some
    machines.
    """
    if not hasattr(_libc, "malloc_trim"):  # glibc's; others do not keep much
        return
    if hasattr(_libc, "mallinfo2"):
        _libc.mallinfo2.restype = _Mallinfo
        if _libc.mallinfo2().fordblks < KEPT_FREE:
            return
    _libc.malloc_trim(ctypes.c_size_t(0))
