"""``rlinf profile``, and ``plan=auto`` of ``rlinf run``: a recipe is measured by a few short runs, then planned.

Everything is counted in items of the step (what is fed: prompts, say). A stage that reads more items than were fed (the
samples of the prompts) has that as its ``per_item``; its portions are converted when the plan is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_sched.explain import explain
from rlinf_sched.export import to_plan
from rlinf_sched.graph import SchedError
from rlinf_sched.planner import plan
from rlinf_sched.problemfile import problem_from_dict
from rlinf_sched.profile import Profile, ProfileSample

if TYPE_CHECKING:
    from rlinf_core.config import Config
    from rlinf_core.graph import FlowGraph

PHASE = "train"
WARM_UP_STEPS = 1
"""Steps at the beginning of each short run that are not counted: they compile, allocate and warm caches."""


@dataclass
class Step:
    """What one stage did in one step, over all its ranks and tasks."""

    items: int = 0
    seconds: float = 0.0
    switch: float = 0.0
    peak: int = 0


@dataclass
class Observed:
    """Collects the calls of one short run."""

    steps: dict[tuple[int, str], Step] = field(default_factory=lambda: defaultdict(Step))

    def __call__(self, call: Any, results: Sequence[Any]) -> None:
        phase, _, index = call.step.partition("/")
        if phase != PHASE or int(index) < WARM_UP_STEPS:
            return
        entry = self.steps[int(index), call.group]
        times = [result.times for result in results]
        entry.seconds += max(t.work for t in times)
        entry.switch += max(t.switch for t in times)
        entry.peak = max(entry.peak, *(t.peak_bytes for t in times))
        if call.task != "receive_weights":
            entry.items += sum(t.items for t in times)


def hardware() -> str:
    """A fingerprint of this machine: times of another kind are no evidence here."""
    return f"{platform.machine()}/{os.cpu_count()} cores"


def measure(
    cfg: Config, recipe: str, devices: Sequence[int], portions: Sequence[int | None], out: Path
) -> tuple[Profile, dict[str, Any]]:
    """Short runs of a recipe at each device count and portion; returns the profile and the problem it describes.

    Raises SchedError when the recipe has no ``train`` phase, and what a run raises.
    """
    from rlinf_core import runner
    from rlinf_core.config import Config

    _, graph, _ = runner.prepare(cfg, out)
    if PHASE not in graph.phases:
        raise SchedError(f"the recipe has no phase {PHASE!r} to profile; it has {', '.join(graph.phases)}")
    samples: list[ProfileSample] = []
    fed = 0
    per_item: dict[str, float] = {}
    for count in devices:
        for portion in portions:
            observed = Observed()
            short = Config(short_settings(cfg, count, portion, out))
            print(f"profile: {count} device(s), portion {portion or 'all'}", file=sys.stderr)
            runner.run(short, recipe, observe=observed)
            fed, per_item = _sizes(graph, observed)
            samples += _samples(graph, observed, count, portion, fed)
    profile = Profile(graph.fingerprint(), hardware(), tuple(samples))
    return profile, problem_of(graph, max(devices), fed, per_item)


def short_settings(cfg: Config, devices: int, portion: int | None, out: Path) -> dict[str, Any]:
    """The recipe's configuration for one short run: temporal, so that every stage gets all the devices."""
    data = cfg.to_dict()
    _merge(data, cfg.profile.overrides.to_dict(), "profile.overrides")
    data["num_steps"] = WARM_UP_STEPS + cfg.profile.steps
    data["plan"], data["portion"], data["placement"] = "temporal", portion, {}
    data["run_dir"], data["loggers"] = str(out / "runs"), ["jsonl"]
    data["checkpoint"]["every"] = 0
    if data["cluster"]["virtual_devices"]:
        data["cluster"]["virtual_devices"] = devices
    return data


def _merge(data: dict[str, Any], changes: dict[str, Any], where: str) -> None:
    for key, value in changes.items():
        if key not in data:
            raise SchedError(f"{where}.{key}: there is no such key in this recipe")
        if isinstance(value, dict) and isinstance(data[key], dict):
            _merge(data[key], value, f"{where}.{key}")
        else:
            data[key] = value


def _sizes(graph: FlowGraph, observed: Observed) -> tuple[int, dict[str, float]]:
    """Items fed in a step, and what each stage reads for one of them."""
    phase = graph.phases[PHASE]
    reads: dict[str, int] = defaultdict(int)
    for (_, stage), step in observed.steps.items():
        reads[stage] = max(reads[stage], step.items)
    heads = {phase.calls[r].group for channel in phase.feeds for r in phase.readers(channel)}
    fed = max((reads[name] for name in heads), default=0) or max(reads.values(), default=0)
    if not fed:
        raise SchedError("no stage read any item in the profiled steps: nothing to plan by")
    return fed, {name: reads[name] / fed for name in graph.stages if reads.get(name)}


