"""All contenders in turn, round after round, so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ways.cases import Case
from ways.pair import Contender, Sample

MOST_ITEMS = 2_000_000
GROWTH = 1.3
"""How much more than the last measurement suggests is tried next, so that it is enough."""
TRIPS_CASES_BYTES = 1 << 20
"""Round trips are measured up to this size."""


@dataclass(frozen=True)
class Figures:
    """Of one contender, case and round. ``trips``: seconds of each round trip, sorted."""

    contender: str
    kind: str
    case: str
    round: int
    count: int
    seconds: float
    cpu: float
    trips: tuple[float, ...]
    load: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


@contextlib.contextmanager
def started_ray() -> Iterator[None]:
    """A Ray with object store enough, which flows find by ``RAY_ADDRESS``."""
    import ray

    before = {name: os.environ.get(name) for name in ("RAY_worker_niceness", "PYTHONPATH", "RAY_ADDRESS")}
    # Ray lowers the priority of its workers; on a busy machine that would be measured.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name in Ray
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), before["PYTHONPATH"] or ""])
    context = ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        resources={f"rlinf_slot_{n}": 1 for n in range(8)},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=1 << 30,
    )
    os.environ["RAY_ADDRESS"] = context.address_info["address"]
    try:
        yield
    finally:
        ray.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def most_items(contender: Contender, case: Case) -> int:
    """Most items of one call; a measurement that needs more is made of several."""
    return max(case.batch_size, min(MOST_ITEMS, contender.most_bytes // case.nbytes))


def counted(contender: Contender, case: Case, seconds: float) -> int:
    """How many items take about ``seconds``, at least one batch: found by trying, in steps so that a slow start does
    not count."""
    most = most_items(contender, case)
    count = min(case.batch_size, most)
    contender.throughput(case, count)
    while True:
        sample = contender.throughput(case, count)
        wanted = min(most, int(count * seconds / sample.seconds) + 1)
        if wanted <= count or sample.seconds >= seconds / 2:
            return max(wanted, count)
        count = min(wanted, 8 * count)


def lasting(contender: Contender, case: Case, count: int, seconds: float) -> Sample:
    """A measurement that lasts ``seconds`` or more: with a larger count than ``count`` when that was too little, and
    where one call may not move so many, over several calls in a row (their items, times and processor times added)."""
    most = most_items(contender, case)
    while True:
        sample = contender.throughput(case, count)
        if sample.seconds >= seconds or count >= most:
            break
        count = min(most, max(count + 1, int(GROWTH * count * seconds / sample.seconds)))
    while sample.seconds < seconds:
        more = contender.throughput(case, count)
        sample = Sample(sample.count + more.count, sample.seconds + more.seconds, sample.cpu + more.cpu)
    return sample


def measure(
    contenders: Sequence[Contender], cases: Sequence[Case], *, rounds: int, seconds: float, trips_s: float
) -> list[Figures]:
    """``seconds`` or more of throughput and ``trips_s`` of round trips for each contender, case and round, after a
    warm-up. The contenders are started already."""
    counts = {(c.name, case.name): counted(c, case, seconds) for case in cases for c in contenders}
    found = []
    for number in range(rounds):
        for case in cases:
            # Another one begins each round, so that none always follows the same.
            turn = number % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                key = contender.name, case.name
                sample = lasting(contender, case, counts[key], seconds)
                # What was enough now is tried first the next time.
                counts[key] = min(most_items(contender, case), max(counts[key], sample.count))
                trips = round_trips(contender, case, trips_s)
                found.append(_figures(contender, case, number, sample, trips))
    return found


def _figures(contender: Contender, case: Case, number: int, sample: Sample, trips: list[float]) -> Figures:
    return Figures(
        contender.name,
        contender.kind,
        case.name,
        number,
        sample.count,
        sample.seconds,
        sample.cpu,
        tuple(sorted(trips)),
        os.getloadavg()[0],
    )


def round_trips(contender: Contender, case: Case, seconds: float) -> list[float]:
    if not contender.round_trips or case.nbytes > TRIPS_CASES_BYTES or seconds <= 0:
        return []
    contender.pingpong(case, 5)
    until = time.perf_counter() + seconds
    found: list[float] = []
    while not found or time.perf_counter() < until:  # some, also where the time is over before the first
        found += contender.pingpong(case, 50)
    return found


def rows(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """For ``data.json``: everything but the single trips, of which the percentiles stay."""
    out = []
    for figure in figures:
        row = asdict(figure)
        trips = row.pop("trips")
        if trips:
            row |= {"trips": len(trips), "p50": percentile(trips, 0.5), "p99": percentile(trips, 0.99)}
        out.append(row)
    return out


def percentile(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def median_rate(figures: Sequence[Figures], contender: str, case: str) -> float:
    return statistics.median(f.rate for f in figures if f.contender == contender and f.case == case)
