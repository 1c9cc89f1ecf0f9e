"""pytest-benchmark: each way and each size; and a check of a few seconds that ours does not fall behind.

    pytest benchmarks --benchmark-only -m "not slow"    # without Ray
    pytest benchmarks --benchmark-skip                  # the check alone, as CI does it

The table in docs/benchmarks comes from ``make evidence NAME=communication``, which takes the contenders in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from ways import channel, gloo, memcpy, ours, queues, rayways, ring
from ways.cases import CASES, Case
from ways.pair import Contender
from ways.run import counted, measure, started_ray

PAIRS = [ours.Communicators, gloo.Gloo, queues.Queue, queues.SimpleQueue, ring.Ring, memcpy.Memcpy]
UNDER_RAY = [
    channel.Channel,
    channel.ChannelMany,
    channel.ChannelSocket,
    rayways.RayQueue,
    rayways.RayQueueBatches,
    rayways.RayObjects,
    rayways.RayPut,
]


@pytest.fixture(scope="module")
def contender(request: pytest.FixtureRequest) -> Iterator[Contender]:
    kind = request.param
    with contextlib.ExitStack() as stack:
        if kind in UNDER_RAY:
            stack.enter_context(started_ray())
        yield stack.enter_context(kind())


def every_way() -> list[Any]:
    marks = (pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600))
    return [pytest.param(kind, id=kind.name) for kind in PAIRS] + [
        pytest.param(kind, id=kind.name, marks=marks) for kind in UNDER_RAY
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
@pytest.mark.parametrize("contender", every_way(), indirect=True)
def test_throughput(benchmark: Any, contender: Contender, case: Case) -> None:
    """The time that pytest-benchmark shows is that of a whole batch; ``items_s`` is what the contenders measure."""
    count = counted(contender, case, 0.2)
    samples = benchmark.pedantic(lambda: contender.throughput(case, count), rounds=5)
    benchmark.extra_info |= {"items_s": samples.count / samples.seconds, "cpu_us": samples.cpu / samples.count * 1e6}
    assert samples.count == count


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_ours_does_not_fall_behind_gloo_and_rays_queue() -> None:
    """Wide of the aim (never slower), so that a busy machine does not fail it: not in a single one of five rounds, in
    which all took turns, half as fast as the better of the two."""
    cases = [CASES[name] for name in ("4 B", "64 KiB", "1 MiB")]
    kinds = (ours.Communicators, gloo.Gloo, rayways.RayQueue)
    with started_ray(), contextlib.ExitStack() as stack:
        contenders = [stack.enter_context(kind()) for kind in kinds]
        figures = measure(contenders, cases, rounds=5, seconds=0.1, trips_s=0)
    slow = {}
    for case in cases:
        rounds = [{f.contender: f.rate for f in figures if (f.case, f.round) == (case.name, n)} for n in range(5)]
        ratios = [found.pop(ours.Communicators.name) / max(found.values()) for found in rounds]
        if max(ratios) < 0.5:
            slow[case.name] = ratios
    assert slow == {}, f"rate of ours over that of the faster peer, round by round: {slow}"
