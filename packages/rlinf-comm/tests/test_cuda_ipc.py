"""Device memory by handle: packing, accounts, order of calls, with a stand-in for CUDA; real CUDA in the last test."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_comm import devices
from rlinf_comm.directory import FileDirectory
from rlinf_comm.errors import CommError, NoRoom
from rlinf_comm.transports.base import Buffer, BufferSpec, Link, Place
from rlinf_comm.transports.cuda_ipc import ALIGN, HANDLE_BYTES, CudaCalls, CudaIpcTransport, Ticket, empty_like, layout

GPU = "11111111-2222-3333-4444-555555555555"
BASE = 1 << 40
"""Where the stand-in maps memory."""
SHIFT = 3 * ALIGN
"""Where a block lies in its allocation."""


class Bench:
    """One device's memory as two processes see it: what is exported, mapped, and in which order things were done."""

    def __init__(self) -> None:
        self.exported: dict[bytes, weakref.ref[torch.Tensor]] = {}
        self.mapped: list[bytes] = []
        self.done: list[str] = []


class StandIn(CudaCalls):
    """CUDA calls over CPU tensors. A handle finds its block only while somebody keeps that alive."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.fail_in_copy = False

    def device_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, str]:
        return 0, GPU

    def pack(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], total: int, index: int) -> tuple[Any, Any]:
        block = torch.zeros(total, dtype=torch.uint8)
        for tensor, offset in zip(tensors, offsets, strict=True):
            raw = tensor.reshape(-1).view(torch.uint8)
            block[offset : offset + raw.numel()].copy_(raw)
        return block, "event"

    def event_handle(self, event: Any) -> bytes:
        return b"E" * HANDLE_BYTES

    def export(self, block: Any, index: int) -> tuple[bytes, int]:
        handle = len(self.bench.exported).to_bytes(HANDLE_BYTES, "little")
        self.bench.exported[handle] = weakref.ref(block)
        return handle, SHIFT

    def open(self, handle: bytes, index: int) -> int:
        self.bench.mapped.append(handle)
        self.bench.done.append("map")
        return BASE

    def close(self, base: int, index: int) -> None:
        assert base == BASE
        self.bench.mapped.pop()
        self.bench.done.append("unmap")

    def boxes(self, specs: Sequence[BufferSpec]) -> list[torch.Tensor]:
        return [empty_like(spec, "cpu") for spec in specs]

    def unpack(
        self, pointer: int, offsets: Sequence[int], boxes: Sequence[torch.Tensor], event: bytes, index: int
    ) -> None:
        assert event == b"E" * HANDLE_BYTES
        self.bench.done.append("copy")
        if self.fail_in_copy:
            raise RuntimeError("out of order")
        block = self.bench.exported[self.bench.mapped[-1]]()
        assert block is not None, "the sender has let go of a block that is mapped"
        for box, offset in zip(boxes, offsets, strict=True):
            at = pointer - BASE - SHIFT + offset
            raw = box.reshape(-1).view(torch.uint8)
            raw.copy_(block[at : at + raw.numel()])


def pair(limit_bytes: int = 1 << 20) -> tuple[CudaIpcTransport, CudaIpcTransport, StandIn]:
    calls = StandIn(Bench())
    nowhere: Any = None
    made = []
    for name, peer, pid in (("a", "b", 1), ("b", "a", 2)):
        here = Place("n", pid, frozenset({"cuda_ipc"}), (GPU,))
        link = Link(here, here, name, peer, name == "a", nowhere, nowhere, "k", 5.0, lambda: 5.0)
        made.append(CudaIpcTransport(link, calls, limit_bytes))
    return made[0], made[1], calls


def specs(tensors: Sequence[Buffer]) -> list[BufferSpec]:
    return [
        BufferSpec(t.numel() * t.element_size(), str(t.dtype).removeprefix("torch."), tuple(t.shape), "cuda:0")
        for t in tensors
        if isinstance(t, torch.Tensor)
    ]


def message() -> list[Buffer]:
    return [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor([True, False, True]),
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.arange(1000, dtype=torch.int64),
        torch.tensor(2.5, dtype=torch.float16),
    ]


def test_buffers_come_with_their_types_and_shapes() -> None:
    a, b, calls = pair()
    sent = message()
    found = b.pull(a.offer(sent), specs(sent))
    for before, after in zip(sent, found, strict=True):
        assert isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
        assert before.dtype == after.dtype and torch.equal(before, after)
    assert calls.bench.done == ["map", "copy", "unmap"]
    assert not calls.bench.mapped


def test_the_sender_may_change_a_tensor_once_it_has_sent_it() -> None:
    a, b, _ = pair()
    tensor = torch.ones(5)
    ticket = a.offer([tensor])
    tensor.zero_()
    (found,) = b.pull(ticket, specs([tensor]))
    assert isinstance(found, torch.Tensor) and found.tolist() == [1.0] * 5


def test_a_block_lives_until_it_is_released_and_not_longer() -> None:
    a, b, calls = pair()
    first, second = a.offer([torch.ones(5)]), a.offer([torch.ones(9)])
    gc.collect()
    blocks = list(calls.bench.exported.values())
    assert all(block() is not None for block in blocks)
    assert a.bytes_held == 2 * ALIGN
    b.pull(second, specs([torch.ones(9)]))
    a.release(second)
    a.release(second)  # told twice: once is enough
    assert blocks[0]() is not None and blocks[1]() is None
    assert a.bytes_held == ALIGN
    b.pull(first, specs([torch.ones(5)]))
    a.release(first)
    assert a.bytes_held == 0 and blocks[0]() is None


def test_the_end_of_the_connection_frees_what_nobody_released() -> None:
    a, _, calls = pair()
    a.offer([torch.ones(5)])
    a.close(True)
    assert a.bytes_held == 0
    assert [block() for block in calls.bench.exported.values()] == [None]


def test_more_than_the_limit_under_way_is_no_room_and_passes() -> None:
    a, _, _ = pair(limit_bytes=2 * ALIGN)
    first = a.offer([torch.zeros(1), torch.zeros(1)])
    with pytest.raises(NoRoom, match=f"{2 * ALIGN} bytes of {GPU} are under way to b"):
        a.offer([torch.zeros(1)])
    a.release(first)
    a.offer([torch.zeros(1)])


def test_a_copy_that_fails_leaves_nothing_mapped() -> None:
    a, b, calls = pair()
    calls.fail_in_copy = True
    with pytest.raises(RuntimeError, match="out of order"):
        b.pull(a.offer([torch.ones(3)]), specs([torch.ones(3)]))
    assert not calls.bench.mapped
    calls.fail_in_copy = False
    (found,) = b.pull(a.offer([torch.ones(3)]), specs([torch.ones(3)]))
    assert isinstance(found, torch.Tensor) and found.tolist() == [1.0] * 3


def test_a_message_of_empty_tensors_maps_nothing() -> None:
    a, b, calls = pair()
    (found,) = b.pull(a.offer([torch.empty(0, 3)]), specs([torch.empty(0, 3)]))
    assert isinstance(found, torch.Tensor) and found.shape == (0, 3)
    assert calls.bench.done == []


def test_tickets_and_frames_that_do_not_fit_are_refused() -> None:
    a, b, calls = pair()
    ticket = a.offer([torch.ones(5)])
    with pytest.raises(CommError, match="3 bytes are no ticket"):
        b.pull(b"abc", [])
    with pytest.raises(CommError, match=f"for {ALIGN} bytes, the frame for {2 * ALIGN}"):
        b.pull(ticket, [BufferSpec(ALIGN + 1, "uint8", (ALIGN + 1,))])
    with pytest.raises(CommError, match=r"shape \(7,\) does not have 20 bytes"):
        b.pull(ticket, [BufferSpec(20, "float32", (7,))])
    with pytest.raises(CommError, match="dtype 'save'"):
        b.pull(ticket, [BufferSpec(20, "save", (5,))])
    known = Ticket.unpack(ticket)
    elsewhere = Ticket("other", known.serial, known.handle, known.offset, known.nbytes, known.event)
    with pytest.raises(CommError, match="b does not see the device other of a"):
        b.pull(elsewhere.pack(), specs([torch.ones(5)]))
    with pytest.raises(CommError, match="not host memory"):
        a.offer([memoryview(b"x")])
    assert calls.bench.done == []


def test_tickets_survive_packing_and_blocks_are_aligned() -> None:
    ticket = Ticket(GPU, 7, bytes(range(64)), 1 << 33, 5 << 30, bytes(range(64))[::-1])
    assert Ticket.unpack(ticket.pack()) == ticket
    assert layout([1, 0, ALIGN, ALIGN + 1]) == ([0, ALIGN, ALIGN, 2 * ALIGN], 4 * ALIGN)
    assert layout([]) == ([], 0)


def test_a_tensor_on_the_cpu_is_refused_before_cuda_is_asked() -> None:
    with pytest.raises(CommError, match="cannot move a tensor on cpu"):
        CudaCalls().device_of([torch.ones(1)])
    with pytest.raises(CommError, match="on 0 devices"):
        CudaCalls().device_of([])


def test_expandable_segments_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    reason = CudaIpcTransport.unavailable()
    assert reason.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: ")


@pytest.mark.parametrize(
    ("build", "driver", "visible", "reason"),
    [
        ("2.13.0+cpu", True, "0", "torch 2.13.0+cpu is a build for CPUs"),
        ("2.13.0", False, "0", "no NVIDIA driver on this machine"),
        ("2.13.0", True, "", "no device is visible to this process (CUDA_VISIBLE_DEVICES)"),
        ("2.13.0", True, "0", "torch finds no device that it can use"),
    ],
)
def test_why_there_is_no_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str, driver: bool, visible: str, reason: str
) -> None:
    monkeypatch.setattr(devices, "version", lambda name: build)
    monkeypatch.setattr(devices, "DRIVER_FILES", (str(tmp_path if driver else tmp_path / "absent"),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.cuda_missing() == reason


RECEIVE = """
import sys, torch
from rlinf_comm.devices import visible_devices
from rlinf_comm.directory import FileDirectory
from rlinf_comm.transports.base import BufferSpec, Link, Place
from rlinf_comm.transports.cuda_ipc import CudaIpcTransport
directory = FileDirectory(sys.argv[1])
here = Place("n", 2, frozenset({"cuda_ipc"}), visible_devices())
b = CudaIpcTransport(Link(here, here, "b", "a", False, None, directory, "k", 60.0, lambda: 60.0))
for k in range(5):
    ticket = directory.lookup(f"ticket/{k}", 60.0)
    x, y = b.pull(ticket, [BufferSpec(4 << 20, "float32", (1024, 1024)), BufferSpec(6, "bfloat16", (3,))])
    assert x.is_cuda and float(x.sum()) == k * 1024 * 1024, x.sum()
    assert y.tolist() == [1.0, 2.0, 3.0]
    directory.publish(f"seen/{k}", b"yes")
