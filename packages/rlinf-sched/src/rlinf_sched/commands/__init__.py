"""``rlinf plan`` and ``rlinf simulate``: from a file that describes stages, costs and devices."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_sched.commands.profile import chosen_of
from rlinf_sched.explain import explain
from rlinf_sched.export import to_plan
from rlinf_sched.gantt import write_perfetto, write_png
from rlinf_sched.graph import SchedError
from rlinf_sched.planner import plan
from rlinf_sched.planread import read_plan
from rlinf_sched.predict import predict
from rlinf_sched.problem import Problem
from rlinf_sched.problemfile import problem_from_dict, read_data, resized
from rlinf_sched.profile import Profile, ProfileError
from rlinf_sched.simulator import simulate
from rlinf_sched.tree import describe


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
    parser.add_argument("--rule", choices=("tree", "lock"), default="tree", help="how a device changes hands")
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
        profile = None if arguments.profile is None else Profile.load(arguments.profile)
        problem, warnings = problem_from_dict(read_data(arguments.file), profile, source=str(arguments.file))
        problem = resized(problem, arguments.devices, arguments.items)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        run(problem, arguments)
    except (SchedError, ProfileError) as error:
        print(f"rlinf {parser.prog.split()[-1]}: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(problem: Problem, arguments: argparse.Namespace) -> None:
    found = plan(problem)
    chosen = chosen_of(found, arguments.family)
    data = to_plan(found, chosen)
    explanation = explain(found)
    if arguments.json:
        print(json.dumps({"plan": data, "explanation": asdict(explanation), "search_seconds": found.search_seconds}))
    else:
        print(f"{describe(chosen.tree, found.problem)}: {chosen.rescored:.4g} s ({chosen.family})")
        print(explanation.text())
    if arguments.out is not None:
        _write(arguments.out, data)
    if arguments.png is not None:
        arguments.png.mkdir(parents=True, exist_ok=True)
        for name, candidate in found.families.items():
            write_png(candidate.run, arguments.png / f"{name}.png", f"{name}: {candidate.rescored:.4g} s")


def _simulate(problem: Problem, arguments: argparse.Namespace) -> None:
    if arguments.plan is not None:
        data = read_data(arguments.plan)
        for warning in read_plan(data, problem, source=str(arguments.plan)).warnings:
            print(f"warning: {warning}", file=sys.stderr)
        run = predict(problem, data, source=str(arguments.plan))
        title, devices = f"{data.get('name', 'plan')}", data.get("devices") or problem.devices
        print(f"{arguments.plan}: {run.seconds:.4g} s")
    else:
        found = plan(problem)
        chosen = chosen_of(found, arguments.family)
        spread = {name: arguments.spread for name in found.problem.graph.stages}
        run = simulate(
            chosen.tree,
            found.problem,
            rule=arguments.rule,
            capacity=arguments.capacity,
            seed=arguments.seed,
            spread=spread,
        )
        title, devices = chosen.family, problem.devices
        print(f"{describe(chosen.tree, found.problem)}: {run.seconds:.4g} s, predicted {chosen.seconds:.4g} s")
    for name, busy in run.busy.items():
        print(f"  {name}: busy {busy:.4g} s")
    print(f"  switching {run.switching:.4g} s, idle {run.idle(devices):.0%}")
    if arguments.png is not None:
        write_png(run, arguments.png, f"{title}: {run.seconds:.4g} s")
    if arguments.perfetto is not None:
        write_perfetto(run, arguments.perfetto)


def _write(path: Path, data: dict[str, Any]) -> None:
    if path.suffix in (".yaml", ".yml"):
        # A plan is read as YAML, and JSON is YAML; what is written needs no library.
        path.write_text(_yaml(data, 0))
    else:
        path.write_text(json.dumps(data, indent=2) + "\n")


def _yaml(data: dict[str, Any], indent: int) -> str:
    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            lines.append(f"{'  ' * indent}{json.dumps(key) if not key.isidentifier() else key}:\n")
            lines.append(_yaml(value, indent + 1))
        else:
            lines.append(f"{'  ' * indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)
