"""Versions between ranks in threads: values, memory, and every way in which one can be refused or interrupted."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from weights_peers import Queues, parameter, tensors_of, until

from rlinf_comm.arena import Arena
from rlinf_comm.slots import HOLDERS, unavailable
from rlinf_comm.weights import (
    ChannelMover,
    ChecksumError,
    ControlMover,
    LayoutError,
    MismatchError,
    Receiver,
    Sender,
    StaleVersion,
    TransferInterrupted,
    WeightsError,
    flat,
    fsdp,
    fused,
    grid,
    replicated,
    split,
)
from rlinf_comm.weights.checksum import checksum
from rlinf_comm.weights.copying import copy_all
from rlinf_comm.weights.differences import first_difference
from rlinf_comm.weights.layout import Layout, Part, RankLayout, Spec
from rlinf_core.errors import ChannelPoisoned

SPECS = {
    "embed": Spec((17, 8)),
    "q": Spec((8, 8)),
    "k": Spec((4, 8)),
    "v": Spec((4, 8)),
    "norm": Spec((8,)),
    "scale": Spec(()),
    "nothing": Spec((0, 8)),
    "steps": Spec((3,), "int64"),
}
TIED = {"head": "embed"}
PART = Part("x", ((0, 2),), "x", 0, (1,))
needs_memory = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there is shared memory")


def as_type(dtype: str) -> dict[str, Spec]:
    return {n: Spec(s.shape, dtype if s.dtype == "float32" else s.dtype) for n, s in SPECS.items()}


class Run:
    """Sources and targets that talk through queues, in shared memory where there is an arena."""

    def __init__(self, source: Layout, target: Layout, arena: Arena | None = None, into: bool = False, **options: Any):
        self.queues = Queues()
        self.source, self.target = source, target
        self.ends = [self.queues.end(rank) for rank in range(len(source.ranks))]
        views = options.pop("views", False)
        self.senders = [
            Sender(rank, source, target, ControlMover(end, arena), **options) for rank, end in enumerate(self.ends)
        ]
        self.installed: list[list[tuple[int, dict[str, torch.Tensor]]]] = [[] for _ in target.ranks]
        self.own = [tensors_of(target, rank, 0) for rank in range(len(target.ranks))]
        self.receivers = []
        for rank in range(len(target.ranks)):
            mover = ControlMover(self.queues.end(rank))
            if into:
                self.receivers.append(Receiver(rank, target, mover, into=self.own[rank]))
            else:
                keep = self.keeper(rank)
                self.receivers.append(Receiver(rank, target, mover, install=keep, views=views))

    def keeper(self, rank: int) -> Callable[[int, list[tuple[str, torch.Tensor]]], None]:
        return lambda version, tensors: self.installed[rank].append((version, dict(tensors)))

    def send(self, version: int) -> None:
        for rank, sender in enumerate(self.senders):
            sender.send(version, tensors_of(self.source, rank, version))

    def receive(self, timeout: float = 5.0) -> list[int]:
        return [receiver.receive(timeout) for receiver in self.receivers]


def check(layout: Layout, rank: int, found: dict[str, torch.Tensor], version: int, source: Layout) -> None:
    """Equal, bit for bit, to the source's values converted once by torch."""
    for part in layout.ranks[rank].parts:
        sizes = [high - low for low, high in part.box]
        name = source.owner(part.parameter)
        wanted = parameter(source, name, version)[tuple(slice(*r) for r in part.box)]
        dtype = getattr(torch, layout.parameters[part.parameter].dtype)
        got = found[part.place].as_strided(sizes, part.strides, found[part.place].storage_offset() + part.offset)
        assert got.dtype == dtype and torch.equal(got, wanted.to(dtype)), (rank, part.parameter)
    assert found.keys() == layout.ranks[rank].places.keys()


