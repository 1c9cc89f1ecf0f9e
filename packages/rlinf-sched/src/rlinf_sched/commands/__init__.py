"""``rlinf plan`` and ``rlinf simulate``: from a file that describes stages, costs and devices."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_sched.commands.profile import chosen_of, header
from rlinf_sched.explain import explain
from rlinf_sched.export import to_plan, yaml_text
from rlinf_sched.gantt import check_charts, write_perfetto, write_png
from rlinf_sched.graph import SchedError
from rlinf_sched.planner import plan
from rlinf_sched.planread import read_plan
from rlinf_sched.predict import SEEDS, followed, predict
from rlinf_sched.problem import Problem
from rlinf_sched.problemfile import beyond_profile, problem_from_dict, read_data, resized
from rlinf_sched.profile import Profile, ProfileError
from rlinf_sched.runtime import run_plan, scatters
from rlinf_sched.simulator import Run, simulate
from rlinf_sched.tree import describe
from rlinf_sched.units import counted, folder, writable


def plan_command(argv: list[str]) -> int:
    """``rlinf plan FILE``: the plan with the least predicted time, the runners-up and why they lose."""
    parser = _parser("plan", plan_command.__doc__)
    parser.add_argument("--out", type=Path, help="write the plan for `rlinf run plan=OUT` (YAML or JSON)")
    parser.add_argument("--family", choices=("temporal", "spatial", "hybrid"), help="write this family's best instead")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="draw each family's best plan into this folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return _guarded(parser, argv, _plan)


def simulate_command(argv: list[str]) -> int:
    """``rlinf simulate FILE``: a discrete-event run of the plan on any number of devices, with a Gantt chart."""
    parser = _parser("simulate", simulate_command.__doc__)
    parser.add_argument("--plan", type=Path, help="simulate this plan of `rlinf run` instead, rank by rank")
    parser.add_argument("--family", choices=("temporal", "spatial", "hybrid"), help="simulate this family's best")
    parser.add_argument("--rule", choices=("tree", "lock"), help="simulate the tree alone, devices changing hands so")
    parser.add_argument("--capacity", type=int, help="portions that a stage may be ahead of the next (at least 2)")
    parser.add_argument("--seed", type=int, help="draw lengths and deviations with this seed")
    parser.add_argument("--spread", type=float, default=0.0, help="relative deviation of all times, with --seed")
    parser.add_argument("--png", type=Path, help="write a Gantt chart (needs matplotlib)")
    parser.add_argument("--perfetto", type=Path, help="write a trace for ui.perfetto.dev")
    return _guarded(parser, argv, _simulate)


def _parser(name: str, text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"rlinf {name}", description=(text or "").replace("``", "`"))
    parser.add_argument("file", type=Path, help="stages, costs and devices (YAML or JSON; see docs/scheduling.md)")
    parser.add_argument("--profile", type=Path, help="measured times for the stages without a cost")
    parser.add_argument("--devices", type=int, help="plan for this many devices instead")
    parser.add_argument("--items", type=int, help="plan for this many items of a step instead")
    return parser


def _guarded(parser: argparse.ArgumentParser, argv: list[str], run: Any) -> int:
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        _check_outputs(arguments)
        profile = None if arguments.profile is None else Profile.load(arguments.profile)
        problem, warnings = problem_from_dict(read_data(arguments.file), profile, source=str(arguments.file))
        problem = resized(problem, arguments.devices, arguments.items)
        if profile is not None:
            warnings += beyond_profile(problem, profile)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        run(problem, arguments)
    except (SchedError, ProfileError) as error:
        print(f"rlinf {parser.prog.split()[-1]}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"rlinf {parser.prog.split()[-1]}: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    """What cannot be written shows before anything is computed."""
    for option in ("out", "perfetto"):
        if getattr(arguments, option, None) is not None:
            writable(getattr(arguments, option), f"--{option}")
    if arguments.png is not None:
        check_charts()
        folder(arguments.png, "--png") if hasattr(arguments, "out") else writable(arguments.png, "--png")


def _wrote(path: Path, what: str, note: str = "") -> None:
    print(f"wrote {path}: {what}{note}", file=sys.stderr)


def _plan(problem: Problem, arguments: argparse.Namespace) -> None:
    found = plan(problem)
    chosen = chosen_of(found, arguments.family)
    data = to_plan(found, chosen)
    explanation = explain(found)
    if arguments.json:
        print(json.dumps({"plan": data, "explanation": asdict(explanation), "search_seconds": found.search_seconds}))
    else:
        print(header(found, chosen))
        print(explanation.text())
    if arguments.out is not None:
        _write(arguments.out, data)
        _wrote(arguments.out, f"the {chosen.family} plan", f"; to run it: rlinf run RECIPE plan={arguments.out}")
    if arguments.png is not None:
        for name, candidate in found.families.items():
            path = arguments.png / f"{name}.png"
            title = f"{name}: {candidate.rescored:.4g} s"
            write_png(candidate.run, path, title, devices=problem.devices, stages=tuple(found.problem.graph.stages))
            _wrote(path, f"a chart of the {name} plan")


def _simulate(problem: Problem, arguments: argparse.Namespace) -> None:
    if arguments.seed is not None and not arguments.spread and not scatters(problem):
        note = "" if arguments.plan is not None else "; --spread gives all times a deviation"
        print(f"--seed: nothing is drawn, no stage's times scatter{note}", file=sys.stderr)
    if arguments.plan is not None:
        run, title, devices = _simulated_file(problem, arguments)
    else:
        run, title, devices = _simulated(problem, arguments)
    for name, busy in run.busy.items():
        print(f"  {name}: busy {busy:.4g} s")
    print(f"  switching {run.switching:.4g} s, idle {run.idle(devices):.0%}")
    if arguments.png is not None:
        stages = tuple(problem.graph.stages)
        write_png(run, arguments.png, f"{title}: {run.seconds:.4g} s", devices=devices, stages=stages)
        _wrote(arguments.png, "a chart")
    if arguments.perfetto is not None:
        write_perfetto(run, arguments.perfetto)
        _wrote(arguments.perfetto, "a trace", "; open it at ui.perfetto.dev")


def _simulated_file(problem: Problem, arguments: argparse.Namespace) -> tuple[Run, str, int]:
    """A plan file, rank by rank. Raises SchedError for options that would not count, and for other devices than its."""
    ignored = [f"--{name}" for name in ("family", "rule", "capacity", "spread") if getattr(arguments, name)]
    if ignored:
        raise SchedError(f"{', '.join(ignored)}: not with --plan, which is followed rank by rank as the runtime would")
    source = str(arguments.plan)
    data = read_data(arguments.plan)
    devices = data.get("devices") or problem.devices
    if arguments.devices is not None and arguments.devices != devices:
        raise SchedError(
            f"--devices {arguments.devices}: {source} is a plan for {counted(devices, 'device')}; leave --devices out, "
            f"or make a plan for {arguments.devices} (rlinf plan --devices {arguments.devices})"
        )
    flat = read_plan(data, problem, source=source)
    for warning in flat.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.seed is None:
        run = predict(problem, data, source=source)
    else:
        run = run_plan(flat, problem, seed=arguments.seed, alone=followed(flat.devices))
    print(f"{arguments.plan}: {run.seconds:.4g} s" + _drawn(problem, arguments.seed))
    return run, str(data.get("name", "plan")), devices


def _drawn(problem: Problem, seed: int | None) -> str:
    if not scatters(problem):
        return ""
    return f" (mean of {SEEDS} draws)" if seed is None else f" (draw {seed})"


def _simulated(problem: Problem, arguments: argparse.Namespace) -> tuple[Run, str, int]:
    """The best plan, or a family's: as `rlinf plan` predicts it, or its tree under what was asked for."""
    found = plan(problem)
    chosen = chosen_of(found, arguments.family)
    tree = describe(chosen.tree, found.problem)
    measured = all(cost.measured for cost in problem.costs.values())
    asked = arguments.rule or arguments.capacity is not None or arguments.spread
    if not asked and (arguments.seed is None or measured):
        run, seconds = chosen.run, chosen.rescored
        if arguments.seed is not None:
            flat = read_plan(to_plan(found, chosen), problem)
            run = run_plan(flat, problem, seed=arguments.seed, alone=followed(flat.devices))
            seconds = run.seconds
        print(f"{tree}: {seconds:.4g} s ({chosen.family})" + (_drawn(problem, arguments.seed) if measured else ""))
        return run, chosen.family, problem.devices
    rule = arguments.rule or "tree"
    run = simulate(
        chosen.tree,
        found.problem,
        rule=rule,
        capacity=arguments.capacity,
        seed=arguments.seed,
        spread=dict.fromkeys(found.problem.graph.stages, arguments.spread),
    )
    print(f"{tree}: {run.seconds:.4g} s by the rule {rule!r}; `rlinf plan` predicts {chosen.rescored:.4g} s")
    return run, chosen.family, problem.devices


def _write(path: Path, data: dict[str, Any]) -> None:
    yaml = path.suffix in (".yaml", ".yml")
    path.write_text(yaml_text(data) if yaml else json.dumps(data, indent=2) + "\n")
