"""Shared memory of one process: slots, holders, limits, what is left after kill -9."""

from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_comm import arena as module
from rlinf_comm import slots
from rlinf_comm.arena import Arena, Slot
from rlinf_comm.slots import OwnerGone, SlotGone, open_slot

pytestmark = pytest.mark.skipif(bool(slots.unavailable()), reason=slots.unavailable() or "available")


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def put(arena: Arena, size: int, holders: tuple[str, ...] = ()) -> Slot:
    slot = arena.put(views(bytes(size)), holders)
    assert slot is not None
    return slot


def test_buffers_come_back_as_they_were_and_are_aligned() -> None:
    arena = Arena(64 << 20)
    parts = [b"", b"a", b"x" * 63, b"y" * 64, b"z" * 5000, np.arange(1000, dtype=np.float64).tobytes()]
    slot = arena.put(views(*parts), ("b",))
    assert slot is not None
    opened = open_slot(slot.ref, 0)
    assert [bytes(view) for view in opened] == parts
    addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in opened if view.nbytes]
    assert {address % slots.ALIGN for address in addresses} == {0}
    assert [bytes(view) for view in arena.read(slot)] == parts
    arena.close()


def test_memory_is_used_again_only_when_the_last_view_is_gone() -> None:
    arena = Arena(64 << 20)
    slot = put(arena, 10_000, ("b",))
    arena.release(slot)
    array = np.frombuffer(open_slot(slot.ref, 0)[0], np.uint8)
    part = array[10:20]
    del array
    assert arena.stats().lingering == 1
    assert put(arena, 10_000).offset != slot.offset
    del part
    gc.collect()
    assert arena.stats().lingering == 0
    assert put(arena, 10_000).offset == slot.offset


def test_a_holder_that_has_not_opened_yet_keeps_the_slot_until_it_is_forgotten() -> None:
    arena = Arena(64 << 20)
    slot = put(arena, 100, ("b", "c"))
    arena.release(slot)
    assert arena.stats().lingering == 1
    held = open_slot(slot.ref, 0)
    arena.forget(slot)
    assert arena.stats().lingering == 1, "who has opened it keeps it"
    del held
    gc.collect()
    assert arena.stats().lingering == 0


def test_what_a_lost_holder_held_is_freed() -> None:
    arena = Arena(64 << 20)
    mine, shared = put(arena, 100, ("b",)), put(arena, 100, ("b", "c"))
    for slot in (mine, shared):
        arena.release(slot)
    assert arena.drop("b") == 2
    assert arena.stats().lingering == 1, "c still holds one"
    assert arena.drop("c") == 1
    assert arena.stats().lingering == 0
    assert arena.drop("nobody") == 0


def test_a_reference_that_is_too_old_is_refused_and_never_gives_other_bytes() -> None:
    arena = Arena(64 << 20)
    old = put(arena, 1000)
    arena.release(old)
    new = arena.put(views(b"n" * 1000))
    assert new is not None
    assert new.offset == old.offset
    with pytest.raises(SlotGone, match="something else"):
        open_slot(old.ref, 0)
    arena.release(old)  # a second time, too late: the new slot stays
    assert bytes(arena.read(new)[0]) == b"n" * 1000
    assert arena.stats().bytes_in_use > 0


def test_private_copies_do_not_hold_and_do_not_change_the_slot() -> None:
    arena = Arena(64 << 20)
    slot = arena.put(views(b"abc"))
    assert slot is not None
    copy = open_slot(slot.ref)[0]
    copy[0] = ord("X")
    assert bytes(arena.read(slot)[0]) == b"abc"
    arena.release(slot)
    assert arena.stats().lingering == 0


def test_there_is_no_room_beyond_the_limit_and_there_is_again_after_a_release() -> None:
    arena = Arena(20 << 20)
    first, second = put(arena, 8 << 20), put(arena, 8 << 20)
    assert arena.put(views(bytes(8 << 20))) is None
    assert arena.stats().refused == 1
    arena.release(first)
    again = put(arena, 8 << 20)
    assert again.offset == first.offset
    arena.release(again)
    arena.release(second)
    assert arena.put(views(bytes(12 << 20))) is not None, "free memory of other sizes is given back for it"
    assert arena.stats().bytes_reserved <= 20 << 20