SOURCES = {
    "fsdp": lambda s: fsdp(s, 2, TIED),
    "flat": lambda s: flat(s, 3, aliases=TIED),
    "replicated": lambda s: replicated(s, 2, TIED),
}
TARGETS = {
    "whole": lambda s: replicated(s, 2, TIED),
    "columns": lambda s: split(s, {"embed": 1, "q": 1, "k": 0}, 3, "balanced", TIED),
    "fused": lambda s: fused(split(s, {"q": 0, "k": 0, "v": 0}, 2, "chunk", TIED), {"qkv": ["q", "k", "v"]}),
}


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("memory", [pytest.param(True, marks=needs_memory), False], ids=["shared", "sent"])
@pytest.mark.parametrize("into", [True, False], ids=["into", "install"])
def test_values_arrive_bit_equal_in_increasing_versions(source: str, target: str, memory: bool, into: bool) -> None:
    arena = Arena(16 << 20) if memory else None
    run = Run(SOURCES[source](SPECS), TARGETS[target](SPECS), arena, into, bucket_bytes=256, checksum="crc32")
    for version in (1, 2, 5):
        run.send(version)
        assert run.receive() == [version] * len(run.receivers)
        for rank in range(len(run.receivers)):
            found = run.own[rank] if into else run.installed[rank][-1][1]
            check(run.target, rank, found, version, run.source)
    if not into:
        assert [[v for v, _ in seen] for seen in run.installed] == [[1, 2, 5]] * len(run.receivers)


