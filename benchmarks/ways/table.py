"""The page and the chart of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ways.cases import CASES
from ways.run import Figures, median_rate, percentile

OURS = "rlinf_comm.Communicator"
CHANNEL = "rlinf channel"
RING = "bare ring (limit)"
ALIKE = 1.1
"""Rates that differ by no more are called alike."""


def contenders(figures: Sequence[Figures]) -> list[str]:
    order = {"ours": 0, "peer": 1, "reference": 2, "limit": 3}
    kinds = {figure.contender: figure.kind for figure in figures}
    return sorted(kinds, key=lambda name: order[kinds[name]])


def cells(figures: Sequence[Figures], contender: str, case: str) -> list[Figures]:
    return [figure for figure in figures if figure.contender == contender and figure.case == case]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(figures: Sequence[Figures], mine: str, other: str, case: str) -> str:
    """Rates of ``mine`` over ``other`` in the same round: median (min-max)."""
    theirs = {f.round: f.rate for f in cells(figures, other, case)}
    found = [f.rate / theirs[f.round] for f in cells(figures, mine, case) if f.round in theirs]
    return f"{statistics.median(found):.2g} ({min(found):.2g}-{max(found):.2g})" if found else "-"


def case_table(figures: Sequence[Figures], case: str) -> str:
    head = ["", "items", "items/s", "spread", "GB/s", "p50 us", "p99 us", "CPU us/item", "CPU s/GB",
            "Communicator to it", "channel to it"]  # fmt: skip
    lines = []
    for name in contenders(figures):
        found = cells(figures, name, case)
        if not found:
            continue
        rates = [figure.rate for figure in found]
        middle = statistics.median(rates)
        size = CASES[case].nbytes
        trips = sorted(trip for figure in found for trip in figure.trips)
        cpu = statistics.median(figure.cpu / figure.count for figure in found)
        shown = [number(percentile(trips, part) * 1e6) if trips else "" for part in (0.5, 0.99)]
        gigabytes = [number(middle * size / 1e9), *shown, number(cpu * 1e6), number(cpu / size * 1e9)]
        spread = f"{number(min(rates))}-{number(max(rates))}"
        ratios = [ratio(figures, ours, name, case) if ours != name else "" for ours in (OURS, CHANNEL)]
        lines.append([name, f"{min(f.count for f in found):,}", number(middle), spread, *gigabytes, *ratios])
    rows = [head, ["---"] * len(head), *lines]
    return f"### {case}: {CASES[case].what}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


TEXT = """\
# Communication between two processes of one machine

{conclusion}

