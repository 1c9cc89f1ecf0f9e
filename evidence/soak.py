"""Ten minutes of items of all sizes through channels and a communicator: nothing lost, nothing doubled, memory flat.

A flow of four groups under Ray: a producer, two ranks that pass items on, a consumer that checks every sum, and two
ranks that send each other objects beside the channels. Each step each process says what it has: private and shared
memory, open files, mapped arenas, threads. At the end what is left on the machine is compared with what was there
before.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import _common as common

PROCESSES = ("producer", "middle", "consumer", "talker")
HAS = ("private_mb", "shared_mb", "files", "arenas", "threads")


def quarters(values: list[float]) -> tuple[float, float]:
    """Medians of the second and of the last quarter (the first fills caches and arenas)."""
    n = max(1, len(values) // 4)
    return statistics.median(values[n : 2 * n] or values), statistics.median(values[-n:])


def left() -> set[str]:
    """Names in shared memory that are ours."""
    return {name for name in os.listdir("/dev/shm") if "rlinf" in name}


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left_axes, right_axes = figure.subplots(1, 2)
    steps = range(1, len(rows) + 1)
    for name in PROCESSES:
        ranks = 2 if name == "talker" else 1
        for axes, what in ((left_axes, "private_mb"), (right_axes, "shared_mb")):
            axes.plot(steps, [row[f"{name}/{what}"] / ranks for row in rows], label=name)
    for axes, title in ((left_axes, "private memory, MB"), (right_axes, "mapped shared memory, MB")):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    left_axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    args = common.arguments(
        __doc__ or "", ("--minutes", {"type": float, "default": 10.0}), ("--step", {"type": float, "default": 10.0})
    )
    before = left()
    recipe = str(Path(__file__).with_name("_soak_recipe.py"))
    steps = max(4, round(args.minutes * 60 / args.step))
    settings = ["cluster.virtual_devices=1", "loggers=[jsonl]", f"num_steps={steps}", f"seconds={args.step}"]
    folder, seconds = common.run_recipe(recipe, *settings)
    rows = common.rows(folder, "train")
    items, passed, talked = (sum(row[name] for row in rows) for name in ("made", "taken", "got"))
    lost = items - passed
    wrong = sum(row["wrong"] + row["talk_wrong"] for row in rows)
    unheard = sum(row["sent"] - row["got"] for row in rows)
    lines = []
    for name in PROCESSES:
        ranks = 2 if name == "talker" else 1
        cells = []
        for what in HAS:
            early, late = quarters([row[f"{name}/{what}"] / ranks for row in rows])
            cells.append(f"{early:.0f} → {late:.0f}")
        lines.append((name, *cells))
    text = (
        f"{len(rows)} steps of {args.step:g} s in {seconds / 60:.1f} minutes. Channel items: {items:.0f} made, lost or "
        f"doubled {lost:.0f}. Messages between the two talkers: {talked:.0f}, lost {unheard:.0f}. Wrong sums: "
        f"{wrong:.0f}. Left in /dev/shm: {len(left() - before)}.\n\nA process's own figures, median of the second "
        "quarter of the steps → of the last:\n\n"
        + common.table(
            ("process", "private memory MB", "mapped shared MB", "open files", "arena segments", "threads"), lines
        )
        + "\n![memory by step](soak.png)\n"
    )
    chart(rows, args.out / "soak.png")
    common.write(args.out, "Soak", text, {"rows": rows, "left": sorted(left() - before)})
    if lost or wrong or unheard or left() - before:
        raise SystemExit("something was lost, changed or left behind")


if __name__ == "__main__":
    main()
