"""Learning curves over seeds: GRPO on each trainer backend, and DAPO, PPO and asynchronous training on one.

Two things are checked. Every run rises by at least ``--rise`` points of greedy accuracy on problems that no phase has
trained on. And the backends learn equally: the mean over seeds of a backend lies within twice the standard error of
the difference to torch's, or within ``EQUAL`` points where the seeds happen to lie close together.

A run that is already in ``--runs`` is not run again, so that an interrupted experiment goes on where it was.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import _common as common

CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "GRPO, torch": ("reasoning/grpo_arithmetic", ("trainer=torch",)),
    "GRPO, DeepSpeed ZeRO 1": ("reasoning/grpo_arithmetic", ("trainer=deepspeed", "trainer.zero_stage=1")),
    "GRPO, Megatron": ("reasoning/grpo_arithmetic", ("trainer=megatron",)),
    "DAPO, torch": ("reasoning/dapo_arithmetic", ()),
    "PPO, torch": ("reasoning/ppo_arithmetic", ()),
    "asynchronous, torch": ("reasoning/async_arithmetic", ()),
}
EQUAL = 0.03
"""Difference of two backends' mean accuracy that is never taken for a real one: eight of 256 problems."""


def run(case: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One run: accuracy before and after, and the training reward of every step."""
    recipe, own = CASES[case]
    folder, seconds = common.run_recipe(recipe, f"seed={seed}", *own, *overrides)
    said, steps = common.summary(folder), common.rows(folder, "train")
    return {
        "before": said["before"]["accuracy"],
        "after": said["after"]["accuracy"],
        "wall_s": seconds,
        "rewards": [row["reward/mean"] for row in steps],
        "seconds": list(_sums(row["time/step_s"] for row in steps)),
    }


def _sums(values: Any) -> Any:
    total = 0.0
    for value in values:
        total += value
        yield total


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--seeds", {"type": int, "nargs": "+", "default": [0, 1, 2]}),
        ("--only", {"default": "", "help": "cases whose name has this in it"}),
        ("--rise", {"type": float, "default": 15.0, "help": "points of accuracy that every run must gain"}),
        ("--runs", {"type": Path, "default": Path("runs/learning"), "help": "one file for each finished run"}),
        ("--page", {"action": "store_true", "help": "run nothing: the page of the runs that are finished"}),
        ("overrides", {"nargs": "*", "help": "key=value given to every run"}),
    )
    args.runs.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if args.only.lower() in case.lower()]
    found: dict[str, dict[int, dict[str, Any]]] = {case: {} for case in cases}
    # Seed by seed, so that an interrupted experiment has the same seeds of every case.
    for seed in args.seeds:
        for case in cases:
            name = "-".join("".join(c if c.isalnum() else " " for c in case).split())
            kept = args.runs / f"{name}-{seed}.json"
            if args.page and not kept.exists():
                continue
            if not kept.exists():
                kept.write_text(json.dumps(run(case, seed, args.overrides)))
            one = found[case][seed] = json.loads(kept.read_text())
            print(
                f"[{time.strftime('%H:%M:%S')}] {case}, seed {seed}: {one['before']:.1%} -> {one['after']:.1%} "
                f"in {one['wall_s']:.0f} s",
                flush=True,
            )
    lines = [
        [
            case,
            ", ".join(f"{100 * one['before']:.1f}" for one in runs.values()),
            ", ".join(f"{100 * one['after']:.1f}" for one in runs.values()),
            f"{100 * statistics.mean(_after(runs)):.1f}",
            f"{100 * _deviation(runs):.1f}" if len(runs) > 1 else "-",
            common.spread([len(one["rewards"]) for one in runs.values()]),
            common.spread([one["wall_s"] for one in runs.values()]),
        ]
        for case, runs in found.items()
        if runs
    ]
    wrong = [
        f"{case}, seed {seed}: rose by {100 * (one['after'] - one['before']):.1f} points only"
        for case, runs in found.items()
        for seed, one in runs.items()
        if 100 * (one["after"] - one["before"]) < args.rise
    ]
    text = (
        "Greedy accuracy in per cent on 256 problems that no phase has trained on.\n\n"
        + common.table(
            ["case", "before", "after (one number a seed)", "mean", "deviation", "steps", "wall in s"], lines
        )
        + "\n![reward of every training step](curves.png)\n"
    )
    backends = {case: runs for case, runs in found.items() if case.startswith("GRPO") and runs}
    if len(backends) > 1:
        apart, unequal = compare(backends)
        wrong += unequal
        text += "\nBackends against torch:\n\n" + common.table(
            ["case", "difference in points", "allowed (2 standard errors, at least 3)"], apart
        )
    plot(found, args.out / "curves.png")
    common.write(args.out, "Learning over seeds", text, found)
    if wrong:
        raise SystemExit("\n".join(wrong))


def _after(runs: dict[int, dict[str, Any]]) -> list[float]:
    return [one["after"] for one in runs.values()]


def _deviation(runs: dict[int, dict[str, Any]]) -> float:
    return statistics.stdev(_after(runs)) if len(runs) > 1 else math.nan


def compare(backends: dict[str, dict[int, dict[str, Any]]]) -> tuple[list[list[str]], list[str]]:
    """The rows of the table of differences, and what is wrong in them."""
    (first, reference), *others = backends.items()
    rows, wrong = [], []
    for case, runs in others:
        difference = statistics.mean(_after(runs)) - statistics.mean(_after(reference))
        error = 0.0
        if len(runs) > 1 and len(reference) > 1:
            error = math.sqrt(_deviation(runs) ** 2 / len(runs) + _deviation(reference) ** 2 / len(reference))
        allowed = max(2 * error, EQUAL)
        rows.append([case, f"{100 * difference:+.1f}", f"{100 * allowed:.1f}"])
        if abs(difference) > allowed:
            wrong.append(f"{case} differs from {first} by {100 * difference:+.1f} points")
    return rows, wrong


def plot(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Reward of each step, smoothed over five, one panel a case and one line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(found))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axis, (case, runs) in zip(axes.flat, found.items(), strict=False):
        for seed, one in runs.items():
            rewards = one["rewards"]
            smooth = [statistics.mean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
            axis.plot(range(1, len(smooth) + 1), smooth, label=f"seed {seed}", linewidth=1.2)
        axis.set_title(case, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean reward, 5 steps")
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