@pytest.mark.parametrize(("there", "here"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")])
@pytest.mark.parametrize("into", [True, False], ids=["into", "install"])
def test_dtypes_are_converted_once_and_integers_never(there: str, here: str, into: bool) -> None:
    run = Run(fsdp(as_type(there), 2), split(as_type(here), {"q": 1}, 2), None, into, bucket_bytes=300)
    run.send(1)
    run.receive()
    for rank in range(2):
        check(run.target, rank, run.own[rank] if into else run.installed[rank][-1][1], 1, run.source)


@needs_memory
def test_one_slot_serves_all_targets_and_what_comes_whole_is_not_copied() -> None:
    arena = Arena(16 << 20)
    run = Run(replicated(SPECS, 1), replicated(SPECS, 3), arena)
    run.send(1)
    assert arena.stats().puts == 1
    run.receive()
    pointers = {tensors["embed"].data_ptr() for ((_, tensors),) in run.installed}
    run.installed[0][0][1]["embed"][3, 3] = 42.0  # against the contract: the others would see it
    assert all(tensors["embed"][3, 3] == 42.0 for ((_, tensors),) in run.installed)
    assert len(pointers) == 1


@needs_memory
def test_memory_is_used_again_and_views_hold_theirs() -> None:
    arena = Arena(16 << 20)
    run = Run(replicated(SPECS, 1), replicated(SPECS, 2), arena, views=True)
    reserved = []
    for version in range(1, 9):
        run.send(version)
        run.receive()
        # The engine points at this version; the one before is not looked at any more.
        for rank, seen in enumerate(run.installed):
            check(run.target, rank, seen[-1][1], version, run.source)
            del seen[:-1]
        gc.collect()
        reserved.append(arena.stats().bytes_reserved)
    assert reserved[-1] == reserved[2]
    assert arena.stats().lingering == 1
    for seen in run.installed:
        seen.clear()
    run.receivers.clear()
    gc.collect()
    assert arena.stats().lingering == 0


@needs_memory
def test_a_target_that_cannot_be_reached_but_lives_keeps_what_it_looks_at() -> None:
    arena = Arena(16 << 20)
    run = Run(replicated(SPECS, 1), replicated(SPECS, 2), arena, views=True)
    run.send(1)
    run.receive()
    end = run.ends[0]
    send = end.send

    def stuck(obj: Any, target: int, timeout: float) -> None:
        if target == 1 and obj[0]["kind"] == "bucket":
            raise TimeoutError("it does not read")
        send(obj, target, timeout)

    end.send = stuck  # type: ignore[method-assign]
    for version in (2, 3, 4):
        with pytest.raises(
            TransferInterrupted, match=f"version {version}: target rank 1 did not get it: it does not read"
        ):
            run.send(version)
        assert run.receivers[0].receive(5.0) == version
        del run.installed[0][:-1]
    check(run.target, 1, run.installed[1][0][1], 1, run.source)
    gc.collect()
    assert arena.stats().lingering == 2  # version 1 at one of them, version 4 at the other
    end.send = send  # type: ignore[method-assign]
    run.send(5)
    assert run.receivers[0].receive(5.0) == 5
    with pytest.raises(TransferInterrupted, match="it began version 3"):
        run.receivers[1].receive(5.0)


@needs_memory
def test_more_targets_than_a_slot_has_places_for_all_get_the_version() -> None:
    specs = {"w": Spec((4, 4))}
    run = Run(replicated(specs, 1), replicated(specs, HOLDERS + 2), Arena(1 << 20))
    run.send(1)
    assert set(run.receive()) == {1}
    for rank in (0, HOLDERS - 1, HOLDERS, HOLDERS + 1):
        check(run.target, rank, run.installed[rank][0][1], 1, run.source)
    pointers = {seen[0][1]["w"].data_ptr() for seen in run.installed}
    assert len(pointers) == 3


@needs_memory
def test_without_room_in_the_arena_bytes_go_in_the_message() -> None:
    arena = Arena(0)
    run = Run(replicated(SPECS, 1), replicated(SPECS, 2), arena)
    run.send(1)
    assert arena.stats().refused == 1
    run.receive()
    check(run.target, 1, run.installed[1][0][1], 1, run.source)


def test_a_target_hears_of_a_version_also_when_nothing_comes_from_the_first_source() -> None:
    stages = {"q": 0, "k": 1, "v": 1}
    specs = {name: SPECS[name] for name in stages}
    run = Run(grid(specs, {}, 1, stages, 2), grid(specs, {}, 1, {"q": (0,), "k": 1, "v": 0}, 2))
    assert [sorted(run.senders[0].plan.for_target(rank)) for rank in range(2)] == [[0, 1], [1]]
    run.send(1)
    assert run.receive() == [1, 1]
    for rank in range(2):
        check(run.target, rank, run.installed[rank][0][1], 1, run.source)


@pytest.mark.parametrize("into", [True, False], ids=["into", "install"])
def test_a_parameter_that_lies_transposed_is_turned(into: bool) -> None:
    part = Part("w", ((0, 4), (0, 3)), "turned", 0, (1, 4))
    turned = Layout({"w": Spec((4, 3))}, (RankLayout({"turned": Spec((3, 4))}, (part,)),))
    plain = replicated({"w": Spec((4, 3))}, 1)
    for source, target in ((plain, turned), (turned, plain)):
        run = Run(source, target, None, into)
        run.send(1)
        run.receive()
        found = run.own[0] if into else run.installed[0][0][1]
        check(target, 0, found, 1, source)


def test_assembled_places_use_their_memory_again() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    seen = []
    for version in (1, 2):
        run.send(version)
        run.receive()
        seen.append(run.installed[0][-1][1]["embed"].data_ptr())
    assert seen[0] == seen[1]
    views = Run(fsdp(SPECS, 2), replicated(SPECS, 1), views=True)
    for version in (1, 2, 3):
        views.send(version)
        views.receive()
        seen.append(views.installed[0][-1][1]["embed"].data_ptr())
    assert seen[2] != seen[3] and seen[2] == seen[4]
    check(views.target, 0, views.installed[0][1][1], 2, views.source)  # while version 3 came, 2 was whole


def test_a_bucket_that_changed_on_the_way_is_found_and_the_next_version_works() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1), bucket_bytes=256, checksum="crc32")
    run.send(1)
    run.receive()
    count = 0

    def flip(obj: Any) -> Any:
        nonlocal count
        header, body = obj
        if header["kind"] == "bucket":
            count += 1
            if count == 2:
                body = body.clone()
                body[5] ^= 1
        return header, body

    run.ends[1].tamper = flip
    run.send(2)
    with pytest.raises(
        ChecksumError, match=r"rank 0: version 2 was interrupted after 1 of \d buckets of rank 1: the crc32"
    ):
        run.receive()
    assert run.receivers[0].version == 1 and [v for v, _ in run.installed[0]] == [1]
    run.ends[1].tamper = None
    run.send(3)
    assert run.receive() == [3]
    check(run.target, 0, run.installed[0][-1][1], 3, run.source)


