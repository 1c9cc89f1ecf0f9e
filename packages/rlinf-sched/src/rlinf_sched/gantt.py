"""Gantt charts of a simulated step: as PNG (needs matplotlib) and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlinf_sched.graph import SchedError
from rlinf_sched.simulator import Run

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def to_perfetto(run: Run) -> dict[str, Any]:
    """Chrome's trace-event format, which ui.perfetto.dev opens: one track for each stage and devices."""
    tracks = list(dict.fromkeys((bar.stage, bar.first, bar.last) for bar in run.bars))
    events: list[dict[str, Any]] = []
    for number, (stage, first, last) in enumerate(tracks, 1):
        where = "CPU" if last < first else f"devices {first}-{last}"
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": f"{stage} ({where})"}}
        )
    for bar in run.bars:
        events.append(
            {
                "ph": "X",
                "name": f"{bar.stage} {bar.portion}" if bar.what == "work" else f"switch {bar.stage}",
                "cat": bar.what,
                "pid": 1,
                "tid": tracks.index((bar.stage, bar.first, bar.last)) + 1,
                "ts": bar.start * 1e6,
                "dur": (bar.end - bar.start) * 1e6,
                "args": {"portion": bar.portion},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(run: Run, path: Path) -> None:
    """Write ``to_perfetto`` as JSON."""
    path.write_text(json.dumps(to_perfetto(run)) + "\n")


def colours(stages: Sequence[str]) -> dict[str, str]:
    """A colour for each stage, by its place among all of them."""
    return {stage: _COLOURS[i % len(_COLOURS)] for i, stage in enumerate(dict.fromkeys(stages))}


def check_charts() -> None:
    """Raise SchedError when matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise SchedError(
            "a chart needs matplotlib: install rlinf-sched[plot] (in a checkout: tools/install rlinf-sched[plot])"
        )


def write_png(run: Run, path: Path, title: str = "", *, devices: int = 0, stages: Sequence[str] = ()) -> None:
    """Devices upwards, seconds to the right; hatched bars are switches. SchedError when matplotlib is missing.

    ``devices``: how many there are (0: those that are used); ``stages``: all that may be drawn, in the order of their
    colours, so that several charts agree (empty: those of the run)."""
    check_charts()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    drawn = list(dict.fromkeys(bar.stage for bar in run.bars if bar.what == "work"))
    colour = colours([*stages, *drawn])
    stages = [stage for stage in colour if stage in drawn]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    cpu = [stage for stage in stages if all(bar.last < bar.first for bar in run.bars if bar.stage == stage)]
    top = max(run.used, devices, 1)
    height = max(top / 12, 0.5)
    for bar in run.bars:
        low, size = (
            (bar.first, bar.last - bar.first + 1)
            if bar.last >= bar.first
            else (-height * (1 + cpu.index(bar.stage)), height)
        )
        switch = bar.what == "switch"
        axes.broken_barh(
            [(bar.start, bar.end - bar.start)],
            (low + 0.04 * min(size, 1), size - 0.08 * min(size, 1)),
            facecolors="white" if switch else colour[bar.stage],
            edgecolors="#555555" if switch else "white",
            hatch="////" if switch else None,
            linewidth=0.4 if switch or top <= 64 else 0.0,
        )
    axes.set_xlim(0, run.seconds)
    axes.set_ylim(-height * len(cpu), top)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("seconds")
    axes.set_ylabel("device")
    axes.set_title(title or f"{run.seconds:.4g} s")
    axes.legend(handles=[Patch(color=colour[s], label=s) for s in stages], loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
