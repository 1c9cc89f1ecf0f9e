"""Tables, charts and the page of the M2Flow experiment, from the data that it left."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from _common import table
from _m2flow_workloads import FAMILIES

COLOURS = {
    "generator": "#2563a8",
    "simulator": "#2563a8",
    "reward": "#9aa5b1",
    "policy": "#e0a030",
    "reference": "#e0a030",
    "critic": "#7a5ea8",
    "trainer": "#3f8f5f",
    "actor": "#3f8f5f",
}


# ------------------------------------------------------------------ numbers


def measured(plan: Mapping[str, Any]) -> float:
    """Mean seconds of a step over all runs of the plan."""
    return statistics.fmean(seconds for run in plan["runs"] for seconds in run)


def error(plan: Mapping[str, Any]) -> float:
    """Predicted over measured, less 1."""
    return float(plan["predicted"]) / measured(plan) - 1


def repeat(plan: Mapping[str, Any]) -> float | None:
    """How far the means of the runs of one plan (other draws each) are apart, of their mean."""
    means = [statistics.fmean(run) for run in plan["runs"]]
    return (max(means) - min(means)) / statistics.fmean(means) if len(means) > 1 else None


def deviation(plan: Mapping[str, Any]) -> float:
    """Standard deviation from step to step (other draws) of the mean."""
    steps = [seconds for run in plan["runs"] for seconds in run]
    return statistics.stdev(steps) / statistics.fmean(steps) if len(steps) > 1 else 0.0


def standard_error(plan: Mapping[str, Any]) -> float:
    """Of the measured mean, relative."""
    return float(deviation(plan) / sum(map(len, plan["runs"])) ** 0.5)


def _percent(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


# ------------------------------------------------------------------ tables


def prediction_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Every plan: what was profiled of it, predicted and measured seconds."""
    lines = []
    for name, data in found.items():
        for plan in data["plans"]:
            if plan["predicted"] is None:
                continue
            lines.append(
                (
                    name,
                    plan["label"],
                    plan["devices"],
                    "yes" if plan["profiled"] else "no",
                    f"{plan['predicted']:.2f}",
                    f"{measured(plan):.2f}",
                    _percent(error(plan), signed=True),
                    _percent(standard_error(plan)),
                    _percent(repeat(plan)),
                )
            )
    header = (
        "workload", "plan", "devices", "counts and portions profiled", "predicted s", "measured s", "error",
        "standard error of the mean", "between runs",
    )  # fmt: skip
    return table(header, lines)


def error_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Mean and worst error by workload, of all plans and of those that were not profiled."""
    lines = []
    groups: dict[str, list[Mapping[str, Any]]] = {name: _predicted(data["plans"]) for name, data in found.items()}
    groups["all"] = [plan for plans in groups.values() for plan in plans]
    for name, plans in groups.items():
        fresh = [plan for plan in plans if not plan["profiled"]]
        both = [value for some in (plans, fresh) for value in _mean_and_worst(some)]
        lines.append((name, len(plans), *both[:2], len(fresh), *both[2:], _percent(_typical(plans, standard_error))))
    header = (
        "workload", "plans", "mean error", "worst", "not profiled", "mean error", "worst", "standard error of a mean",
    )  # fmt: skip
    return table(header, lines)


def _predicted(plans: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [plan for plan in plans if plan["predicted"] is not None]


def _mean_and_worst(plans: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    errors = [abs(error(plan)) for plan in plans]
    return (_percent(statistics.fmean(errors)), _percent(max(errors))) if errors else ("", "")


def _typical(plans: Sequence[Mapping[str, Any]], what: Any) -> float:
    return statistics.fmean(what(plan) for plan in plans)


def auto_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """``plan=auto`` against the best and the worst of the families, all of them run."""
    lines = []
    for name, data in found.items():
        plans = {plan["label"]: plan for plan in data["plans"]}
        seconds = {label: measured(plans[label]) for label in FAMILIES if label in plans}
        auto = measured(plans["auto"])
        best, worst = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
        each = [f"{seconds[label]:.2f}" if label in seconds else "none" for label in FAMILIES]
        ratio, factor = auto / seconds[best], seconds[worst] / auto
        ray = f"{statistics.fmean(data['ray_steps']):.2f}" if data["ray_steps"] else ""
        chose = plans["auto"]["family"]
        lines.append((name, *each, f"{auto:.2f}", chose, f"{ratio:.3f} ({best})", f"{factor:.2f}", ray))
    header = (
        "workload",
        *FAMILIES,
        "auto",
        "auto chose",
        "auto over the best",
        "the worst over auto",
        "auto under Ray",
    )
    return table(header, lines)


# ------------------------------------------------------------------ charts


def scatter(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Predicted against measured seconds, profiled plans hollow, with the band of 10 %."""
    figure, axes = _figure(5.4, 5.0)
    top = max(max(measured(p), p["predicted"]) for d in found.values() for p in _predicted(d["plans"])) * 1.08
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="#e8ecf0", label="10 %")
    axes.plot([0, top], [0, top], color="#7b8794", linewidth=0.8)
    for colour, (name, data) in zip(
        ("#2563a8", "#d9730d", "#7a5ea8", "#3f8f5f", "#b04a5a"), found.items(), strict=False
    ):
        for profiled in (False, True):
            plans = [plan for plan in _predicted(data["plans"]) if plan["profiled"] is profiled]
            x, y = [measured(plan) for plan in plans], [plan["predicted"] for plan in plans]
            face = "none" if profiled else colour
            axes.scatter(x, y, s=26, edgecolors=colour, facecolors=face, label=None if profiled else name, zorder=3)
    axes.set(xlim=(0, top), ylim=(0, top), xlabel="measured seconds a step", ylabel="predicted seconds a step")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path)


