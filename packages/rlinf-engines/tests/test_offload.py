"""What a switch must keep: every bit, object, view and tie; and what it must do: give the memory back."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlinf_core.errors import RLinfError  # noqa: E402
from rlinf_engines import offload, slot_memory  # noqa: E402
from rlinf_engines.offload import BlockMemory, DeviceStore, state_tensors  # noqa: E402
from rlinf_engines.slot_memory import PAGE, Arena, SlotMemory, whole_pages  # noqa: E402

CPU = torch.device("cpu")
SCRIPT = Path(__file__).with_name("offload_session.py")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's memory calls")

MOVERS = [
    pytest.param(lambda: SlotMemory("engine"), id="slot", marks=linux),
    pytest.param(lambda: SlotMemory("engine", threads=3), id="slot-3-threads", marks=linux),
    pytest.param(lambda: BlockMemory("engine", CPU), id="blocks"),
]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_tensors() -> dict[str, torch.Tensor]:
    """Sizes around pages and pieces; formats; ties; views of one buffer, strided and transposed; nothing at all."""
    flat = numbers(700_000)
    big = numbers(1100, 1100, seed=1)
    return {
        "big": big,
        "tied": big,
        "transposed": big.T,
        "view 0": flat[:300_000].view(300, 1000),
        "view 1": flat[300_000:].view(400, 1000),
        "column": flat.view(700, 1000)[:, 3],
        "bfloat16": numbers(513, 777, seed=2, dtype=torch.bfloat16),
        "float64": numbers(100, 100, seed=3, dtype=torch.float64),
        "bools": numbers(30_000, seed=4) > 0,
        "int64": torch.arange(50_001),
        "small": numbers(7, seed=5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        **{f"{n} bytes": torch.arange(n, dtype=torch.uint8) for n in (PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 64)},
    }


def store_of(tensors: dict[str, torch.Tensor], mover: Any) -> DeviceStore:
    return DeviceStore("engine", CPU, tensors.values, mover=mover)


@pytest.mark.parametrize("make", MOVERS)
def test_every_bit_object_view_and_tie_is_kept(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "HOST_BLOCK", 1 << 16)  # storages that span blocks of host memory
    tensors = some_tensors()
    outside = tensors["big"][5:8]  # nobody tells the store of this view
    store = store_of(tensors, make())
    for turn in range(4):
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        store.offload()
        assert not store.loaded
        store.onload()
        assert store.loaded
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.dtype == expected[name].dtype
        assert torch.equal(outside, expected["big"][5:8])
        # What aliased before aliases now, and new values are what moves next.
        tensors["view 1"].fill_(float(turn))
        assert tensors["column"][500] == float(turn)
        tensors["transposed"][0, 5] = -float(turn)
        assert tensors["tied"][5, 0] == outside[0, 0] == -float(turn)
    store.close()


@pytest.mark.parametrize("make", MOVERS)
def test_a_second_call_does_nothing(make: Callable[[], Any]) -> None:
    tensors = some_tensors()
    expected = tensors["big"].clone()
    store = store_of(tensors, make())
    store.onload()
    for _ in range(2):
        store.offload()
        store.offload()
        store.onload()
        store.onload()
    assert torch.equal(tensors["big"], expected)


@pytest.mark.parametrize("make", MOVERS)
def test_what_is_there_may_change_between_switches(make: Callable[[], Any]) -> None:
    """Gradients and optimizer state come and go; their references stay the optimizer's."""

    def train(switch: Callable[[], None]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(60, 70), torch.nn.Linear(70, 60))
        model[1].weight = torch.nn.Parameter(model[0].weight.detach().T)  # another view of the same storage
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        stores.append(DeviceStore("engine", CPU, lambda: state_tensors(model, optimizer), mover=make()))
        for turn in range(3):
            for part in range(2):
                switch()
                model(numbers(4, 60, seed=10 * turn + part)).square().sum().backward()
            switch()
            optimizer.step()
            switch()
            optimizer.zero_grad(set_to_none=turn != 1)
        return [p.detach().clone() for p in model.parameters()]

    def there_and_back() -> None:
        stores[-1].offload()
        stores[-1].onload()

    stores: list[DeviceStore] = []
    plain, switched = train(lambda: None), train(there_and_back)
    assert all(torch.equal(a, b) for a, b in zip(plain, switched, strict=True))