def test_a_source_that_stops_in_between_is_named() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1), bucket_bytes=256)
    run.send(1)
    run.receive()
    count = 0

    def fail(obj: Any) -> Any:
        nonlocal count
        count += obj[0]["kind"] == "bucket"
        if count == 3 and obj[0]["kind"] == "bucket":
            raise RuntimeError("out of luck")
        return obj

    run.ends[0].tamper = fail
    with pytest.raises(TransferInterrupted, match=r"version 2: rank 0 stopped after 2 of \d buckets: out of luck"):
        run.senders[0].send(2, tensors_of(run.source, 0, 2))
    run.senders[1].send(2, tensors_of(run.source, 1, 2))
    with pytest.raises(
        TransferInterrupted, match=r"after 2 of \d buckets of rank 0: it stopped: RuntimeError: out of luck"
    ):
        run.receive()
    run.ends[0].tamper = None
    run.send(3)
    assert run.receive() == [3]
    check(run.target, 0, run.installed[0][-1][1], 3, run.source)


def test_a_source_that_begins_the_next_version_in_between_is_named_and_that_one_is_taken() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1), bucket_bytes=256)
    run.ends[1].tamper = None
    mover = run.senders[1]._mover
    send, sent = mover.send, []

    def some(header: Any, *rest: Any) -> Any:
        sent.append(header["kind"])
        return send(header, *rest) if sent.count("bucket") < 2 else {}

    mover.send = some  # type: ignore[method-assign]
    run.send(1)
    mover.send = send  # type: ignore[method-assign]
    run.send(2)
    with pytest.raises(
        TransferInterrupted, match=r"after 1 of \d buckets of rank 1: it began version 2; version -1 stays"
    ):
        run.receive()
    assert run.receive() == [2]
    check(run.target, 0, run.installed[0][-1][1], 2, run.source)


def test_sources_at_different_versions_are_named() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    run.senders[0].send(1, tensors_of(run.source, 0, 1))
    run.senders[1].send(2, tensors_of(run.source, 1, 2))
    with pytest.raises(TransferInterrupted, match="version 1 of source rank 0 came with version 2 of source rank 1"):
        run.receive()
    run.senders[0].send(2, tensors_of(run.source, 0, 2))
    assert run.receive() == [2]
    check(run.target, 0, run.installed[0][-1][1], 2, run.source)


def test_a_deadline_names_what_is_missing_and_a_late_version_is_passed_over() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1), bucket_bytes=256)
    with pytest.raises(TransferInterrupted, match="no new version: its manifest of source rank 0 did not come"):
        run.receive(0.05)
    run.senders[0].send(1, tensors_of(run.source, 0, 1))
    with pytest.raises(TransferInterrupted, match="its manifest of source rank 1 did not come: TimeoutError"):
        run.receive(0.05)
    run.senders[1].send(1, tensors_of(run.source, 1, 1))
    run.send(2)
    assert run.receive() == [2]
    check(run.target, 0, run.installed[0][-1][1], 2, run.source)


def test_old_versions_are_refused_at_both_ends() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    run.send(3)
    run.receive()
    with pytest.raises(StaleVersion, match="rank 0: version 3 comes after version 3 was sent"):
        run.send(3)
    again = [Sender(rank, run.source, run.target, ControlMover(end)) for rank, end in enumerate(run.ends)]
    for rank, sender in enumerate(again):  # a trainer that was started again from an old checkpoint
        sender.send(2, tensors_of(run.source, rank, 2))
    with pytest.raises(StaleVersion, match="rank 0: version 2 came, but 3 is in use"):
        run.receive()
    run.send(4)
    assert run.receive() == [4]
    check(run.target, 0, run.installed[0][-1][1], 4, run.source)


def test_sides_that_mean_different_transfers_are_named_before_anything_is_staged() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    run.senders = [Sender(r, run.source, split(SPECS, {"q": 1}, 2), ControlMover(e)) for r, e in enumerate(run.ends)]
    run.send(1)
    with pytest.raises(MismatchError) as caught:
        run.receive()
    assert str(caught.value) == (
        "rank 0: the sender was told another layout of the targets than this rank has: there are 2 ranks in "
        "target_layout() of the sender, 1 in weight_layout() here"
    )


