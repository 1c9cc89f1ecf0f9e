"""Layouts: the builders against slices that numpy and torch make, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from rlinf_comm.weights.boxes import balanced, chunk, flat_range, intersect, pieces, subtract, volume, whole
from rlinf_comm.weights.builders import flat, fsdp, fused, grid, replicated, split
from rlinf_comm.weights.dtensor import from_dtensors
from rlinf_comm.weights.errors import LayoutError
from rlinf_comm.weights.layout import Layout, Part, RankLayout, Spec

SHAPES: dict[str, tuple[int, ...]] = {"a": (7, 4), "b": (5,), "scale": (), "none": (0, 3), "c": (3, 2, 2)}
SPECS = {name: Spec(shape) for name, shape in SHAPES.items()}

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def numbered(specs: Mapping[str, Spec]) -> dict[str, np.ndarray[Any, Any]]:
    """Every element of every parameter has a number of its own."""
    found, at = {}, 0
    for name, spec in specs.items():
        count = int(np.prod(spec.shape, dtype=int))
        found[name] = np.arange(at, at + count, dtype=np.int64).reshape(spec.shape)
        at += count
    return found


def fill(layout: Layout, rank: int, whole_ones: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """What the rank's places hold (-1 where no part lies)."""
    held = layout.ranks[rank]
    places = {name: np.full(spec.shape, -1, np.int64) for name, spec in held.places.items()}
    for part in held.parts:
        if volume(part.box):
            view(places[part.place], part)[...] = whole_ones[part.parameter][tuple(slice(*r) for r in part.box)]
    return places


def view(place: np.ndarray[Any, Any], part: Any) -> np.ndarray[Any, Any]:
    flat_place = place.reshape(-1)[part.offset :]
    steps = [step * place.itemsize for step in part.strides]
    return np.lib.stride_tricks.as_strided(flat_place, [high - low for low, high in part.box], steps)


@given(shapes, st.data())
def test_a_flat_range_is_the_elements_it_says_in_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = int(np.prod(shape, dtype=int))
    low = data.draw(st.integers(0, count))
    high = data.draw(st.integers(low, count))
    array = np.arange(count).reshape(shape)
    boxes = list(flat_range(shape, low, high))
    found = [array[tuple(slice(*r) for r in box)].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([np.empty(0, int), *found]), np.arange(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda r: tuple(sorted(r))) for n in shape))


@given(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.data())
def test_subtracting_and_intersecting_part_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    marks = np.zeros(shape, int)
    for box in subtract(a, b):
        marks[tuple(slice(*r) for r in box)] += 1
    if (common := intersect(a, b)) is not None:
        marks[tuple(slice(*r) for r in common)] += 1
    expected = np.zeros(shape, int)
    expected[tuple(slice(*r) for r in a)] = 1
    assert np.array_equal(marks, expected)


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.integers(1, 40))
def test_pieces_are_bounded_and_make_up_the_box(shape: tuple[int, ...], most: int) -> None:
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    cut = list(pieces(whole(shape), most))
    assert all(0 < volume(box) <= most for box in cut)
    found = [array[tuple(slice(*r) for r in box)].reshape(-1) for box in cut]
    assert np.array_equal(np.concatenate(found), array.reshape(-1))


@given(st.integers(0, 20), st.integers(1, 7))
def test_the_rules_cut_as_torch_and_numpy_do(size: int, parts: int) -> None:
    theirs = [len(part) for part in torch.arange(size).chunk(parts)] if size else []
    assert [high - low for low, high in chunk(size, parts)] == theirs + [0] * (parts - len(theirs))
    assert [high - low for low, high in balanced(size, parts)] == [len(p) for p in np.array_split(range(size), parts)]


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_builders_hold_what_numpy_slices(parts: int) -> None:
    values = numbered(SPECS)
    rows, columns = fsdp(SPECS, parts), split(SPECS, {"a": 1, "c": 2}, parts, "balanced")
    one_flat = np.concatenate([values[name].reshape(-1) for name in SPECS])
    zero, each = flat(SPECS, parts, rule="balanced"), flat(SPECS, parts, each=True)
    for rank in range(parts):
        held = fill(rows, rank, values)
        for name in ("a", "b", "c", "none"):
            low, high = chunk(SHAPES[name][0], parts)[rank]
            assert np.array_equal(held[name], values[name][low:high])
        assert held["scale"] == values["scale"]
        held = fill(columns, rank, values)
        assert np.array_equal(held["a"], np.array_split(values["a"], parts, axis=1)[rank])
        assert np.array_equal(held["c"], np.array_split(values["c"], parts, axis=2)[rank])
        assert np.array_equal(held["b"], values["b"])
        assert np.array_equal(fill(zero, rank, values)["flat.float32"], np.array_split(one_flat, parts)[rank])
        low, high = chunk(28, parts)[rank]
        assert np.array_equal(fill(each, rank, values)["a"], values["a"].reshape(-1)[low:high])


def test_grid_and_fused_places() -> None:
    specs = {name: Spec((4, 3)) for name in ("q", "k", "v", "head")}
    values = numbered(specs)
    layout = grid(specs, {"q": 0, "k": 0, "v": 0}, 2, {"q": 0, "k": 0, "v": 0, "head": 1}, 2)
    assert [sorted(held.places) for held in layout.ranks] == [["k", "q", "v"]] * 2 + [["head"]] * 2
    together = fused(layout, {"qkv": ["q", "k", "v"]})
    expected = np.concatenate([values[name][2:4] for name in "qkv"])
    assert np.array_equal(fill(together, 1, values)["qkv"], expected)