def test_state_tensors_are_all_there_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model.register_buffer("rotary", torch.ones(2), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    before = len(list(state_tensors(model, optimizer)))
    assert before == 4 + 3 + 1
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert len(list(state_tensors(model, optimizer))) == before + 4 + 4 * 3


@linux
def test_pages_are_given_back() -> None:
    tensors = {"big": numbers(1000, 1000), "small": numbers(100)}
    address = tensors["big"].data_ptr()
    store = store_of(tensors, SlotMemory("engine"))
    kept = tensors["small"].clone()
    store.offload()
    inside = tensors["big"].view(-1)[PAGE // 4 : -PAGE // 4]
    assert not inside.any()  # fresh pages read as zeros
    assert torch.equal(tensors["small"], kept)  # smaller than a page
    store.onload()
    assert inside.any() and tensors["big"].data_ptr() == address


def test_blocks_are_given_back() -> None:
    tensors = some_tensors()
    store = store_of(tensors, BlockMemory("engine", CPU))
    store.offload()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())


def test_use_while_offloaded_is_refused_by_name() -> None:
    store = store_of(some_tensors(), BlockMemory("engine", CPU))
    store.check("step")
    store.offload()
    with pytest.raises(RLinfError, match=r"engine: step while offloaded; call onload\(\) first"):
        store.check("step")


def test_tensors_elsewhere_stay_and_sparse_ones_are_refused() -> None:
    elsewhere = torch.empty(10_000, device="meta")
    DeviceStore("engine", CPU, lambda: [elsewhere], mover=BlockMemory("engine", CPU)).offload()
    assert elsewhere.untyped_storage().nbytes() == 40_000
    with pytest.raises(RLinfError, match=r"layout torch\.sparse_coo cannot be offloaded"):
        DeviceStore("engine", CPU, lambda: [torch.eye(3).to_sparse()]).offload()


@linux
def test_memory_shared_with_other_processes_is_left_alone() -> None:
    shared = numbers(100_000).share_memory_()
    store = store_of({"shared": shared}, SlotMemory("engine"))
    store.offload()
    shared.fill_(2.0)  # another process may
    store.onload()
    assert bool((shared == 2.0).all())


def full_arena(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "little left":
        monkeypatch.setattr(Arena, "_left", lambda self: 4096)
        return

    def fail(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)


@linux
@pytest.mark.parametrize("how", ["little left", "claiming fails"])
def test_full_host_memory_loses_nothing(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    tensors = some_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    store = store_of(tensors, SlotMemory("engine"))
    with monkeypatch.context() as patch:
        full_arena(patch, how)
        message = r"engine: cannot be offloaded and stays loaded: \d{6,} bytes of host memory are needed in /dev/shm"
        with pytest.raises(RLinfError, match=message):
            store.offload()
    assert store.loaded
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    store.offload()
    tensors["more"] = numbers(500_000, seed=9)
    expected["more"] = tensors["more"].clone()
    store.onload()
    with monkeypatch.context() as patch:
        full_arena(patch, how)
        with pytest.raises(RLinfError, match=r"19\d{5} bytes .* besides the \d+ bytes held"):
            store.offload()
    store.offload()
    store.onload()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


@linux
def test_memory_that_the_system_does_not_take_back_loses_nothing() -> None:
    first, locked = numbers(50_000), numbers(50_000, seed=1)
    expected = first.clone(), locked.clone()
    address, size = whole_pages([(locked.data_ptr(), locked.nbytes)])[0]
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(address), ctypes.c_size_t(size)
    if libc.mlock(*place) != 0:
        pytest.skip("this process may not lock memory")
    store = store_of({"first": first, "locked": locked}, SlotMemory("engine"))
    with pytest.raises(RLinfError, match="does not take its memory back"):
        store.offload()
    assert store.loaded
    assert torch.equal(first, expected[0]) and torch.equal(locked, expected[1])
    libc.munlock(*place)
    store.offload()
    store.onload()
    assert torch.equal(first, expected[0]) and torch.equal(locked, expected[1])


@linux
def test_an_arena_elsewhere_is_used_where_there_is_no_dev_shm(tmp_path: Path) -> None:
    tensors = some_tensors()
    expected = tensors["big"].clone()
    store = store_of(tensors, SlotMemory("engine", arena=Arena(str(tmp_path / "absent"))))
    store.offload()
    store.onload()
    assert torch.equal(tensors["big"], expected)


@linux
def test_a_closed_arena_gives_its_file_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena()
    arena.reserve(1 << 20)
    arena.reserve(1 << 21)
    held = set(os.listdir("/proc/self/fd")) - before
    assert held
    arena.close()
    arena.close()
    assert not held & set(os.listdir("/proc/self/fd"))
    arena.reserve(PAGE)
    assert arena.size == PAGE
    del arena
    assert not held & set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([(10 * PAGE, PAGE)], [(10 * PAGE, PAGE)]),
        ([(10 * PAGE + 64, PAGE)], []),
        ([(10 * PAGE + 64, 2 * PAGE)], [(11 * PAGE, PAGE)]),
        ([(20 * PAGE, 3 * PAGE), (10 * PAGE, 2 * PAGE)], [(10 * PAGE, 2 * PAGE), (20 * PAGE, 3 * PAGE)]),
        ([(10 * PAGE, 4 * PAGE), (11 * PAGE, PAGE), (13 * PAGE, 3 * PAGE)], [(10 * PAGE, 6 * PAGE)]),
    ],
)
def test_whole_pages(blocks: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert whole_pages(blocks) == expected


def test_blocks_of_others_are_refused_before_anything_moves() -> None:
    numpy = pytest.importorskip("numpy")
    mine, theirs = numbers(10_000), torch.from_numpy(numpy.ones(1000, dtype="float32"))
    store = store_of({"mine": mine, "theirs": theirs}, BlockMemory("engine", CPU))
    with pytest.raises(RLinfError, match="a block of 4000 bytes belongs to another process or library"):
        store.offload()
    assert store.loaded and mine.untyped_storage().nbytes() == 40_000


class Scarce:
    """A storage whose memory is not free for a while."""

    def __init__(self, storage: Any) -> None:
        self.storage, self.short = storage, False

    def resize_(self, size: int) -> None:
        if size and self.short:
            raise RuntimeError("out of memory")
        self.storage.resize_(size)


def test_a_full_device_loses_nothing() -> None:
    first, second = numbers(10_000), numbers(20_000, seed=1)
    expected = first.clone(), second.clone()
    mover = BlockMemory("engine", CPU)
    store = DeviceStore("engine", CPU, lambda: [first, second], mover=mover)
    store.offload()
    scarce = Scarce(mover._held[1][0])
    held = mover._held
    mover._held = [held[0], (scarce, held[1][1])]  # type: ignore[list-item]
    scarce.short = True
    with pytest.raises(RLinfError, match="loading needs 120000 bytes of cpu, which are not free: out of memory"):
        store.onload()
    assert not store.loaded
    assert first.untyped_storage().nbytes() == 0
    mover._held = held
    store.onload()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def session(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@linux
def test_private_memory_really_falls_and_returns() -> None:
    process = session("measure")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    found = json.loads(out)
    moved = found["bytes"]
    for offloaded, loaded in found["turns"]:
        assert found["before"] - offloaded > 0.97 * moved
        assert abs(loaded - found["before"]) < 0.05 * moved
    assert found["equal"]


@linux
def test_a_killed_process_leaves_nothing_behind() -> None:
    process = session("hold")
    assert process.stdin is not None and process.stdout is not None
    found = json.loads(process.stdout.readline())
    # No name: the last process that has it open keeps the memory, and nobody else can.
    assert found["links"] == 0 and found["bytes"] > 1 << 20
    assert found["files"] and all(name.endswith("(deleted)") for name in found["files"])
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()
    for name in found["files"]:
        assert not os.path.exists(name.removesuffix(" (deleted)"))


def test_other_systems_keep_state_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.sys, "platform", "darwin")
    tensors = some_tensors()
    store = DeviceStore("engine", CPU, tensors.values)
    store.offload()
    with pytest.raises(RLinfError, match="while offloaded"):
        store.check("step")
    store.onload()
    store.close()
    assert torch.equal(tensors["big"], numbers(1100, 1100, seed=1))


@linux
def test_kernels_without_the_hints_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(slot_memory, "MADV_HUGEPAGE", 9999)
    tensors = some_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    store = store_of(tensors, SlotMemory("engine"))
    for _ in range(2):
        store.offload()
        store.onload()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
