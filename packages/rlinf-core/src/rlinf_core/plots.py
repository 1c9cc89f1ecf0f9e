"""One picture of a run, from its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import RLinfError
from rlinf_core.loggers.jsonl import FILE, read_metrics
from rlinf_core.progress import stage_times
from rlinf_core.rundir import guard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[list[float], list[float]]

INK = "#1f2933"
MUTED = "#7b8794"
BLUE = "#2563a8"
ORANGE = "#d9730d"
STAGE_COLOURS = ("#2563a8", "#e0a030", "#3f8f5f", "#b04a5a", "#7a5ea8", "#5aa7b8", "#8a6d4b", "#9aa5b1")


def series(rows: Sequence[dict[str, Any]], phase: str, metric: str) -> Points:
    """(steps, values) of one metric in one phase; steps where it is absent or null are left out.

    A phase other than ``train`` is placed by ``train/steps``, the training steps done before it.
    """
    points = [
        (float(row.get("train/steps", row["step"])), float(row[metric]))
        for row in rows
        if row.get("phase") == phase and isinstance(row.get(metric), int | float)
    ]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values at every point (fewer at the start)."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def stage_series(rows: Sequence[dict[str, Any]], phase: str = "train") -> tuple[list[float], dict[str, list[float]]]:
    """(steps, stage -> seconds per step) from ``time/<stage>_s``; a stage that a step lacks took 0 s there."""
    picked = []
    for row in rows:
        if row.get("phase") == phase:
            times = stage_times({key: value for key, value in row.items() if isinstance(value, int | float)})
            if times:
                picked.append((float(row["step"]), times))
    stages = list(dict.fromkeys(name for _, times in picked for name in times))
    return [step for step, _ in picked], {name: [times.get(name, 0.0) for _, times in picked] for name in stages}


def plot_run(run_dir: str | Path, name: str = "run.png") -> Path:
    """Draw reward, accuracy, response length, return, success and stage times of a run into ``run_dir/name``; returns
    the path.

    Reads phase ``train``: ``reward/mean``, ``accuracy``, ``response/length``, ``return``, ``success_once``,
    ``time/<stage>_s``; and phase ``evaluate``: ``accuracy``, ``return``, ``success_once``. What a run did not log has
    no panel. Raises RLinfError when there are no metrics to draw.
    """
    folder = Path(run_dir)
    if not (folder / FILE).is_file():
        raise RLinfError(f"nothing to plot: {folder / FILE} does not exist (is the jsonl logger on?)")
    rows = read_metrics(folder)
    if not any(row.get("phase") in ("train", "evaluate") for row in rows):
        raise RLinfError(f"nothing to plot: {folder / FILE} has no line of phase train or evaluate")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(rows)
    down, across = (1, len(panels)) if len(panels) < 3 else (2, -(-len(panels) // 2))
    figure = Figure(figsize=(5.5 * across, 3.5 * down), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for place, draw in enumerate(panels):
        draw(figure.add_subplot(down, across, place + 1))
    figure.suptitle("/".join(folder.resolve().parts[-3:]), fontsize=10, color=MUTED, x=0.01, ha="left")
    path = folder / name
    with guard(path):
        figure.savefig(path)
    return path


def _panels(rows: list[dict[str, Any]]) -> list[Callable[[Axes], None]]:
    """What there is to draw, at least the times of the stages."""
    found: list[Callable[[Axes], None]] = []
    reward, length = series(rows, "train", "reward/mean"), series(rows, "train", "response/length")
    if reward[0]:
        found.append(lambda axis: _curve(axis, "Reward (mean per step)", reward))
    if series(rows, "train", "accuracy")[0] or series(rows, "evaluate", "accuracy")[0]:
        found.append(lambda axis: _accuracy(axis, rows))
    if series(rows, "train", "return")[0] or series(rows, "evaluate", "return")[0]:
        found.append(lambda axis: _episodes(axis, rows, "return", "Return (mean over episodes)"))
    if _ever(rows, "train") or _ever(rows, "evaluate"):
        found.append(lambda axis: _episodes(axis, rows, "success_once", "Success (once in the episode)"))
    if length[0]:
        found.append(lambda axis: _curve(axis, "Response length (tokens, mean)", length))
    use = series(rows, "train", "device/use")
    if len(found) < 2 and use[0]:
        found.append(lambda axis: _curve(axis, "Devices at work (part of the step)", use))
    found.append(lambda axis: _stages(axis, *stage_series(rows), series(rows, "train", "time/step_s")))
    return found


def _frame(axis: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    axis.set_xlabel("step", fontsize=9, color=MUTED)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.tick_params(labelsize=8.5, colors=MUTED, length=3)
    axis.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#cbd2d9")


def _empty(axis: Axes, text: str = "not logged in this run") -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=9, color=MUTED)
    axis.set_xticks([])
    axis.set_yticks([])


def _curve(axis: Axes, title: str, points: Points) -> None:
    _frame(axis, title)
    steps, values = points
    if not steps:
        _empty(axis)
        return
    window = max(1, len(values) // 12)
    if window > 1:
        axis.plot(steps, values, color=BLUE, alpha=0.28, linewidth=1)
        axis.plot(steps, smooth(values, window), color=BLUE, linewidth=2, label=f"mean of last {window} steps")
        axis.legend(frameon=False, fontsize=8.5, labelcolor=MUTED)
    else:
        axis.plot(steps, values, color=BLUE, linewidth=2, marker="o", markersize=4)
    _end_value(axis, steps[-1], smooth(values, window)[-1], f"{smooth(values, window)[-1]:.3g}")


def _accuracy(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    _frame(axis, "Accuracy")
    train, evaluate = series(rows, "train", "accuracy"), series(rows, "evaluate", "accuracy")
    if not train[0] and not evaluate[0]:
        _empty(axis)
        return
    axis.set_ylim(0, 1.04)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _smoothed(axis, train, "training samples")
    if evaluate[0]:
        axis.plot(*evaluate, color=ORANGE, linewidth=1.6, marker="o", markersize=6, label="held-out, greedy")
        for index, below in {0: True, len(evaluate[0]) - 1: False}.items():
            step, value = evaluate[0][index], evaluate[1][index]
            _end_value(axis, step, value, f"{value:.1%}", ORANGE, below=below)
    axis.legend(frameon=False, fontsize=8.5, labelcolor=MUTED, loc="lower right")


def _smoothed(axis: Axes, points: Points, label: str) -> None:
    """The curve of training: smoothed, and as it is behind that where there are many points."""
    steps, values = points
    if not steps:
        return
    window = max(1, len(values) // 12)
    if window > 1:
        axis.plot(steps, values, color=BLUE, alpha=0.28, linewidth=1)
    axis.plot(steps, smooth(values, window), color=BLUE, linewidth=2, label=label)


def _ever(rows: Sequence[dict[str, Any]], phase: str) -> bool:
    """Whether an episode of the phase succeeded: environments without a notion of success have no panel for it."""
    return any(value > 0.0 for value in series(rows, phase, "success_once")[1])


def _episodes(axis: Axes, rows: Sequence[dict[str, Any]], metric: str, title: str) -> None:
    """A metric of training episodes, and of evaluations with their confidence intervals."""
    _frame(axis, title)
    train, evaluate = series(rows, "train", metric), series(rows, "evaluate", metric)
    if metric == "success_once":
        axis.set_ylim(-0.02, 1.04)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _smoothed(axis, train, "training episodes")
    if evaluate[0]:
        axis.plot(*evaluate, color=ORANGE, linewidth=1.6, marker="o", markersize=6, label="evaluation")
        low, high = (series(rows, "evaluate", f"{metric}/{end}") for end in ("low", "high"))
        axis.vlines(low[0], low[1], high[1], color=ORANGE, linewidth=1.2, alpha=0.6)
        text = f"{evaluate[1][-1]:.1%}" if metric == "success_once" else f"{evaluate[1][-1]:.4g}"
        _end_value(axis, evaluate[0][-1], evaluate[1][-1], text, ORANGE)
    axis.legend(frameon=False, fontsize=8.5, labelcolor=MUTED, loc="lower right")


def _end_value(axis: Axes, step: float, value: float, text: str, colour: str = BLUE, *, below: bool = False) -> None:
    axis.annotate(
        text,
        (step, value),
        xytext=(4, -14 if below else 6),
        textcoords="offset points",
        fontsize=8.5,
        color=colour,
        annotation_clip=False,
    )


def _stages(axis: Axes, steps: list[float], stages: dict[str, list[float]], whole: Points) -> None:
    """Stages stacked, and the step as a line: below the stack where stages work at the same time."""
    _frame(axis, "Time of the stages (s per step, stacked)")
    if not steps:
        _empty(axis)
        return
    bottom = [0.0] * len(steps)
    width = min((b - a for a, b in pairwise(steps) if b > a), default=1.0)
    for index, (name, seconds) in enumerate(stages.items()):
        mean = sum(seconds) / len(seconds)
        colour = STAGE_COLOURS[index % len(STAGE_COLOURS)]
        axis.bar(steps, seconds, bottom=bottom, width=width, color=colour, linewidth=0, label=f"{name} ({mean:.2f} s)")
        bottom = [below + value for below, value in zip(bottom, seconds, strict=True)]
    if whole[0]:
        mean = sum(whole[1]) / len(whole[1])
        axis.plot(*whole, color=INK, linewidth=1.4, marker="o", markersize=3, label=f"whole step ({mean:.2f} s)")
    axis.margins(x=0.01)
    axis.set_ylim(0, max([*bottom, *whole[1]]) * 1.4 or 1.0)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8.5, labelcolor=INK, loc="upper right", ncols=2)
