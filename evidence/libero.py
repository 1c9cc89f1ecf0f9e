"""GRPO of a vision-language-action policy on LIBERO, iteration by iteration; what resets and steps cost, and how far a
kept simulation's episodes are from a new one's.

What is checked of the iterations: gradients are not zero, weights change, and the policy decides in the next iteration
with the trainer's weights, bit for bit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import _common as common

from rlinf_embodied.conf.libero import INSTALL, find_python

TASKS = ["libero_spatial:0", "libero_object:0", "libero_goal:0", "libero_10:2", "libero_90:0"]
WAYS = {
    "soft": "`reset()` without building anew, the gripper's drive set back, `set_init_state()` (what the plugin does)",
    "gripper kept": "the same, the gripper's drive left as it was",
    "no reset": "`set_init_state()` alone",
}
COSTS = {
    "import": "importing LIBERO",
    "build": "building a simulation (in a new process)",
    "hard reset": "hard reset, `set_init_state()`, 10 steps at rest, one picture of each camera",
    "plain soft reset": "soft reset, `set_init_state()`, a picture of each camera after each of the two",
    "soft reset": "soft reset as the plugin does it: with 10 steps at rest, and pictures at the end alone",
    "step, two cameras": "a step with both pictures",
    "step, one camera": "a step without the wrist's picture",
    "step, one camera, no reflections": "the same, without what the table reflects (`env.reflections=false`)",
    "step, no picture": "a step without pictures",
}


RECIPE = "embodied/grpo_libero_vla"
HERE = Path(__file__).resolve().parent


def trained(python: Path, steps: int) -> dict[str, Any]:
    """Iterations of the recipe with stages that say which weights they have; two evaluated episodes after them."""
    few = ("eval.episodes=2", "eval.num_envs=2", "eval.videos=2", "env.max_episode_steps=64")
    telling = f"program={HERE / '_libero_recipe.py'}:program"
    # env.python is named since this folder has a module called libero, too.
    folder, seconds = common.run_recipe(RECIPE, telling, f"env.python={python}", f"num_steps={steps}", *few)
    print(f"run directory: {folder}")
    found = common.rows(folder, "train")
    return {"steps": found, "after": common.summary(folder)["after"], "seconds": seconds}


def wrong(training: dict[str, Any]) -> list[str]:
    """What does not hold of the iterations."""
    problems = []
    later = [*training["steps"][1:], training["after"]]
    for number, (row, then) in enumerate(zip(training["steps"], later, strict=True), start=1):
        if not row["grad_norm"] > 0.0:
            problems.append(f"iteration {number}: the gradient is zero")
        if not row["weights/changed"]:
            problems.append(f"iteration {number}: no weight changed")
        if row["weights/digest"] != then["policy/digest"] or row["policy/version"] >= then["policy/version"]:
            problems.append(f"iteration {number}: its weights did not reach the policy")
    return problems


def training_text(training: dict[str, Any]) -> str:
    later = [*training["steps"][1:], training["after"]]
    lines = [
        [
            number,
            f"{row['policy/version']:.0f}",
            f"{row['return']:.4f}",
            f"{row['groups/all_failed']:.0f} of {row['groups']:.0f}",
            f"{row['groups/trained']:.0f}",
            f"{row['grad_norm']:.2f}",
            f"{row['weights/changed']:,.0f} of {row['weights/of']:,.0f}",
            f"{row['weights/moved']:.2g}",
            f"{int(row['weights/digest']):012x}",
            f"{int(then['policy/digest']):012x} (version {then['policy/version']:.0f})",
            f"{row['time/step_s']:.1f}",
        ]
        for number, (row, then) in enumerate(zip(training["steps"], later, strict=True), start=1)
    ]
    header = [
        "iteration",
        "version that decided",
        "mean return, m",
        "groups that failed as a whole",
        "groups trained on",
        "gradient norm",
        "numbers that changed",
        "distance in weight space",
        "hash of the trainer's weights after it",
        "of the policy's in the next",
        "s",
    ]
    return (
        f"`{RECIPE}`: the tiny policy, task 0 of the spatial suite, one group of four episodes of 32 steps. The reward "
        "is by how many metres the gripper came nearer to the bowl, and 1 at success. A group in which nobody "
        "succeeds is counted; the distance tells its episodes apart all the same. What follows the last iteration is "
        "the evaluation.\n\n" + common.table(header, lines)
    )


def measured(python: Path, what: str, task: str) -> dict[str, Any]:
    """The answer of ``_libero_run.py`` in LIBERO's own environment."""
    packages = [str(HERE.parent / "packages" / name / "src") for name in ("rlinf-core", "rlinf-embodied")]
    done = subprocess.run(
        [str(python), "-P", str(HERE / "_libero_run.py"), what, task],  # -P: this file is called libero, too
        env={**os.environ, "PYTHONPATH": os.pathsep.join(packages), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def costs_text(costs: dict[str, Any]) -> str:
    return (
        f"Task `{costs['task']}`, pictures of 128 x 128. Seconds of a processor (all threads), and wall time; median "
        f"(min-max) of {len(costs['runs'])} processes.\n\n"
        + common.table(
            ["what", "CPU s", "wall s"],
            [
                [text, *(common.spread([run[clock][name] for run in costs["runs"]]) for clock in ("cpu", "wall"))]
                for name, text in COSTS.items()
            ],
        )
        + "\nMemory of the process (largest resident size), GB: "
        + ", ".join(
            f"{name} {statistics.median(run['memory'][name] for run in costs['runs']):.2f}"
            for name in costs["runs"][0]["memory"]
        )
        + ".\n"
    )


def difference_text(apart: dict[str, Any]) -> str:
    return (
        "How far an episode of a kept simulation is from the same one of a simulation built anew, after another "
        "episode of 40 random steps with the gripper closing: largest difference of the simulator's state (positions, "
        "metres and radians, and velocities) at the beginning and after 10 random steps, and the share of pixels of "
        "the agent's camera that differ then.\n\n"
        + common.table(
            ["task", "way", "state at the beginning", "after 10 steps", "pixels"],
            [
                [task, WAYS[way], f"{found['begin']:.2g}", f"{found['end']:.2g}", f"{found['pixels']:.1%}"]
                for task, ways in apart.items()
                for way, found in ways.items()
            ],
        )
    )


PARTS = {
    "training": ("Training", training_text),
    "costs": ("Resets and steps", costs_text),
    "difference": ("A kept simulation against a new one", difference_text),
}


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--steps", {"type": int, "default": 3, "help": "iterations of training"}),
        ("--rounds", {"type": int, "default": 3, "help": "processes in which costs are measured"}),
        ("--tasks", {"nargs": "+", "default": TASKS}),
        ("--only", {"nargs": "+", "choices": list(PARTS), "default": list(PARTS), "help": "keep the others"}),
    )
    python = find_python()
    if python is None:
        raise SystemExit(f"LIBERO needs a Python environment of its own; {INSTALL} makes it")
    kept = args.out / "data.json"
    data = json.loads(kept.read_text()) if kept.exists() else {}
    first = args.tasks[0]
    for part in args.only:
        began = os.getloadavg()[0]
        if part == "training":
            data[part] = trained(python, args.steps)
        elif part == "costs":
            data[part] = {"task": first, "runs": [measured(python, "cost", first) for _ in range(args.rounds)]}
        else:
            data[part] = {task: measured(python, "difference", task) for task in args.tasks}
        data.setdefault("load", {})[part] = [began, os.getloadavg()[0]]
    text = "\n".join(f"## {title}\n\n{write(data[part])}" for part, (title, write) in PARTS.items() if part in data)
    loads = ", ".join("{}: {:.0f} to {:.0f}".format(part, *data["load"][part]) for part in PARTS if part in data)
    text += f"\nLoad of the machine at begin and end ({os.cpu_count()} cores), {loads}.\n"
    common.write(args.out, "LIBERO: training, resets and steps", text, data)
    if problems := wrong(data["training"]) if "training" in data else []:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