"""


@pytest.mark.gpu
@pytest.mark.skipif(bool(devices.cuda_missing()), reason=devices.cuda_missing())
def test_on_a_real_gpu_between_two_processes(tmp_path: Path) -> None:
    import subprocess
    import sys

    nowhere: Any = None
    here = Place("n", 1, frozenset({"cuda_ipc"}), devices.visible_devices())
    a = CudaIpcTransport(Link(here, here, "a", "b", True, nowhere, nowhere, "k", 60.0, lambda: 60.0))
    directory = FileDirectory(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", RECEIVE, str(tmp_path)])
    stream = torch.cuda.Stream()
    x, y = torch.empty(1024, 1024, device="cuda"), torch.tensor([1.0, 2.0, 3.0], device="cuda", dtype=torch.bfloat16)
    free = 0
    for k in range(5):
        with torch.cuda.stream(stream):  # the tensor is still being made when it is sent
            for _ in range(200):
                x.fill_(-1.0)
            x.fill_(float(k))
            ticket = a.offer([x, y])
            x.fill_(-2.0)
        directory.publish(f"ticket/{k}", ticket)
        directory.lookup(f"seen/{k}", 60.0)
        a.release(ticket)
        torch.cuda.synchronize()
        free = free or torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == free and a.bytes_held == 0
    assert child.wait(60) == 0
