"""Does the planner know what a plan will take, and does ``plan=auto`` find the best? Four workloads of sleeping stages
(examples/m2flow) on eight virtual devices and GRPO with real models on two: profiled, planned, predicted, run."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _common import RLINF, arguments, rows, write
from _m2flow_page import auto_table, error_table, gantt, prediction_table, refresh, scatter, step_bars
from _m2flow_workloads import FAMILIES, WORKLOADS

from rlinf_sched import Profile
from rlinf_sched.planread import read_plan
from rlinf_sched.problemfile import problem_from_dict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "m2flow.md"
PROFILE_SEED, RUN_SEED = 0, 1  # times are drawn by seed: what is measured is not what was profiled
PROFILE_STEPS = 4
CHARTED = "ppo"  # the workload whose Gantt charts are drawn
MODES = {"auto": "auto", "plan=temporal": "temporal", "plan=spatial": "spatial"}  # what comes without a plan file


# ------------------------------------------------------------------ one workload


class Experiment:
    """Profiles, plans and runs one workload; ``plans`` collects what is found."""

    def __init__(self, name: str, out: Path, steps: int, repeats: int, threads: bool) -> None:
        self.name, self.out, self.workload = name, out, WORKLOADS[name]
        self.steps, self.repeats = steps, repeats
        self.root = Path(tempfile.mkdtemp(prefix=f"rlinf-m2flow-{name}-"))
        self.common = [f"cluster.virtual_devices={self.workload.devices}", "loggers=[jsonl]", *self.workload.overrides]
        self.threads = threads and self.workload.sleeps
        self.common += ["cluster.debug=true"] if self.threads else []
        self.plans: dict[str, dict[str, Any]] = {}
        self.panels: dict[str, Any] = {}
        self.explanation = ""
        self.ray_steps: list[float] = []
        self.ray_seconds = 0.0
        self.charted = name == CHARTED
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        self._timed("profile", self._profile)
        self._timed("plan", self._plan)
        for number in range(self.repeats):  # interleaved, so that a slow minute of the machine meets all of them
            for label in (*self.workload.families, "auto"):
                self._timed("compare", partial(self._measure, label))
            self._say(f"round {number + 1} of {self.repeats} done")
        for label in (*MODES, *self.plans):
            if label not in self.plans or not self.plans[label]["runs"]:
                self._timed("others", partial(self._measure, label))
        self._save()

    def run_under_ray(self) -> None:
        """The plan that ``plan=auto`` found once more, with a process for every rank."""
        self.common.remove("cluster.debug=true")
        folder = self._go("under-ray", self.plans["auto"]["file"], self.workload.devices, RUN_SEED)
        self.ray_steps = [row["time/step_s"] for row in rows(folder, "train")[1:]]
        self.ray_seconds = json.loads((folder / "summary.json").read_text())["seconds"]
        self._say(f"under Ray: measured {statistics.fmean(self.ray_steps):.2f} s")
        self._save()

    def _save(self) -> None:
        data = {
            "workload": self.name,
            "recipe": self.workload.recipe,
            "overrides": self.workload.overrides,
            "threads": self.threads,
            "steps": self.steps,
            "seconds": self.seconds,
            "plans": list(self.plans.values()),
            "explanation": self.explanation,
            "panels": self.panels,
            "ray_steps": self.ray_steps,
            "ray_seconds": self.ray_seconds,
        }
        (self.out / f"{self.name}.json").write_text(json.dumps(data, indent=2) + "\n")

    def _profile(self) -> None:
        w = self.workload
        where = ["--devices", w.profile_devices, "--out", str(self.root / "profile")]
        self._rlinf("profile", w.recipe, *self.common, f"seed={PROFILE_SEED}", f"profile.steps={PROFILE_STEPS}", *where)

    def _plan(self) -> None:
        w = self.workload
        self.explanation = self._rlinf("plan", *self._profiled())
        for family in w.families:
            self._planned(family, w.devices, family)
        for count in w.other_devices:
            self._planned(f"best on {count} devices", count, "best")
        for case in w.cases:
            file = self.root / f"{len(self.plans)}.yaml"
            data = {"name": case.label, "cpu": case.cpu, "cpu_portion": case.cpu_portion, "tree": case.tree}
            file.write_text(json.dumps({key: value for key, value in data.items() if value}, indent=2))
            self._add(case.label, file, w.devices, "by hand")

    def _planned(self, label: str, devices: int, family: str) -> None:
        file = self.root / f"{len(self.plans)}.yaml"
        options = ["--out", str(file), *(["--devices", str(devices)] if devices != self.workload.devices else [])]
        options += ["--family", family] if family in FAMILIES else []
        self._rlinf("plan", *self._profiled(), *options)
        self._add(label, file, devices, family)

    def _profiled(self) -> list[str]:
        place = self.root / "profile"
        return [str(place / "problem.json"), "--profile", str(place / "profile.json")]

    def _add(self, label: str, file: Path, devices: int, family: str) -> None:
        self.plans[label] = {
            "label": label,
            "family": family,
            "devices": devices,
            "profiled": self._was_profiled(_yaml(file)),
            "file": str(file),
            "plan": file.read_text(),
            "predicted": self._predict(file, devices),
            "runs": [],
        }

    def _predict(self, file: Path, devices: int) -> float:
        more = ["--devices", str(devices)] if devices != self.workload.devices else []
        said = self._rlinf("simulate", *self._profiled(), "--plan", str(file), *more)
        found = re.search(r": ([0-9.e+-]+) s( \(|$)", said.splitlines()[0])
        if found is None:
            raise RuntimeError(f"rlinf simulate does not say the seconds:\n{said}")
        return float(found[1])

    def _was_profiled(self, data: Mapping[str, Any]) -> bool:
        """Whether every stage was profiled on as many devices and with the same portion."""
        profile = Profile.load(self.root / "profile" / "profile.json")
        problem, _ = problem_from_dict(_yaml(self.root / "profile" / "problem.json"), profile)
        seen = {(sample.stage, sample.devices, sample.each) for sample in profile.samples}
        whole = {(sample.stage, sample.devices) for sample in profile.samples if sample.portion >= problem.items}
        for name, placed in read_plan(data, problem).stages.items():
            at = (name, len(placed.devices))
            if (*at, placed.portion or 0) not in seen and not (placed.portion is None and at in whole):
                return False
        return True

    # ------------------------------------------------------------ running

    def _measure(self, label: str) -> None:
        plan = self.plans.get(label)
        number = len(plan["runs"]) if plan else 0
        spec = MODES[label] if plan is None else plan["file"]
        count = self.workload.devices if plan is None else plan["devices"]
        name = f"{re.sub('[^a-z0-9]+', '-', label)}-{number}"
        folder = self._go(name, spec, count, RUN_SEED + number)
        if plan is None:
            file = folder / "plan.yaml"
            self._add(label, file, count, kind(_yaml(file)["tree"]))
            plan = self.plans[label]
        steps = rows(folder, "train")[1:]  # the first loads everything
        plan["runs"].append([row["time/step_s"] for row in steps])
        if self.charted and label in (*FAMILIES, "auto"):
            middle = sorted(steps, key=lambda row: row["time/step_s"])[len(steps) // 2]
            self.panels[label] = step_bars(folder, middle["step"], middle["time/step_s"])
        mean = statistics.fmean(plan["runs"][-1])
        self._say(f"{label}: measured {mean:.2f} s, predicted {plan['predicted']:.2f} s")

    def _go(self, name: str, plan: str, devices: int, seed: int) -> Path:
        """One run; returns its directory."""
        place = self.root / f"run-{name}"
        more = [f"plan={plan}", f"num_steps={self.steps + 1}", f"run_dir={place}", f"seed={seed}"]
        self._rlinf("run", self.workload.recipe, *self.common, f"cluster.virtual_devices={devices}", *more)
        recipe = self.workload.recipe
        (folder,) = (place / (Path(recipe).stem if recipe.endswith(".py") else recipe)).iterdir()
        return folder

    def _rlinf(self, *options: str) -> str:
        done = subprocess.run([*RLINF, *options], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"rlinf {' '.join(options)} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def _timed(self, what: str, do: Callable[[], None]) -> None:
        began = time.perf_counter()
        do()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def _say(self, text: str) -> None:
        print(f"[{self.name}] {text} ({sum(self.seconds.values()):.0f} s so far)", flush=True)


def _yaml(file: Path) -> dict[str, Any]:
    import yaml

    data: dict[str, Any] = yaml.safe_load(file.read_text())
    return data


def kind(tree: Mapping[str, Any]) -> str:
    """Family of a plan's tree: only shares are temporal, none is spatial."""
    kinds = set(_kinds(tree))
    shared = "share" in kinds
    beside = bool(kinds & {"pipe", "parallel"})
    return "hybrid" if shared and beside else "temporal" if shared else "spatial"