def gantt(panels: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """One step of one workload under several plans, measured. A panel: see ``step_bars``."""
    figure, all_axes = _figure(10.5, 1.9 * len(panels) + 0.8, rows=len(panels))
    longest = max(panel["seconds"] for panel in panels.values())
    for axes, (name, panel) in zip(all_axes, panels.items(), strict=True):
        rows = panel["rows"]
        for bar in panel["bars"]:
            colour = COLOURS.get(bar["stage"], "#8a6d4b")
            style: dict[str, Any] = {"color": colour} if bar["what"] == "work" else {"hatch": "////", "fill": False}
            axes.barh(rows.index(bar["row"]), bar["end"] - bar["start"], 0.78, bar["start"], edgecolor=colour, **style)
        axes.axvline(panel["seconds"], color="#b04a5a", linewidth=1.0)
        axes.set(yticks=range(len(rows)), xlim=(0, longest * 1.02))
        axes.set_yticklabels(rows, fontsize=6)
        axes.invert_yaxis()
        axes.set_title(f"{name}: {panel['seconds']:.2f} s", fontsize=9, loc="left")
    stages = dict.fromkeys(bar["stage"] for panel in panels.values() for bar in panel["bars"])
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS.get(stage, "#8a6d4b"), label=stage) for stage in stages]
    handles.append(Patch(hatch="////", fill=False, label="loading or offloading"))
    all_axes[-1].set_xlabel("seconds from the beginning of the step")
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(path)


def _figure(width: float, height: float, rows: int = 1) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1) if rows > 1 else figure.subplots()
    return figure, axes


def step_bars(run: Path, step: int, seconds: float) -> dict[str, Any]:
    """What every device did in one step of a run: the stages' diaries, laid on the devices of the plan."""
    data = yaml.safe_load((run / "plan.yaml").read_text())
    where = {stage: _devices(text) for stage, text in _leaves(data["tree"])}
    bars, starts = [], []
    for file in sorted((run / "diary").glob("*.json")):
        stage, rank = file.stem.rsplit("-", 1)
        row = f"device {where[stage][int(rank)]}" if stage in where else "CPU"
        for name, what, start, end in json.loads(file.read_text()):
            if name == f"train/{step}":
                bars.append({"stage": stage, "row": row, "what": what, "start": start, "end": end})
                starts.append(start)
    origin = min(starts)
    for bar in bars:
        bar["start"], bar["end"] = bar["start"] - origin, bar["end"] - origin
    rows = sorted({bar["row"] for bar in bars}, key=lambda row: (row == "CPU", row))
    return {"seconds": seconds, "rows": rows, "bars": bars}


def _leaves(node: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    ((kind, body),) = node.items()
    if kind == "leaf":
        yield body["stage"], str(body["devices"])
    else:
        for side in body.values():
            if isinstance(side, Mapping):
                yield from _leaves(side)


def _devices(text: str) -> list[int]:
    """Device of each rank, of placements with one device per rank such as ``0-3,6``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")[0].partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


# ------------------------------------------------------------------ the page


def refresh(page: Path, tables: Mapping[str, str]) -> None:
    """Put tables between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` of the page; KeyError where one is missing."""
    text = page.read_text()
    for name, body in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        place = pattern.search(text)
        if place is None:
            raise KeyError(f"{page} has no place for {name!r}")
        text = text[: place.end(1)] + body + text[place.start(2) :]
    page.write_text(text)