def test_where_only_the_fingerprint_came_it_is_said_what_to_compare() -> None:
    run = Run(fsdp(SPECS, 1), replicated(SPECS, 1))
    for tampered in (b"no layout", None):
        run.ends[0].tamper = lambda obj, data=tampered: (
            {**{k: v for k, v in obj[0].items() if k != "target_data" or data}, "target_layout": "another"}
            | ({"target_data": data} if data else {}),
            obj[1],
        )
        run.send(1 if tampered else 2)
        with pytest.raises(MismatchError, match=r"compare target_layout\(\) of the sender with weight_layout\(\) here"):
            run.receive()


def test_the_members_that_do_not_agree_are_named() -> None:
    run = Run(fsdp(SPECS, 1), replicated(SPECS, 1))
    named, mine = ControlMover(run.ends[0]), ControlMover(run.queues.end(0))
    named.name, mine.name = "trainer[0]", "rollout[0]"
    other = {**SPECS, "q": Spec((8, 8), "bfloat16")}
    run.senders = [Sender(0, run.source, replicated(other, 1), named)]
    run.receivers[0].connect(mine)
    run.send(1)
    with pytest.raises(MismatchError) as caught:
        run.receive()
    assert str(caught.value) == (
        "rollout[0] (rank 0): the sender trainer[0] was told another layout of the targets than this rank has: "
        "parameter 'q' is bfloat16 of shape (8, 8) in target_layout() of the sender, float32 of shape (8, 8) in "
        "weight_layout() here"
    )
    with pytest.raises(MismatchError, match=r"^trainer\[0\]: the source has no parameter 'new'"):
        Sender(0, run.source, replicated({**SPECS, "new": Spec(())}, 1), named)


@pytest.mark.parametrize(
    ("told", "own", "what"),
    [
        (replicated(SPECS, 1), replicated(SPECS, 1), ""),
        (replicated({**SPECS, "new": Spec(())}, 1), replicated(SPECS, 1), "parameter 'new' is in A alone"),
        (replicated(SPECS, 1), replicated({**SPECS, "new": Spec(())}, 1), "parameter 'new' is in B alone"),
        (replicated(SPECS, 1, TIED), replicated(SPECS, 1), "'head' is tied to 'embed' in A, not tied in B"),
        (
            split(SPECS, {"q": 0}, 2),
            split(SPECS, {"q": 1}, 2),
            "of parameter 'q' rank 0 has [0:4, 0:8] in A, [0:8, 0:4] in B",
        ),
        (
            replicated(SPECS, 1),
            fused(replicated(SPECS, 1), {"qk": ["q", "k"]}),
            "of parameter 'q' rank 0 has [0:8, 0:8] in 'q' from element 0 on (steps (8, 1)) in A, "
            "[0:8, 0:8] in 'qk' from element 0 on (steps (8, 1)) in B",
        ),
        (
            Layout({"x": Spec((2,))}, (RankLayout({"x": Spec((2,)), "spare": Spec((1,))}, (PART,)),)),
            Layout({"x": Spec((2,))}, (RankLayout({"x": Spec((2,)), "spare": Spec((3,))}, (PART,)),)),
            "rank 0: place 'spare' is float32 of shape (1,) in A, float32 of shape (3,) in B",
        ),
        (
            replicated({"a": Spec(()), "b": Spec(())}, 1),
            replicated({"b": Spec(()), "a": Spec(())}, 1),
            "names and parts come in another order in A than in B",
        ),
    ],
)
def test_the_first_difference_of_two_layouts(told: Layout, own: Layout, what: str) -> None:
    assert first_difference(told, own, "A", "B") == what


def test_a_manifest_that_does_not_fit_the_plan_is_named() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    run.ends[1].tamper = lambda obj: ({**obj[0], "count": 7}, obj[1])
    run.send(1)
    with pytest.raises(MismatchError, match="source rank 1 says count 7 of version 1, here it is 1"):
        run.receive()