`{command}` at commit {commit}; {rounds} rounds, the contenders in turn. {cores} cores, shared with other work: load
{load}. Throughput is from the first `send` to the last `recv` of {seconds:g} s or more, one item a call unless the name
says otherwise; *items* is how many that were in the round with the fewest, *spread* the slowest and the fastest round.
The round trips of all rounds are taken together. 64 MiB has none: one would take tens of milliseconds, so that there
would be too few for percentiles, and what it takes is the copying, which GB/s shows. CPU is that of producer and
consumer together (Ray's own processes are not counted). *to it*: rate of ours over that of the line, in the same round,
median (min-max); more than 1: ours is faster. Every consumer looks at each item, and all of the last one of a
measurement is compared.

{notes}

![items per second and bytes per second by size]({chart})

{tables}"""

NOTES = """\
- *memcpy* and *bare ring* are limits: the ring knows the size of all items, has no order beyond its socket, and no
  errors, time limits, keys or account.
- gloo is told shapes and dtypes in advance, has several sends and receives under way, and sends the eight tensors
  joined (faster than eight sends).
- `ray.util.queue.Queue` in batches: `put_nowait_batch` and `get_nowait_batch`. *Ray objects*: calls of an actor, up to
  64 of them or 256 MiB under way.
- `multiprocessing`'s queues are for reference: no keys, weights, account or end of stream.
- *rlinf channel* is core's channel in a real flow of two groups under Ray, with the link that `channels.link=auto`
  finds; *sockets only* is without the link of shared memory.
- An item is one flat numpy array of bytes of the size that the table names; of *8 tensors*, a dict of eight float32
  tensors, 64 KiB together."""


LACKING = """\
are handed to processes when these start, on one machine; send arrays pickled through a pipe; do not notice a peer that
  died; and have no keys, end of stream, limit by bytes or account of what moved (`SimpleQueue` no deadlines either)"""


def middle_ratio(figures: Sequence[Figures], mine: str, other: str, case: str) -> float | None:
    """Median of the rates of ``mine`` over those of ``other``, round by round; None where one was not measured."""
    theirs = {f.round: f.rate for f in cells(figures, other, case)}
    found = [f.rate / theirs[f.round] for f in cells(figures, mine, case) if f.round in theirs]
    return statistics.median(found) if found else None


def conclusion(figures: Sequence[Figures]) -> str:
    """Three lines: ours beside the fastest peer, beside multiprocessing's queues, and beside the limit."""
    return f"""\
- **Beside Ray and gloo** (at each size the fastest of them) a Communicator is {_beside(figures, "peer")}.
- **Beside `multiprocessing`'s queues** (the faster one) it is {_beside(figures, "reference")}. They {LACKING}.
- **Of the bare ring's rate**, which is a limit, it reaches {_reached(figures)}; core's channel, which adds order over
  many writers and readers, keys, credit and the account, moves {_channel(figures)} what the Communicator does."""


def _beside(figures: Sequence[Figures], kind: str) -> str:
    """Where ours is faster than the best contender of a kind, and where slower, with the ratios."""
    names = {figure.contender for figure in figures if figure.kind == kind}
    verdicts: dict[str, list[str]] = {}
    for case in CASES:
        rates = {name: median_rate(figures, name, case) for name in names if cells(figures, name, case)}
        best = max(rates, key=lambda name: rates[name], default="")
        value = middle_ratio(figures, OURS, best, case)
        if value is not None:
            verdict = "faster" if value > ALIKE else "slower" if value < 1 / ALIKE else "about as fast"
            verdicts.setdefault(verdict, []).append(f"{case} ({value:.2g} times the rate of {best})")
    return "; ".join(f"{verdict} at {', '.join(found)}" for verdict, found in verdicts.items()) or "not measured"


def _reached(figures: Sequence[Figures]) -> str:
    parts = ((case, middle_ratio(figures, OURS, RING, case)) for case in CASES)
    return ", ".join(f"{value:.0%} at {case}" for case, value in parts if value is not None) or "(not measured)"


def _channel(figures: Sequence[Figures]) -> str:
    found = [middle_ratio(figures, CHANNEL, OURS, case) for case in CASES]
    known = [value for value in found if value is not None]
    return f"{min(known):.2g} to {max(known):.2g} times" if known else "-"


def too_short(figures: Sequence[Figures], seconds: float) -> list[str]:
    """Measurements that did not last as long as was asked for."""
    return [
        f"{figure.contender}, {figure.case}, round {figure.round}: {figure.count} items in {figure.seconds:.3g} s"
        for figure in figures
        if figure.seconds < seconds
    ]


def page(figures: Sequence[Figures], facts: dict[str, Any], chart: str) -> str:
    """Raises ValueError when a measurement was shorter than the page says."""
    if short := too_short(figures, facts["seconds"]):
        raise ValueError(f"shorter than {facts['seconds']:g} s: {'; '.join(short)}")
    loads = [figure.load for figure in figures]
    tables = "\n".join(case_table(figures, case) for case in CASES if any(f.case == case for f in figures))
    load = f"{min(loads):.1f} to {max(loads):.1f}"
    return TEXT.format(**facts, conclusion=conclusion(figures), load=load, notes=NOTES, chart=chart, tables=tables)


def draw(figures: Sequence[Figures], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in CASES.values() if not case.tensors and any(f.case == case.name for f in figures)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6.5))
    styles = {"ours": "-", "peer": "--", "reference": ":", "limit": "-."}
    for name in contenders(figures):
        kind = next(f.kind for f in figures if f.contender == name)
        known = [case for case in cases if cells(figures, name, case.name)]
        sizes = [case.nbytes for case in known]
        rates = [median_rate(figures, name, case.name) for case in known]
        look = {"linestyle": styles[kind], "marker": "o", "linewidth": 2.5 if kind == "ours" else 1.2, "label": name}
        left.plot(sizes, rates, **look)
        right.plot(sizes, [rate * size / 1e9 for rate, size in zip(rates, sizes, strict=True)], **look)
    for axes, label in ((left, "items/s"), (right, "GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([case.nbytes for case in cases], [case.name for case in cases])
        axes.set_xlabel("size of an item")
        axes.set_ylabel(label)
        axes.grid(True, which="both", alpha=0.3)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