def test_memory_that_the_machine_does_not_have_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 30)
    put(arena, 100)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        patch.setattr(os, "pwritev", full)
        for size in (200 << 20, 6 << 20, 60_000):
            assert arena.put(views(bytes(size))) is None
    stats = arena.stats()
    assert stats.segments == 1, "nothing is left of the attempts"
    assert stats.refused == 3
    assert stats.bytes_in_use == stats.bytes_reserved == 512
    for size in (200 << 20, 6 << 20, 60_000):
        put(arena, size)


@pytest.mark.parametrize("step", [1, 7, 4096, 1_000_000])
def test_memory_that_is_written_in_several_goes_is_whole(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev

    def short(fd: int, parts: list[memoryview], at: int) -> int:
        return write(fd, [parts[0][: max(1, parts[0].nbytes // step)]] if parts[0].nbytes else parts, at)

    monkeypatch.setattr(os, "pwritev", short)
    parts = [b"", b"a" * 100_000, b"b" * 99, b"", b"c" * 200_000]
    if step > 7:
        parts = [b"a" * 300, b"b" * 5, b"c" * 300]
        monkeypatch.setattr(module, "WRITTEN_FROM", 1)
    slot = Arena(64 << 20).put(views(*parts))
    assert slot is not None
    assert [bytes(view) for view in open_slot(slot.ref)] == parts


def test_memory_given_back_is_taken_again() -> None:
    """Many sizes in turn under a small limit: memory moves from one size to the next."""
    arena = Arena(4 << 20)
    for round_ in range(3):
        for size in (3 << 20, 100_000, 2 << 20, 1 << 20):
            slots = []
            while (slot := arena.put(views(bytes([round_]) * size))) is not None:
                slots.append(slot)
            assert slots
            assert all(bytes(arena.read(one)[0]) == bytes([round_]) * size for one in slots)
            for one in slots:
                arena.release(one)
            assert arena.stats().bytes_reserved <= 4 << 20
    assert arena.stats().bytes_in_use == 0
    assert arena.stats().segments == 1


def test_a_limit_on_file_sizes_is_no_room() -> None:
    code = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from rlinf_comm.arena import Arena\n"
        "assert Arena(1 << 30).put([memoryview(bytes(8 << 20))]) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@given(st.binary(max_size=120))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_reference_are_refused(ref: bytes) -> None:
    with pytest.raises(SlotGone):
        open_slot(ref, 0)


@given(st.integers(0, 43), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_reference_that_was_changed_opens_that_slot_or_nothing(at: int, value: int) -> None:
    arena = _ARENA
    slot = arena.put(views(b"secret" * 10))
    assert slot is not None
    changed = bytearray(slot.ref)
    changed[at] = value
    try:
        opened = open_slot(bytes(changed))
    except SlotGone:
        pass
    else:
        assert [bytes(view) for view in opened] == [b"secret" * 10]
    arena.release(slot)


_ARENA = Arena(64 << 20)


def test_a_file_that_is_no_arena_is_not_mapped(tmp_path: Path) -> None:
    slot = put(Arena(64 << 20), 100)
    fields = list(slots.REF.unpack_from(slot.ref))
    path = tmp_path / "memfd:rlinf-arena"
    path.write_bytes(bytes(fields[3]))
    with path.open("rb+") as file:
        fields[2] = file.fileno()
        with pytest.raises(SlotGone):
            open_slot(slots.REF.pack(*fields) + struct.pack("<Q", 100), 0)


PRODUCER = """
import sys
from rlinf_comm.arena import Arena
arena = Arena(64 << 20)
slot = arena.put([memoryview(b"from another process" * 1000)], ("b",))
arena.release(slot)
print(slot.ref.hex(), flush=True)
sys.stdin.readline()
print(arena.stats().lingering, flush=True)
sys.stdin.readline()
"""


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_another_process_is_read_and_nothing_stays_after_kill_9() -> None:
    before = shared_files()
    process = subprocess.Popen(
        [sys.executable, "-c", PRODUCER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ref = bytes.fromhex(process.stdout.readline().strip())
    opened = open_slot(ref, 0)
    expected = b"from another process" * 1000
    assert bytes(opened[0]) == expected
    process.stdin.write("\n")
    assert process.stdout.readline().strip() == "1", "it sees that the slot is in use here"
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdin.close()
    process.stdout.close()
    assert bytes(opened[0]) == expected, "what is open here stays readable"
    assert shared_files() == before
    slots.mapped.forget(process.pid)
    with pytest.raises(OwnerGone, match=f"process {process.pid} has ended"):
        open_slot(ref, 0)


def test_a_forked_child_puts_nothing_into_its_parents_memory() -> None:
    code = (
        "import os\n"
        "from rlinf_comm.arena import Arena\n"
        "arena = Arena(64 << 20)\n"
        "assert arena.put([memoryview(b'x' * 100)]) is not None\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(0 if arena.put([memoryview(b'y' * 100)]) is None else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "assert arena.put([memoryview(b'x' * 100)]) is not None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_descriptors_are_given_back() -> None:
    slots.mapped.forget(os.getpid())  # of the tests before
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(256 << 20)
    mine = [put(arena, 6 << 20) for _ in range(5)]
    opened = [open_slot(slot.ref, None) for slot in mine]
    assert len(opened) == 5
    arena.close()
    del mine, opened
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert arena.put(views(b"x")) is None


def test_more_holders_than_a_slot_has_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="room for 56 holders, got 57"):
        Arena(1 << 20).put(views(b"x"), tuple(range(57)))


@given(st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 3)), max_size=60), st.randoms())
@settings(max_examples=30, deadline=None)
def test_no_slot_is_given_out_twice(plan: list[tuple[int, int]], random: object) -> None:
    """Random sizes, releases and holds: live slots never overlap and keep their bytes."""
    arena = Arena(8 << 20)
    live: list[tuple[Slot, bytes, list[memoryview] | None]] = []
    for number, (size, action) in enumerate(plan):
        if action == 3 and live:
            slot, _, _ = live.pop(random.randrange(len(live)))  # type: ignore[attr-defined]
            arena.forget(slot)
            continue
        content = bytes([number % 251]) * size
        slot = arena.put(views(content), ("b",) if action else ())
        if slot is None:
            continue
        opened = open_slot(slot.ref, 0) if action == 1 else None
        if action == 1:
            arena.release(slot)
        live.append((slot, content, opened))
        for other, expected, kept in live:
            assert bytes((kept or arena.read(other))[0]) == expected
    arena.close()


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_several_holders_that_want_it_for_themselves_do_not_see_each_other(size: int) -> None:
    arena = Arena(64 << 20)
    slot = put(arena, size, ("b", "c"))
    arena.release(slot)
    first, second = (open_slot(slot.ref, place, private=True)[0] for place in range(2))
    first[0], first[size - 1] = 1, 2
    assert (second[0], second[size - 1]) == (0, 0)
    second[0] = 9
    assert (first[0], bytes(arena.read(slot)[0][:1])) == (1, b"\0")
    del first, second
    gc.collect()
    assert arena.stats().lingering == 0


def test_what_a_forked_child_throws_away_its_parent_still_holds() -> None:
    code = (
        "import gc, os\n"
        "from rlinf_comm.arena import Arena\n"
        "from rlinf_comm.slots import open_slot\n"
        "arena = Arena(64 << 20)\n"
        "slot = arena.put([memoryview(b'x' * 100)], ('b',))\n"
        "arena.release(slot)\n"
        "held = open_slot(slot.ref, 0)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    del held\n"
        "    gc.collect()\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "assert arena.stats().lingering == 1\n"
        "del held\n"
        "gc.collect()\n"
        "assert arena.stats().lingering == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_arena_full_of_what_consumers_keep_is_not_searched_at_every_put(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(2 << 20)
    kept = []
    while (slot := arena.put(views(bytes(9000)), ("b",))) is not None:
        kept.append(open_slot(slot.ref, 0))
        arena.release(slot)
    looked: list[int] = []
    sweep = Arena._sweep

    def count(self: Arena, count: int) -> None:
        looked.append(count)
        sweep(self, count)

    monkeypatch.setattr(Arena, "_sweep", count)
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 100.0)
    arena._full_until = 0.0
    for _ in range(50):
        assert arena.put(views(bytes(9000))) is None
    assert sum(looked) < 2 * len(kept) + 50 * module.LOOKED_AT
    kept.clear()
    gc.collect()
    assert arena.put(views(bytes(9000))) is not None
