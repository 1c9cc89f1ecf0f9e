"""Plans of embodied PPO: which of temporal, spatial and hybrid is fastest where simulators are heavy and where training
is, what was predicted, and what ``plan=auto`` chose; and two sub-batches of environments against one."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from _common import arguments, rows, run_recipe, table, write
from _m2flow_page import auto_table, error_table, gantt, prediction_table
from _m2flow_workloads import WORKLOADS, Case, Workload, cycle, leaf, pipe, share
from m2flow import Experiment

from rlinf_sched.cycles import round_seconds

RECIPE = "evidence/_embodied_recipe.py"
SIM, POLICY, ACTOR = "simulator", "policy", "actor"
CASES = (
    Case("6 + 2 devices, sub-batches of 2", share(cycle(leaf(SIM, "0-5"), leaf(POLICY, "6-7"), 2), leaf(ACTOR, "0-7"))),
    Case("3 + 2 + 3 devices", pipe(cycle(leaf(SIM, "0-2"), leaf(POLICY, "3-4"), 4), leaf(ACTOR, "5-7"), 24)),
)


def waiting(stage: str, **seconds: float) -> list[str]:
    return [f"waits.{stage}.{key}={value}" for key, value in seconds.items()]


SETTINGS = {
    "simulator_heavy": [  # simulators share the host's cores: more ranks step no more environments a second
        *waiting(SIM, fixed=0.005, item=0.006, power=1.0, tail=0.3),
        *waiting(POLICY, fixed=0.005, item=0.02),
        *waiting(ACTOR, fixed=0.05, item=0.01),
    ],
    "training_heavy": [
        *waiting(SIM, fixed=0.003, item=0.006, tail=0.3),
        *waiting(POLICY, fixed=0.003, item=0.006),
        *waiting(ACTOR, fixed=0.05, item=0.2, log2=0.02),
    ],
}
MINE = {
    name: Workload(RECIPE, 8, "2,4,8", CASES, (), overrides=("env.id=CartPole-v1", *overrides))
    for name, overrides in SETTINGS.items()
}


ABOUT = """Seconds of a step on eight virtual devices: 24 environments make 10 steps each, then the policy is trained.
Environments, policy, channels and program are the shipped ones; every stage also waits for as long as a heavier one
would compute, and the trainer only waits. Everything runs in threads of one process, profile and runs with different
seeds. In `simulator_heavy` simulators share the host's cores: more ranks of them step no more environments a second.
Temporal: simulators and policies in turn on the same devices, then the trainer on them. Hybrid: simulators and
policies apart, in sub-batches, then the trainer on all devices. Spatial: the trainer has devices of its own, which
are idle until the whole batch is there.
"""


# ------------------------------------------------------------------ two sub-batches


APART = {"name": "apart", "tree": share(cycle(leaf(SIM, "0"), leaf(POLICY, "1"), None), leaf(ACTOR, "0"))}
BLOCK = ("env.id=CartPole-v1", "num_envs=8", *waiting(ACTOR, item=0.0))
VLA = (
    "model=vla",
    "model.chunk=1",
    "model.tiny.hidden_size=256",
    "model.tiny.layers=4",
    "algorithm.reward_level=chunk",
)
SEEN = ("pictures=true", "env.max_episode_steps=50", *waiting(POLICY, fixed=0.0, item=0.0))
STAGES = {
    "waits, inference-heavy": (
        RECIPE,
        [*BLOCK, "rollout_steps=20", *waiting(SIM, fixed=0.0, item=0.006), *waiting(POLICY, fixed=0.01, item=0.01)],
    ),
    "waits, as heavy as each other": (
        RECIPE,
        [*BLOCK, "rollout_steps=20", *waiting(SIM, fixed=0.0, item=0.01), *waiting(POLICY, fixed=0.0, item=0.01)],
    ),
    "the tiny VLA on pictures; simulators wait": (
        RECIPE,
        [*BLOCK, *VLA, *SEEN, "rollout_steps=8", *waiting(SIM, fixed=0.0, item=0.015)],
    ),
    "waits, short": (
        RECIPE,
        [*BLOCK, "rollout_steps=60", *waiting(SIM, fixed=0.0, item=0.001), *waiting(POLICY, fixed=0.0, item=0.001)],
    ),
}


ABOUT_STAGES = """One simulator and one policy, eight environments, on a device each: all at once (`num_stages=1`), or
in two halves, of which one is stepped while the policy answers for the other. The bound is
(a + s) / max(2 max(a', s'), a' + s'), with a and s the measured milliseconds of stepping and inference of all, a' and
s' of a half. The rest of a turn is what it takes beyond them: four messages through the hub, and waiting for a core.
"""


def one_rollout(name: str, stages: int, steps: int, threads: bool) -> dict[str, float]:
    """Seconds of a rollout, and of its stepping, inference and the rest, means over the steps after the first."""
    recipe, overrides = STAGES[name]
    file = Path(tempfile.mkdtemp(prefix="rlinf-stages-")) / "apart.yaml"
    file.write_text(json.dumps(APART))
    more = [f"plan={file}", "cluster.virtual_devices=2", f"num_stages={stages}", f"num_steps={steps + 1}"]
    more += ["cluster.debug=true"] if threads else []
    folder, _ = run_recipe(recipe, *overrides, *more, "loggers=[jsonl]")
    found = rows(folder, "train")[1:]
    rollout = [row["rollout/env_steps"] / row["rollout/env_steps_per_s"] for row in found]
    turns = int(next(o.split("=")[1] for o in overrides if o.startswith("rollout_steps=")))
    return {
        "rollout": statistics.median(rollout),
        "least": min(rollout),
        "most": max(rollout),
        "stepping": statistics.median(row["rollout/stepping_s"] for row in found) / turns / stages,
        "inference": statistics.median(row["rollout/inference_s"] for row in found) / turns / stages,
        "turns": float(turns),
    }


def compare_stages(steps: int, repeats: int, threads: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in STAGES:
        runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for _ in range(repeats):
            for stages in runs:  # in turn, so that a slow minute of the machine meets both
                runs[stages].append(one_rollout(name, stages, steps, threads))
        found[name] = {str(stages): some for stages, some in runs.items()}
    return found


def stages_table(found: Mapping[str, Any]) -> str:
    lines = []
    for name, runs in found.items():
        one, two = (_median(runs[k]) for k in ("1", "2"))
        rest = one["rollout"] / one["turns"] - one["stepping"] - one["inference"]
        whole = one["stepping"] + one["inference"]
        bound = whole / float(round_seconds(two["stepping"], two["inference"], 2))
        with_hub = (whole + rest) / float(round_seconds(two["stepping"], two["inference"], 2, rest))
        lines.append(
            (
                name,
                *(f"{1e3 * one[key]:.1f}" for key in ("stepping", "inference")),
                f"{1e3 * rest:.1f}",
                *(f"{1e3 * two[key]:.1f}" for key in ("stepping", "inference")),
                f"{1e3 * one['rollout'] / one['turns']:.1f}",
                f"{1e3 * two['rollout'] / two['turns']:.1f}",
                f"{one['rollout'] / two['rollout']:.2f}",
                f"{bound:.2f}",
                f"{with_hub:.2f}",
            )
        )
    header = (
        "setting", "step ms", "infer ms", "rest of a turn ms", "step ms of a half", "infer ms of a half",
        "turn ms, one stage", "turn ms, two", "speed-up", "bound by a and s", "with the rest of a turn",
    )  # fmt: skip
    return table(header, lines)


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


# ------------------------------------------------------------------ all of it


class Plans(Experiment):
    """As of ``m2flow``, but one profile does for all: ``auto`` is the plan that ``plan=auto`` would take from it."""

    profiles: Path | None = None
    """Where profiles of an earlier run are, by name, to be taken instead of making one."""

    def run(self) -> None:
        self.charted = True
        if self.profiles is None:
            self._timed("profile", self._profile)
        else:
            shutil.copytree(self.profiles / self.name, self.root / "profile")
        self._timed("plan", self._plan)
        self._planned("auto", self.workload.devices, "best")
        self.plans["auto"]["family"] = yaml.safe_load(self.plans["auto"]["plan"])["name"]
        for _ in range(self.repeats):  # interleaved, so that a slow minute of the machine meets all of them
            for label in self.plans:
                self._timed("compare", partial(self._measure, label))
            self._save()


def main() -> None:
    options = arguments(
        __doc__ or "",
        ("--only", {"choices": [*MINE, "stages"], "nargs": "+", "help": "these; the others keep what they have"}),
        ("--ray", {"action": "store_true", "help": "a process for every rank, instead of threads of one"}),
        ("--steps", {"type": int, "default": 5, "help": "measured steps of a run"}),
        ("--repeats", {"type": int, "default": 2, "help": "runs of each plan that is compared"}),
        ("--profiles", {"type": Path, "help": "folder NAME/profile.json, NAME/problem.json of an earlier profile"}),
        ("--show", {"action": "store_true", "help": "run nothing: tables and charts of what is there"}),
    )
    chosen = [] if options.show else options.only or [*MINE, "stages"]
    WORKLOADS.update(MINE)
    threads = not options.ray
    todo = [Plans(name, options.out, options.steps, options.repeats, threads) for name in MINE if name in chosen]
    for one in todo:
        one.profiles = options.profiles
    busy = [os.getloadavg()[0]]
    with ThreadPoolExecutor(len(MINE)) as pool:  # stages that wait do not disturb each other
        list(pool.map(Plans.run, todo))
    stages = options.out / "stages.json"
    if "stages" in chosen:
        stages.write_text(json.dumps(compare_stages(options.steps, options.repeats, threads), indent=2) + "\n")
    busy.append(os.getloadavg()[0])
    files = {name: options.out / f"{name}.json" for name in MINE}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    parts = [ABOUT]
    if found:
        parts += [auto_table(found), error_table(found), prediction_table(found)]
    for name, data in found.items():
        gantt(data["panels"], options.out / f"{name}.png", f"{name}: one measured step, eight devices")
        parts.append(f"![{name}]({name}.png)\n")
    if stages.exists():
        parts += ["## Two sub-batches against one\n", ABOUT_STAGES, stages_table(json.loads(stages.read_text()))]
    load = options.out / "load.json"
    if chosen:
        load.write_text(json.dumps({"load": busy, "cores": os.cpu_count()}) + "\n")
    said: dict[str, Any] = json.loads(load.read_text()) if load.exists() else {"load": [0.0, 0.0], "cores": 0}
    before, after = said["load"]
    parts.append(f"Load of the machine at begin and end: {before:.1f} and {after:.1f} on {said['cores']} cores.\n")
    write(options.out, "Plans of embodied PPO", "\n".join(parts), {"settings": SETTINGS, "load": said})


if __name__ == "__main__":
    main()
