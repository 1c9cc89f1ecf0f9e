"""Plans against a brute force: whatever the two splits are, every element of every target comes once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_comm.weights.boxes import volume
from rlinf_comm.weights.builders import flat, fsdp, fused, grid, replicated, split
from rlinf_comm.weights.errors import MismatchError
from rlinf_comm.weights.layout import ITEM_BYTES, Layout, Part, RankLayout, Spec
from rlinf_comm.weights.plan import ALIGN, TransferPlan, plan, wire_dtype


def number(layout: Layout) -> dict[str, np.ndarray[Any, Any]]:
    found, at = {}, 0
    for name, spec in sorted(layout.parameters.items()):
        count = int(np.prod(spec.shape, dtype=int))
        found[name] = np.arange(at, at + count).reshape(spec.shape)
        at += count
    return found


def view(place: np.ndarray[Any, Any], box: Any, offset: int, strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    steps = [step * place.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(place.reshape(-1)[offset:], [high - low for low, high in box], steps)


def filled(layout: Layout, values: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, np.ndarray[Any, Any]]]:
    """What every rank's places should hold; -1 where nothing lies. Element by element, from the parts alone."""
    ranks = []
    for held in layout.ranks:
        places = {name: np.full(int(np.prod(spec.shape, dtype=int)), -1) for name, spec in held.places.items()}
        for part in held.parts:
            if volume(part.box):
                for index in np.ndindex(*(high - low for low, high in part.box)):
                    at = part.offset + sum(i * step for i, step in zip(index, part.strides, strict=True))
                    corner = tuple(low for low, _ in part.box)
                    there = tuple(i + c for i, c in zip(index, corner, strict=True))
                    places[part.place][at] = values[part.parameter][there]
        ranks.append(places)
    return ranks


def carried_out(made: TransferPlan, source: Layout, target: Layout, values: dict[str, Any]) -> None:
    """Perform the plan on numbers and compare; counts the writes of every element."""
    have, want = (
        filled(source, values),
        filled(target, {n: values[source_name(source, target, n)] for n in target.parameters}),
    )
    got = [{name: np.full(array.size, -1) for name, array in places.items()} for places in want]
    writes = [{name: np.zeros(array.size, int) for name, array in places.items()} for places in want]
    for rank, buckets in enumerate(made.buckets):
        for index, bucket in enumerate(buckets):
            assert (bucket.source, bucket.index) == (rank, index)
            assert 0 < bucket.nbytes <= made.bucket_bytes
            end = 0
            for move in bucket.moves:
                assert move.start % ALIGN == 0 and move.start >= end
                assert move.nbytes == volume(move.box) * ITEM_BYTES[move.wire] > 0
                end = move.start + move.nbytes
                assert {landing.rank for landing in move.landings} == set(bucket.targets)
                piece = view(have[rank][move.place], move.box, move.offset, move.strides)
                for landing in move.landings:
                    place = (landing.place, move.box, landing.offset, landing.strides)
                    view(got[landing.rank][place[0]], *place[1:])[...] = piece
                    view(writes[landing.rank][place[0]], *place[1:])[...] += 1
            assert end == bucket.nbytes
    for rank, places in enumerate(want):
        for name, array in places.items():
            assert np.array_equal(got[rank][name], array), (rank, name)
            assert np.array_equal(writes[rank][name], (array >= 0).astype(int)), (rank, name)


def source_name(source: Layout, target: Layout, name: str) -> str:
    return source.aliases.get(name, name)


SHAPES = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4
)


@st.composite
def layouts(draw: st.DrawFn, specs: dict[str, Spec]) -> Layout:
    parts = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["replicated", "split", "fsdp", "grid", "flat", "each", "mixed"]))
    dims = {n: draw(st.sampled_from([None, *range(len(s.shape))])) for n, s in specs.items()}
    rule = draw(st.sampled_from(["chunk", "balanced"]))
    if kind == "replicated":
        return replicated(specs, parts)
    if kind == "split":
        return split(specs, dims, parts, rule)
    if kind == "fsdp":
        return fsdp(specs, parts)
    if kind == "grid":
        stages = {n: draw(st.sampled_from([0, 1, (0, 1)])) for n in specs}
        return grid(specs, dims, min(parts, 2), stages, 2, rule)
    if kind == "mixed":  # replicas that are split in different ways: boxes that overlap in part
        a, b = split(specs, dims, parts, rule), fsdp(specs, draw(st.integers(1, 3)))
        return Layout(a.parameters, a.ranks + b.ranks)
    return flat(specs, parts, each=kind == "each", rule=rule)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_to_any_other_moves_every_element_once(data: st.DataObject) -> None:
    specs = {name: Spec(shape) for name, shape in data.draw(SHAPES).items()}
    source, target = data.draw(layouts(specs)), data.draw(layouts(specs))
    bucket = data.draw(st.sampled_from([ALIGN, 100, 256, 1 << 20]))
    made = plan(source, target, bucket)
    carried_out(made, source, target, number(source))
    again = plan(Layout.from_data(source.data), Layout.from_data(target.data), bucket)
    assert again == made and again.fingerprint == made.fingerprint


def test_replicated_sources_share_the_work() -> None:
    specs = {f"p{i}": Spec((100 + i, 8)) for i in range(40)}
    made = plan(replicated(specs, 4), fsdp(specs, 3), 1 << 14)
    sent = made.sent_bytes()
    assert sum(sent) >= sum(spec.nbytes for spec in specs.values())
    assert max(sent) < 1.1 * min(sent)