def test_tensors_are_checked_before_anything_moves() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    good = tensors_of(run.source, 1, 1)
    for change, message in (
        ({"q": good["q"].double()}, "rank 1: 'q' is float64, the layout says float32"),
        ({"q": good["q"][:2]}, r"rank 1: 'q' has shape \(2, 8\), the layout says \(4, 8\)"),
        ({"q": torch.zeros(8, 4).t()}, r"rank 1: 'q' is not contiguous \(strides \(1, 4\)\)"),
        ({"extra": good["q"]}, "rank 1: tensor 'extra' is not in the layout"),
    ):
        with pytest.raises(LayoutError, match=message):
            run.senders[1].send(1, {**good, **change})
    with pytest.raises(LayoutError, match="rank 1: tensor 'q' .* is not there"):
        run.senders[1].send(1, {n: t for n, t in good.items() if n != "q"})
    assert run.queues.pair(1, 0).empty()
    with pytest.raises(LayoutError, match="rank 0: 'q' is float64"):
        Receiver(0, run.target, ControlMover(run.queues.end(0)), into={**run.own[0], "q": run.own[0]["q"].double()})


def test_an_install_that_fails_does_not_count() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    failing = True

    def install(version: int, tensors: Any) -> None:
        if failing:
            raise RuntimeError("the engine is busy")

    receiver = Receiver(0, run.target, ControlMover(run.queues.end(0)), install=install)
    run.send(1)
    with pytest.raises(RuntimeError, match="busy"):
        receiver.receive(5.0)
    assert receiver.version == -1
    with pytest.raises(WeightsError, match="nothing to install"):
        receiver.commit()
    failing = False
    run.send(2)
    assert receiver.receive(5.0) == 2


def test_use_that_makes_no_sense_is_refused() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 1))
    mover = ControlMover(run.queues.end(0))
    with pytest.raises(ValueError, match="install="):
        Receiver(0, run.target, mover)
    with pytest.raises(ValueError, match="install="):
        Receiver(0, run.target, mover, into=run.own[0], views=True)
    with pytest.raises(MismatchError, match="checksum 'md5' is unknown"):
        Sender(0, run.source, run.target, mover, checksum="md5")


def test_a_slow_receiver_holds_nobody_up_and_gets_its_version() -> None:
    run = Run(fsdp(SPECS, 2), replicated(SPECS, 2))
    run.send(1)
    got: list[int] = []
    begin = threading.Event()
    slow = threading.Thread(target=lambda: (begin.wait(10), got.append(run.receivers[1].receive(5.0))))
    slow.start()
    assert run.receivers[0].receive(5.0) == 1
    assert got == []
    begin.set()
    slow.join(10)
    assert until(lambda: got == [1])
    check(run.target, 1, run.installed[1][0][1], 1, run.source)


@needs_memory
def test_an_interruption_gives_the_staged_memory_back_though_its_error_is_kept() -> None:
    arena = Arena(16 << 20)
    run = Run(fsdp(SPECS, 1), replicated(SPECS, 1), arena, bucket_bytes=256, checksum="crc32")
    count = len(run.senders[0].plan.buckets[0])

    def spoil(obj: Any) -> Any:
        header, body = obj
        last = header["kind"] == "bucket" and header["index"] == count - 1
        return ({**header, "checksum": header["checksum"] ^ 1}, body) if last else obj

    run.ends[0].tamper = spoil
    run.send(1)
    assert arena.stats().lingering == count
    with pytest.raises(ChecksumError, match=f"after {count - 1} of {count} buckets") as caught:
        run.receive()
    gc.collect()
    assert caught.value.__traceback__ is not None and arena.stats().bytes_in_use == 0
    run.ends[0].tamper = None
    run.send(2)
    assert run.receive() == [2]