def _kinds(node: Mapping[str, Any]) -> Sequence[str]:
    ((name, body),) = node.items()
    inner = [side for side in body.values() if isinstance(side, Mapping)] if name != "leaf" else []
    return [name, *(found for side in inner for found in _kinds(side))]


# ------------------------------------------------------------------ all of them


def main() -> None:
    options = arguments(
        __doc__ or "",
        ("--only", {"choices": WORKLOADS, "nargs": "+", "help": "these workloads; the others keep what they have"}),
        ("--threads", {"action": "store_true", "help": "sleeping stages as threads of one process instead of Ray"}),
        ("--jobs", {"type": int, "default": 1, "help": "workloads at a time (those that sleep, with --threads)"}),
        ("--steps", {"type": int, "default": 6, "help": "measured steps of a run"}),
        ("--repeats", {"type": int, "default": 2, "help": "runs of each plan that is compared"}),
        ("--show", {"action": "store_true", "help": "run nothing: tables, charts and page of what is there"}),
    )
    chosen = [] if options.show else options.only or list(WORKLOADS)

    todo = [Experiment(name, options.out, options.steps, options.repeats, options.threads) for name in chosen]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(Experiment.run, [one for one in todo if one.workload.sleeps]))
    for one in todo:  # alone: models compute, or many processes start
        if not one.workload.sleeps:
            one.run()
        elif one.threads:
            one.run_under_ray()
    files = {name: options.out / f"{name}.json" for name in WORKLOADS}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    tables = {"auto": auto_table(found), "errors": error_table(found), "predictions": prediction_table(found)}
    scatter(found, options.out / "predicted.png")
    if CHARTED in found:
        gantt(found[CHARTED]["panels"], options.out / "gantt.png", f"{CHARTED}: one measured step, eight devices")
    if CHARTED in found:
        refresh(PAGE, {**tables, "explanation": f"```\n{found[CHARTED]['explanation'].strip()}\n```\n"})
    short = {
        name: {key: data[key] for key in ("steps", "seconds", "overrides", "ray_seconds")}
        for name, data in found.items()
    }
    write(options.out, "M2Flow: predicted and measured", "\n".join(tables.values()), short)


if __name__ == "__main__":
    main()