def _samples(graph: FlowGraph, observed: Observed, devices: int, portion: int | None, fed: int) -> list[ProfileSample]:
    found = []
    for (_, name), step in sorted(observed.steps.items()):
        stage = graph.stages[name]
        whole = portion is None or stage.barrier == "batch" or step.items <= portion
        taken = fed if whole else max(1, round(fed * (portion or 1) / step.items))
        count = devices if stage.device else 0
        found.append(
            ProfileSample(name, count, taken, fed, step.seconds, step.peak if stage.device else 0, step.switch)
        )
    return found


def problem_of(graph: FlowGraph, devices: int, fed: int, per_item: dict[str, float]) -> dict[str, Any]:
    """The problem file's data: stages, edges, devices and items; costs come from the profile."""
    used = {call.group for call in graph.phases[PHASE].calls}
    stages: dict[str, Any] = {}
    for name, stage in graph.stages.items():
        if name not in used:
            continue
        body: dict[str, Any] = {"barrier": stage.barrier, "device": stage.device, "per_item": per_item.get(name, 1.0)}
        if stage.ranks_fixed is not None:
            body["ranks"] = stage.ranks_fixed
        stages[name] = body
    edges = [[a, b] for a, targets in graph.edges().items() for b in sorted(targets) if a in stages and b in stages]
    return {
        "devices": devices,
        "items": fed,
        "flow": graph.fingerprint(),
        "hardware": hardware(),
        "stages": stages,
        "edges": edges,
    }


def profile_command(argv: list[str]) -> int:
    """``rlinf profile RECIPE [key=value …]``: measure a recipe's stages by a few short runs."""
    parser = argparse.ArgumentParser(
        prog="rlinf profile", description=(profile_command.__doc__ or "").replace("``", "`")
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--devices", help="device counts, e.g. 1,2 (at most three; default: all, half of them, one)")
    parser.add_argument("--portions", help="portions, e.g. all,16 (at most two; default: all at once)")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder for profile.json and problem.json")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    from rlinf_core.config import compose_full

    try:
        composed = compose_full(arguments.recipe, arguments.overrides)
        devices = _numbers(arguments.devices, 3, "--devices") or _counts(composed.config.cluster.virtual_devices)
        portions = _portions(arguments.portions)
        arguments.out.mkdir(parents=True, exist_ok=True)
        profile, problem = measure(composed.config, composed.name, devices, portions, arguments.out)
        profile.save(arguments.out / "profile.json")
        (arguments.out / "problem.json").write_text(json.dumps(problem, indent=2) + "\n")
    except SchedError as error:
        print(f"rlinf profile: error: {error}", file=sys.stderr)
        return 2
    for line in profile.summaries():
        where = f"{line.devices} device(s)" if line.devices else "CPU"
        print(f"{line.stage} on {where}, portion {line.portion}: {1000 * line.seconds_per_item:.3g} ms an item")
    print(f"next: rlinf plan {arguments.out}/problem.json --profile {arguments.out}/profile.json --out plan.yaml")
    return 0


def schedule(cfg: Config, recipe: str, out: Path) -> Path:
    """``plan=auto``: profile, plan, and write the plan into ``out``. The entry of ``rlinf.schedulers``."""
    devices = _counts(cfg.cluster.virtual_devices)
    profile, data = measure(cfg, recipe, devices, [None], out)
    profile.save(out / "profile.json")
    (out / "problem.json").write_text(json.dumps(data, indent=2) + "\n")
    problem, _ = problem_from_dict(data, profile)
    found = plan(problem)
    print(explain(found).text(), file=sys.stderr)
    path = out / "plan.yaml"
    path.write_text(json.dumps(to_plan(found), indent=2) + "\n")  # JSON is YAML
    return path


def _counts(most: int) -> list[int]:
    return sorted({1, max(1, most // 2), max(1, most)})


def _numbers(text: str | None, most: int, option: str) -> list[int]:
    if text is None:
        return []
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise SchedError(f"{option}: whole numbers separated by commas, not {text!r}") from error
    if not numbers or numbers[0] < 1 or len(numbers) > most:
        raise SchedError(f"{option}: at most {most} positive numbers, not {text!r}")
    return numbers


def _portions(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = text.split(",")
    numbers = _numbers(",".join(p for p in parts if p != "all") or None, 2, "--portions")
    found: list[int | None] = [None] if "all" in parts else []
    if len(found) + len(numbers) > 2:
        raise SchedError(f"--portions: at most two, not {text!r}")
    return [*found, *numbers]
