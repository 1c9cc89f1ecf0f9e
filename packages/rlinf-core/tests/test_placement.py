"""Placement texts: what each form means, and every fault by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.errors import PlacementError
from rlinf_core.placement import (
    ClusterInfo,
    DeviceInfo,
    NodeInfo,
    Placement,
    check_syntax,
    format_placement,
    parse_placement,
)

EIGHT = ClusterInfo(
    tuple(DeviceInfo(i, "n0" if i < 4 else "n1", i % 4, f"GPU-{i}", "H200") for i in range(8)),
    (NodeInfo("n0", ("gpu_a", "fast")), NodeInfo("n1", ("gpu_b",))),
)


@pytest.mark.parametrize(
    ("text", "processes"),
    [
        ("0-3", ((0,), (1,), (2,), (3,))),
        ("2", ((2,),)),
        ("0,2", ((0,), (2,))),
        ("5,1-2", ((5,), (1,), (2,))),
        ("0-3:0-1", ((0, 1), (2, 3))),
        ("0-1:0-3", ((0,), (0,), (1,), (1,))),
        ("0-3:0", ((0, 1, 2, 3),)),
        ("4-7:1, 0-3:0", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("0-1:0,2,3", ((0, 1), (2,), (3,))),
        ("all", tuple((i,) for i in range(8))),
        ("all:0-1", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("gpu_b:0-1", ((4,), (5,))),
        ("gpu_b:all", ((4,), (5,), (6,), (7,))),
        ("gpu_b:2-3:0,n0:0:1", ((6, 7), (0,))),
    ],
)
def test_forms(text: str, processes: tuple[tuple[int, ...], ...]) -> None:
    placement = parse_placement(text, EIGHT)
    assert placement == Placement(processes)
    assert placement.devices == {device for process in processes for device in process}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty; give device ids such as 0-3, or all"),
        ("  ", "is empty"),
        ("0-8", "names device 8, but there are 8 (ids 0-7); more CPU slots: cluster.virtual_devices"),
        ("0,0", "names device 0 twice, in '0' and '0'"),
        ("0-3,2", "names device 2 twice, in '0-3' and '2'"),
        ("3-1", "the range 3-1 runs backwards; did you mean 1-3?"),
        ("a", "'a' is not devices: give a number (2), a range (0-3) or all"),
        ("0-", "'0-' is not devices"),
        ("-1", "'-1' is not devices"),
        ("0,,1", "'' is not devices"),
        ("0:x", "'x' is not processes: give a number (2), a range (0-3)"),
        ("0-1:0:1", "is not devices, devices:processes or label:devices:processes"),
        ("0-2:0-1", "3 devices and 2 processes do not divide evenly"),
        ("0:0,1:0", "names process 0 twice (again in '1:0')"),
        ("0:0,1:2", "leaves a gap: processes 0, 2 are named but not 1"),
        ("0:1", "leaves a gap: processes 1 are named but not 0"),
        ("2-5:0", "process 0 devices 2, 3, 4, 5, which are on nodes n0 and n1"),
        ("gpu_c:0", "node label 'gpu_c', which no node with devices has (did you mean"),
        ("gpu_a:4", "names device 4 of the nodes labelled 'gpu_a', but there are 4 (ids 0-3)"),
        ("0-9999999", "is too long"),
        ("0:0-99999", "has '0:0-99999', which puts 100000 processes on each device; at most 64 may share one"),
        ("0-1:0-129", "puts 65 processes on each device"),
        ("0:999999", "are named but not 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …;"),
        ("9" * 5000, "is not devices"),
    ],
)
def test_faults(text: str, fault: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse_placement(text, EIGHT, where="placement.actor")
    assert str(caught.value).startswith(f"placement.actor: {text!r} ")
    assert fault in str(caught.value)


@pytest.mark.parametrize("text", ["", "a", "0,,1", "0:x", "0-1:0:1", "3-1", "0-2:0-1", "gpu_a:0:0-99", "0:0-99999"])
def test_the_grammar_is_checked_without_a_cluster(text: str) -> None:
    with pytest.raises(PlacementError) as caught:
        check_syntax(text, where="placement.actor")
    with pytest.raises(PlacementError) as known:
        parse_placement(text, EIGHT, where="placement.actor")
    assert str(caught.value) == str(known.value)


@pytest.mark.parametrize("text", ["0-99", "all", "all:0-3", "gpu_z:0-3:0-1", "0-3,5:4-67", "7"])
def test_what_only_a_cluster_can_refuse_passes_the_grammar(text: str) -> None:
    check_syntax(text)


def test_labels_are_listed_in_a_miss() -> None:
    with pytest.raises(PlacementError, match="labels here: n0, gpu_a, fast, n1, gpu_b"):
        parse_placement("tpu:0", EIGHT)


def test_no_devices_at_all() -> None:
    none = ClusterInfo.virtual(0)
    with pytest.raises(PlacementError, match="set cluster.virtual_devices"):
        parse_placement("all", none)
    with pytest.raises(PlacementError, match=r"names device 0, but there are 0 \(ids none\)"):
        parse_placement("0", none)


def test_virtual_devices() -> None:
    cluster = ClusterInfo.virtual(2)
    assert [device.local_id for device in cluster.devices] == [0, 1]
    assert {device.kind for device in cluster.devices} == {"cpu"}
    assert parse_placement("all", cluster) == Placement(((0,), (1,)))
    with pytest.raises(PlacementError, match=r"\(ids 0-1\)"):
        parse_placement("2", cluster)
    with pytest.raises(PlacementError, match=r"there are 1 \(ids 0\)"):
        parse_placement("2", ClusterInfo.virtual(1))


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        (((0,), (1,), (2,)), "0-2"),
        (((2,),), "2"),
        (((0, 1), (2, 3)), "0-3:0-1"),
        (((0,), (0,), (1,), (1,)), "0-1:0-3"),
        (((0,), (2,)), "0,2"),
        (((0, 1), (5,)), "0-1:0,5"),
    ],
)
def test_text_of_processes(processes: tuple[tuple[int, ...], ...], text: str) -> None:
    assert format_placement(processes) == text
    assert parse_placement(text, ClusterInfo.virtual(8)) == Placement(processes)


@pytest.mark.parametrize("processes", [((0, 2),), ((0, 1), (1, 2)), ((),), ((0,), (1,), (0,))])
def test_without_a_text(processes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(PlacementError, match="no text form"):
        format_placement(processes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4))
def test_round_trip(blocks: list[tuple[int, int, int]]) -> None:
    """Blocks of (devices, factor, gap): either several devices per process, or several processes per device."""
    processes: list[tuple[int, ...]] = []
    device = 0
    for devices, factor, gap in blocks:
        device += gap
        if gap % 2:
            processes += [tuple(range(device, device + devices))] * 1
        else:
            processes += [(d,) for d in range(device, device + devices) for _ in range(factor)]
        device += devices
    text = format_placement(processes)
    assert parse_placement(text, ClusterInfo.virtual(device)) == Placement(tuple(processes))
