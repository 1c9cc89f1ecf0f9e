"""Which transport a message takes: one row for each kind of pair, and what must hold for every pair."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_comm.errors import NoRoute
from rlinf_comm.selection import SEVERAL, Choice, Summary, Thresholds, candidates, select
from rlinf_comm.transports.base import Place

ALL = frozenset({"inproc", "shm", "tcp", "gloo", "nccl", "cuda_ipc"})
TABLE = Thresholds(shm_from=1000, gloo_from=None)
SMALL, LARGE = 999, 1000


def place(node: str = "n0", pid: int = 1, lacks: str = "", devices: tuple[str, ...] = ()) -> Place:
    return Place(node, pid, ALL - set(lacks.split()), devices)


HERE = place()
SAME_NODE = place(pid=2)
OTHER_NODE = place("n1", 1)


def host(nbytes: int) -> Summary:
    return Summary(host_bytes=nbytes)


def gpu(source: str, target: str, nbytes: int = LARGE) -> Summary:
    return Summary(device_bytes=nbytes, source_device=source, target_device=target)


@pytest.mark.parametrize(
    ("source", "target", "summary", "name", "staged", "why"),
    [
        # one process
        (HERE, HERE, host(0), "inproc", False, "one process"),
        (HERE, HERE, gpu("A", "B"), "inproc", False, "one process"),
        (place(lacks="inproc"), HERE, host(LARGE), "shm", False, "shared memory"),
        # one node, host memory
        (HERE, SAME_NODE, host(0), "tcp", False, "fewer than 1000 bytes"),
        (HERE, SAME_NODE, host(SMALL), "tcp", False, "fewer than 1000 bytes"),
        (HERE, SAME_NODE, host(LARGE), "shm", False, "1000 bytes or more"),
        (HERE, place(pid=2, lacks="tcp"), host(SMALL), "shm", False, "shared memory"),
        (place(lacks="shm"), SAME_NODE, host(LARGE), "tcp", False, "the stream"),
        (place(lacks="shm"), place(pid=2, lacks="tcp"), host(LARGE), "gloo", False, "within one node"),
        # two nodes, host memory (equal process numbers mean nothing there)
        (HERE, OTHER_NODE, host(SMALL), "tcp", False, "the stream"),
        (HERE, OTHER_NODE, host(1 << 30), "tcp", False, "the stream"),
        (HERE, place("n1", 1, "tcp"), host(SMALL), "gloo", False, "between nodes"),
        # the device that both use
        (HERE, SAME_NODE, gpu("A", "A"), "cuda_ipc", False, "both use"),
        (place(lacks="cuda_ipc"), SAME_NODE, gpu("A", "A"), "shm", True, "copied to host memory first"),
        (place(lacks="cuda_ipc"), SAME_NODE, gpu("A", "A", SMALL), "tcp", True, "copied to host memory first"),
        # two devices of one node
        (HERE, SAME_NODE, gpu("A", "B"), "nccl", False, "in one node"),
        (HERE, place(pid=2, lacks="nccl", devices=("A", "B")), gpu("A", "B"), "cuda_ipc", False, "sees"),
        (HERE, place(pid=2, lacks="nccl", devices=("B",)), gpu("A", "B"), "shm", True, "copied"),
        # devices of two nodes
        (HERE, OTHER_NODE, gpu("A", "B"), "nccl", False, "between nodes"),
        (place(lacks="nccl"), OTHER_NODE, gpu("A", "B"), "tcp", True, "copied"),
        (HERE, place("n1", 2, "nccl", devices=("A",)), gpu("A", "B"), "tcp", True, "copied"),
        (HERE, SAME_NODE, gpu("A", "B", 0), "nccl", False, "in one node"),
        # device to host, host to device
        (HERE, SAME_NODE, gpu("A", ""), "shm", True, "copied"),
        (HERE, OTHER_NODE, gpu("A", ""), "tcp", True, "copied"),
        (HERE, SAME_NODE, Summary(LARGE, target_device="A"), "shm", False, "shared memory"),
        (HERE, OTHER_NODE, Summary(LARGE, target_device="A"), "tcp", False, "the stream"),
        # buffers of one message on several devices
        (HERE, SAME_NODE, gpu(SEVERAL, "A"), "shm", True, "copied"),
    ],
)
def test_each_kind_of_pair(source: Place, target: Place, summary: Summary, name: str, staged: bool, why: str) -> None:
    choice = select(source, target, summary, TABLE)
    assert (choice.name, choice.staged) == (name, staged)
    assert why in choice.why


def test_gloo_between_nodes_from_a_measured_size() -> None:
    table = Thresholds(gloo_from=5000)
    assert select(HERE, OTHER_NODE, host(4999), table).name == "tcp"
    assert select(HERE, OTHER_NODE, host(5000), table).name == "gloo"
    assert select(HERE, place("n1", 1, "gloo"), host(5000), table).name == "tcp"


def test_the_next_best_is_taken_when_one_has_no_room() -> None:
    assert select(HERE, SAME_NODE, host(LARGE), TABLE, frozenset({"shm"})).name == "tcp"
    assert select(HERE, SAME_NODE, host(LARGE), TABLE, frozenset({"shm", "tcp"})).name == "gloo"


def test_no_way_names_both_ends_and_what_each_lacks() -> None:
    source, target = place("node-one", 11, "tcp gloo"), place("node-two", 22, "tcp")
    with pytest.raises(NoRoute) as caught:
        select(source, target, host(7), TABLE)
    text = str(caught.value)
    assert "7 bytes from process 11 on node node-one to process 22 on node node-two" in text
    assert "tcp is missing at process 11 on node node-one and process 22 on node node-two" in text
    assert "gloo is missing at process 11 on node node-one" in text and text.count("node-two") == 2
    with pytest.raises(NoRoute, match="shm has no room for it"):
        select(HERE, place(pid=2, lacks="tcp gloo"), host(LARGE), TABLE, frozenset({"shm"}))


@pytest.mark.parametrize(
    "facts",
    [
        {"host_bytes": -1},
        {"device_bytes": -1, "source_device": "A"},
        {"device_bytes": 5},
    ],
)
def test_impossible_summaries_are_refused(facts: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Summary(**facts)  # type: ignore[arg-type]


def test_negative_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="gloo_from"):
        Thresholds(gloo_from=-1)


DEVICES = st.sampled_from(["", "A", "B", SEVERAL])
PLACES = st.builds(
    Place,
    st.sampled_from(["n0", "n1"]),
    st.integers(1, 2),
    st.frozensets(st.sampled_from(sorted(ALL))),
    st.lists(st.sampled_from(["A", "B"]), unique=True).map(tuple),
)
BYTES = st.integers(0, 1 << 40)
SUMMARIES = st.builds(
    lambda host, size, source, target: Summary(host, size if source else 0, source, target),
    BYTES,
    BYTES,
    DEVICES,
    st.sampled_from(["", "A", "B"]),
)
TABLES = st.builds(Thresholds, BYTES, st.none() | BYTES)


def chosen(source: Place, target: Place, summary: Summary, table: Thresholds) -> Choice | None:
    try:
        return select(source, target, summary, table)
    except NoRoute:
        return None


@given(PLACES, PLACES, SUMMARIES, TABLES)
def test_a_choice_is_what_both_ends_have_and_the_topology_allows(
    source: Place, target: Place, summary: Summary, table: Thresholds
) -> None:
    choice = chosen(source, target, summary, table)
    common = source.capabilities & target.capabilities
    if choice is None:
        offered = {c.name for c in candidates(source, target, summary, table)}
        assert not offered & common
        assert "tcp" not in common  # the stream is always there, and can move everything
        return
    assert choice.name in common
    one_node, one_process = source.node == target.node, (source.node, source.pid) == (target.node, target.pid)
    needs = {
        "inproc": one_process,
        "shm": one_node,
        "cuda_ipc": one_node and bool(summary.source_device and summary.target_device),
        "nccl": bool(summary.source_device and summary.target_device)
        and not (one_node and summary.source_device == summary.target_device),
    }
    assert needs.get(choice.name, True)
    by_device = choice.name in ("nccl", "cuda_ipc", "inproc")
    assert choice.staged == (bool(summary.source_device) and not by_device)


@given(PLACES, PLACES, SUMMARIES, TABLES, st.lists(BYTES, min_size=2, max_size=12))
def test_a_larger_message_never_goes_back_to_an_earlier_way(
    source: Place, target: Place, summary: Summary, table: Thresholds, sizes: list[int]
) -> None:
    names = []
    for size in sorted(sizes):
        sized = (
            Summary(0, size + 1, summary.source_device, summary.target_device)
            if summary.source_device
            else Summary(size, target_device=summary.target_device)
        )
        choice = chosen(source, target, sized, table)
        names.append(choice and choice.name)
    changes = [after for before, after in pairwise(names) if after != before]
    assert len(changes) <= 1


@given(PLACES, PLACES, SUMMARIES, TABLES)
def test_what_an_end_gains_never_takes_a_way_from_it(
    source: Place, target: Place, summary: Summary, table: Thresholds
) -> None:
    richer = Place(source.node, source.pid, ALL, source.devices)
    if chosen(source, target, summary, table) is not None:
        assert chosen(richer, target, summary, table) is not None
