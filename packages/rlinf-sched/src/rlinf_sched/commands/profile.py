"""``rlinf profile``, and ``plan=auto`` of ``rlinf run``: a recipe is measured by a few short runs, then planned."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_sched.commands.measure import HYBRID, measure
from rlinf_sched.explain import explain
from rlinf_sched.export import to_plan
from rlinf_sched.graph import SchedError
from rlinf_sched.planner import Candidate, Plan, plan
from rlinf_sched.problem import Problem
from rlinf_sched.problemfile import problem_from_dict
from rlinf_sched.profile import ProfileError
from rlinf_sched.replan import Replanner

if TYPE_CHECKING:
    from rlinf_core.config import Config


def profile_command(argv: list[str]) -> int:
    """``rlinf profile RECIPE [key=value …]``: measure a recipe's stages by a few short runs."""
    parser = argparse.ArgumentParser(
        prog="rlinf profile", description=(profile_command.__doc__ or "").replace("``", "`")
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--devices", help="device counts, e.g. 1,2 (at most three; default: all, half of them, one)")
    parser.add_argument("--portions", help="portions, e.g. all,4 (at most two; default: all, and a small one)")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder for profile.json and problem.json")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    from rlinf_core.config import compose_full

    try:
        composed = compose_full(arguments.recipe, arguments.overrides)
        devices = _numbers(arguments.devices, 3, "--devices") or None
        portions = _portions(arguments.portions)
        arguments.out.mkdir(parents=True, exist_ok=True)
        profile, problem = measure(composed.config, composed.name, devices, portions, arguments.out)
        profile.save(arguments.out / "profile.json")
        (arguments.out / "problem.json").write_text(json.dumps(problem, indent=2) + "\n")
        fitted, _ = problem_from_dict(problem, profile)
    except (SchedError, ProfileError) as error:
        print(f"rlinf profile: error: {error}", file=sys.stderr)
        return 2
    print(table(fitted))
    print(f"next: rlinf plan {arguments.out}/problem.json --profile {arguments.out}/profile.json --out plan.yaml")
    return 0


def table(problem: Problem) -> str:
    """The stages as fitted: seconds of a step by device count, held-out error, memory, switch."""
    counts = sorted({1, max(1, problem.devices // 4), max(1, problem.devices // 2), problem.devices})
    heads = [f"{n} dev." for n in counts]
    rows = [["stage", *heads, "error", "resident", "switch"]]
    for name, stage in problem.graph.stages.items():
        cost = problem.costs[name]
        cells = []
        for n in counts:
            there = not stage.device or n in stage.accepted(problem.devices)
            at = problem.evaluated(stage, (n,))
            cells.append(
                f"{float(cost.seconds(at, problem.items, cost.options(problem.items)[-1])[0]):.3g} s" if there else "-"
            )
        whole = problem.evaluated(stage, (counts[-1],))
        resident = float(cost.resident(whole)[0])
        switch = float(cost.reload(whole)[0]) if stage.device else 0.0
        rows.append(
            [name, *cells, f"{cost.error:.1%}", f"{resident / 2**30:.3g} GiB" if resident else "-", f"{switch:.3g} s"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = f"all {problem.items} items of a step at once; CPU stages do not depend on the devices"
    return "\n".join([*lines, note])


def schedule(cfg: Config, recipe: str, out: Path) -> tuple[Path, Replanner]:
    """``plan=auto`` and ``plan=hybrid``: profile, plan, and write the plan into ``out``; what may change it while it
    runs comes with it. The entry of ``rlinf.schedulers``. Raises PlanError of core when there is no plan, or none of
    that family."""
    from rlinf_core.errors import PlanError

    try:
        return _schedule(cfg, recipe, out)
    except (SchedError, ProfileError) as error:
        raise PlanError(f"plan={cfg.plan}: {error}") from error


def _schedule(cfg: Config, recipe: str, out: Path) -> tuple[Path, Replanner]:
    profile, data = measure(cfg, recipe, None, None, out)
    profile.save(out / "profile.json")
    (out / "problem.json").write_text(json.dumps(data, indent=2) + "\n")
    problem, warnings = problem_from_dict(data, profile)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(table(problem), file=sys.stderr)
    found = plan(problem)
    print(explain(found).text(), file=sys.stderr)
    chosen = chosen_of(found, HYBRID if cfg.plan == HYBRID else None)
    path = out / "plan.yaml"
    path.write_text(json.dumps(to_plan(found, chosen), indent=2) + "\n")  # JSON is YAML
    return path, Replanner(found, chosen)


def chosen_of(found: Plan, family: str | None) -> Candidate:
    """The best plan, or the best of one family. Raises SchedError saying why there is none."""
    if family is None:
        return found.best
    if family not in found.families:
        why = [line for line in explain(found).absent if line.startswith(f"no {family} plan")]
        have = ", ".join(found.families)
        raise SchedError(f"there is no {family} plan for this problem{': ' + why[0] if why else ''}; there are: {have}")
    return found.families[family]


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


def _portions(text: str | None) -> list[int | None] | None:
    if text is None:
        return None
    parts = text.split(",")
    numbers = _numbers(",".join(p for p in parts if p != "all") or None, 2, "--portions")
    found: list[int | None] = [None] if "all" in parts else []
    if len(found) + len(numbers) > 2:
        raise SchedError(f"--portions: at most two, not {text!r}")
    return [*found, *numbers]