def test_what_targets_need_alike_is_sent_once_for_all() -> None:
    specs = {"a": Spec((64, 8)), "b": Spec((64, 8))}
    made = plan(fsdp(specs, 2), replicated(specs, 3), 1 << 20)
    assert [[bucket.targets for bucket in mine] for mine in made.buckets] == [[(0, 1, 2)], [(0, 1, 2)]]
    assert [mine[0].nbytes for mine in made.buckets] == [2 * 32 * 8 * 4] * 2


def test_tied_parameters_move_once_and_to_both_places_where_the_target_has_two() -> None:
    specs, both = {"embed": Spec((6, 4))}, {"embed": Spec((6, 4)), "head": Spec((6, 4))}
    tied = {"head": "embed"}
    source, same, apart = fsdp(specs, 2, tied), replicated(specs, 1, tied), replicated(both, 1)
    values = number(source)
    made = plan(source, same, 1 << 10)
    assert sum(b.nbytes for mine in made.buckets for b in mine) == 6 * 4 * 4
    carried_out(made, source, same, values)
    carried_out(plan(source, apart, 1 << 10), source, apart, values)
    # The group may go by its other name at the target.
    other = replicated({"head": Spec((6, 4))}, 1, {"embed": "head"})
    moves = [m for mine in plan(replicated(specs, 1), other).buckets for b in mine for m in b.moves]
    assert [(m.parameter, m.place) for m in moves] == [("head", "embed")]


def test_a_fused_target_gets_its_rows() -> None:
    specs = {name: Spec((5, 3)) for name in "qkv"}
    target = fused(split(specs, dict.fromkeys(specs, 0), 2, "balanced"), {"qkv": ["q", "k", "v"]})
    source = flat(specs, 3)
    carried_out(plan(source, target, 128), source, target, number(source))


def test_columns_packed_as_rows_in_a_larger_place() -> None:
    """A part whose strides are not those of a dense tensor: columns 2:5 of a place."""
    part = Part("w", ((0, 4), (0, 3)), "wide", 2, (8, 1))
    target = Layout({"w": Spec((4, 3))}, (RankLayout({"wide": Spec((4, 8))}, (part,)),))
    source = fsdp({"w": Spec((4, 3))}, 2)
    carried_out(plan(source, target, 64), source, target, number(source))


def test_a_parameter_that_lies_transposed() -> None:
    part = Part("w", ((0, 4), (0, 3)), "turned", 0, (1, 4))
    target = Layout({"w": Spec((4, 3))}, (RankLayout({"turned": Spec((3, 4))}, (part,)),))
    source = fsdp({"w": Spec((4, 3))}, 2)
    carried_out(plan(source, target, 64), source, target, number(source))
    carried_out(plan(target, source, 64), target, source, number(target))


@pytest.mark.parametrize(
    ("source", "target", "wire"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float64", "float32", "float32"),
        ("float16", "bfloat16", "bfloat16"),
        ("int64", "int64", "int64"),
    ],
)
def test_the_smaller_format_travels(source: str, target: str, wire: str) -> None:
    assert wire_dtype("w", source, target) == wire
    made = plan(fsdp({"w": Spec((4, 4), source)}, 2), fsdp({"w": Spec((4, 4), target)}, 2))
    assert {m.wire for mine in made.buckets for b in mine for m in b.moves} == {wire}


W = {"w": Spec((4, 4))}
INT, LONG = {"w": Spec((4, 4), "int32")}, {"w": Spec((4, 4), "int64")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan(fsdp(INT, 2), fsdp(LONG, 2)), "'w' is int32 at the source and int64 at the target"),
        (lambda: plan(fsdp(W, 2), fsdp(INT, 2)), "'w' is float32 at the source and int32"),
        (lambda: plan(fsdp(W, 2), fsdp({"w": Spec((4, 5))}, 2)), r"'w' has shape \(4, 4\) at the source and \(4, 5\)"),
        (lambda: plan(fsdp(W, 2), fsdp({**W, "v": Spec(())}, 2)), "the source has no parameter 'v'"),
        (lambda: plan(fsdp({**W, "v": Spec(())}, 2), fsdp(W, 2)), "the target has no parameter 'v'"),
        (lambda: plan(fsdp(W, 2), fsdp(W, 2), without=["w"]), "'w' is to be left out, but the target has it"),
        (lambda: plan(fsdp(W, 2), fsdp(W, 2), 8), "buckets of 8 bytes"),
        (
            lambda: plan(fsdp({**W, "head": Spec((4, 4))}, 1), replicated(W, 1, {"head": "w"})),
            "'head' is tied to 'w' at the target, but not at the source",
        ),
    ],
)
def test_sides_that_do_not_fit_are_named(make: Callable[[], TransferPlan], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        make()


def test_any_name_is_a_name() -> None:
    unnamed = {"": Spec((4,))}
    assert plan(replicated(unnamed, 1), replicated(unnamed, 1)).buckets


def test_a_parameter_may_be_left_out_by_name() -> None:
    source, target = fsdp({**W, "value_head": Spec((1, 4))}, 2), fsdp(W, 3)
    carried_out(plan(source, target, without=["value_head"]), source, target, number(source))
