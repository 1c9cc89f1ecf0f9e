"""Accuracy of the main job over seeds, its wall time, and where a step's time goes."""

from __future__ import annotations

import shutil
import statistics

import _common as common

RECIPE = "reasoning/grpo_arithmetic"
PARTS = {
    "generation": ["time/generate_s"],
    "reward": ["time/score_s"],
    "training": ["time/train_s"],
    "weight sync": ["time/publish_weights_s", "time/receive_weights_s"],
    "switching": ["time/switch_s"],
    "framework (no task running)": ["time/framework_s"],
}


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--seeds", {"type": int, "nargs": "+", "default": [0, 1, 2]}),
        ("overrides", {"nargs": "*", "help": "key=value given to the recipe"}),
    )
    data, lines, folder = {}, [], None
    for seed in args.seeds:
        folder, seconds = common.run_recipe(RECIPE, f"seed={seed}", *args.overrides)
        said = common.summary(folder)
        before, after = (said[when]["accuracy"] for when in ("before", "after"))
        steps = common.rows(folder, "train")
        data[seed] = {"before": before, "after": after, "wall_s": seconds, "steps": len(steps)}
        lines.append([seed, f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f}", f"{seconds:.0f} s"])
        shutil.copy(folder / "run.png", args.out / f"seed-{seed}.png")
    assert folder is not None
    step = statistics.median(row["time/step_s"] for row in steps)
    parts = {
        name: statistics.median(sum(row.get(key, 0.0) for key in keys) for row in steps) for name, keys in PARTS.items()
    }
    rest = step - sum(parts.values())
    split = [[name, f"{1000 * value:.1f}", f"{value / step:.1%}"] for name, value in parts.items()]
    split.append(["waiting (items on their way, stages not overlapping)", f"{1000 * rest:.1f}", f"{rest / step:.1%}"])
    split.append(["whole step", f"{1000 * step:.1f}", "100 %"])
    text = (
        "Greedy accuracy on 256 problems that no phase has trained on; wall time of the whole command.\n\n"
        + common.table(["seed", "before", "after", "points", "wall"], lines)
        + f"\nWhere a step's time goes (medians of {len(steps)} steps, slowest rank of each stage, last seed):\n\n"
        + common.table(["part", "ms", "share"], split)
    )
    common.write(args.out, "Main job: GRPO on arithmetic", text, {"seeds": data, "step_s": step, "parts_s": parts})
    worst = min(entry["after"] - entry["before"] for entry in data.values())
    if worst < 0.30:
        raise SystemExit(f"a seed rose by {100 * worst:.1f} points only, at least 30 are claimed")


if __name__ == "__main__":
    main()
