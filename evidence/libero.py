"""What LIBERO's resets and steps cost, and how far a kept simulation's episodes are from a new one's."""

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


def measured(python: Path, what: str, task: str) -> dict[str, Any]:
    """The answer of ``_libero_run.py`` in LIBERO's own environment."""
    here = Path(__file__).resolve().parent
    packages = [str(here.parent / "packages" / name / "src") for name in ("rlinf-core", "rlinf-embodied")]
    done = subprocess.run(
        [str(python), "-P", str(here / "_libero_run.py"), what, task],  # -P: this file is called libero, too
        env={**os.environ, "PYTHONPATH": os.pathsep.join(packages), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    args = common.arguments(
        __doc__ or "", ("--rounds", {"type": int, "default": 3}), ("--tasks", {"nargs": "+", "default": TASKS})
    )
    python = find_python()
    if python is None:
        raise SystemExit(f"LIBERO needs a Python environment of its own; {INSTALL} makes it")
    runs = [measured(python, "cost", args.tasks[0]) for _ in range(args.rounds)]
    costs = {name: [run["cpu"][name] for run in runs] for name in COSTS}
    walls = {name: [run["wall"][name] for run in runs] for name in COSTS}
    memory = {name: [run["memory"][name] for run in runs] for name in runs[0]["memory"]}
    apart = {task: measured(python, "difference", task) for task in args.tasks}
    text = (
        f"Task `{args.tasks[0]}`, pictures of 128 x 128. Seconds of a processor (all threads), and wall time; "
        f"median (min-max) of {args.rounds} processes.\n\n"
        + common.table(
            ["what", "CPU s", "wall s"],
            [[text, common.spread(costs[name]), common.spread(walls[name])] for name, text in COSTS.items()],
        )
        + "\nMemory of the process (largest resident size), GB: "
        + ", ".join(f"{name} {statistics.median(found):.2f}" for name, found in memory.items())
        + ".\n\nHow far an episode of a kept simulation is from the same one of a simulation built anew, after another "
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
    data = {"cpu": costs, "wall": walls, "memory": memory, "difference": apart}
    common.write(args.out, "LIBERO: resets and steps", text, data)


if __name__ == "__main__":
    main()