@needs_memory
def test_buckets_that_nobody_took_are_given_back_with_the_next_version() -> None:
    arena = Arena(16 << 20)
    run = Run(fsdp(SPECS, 1), replicated(SPECS, 1), arena, into=True, bucket_bytes=256)
    run.ends[0].tamper = lambda obj: ({**obj[0], "count": 1}, obj[1]) if obj[0]["kind"] == "manifest" else obj
    run.send(1)
    with pytest.raises(MismatchError, match="says count 1"):
        run.receive()
    assert arena.stats().lingering > 1
    run.ends[0].tamper = None
    run.send(2)
    assert run.receive() == [2]
    gc.collect()
    assert arena.stats().bytes_in_use == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_are_exact_whatever_lies_where(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        big = torch.randint(0, 255, (20 << 20,), dtype=torch.uint8)  # several blocks, the last one shorter
        pairs = [
            (torch.zeros_like(big)[:-3], big[3:]),
            (torch.zeros(300, 200), torch.randn(200, 300).t()),
            (torch.zeros(300, 200, dtype=torch.bfloat16), torch.randn(300, 200)),
            (torch.zeros(200, 300)[:, 7:107], torch.randn(200, 100)),
            (torch.zeros(5), torch.randn(5)),
            (torch.zeros(0), torch.zeros(0)),
            (torch.zeros(()), torch.tensor(3.0)),
        ]
        copy_all(pairs)
        assert all(torch.equal(target, source.to(target.dtype)) for target, source in pairs)
    finally:
        torch.set_num_threads(before)


def test_a_checksum_does_not_mind_the_stride_of_a_single_element() -> None:
    piece = torch.arange(6.0).reshape(3, 2)[:1, 1:].t()
    assert piece.stride() != (1, 1)
    assert checksum("crc32", [piece]) == checksum("crc32", [torch.tensor([1.0])])


@pytest.mark.parametrize("kind", ["crc32", "xxh3"])
def test_checksums_depend_on_every_byte_and_its_place(kind: str) -> None:
    if kind == "xxh3":
        pytest.importorskip("xxhash")
    pieces = [torch.arange(6.0).view(2, 3), torch.tensor([1, 2]), torch.zeros(0), torch.ones(2, dtype=torch.bfloat16)]
    value = checksum(kind, pieces)
    assert value == checksum(kind, [piece.clone() for piece in pieces])
    changed = [
        [*pieces[:3], pieces[3] * 2],
        [pieces[1], pieces[0], *pieces[2:]],
        pieces[:3],
        [pieces[0].t(), *pieces[1:]],
    ]
    assert all(checksum(kind, other) != value for other in changed)


def test_a_checksum_whose_package_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MismatchError, match="the package xxhash is not installed here"):
        Sender(0, fsdp(SPECS, 1), fsdp(SPECS, 1), ChannelMover(None, 0), checksum="xxh3")


class OneChannel:
    """A flow's channel, as far as a transfer needs it."""

    def __init__(self) -> None:
        self.items: dict[str, queue.Queue[Any]] = {}

    def broadcast(self, item: Any, keys: list[str]) -> None:
        for key in keys:
            self.items.setdefault(key, queue.Queue()).put(item)

    def get(self, key: str, timeout: float) -> Any:
        return self.items.setdefault(key, queue.Queue()).get(timeout=timeout)


def test_a_channel_carries_a_version_one_item_for_each_bucket() -> None:
    source, target = flat(SPECS, 2), split(SPECS, {"embed": 1}, 2)
    channel = OneChannel()
    senders = [Sender(rank, source, target, ChannelMover(channel, rank), bucket_bytes=512) for rank in range(2)]
    for rank, sender in enumerate(senders):
        sender.send(1, tensors_of(source, rank, 1))
    own = [tensors_of(target, rank, 0) for rank in range(2)]
    for rank in range(2):
        assert Receiver(rank, target, ChannelMover(channel, rank), into=own[rank]).receive(5.0) == 1
        check(target, rank, own[rank], 1, source)
    assert all(items.empty() for items in channel.items.values())


def test_an_end_of_the_flow_is_not_taken_for_a_fault_of_the_transfer() -> None:
    class Ended(OneChannel):
        def get(self, key: str, timeout: float) -> Any:
            raise ChannelPoisoned("the trainer failed")

    target = replicated(SPECS, 1)
    with pytest.raises(ChannelPoisoned, match="the trainer failed"):
        Receiver(0, target, ChannelMover(Ended(), 0), into=tensors_of(target, 0, 0)).receive(5.0)
