"""Learning curves of the embodied recipes over seeds, from the command to the evaluated policy.

What is checked: CartPole's evaluated return is at least 475; MetaWorld's reach-v3 succeeds in at least 95 % of 50
evaluated episodes; PushCube's evaluated success lies above the untrained policy's 95 % interval. Evaluation is
deterministic, in environments and from seeds that training has not.

A run that is already in ``--runs`` is not run again, so that an interrupted experiment goes on where it was. The page
keeps the runs of the cases that ``--only`` leaves out, and says of every run when, from which commit and on how busy a
machine it was made.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import _common as common

CASES = {
    "CartPole": "embodied/ppo_cartpole",
    "MetaWorld reach-v3": "embodied/ppo_reach",
    "ManiSkill PushCube": "embodied/ppo_pushcube",
}
AIMS = {"CartPole": 120.0, "MetaWorld reach-v3": 240.0}
"""Seconds from the command to the end that are aimed at on two cores."""
MADE = ("date", "commit")
METRIC = {"CartPole": "return", "MetaWorld reach-v3": "success_once", "ManiSkill PushCube": "success_once"}


def run(case: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One run: evaluations before, within and after, and what training episodes came to at each step."""
    made = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit()}
    load = os.getloadavg()[0]
    folder, seconds = common.run_recipe(CASES[case], f"seed={seed}", *overrides)
    said, steps = common.summary(folder), common.rows(folder, "train")
    metric = METRIC[case]
    known = [row for row in steps if metric in row]
    spent = list(accumulate(row["time/step_s"] for row in steps))
    return {
        "before": {k: v for k, v in said["before"].items() if not k.startswith("time")},
        "after": {k: v for k, v in said["after"].items() if not k.startswith("time")},
        "wall_s": seconds,
        "train_s": spent[-1],
        "env_steps": sum(row["env_steps"] for row in steps),
        "steps": [row["step"] for row in known],
        "seconds": [spent[steps.index(row)] for row in known],
        "values": [row[metric] for row in known],
        "overrides": overrides,
        "load": [load, os.getloadavg()[0]],
        **made,
    }


def commit() -> str:
    """The checked-out commit, and whether files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + (" with uncommitted changes" if git("status", "--porcelain", "-uno") else "")


def known_runs(out: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs that the page has; those that do not say how they were made were made as ``provenance.json`` says."""
    if not (out / "data.json").exists():
        return {}
    file = out / "provenance.json"
    said = json.loads(file.read_text()) if file.exists() else {"date": "unknown", "commit": "unknown"}
    made = {key: said[key] for key in MADE if key in said}
    return {
        case: {int(seed): {**made, **one} for seed, one in runs.items()}
        for case, runs in json.loads((out / "data.json").read_text()).items()
    }


def wrong(case: str, one: dict[str, Any]) -> str:
    """Why a run is not what the docs say; empty where it is."""
    before, after = one["before"], one["after"]
    if case == "CartPole":
        return "" if after["return"] >= 475 else f"evaluated return {after['return']:.1f}, not 475"
    if case == "MetaWorld reach-v3":
        return "" if after["success_once"] >= 0.95 else f"evaluated success {after['success_once']:.1%}, not 95 %"
    limit = before["success_once/high"]
    good = after["success_once"] > limit
    return "" if good else f"evaluated success {after['success_once']:.1%}, within the untrained policy's {limit:.1%}"


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--seeds", {"type": int, "nargs": "+", "default": [0, 1, 2]}),
        ("--only", {"default": "", "help": "cases whose name has this in it"}),
        ("--runs", {"type": Path, "default": Path("runs/embodied_learning"), "help": "one file per finished run"}),
        ("overrides", {"nargs": "*", "help": "key=value given to every run"}),
    )
    args.runs.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if args.only.lower() in case.lower()]
    before = known_runs(args.out)
    found = {case: before.get(case, {}) if case not in cases else {} for case in CASES}
    for seed in args.seeds:
        for case in cases:
            kept = args.runs / f"{CASES[case].rpartition('/')[2]}-{seed}.json"
            if not kept.exists():
                kept.write_text(json.dumps(run(case, seed, args.overrides)))
            one = found[case][seed] = json.loads(kept.read_text())
            print(f"[{time.strftime('%H:%M:%S')}] {case}, seed {seed}: {_shown(case, one)}", flush=True)
    found = {case: runs for case, runs in found.items() if runs}
    problems = [
        f"{case}, seed {seed}: {why}"
        for case, runs in found.items()
        for seed, one in runs.items()
        if (why := wrong(case, one))
    ]
    lines = [
        [
            case,
            seed,
            f"{one['before'][METRIC[case]]:.3g}",
            f"{one['after'][METRIC[case]]:.3g} ({_interval(case, one)})",
            f"{one['after']['success_at_end']:.0%}",
            f"{one['env_steps']:,.0f}",
            f"{one['train_s']:.0f}",
            f"{one['wall_s']:.0f}",
            "{:.0f} to {:.0f}".format(*one["load"]) if "load" in one else "",
            f"{one['date']}, {one['commit'][:7]}{'+' if ' ' in one['commit'] else ''}",
        ]
        for case, runs in found.items()
        for seed, one in runs.items()
    ]
    header = [
        "case",
        "seed",
        "before",
        "after (95 % interval)",
        "success at end",
        "env steps",
        "training in s",
        "wall in s",
        "load",
        "made",
    ]
    aims = [
        f"- {case}: {statistics.median(one['wall_s'] for one in runs.values()):.0f} s from the command to the end "
        f"(median), {AIMS[case]:.0f} s were aimed at."
        for case, runs in found.items()
        if case in AIMS
    ]
    text = (
        "Evaluated return (CartPole) or share of successful episodes of 50, with the likeliest actions. Load: how "
        "many processes wanted one of the cores at begin and end, where it was kept; made: date and commit, with a + "
        "where files differed from it.\n\n"
        + common.table(header, lines)
        + "\n"
        + "\n".join(aims)
        + "\n\n![training episodes of every step, and the evaluation after training](curves.png)\n"
    )
    plot(found, args.out / "curves.png")
    common.write(args.out, "Embodied learning over seeds", text, found)
    if problems:
        raise SystemExit("\n".join(problems))


def _shown(case: str, one: dict[str, Any]) -> str:
    metric = METRIC[case]
    return f"{metric} {one['before'][metric]:.3g} -> {one['after'][metric]:.3g} in {one['wall_s']:.0f} s"


def _interval(case: str, one: dict[str, Any]) -> str:
    metric = METRIC[case]
    return f"{one['after'][f'{metric}/low']:.3g} to {one['after'][f'{metric}/high']:.3g}"


def plot(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """One panel a case and one line a seed, over seconds of training; the evaluation after it as a point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(found), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (case, runs) in zip(axes, found.items(), strict=True):
        for place, (seed, one) in enumerate(runs.items()):
            values = one["values"]
            smooth = [statistics.mean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
            axis.plot(one["seconds"], smooth, color=f"C{place}", label=f"seed {seed}", linewidth=1.2)
            low, high = (one["after"][f"{METRIC[case]}/{end}"] for end in ("low", "high"))
            axis.plot([one["train_s"]] * 2, [low, high], color=f"C{place}", linewidth=1)
            axis.plot([one["train_s"]], [one["after"][METRIC[case]]], color=f"C{place}", marker="o")
        axis.set_title(case, fontsize=10)
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("return" if METRIC[case] == "return" else "success once")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