def test_data_comes_back_the_same_and_alike_ranks_are_written_once() -> None:
    layout = replicated(SPECS, 5, {"tied": "a"})
    again = Layout.from_data(layout.data)
    assert again == layout and again.fingerprint == layout.fingerprint
    assert len(layout.data) < 2 * len(replicated(SPECS, 1).data)
    assert fsdp(SPECS, 2).fingerprint != fsdp(SPECS, 3).fingerprint
    with pytest.raises(LayoutError, match="not the data of a layout"):
        Layout.from_data(b'{"parameters": 3}')


def one(parts: list[Part], places: dict[str, Spec], aliases: dict[str, str] | None = None) -> Callable[[], Layout]:
    return lambda: Layout({"w": Spec((4, 2))}, (RankLayout(places, tuple(parts)),), aliases or {})


W, TOP, LOW = Spec((4, 2)), ((0, 2), (0, 2)), ((2, 4), (0, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (one([Part("w", TOP, "w", 0, (2, 1))], {"w": W}), r"no rank holds 'w'\[2:4, 0:2\] \(shape \(4, 2\)\)"),
        (one([Part("x", TOP, "w", 0, (2, 1))], {"w": W}), r"rank 0: 'x'\[0:2, 0:2\]: there is no such parameter"),
        (one([Part("t", TOP, "w", 0, (2, 1))], {"w": W}, {"t": "w"}), r"no such parameter \(it is tied to 'w'\)"),
        (one([Part("w", TOP, "p", 0, (2, 1))], {"w": W}), r"rank 0: 'w'\[0:2, 0:2\]: the rank has no place 'p'"),
        (one([Part("w", TOP, "w", 6, (2, 1))], {"w": W}), r"elements 6 to 10 of 'w', which has 8"),
        (one([Part("w", ((3, 5), (0, 2)), "w", 0, (2, 1))], {"w": W}), r"outside the parameter's shape \(4, 2\)"),
        (one([Part("w", ((0, 4),), "w", 0, (1,))], {"w": W}), "the parameter has 2 dimensions"),
        (one([Part("w", TOP, "w", 0, (3, 1))], {"w": W}), r"strides \(3, 1\) are not those of a box"),
        (
            one([Part("w", TOP, "w", 0, (2, 1))], {"w": Spec((4, 2), "int8")}),
            "place 'w' is int8, the parameter float32",
        ),
        (one([], {"w": Spec((4, 2), "float33")}), "rank 0: place 'w': dtype 'float33' is unknown"),
        (
            one([Part("w", TOP, "w", 0, (2, 1)), Part("w", LOW, "w", 2, (2, 1))], {"w": W}),
            r"rank 0: 'w'\[2:4, 0:2\] and 'w'\[0:2, 0:2\] lie in the same elements of 'w'",
        ),
        (one([], {}, {"w": "v"}), "'w' is a parameter and tied to 'v'"),
        (one([], {}, {"u": "v"}), "'u' is tied to 'v', which is no parameter"),
        (lambda: Layout({}, ()), "at least one rank"),
        (lambda: split({"w": W}, {"w": 2}, 2), r"'w' has shape \(4, 2\): it cannot be split along dimension 2"),
        (lambda: split({"w": W}, {"x": 0}, 2), "'x' is to be split but is no parameter"),
        (lambda: grid({"w": W}, {}, 1, {"w": 2}, 2), "'w' in stage 2"),
        (lambda: flat({"w": W}, 0), "cannot split over 0 ranks"),
        (lambda: fused(replicated({"w": W, "b": Spec((2,))}), {"x": ["w", "b"]}), "rank 0: 'b' .* cannot be fused"),
    ],
)
def test_what_is_wrong_is_named(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    """Be rank r of four, in turn, without other processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


PLACEMENTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (7, 3), (2, 6)])
def test_the_layout_of_dtensors_is_torch_s(
    world: Callable[[int], None], mesh_shape: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]
) -> None:
    layouts = set()
    for rank in range(4):
        world(rank)
        mesh = init_device_mesh("cpu", mesh_shape)
        local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        size, stride = torch.Size(shape), (shape[1], 1)
        tensor = DTensor.from_local(torch.zeros(local), mesh, placements, run_check=False, shape=size, stride=stride)
        layout = from_dtensors({"w": tensor, "plain": torch.zeros(3)}, 4)
        layouts.add(layout.fingerprint)
        (part,) = (p for p in layout.ranks[rank].parts if p.parameter == "w")
        assert tuple(high - low for low, high in part.box) == tuple(local)
        if volume(part.box):
            assert tuple(low for low, _ in part.box) == tuple(offset)
        assert layout.ranks[rank].places["plain"] == Spec((3,))
    assert len(layouts) == 1


def test_unreduced_dtensors_are_refused(world: Callable[[int], None]) -> None:
    world(0)
    tensor = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (4,)), [Partial()], run_check=False)
    with pytest.raises(LayoutError, match="'w' is P.*: only sharded and replicated"):
        from_dtensors({"w": tensor}, 4)


def test_layouts_and_plans_do_without_torch() -> None:
    code = (
        "import sys\n"
        "from rlinf_comm.weights import Spec, flat, fsdp, plan\n"
        "specs = {'w': Spec((4, 3))}\n"
        "assert len(plan(flat(specs, 3), fsdp(specs, 2)).buckets) == 3\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
