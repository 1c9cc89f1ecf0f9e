"""``rlinf profile``, and ``plan=auto`` of ``rlinf run``: a recipe is measured by a few short runs, then planned."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_sched.commands.measure import HYBRID, measure
from rlinf_sched.costmodel import Cost, FormulaCost
from rlinf_sched.explain import explain, why_absent
from rlinf_sched.export import to_plan, yaml_text
from rlinf_sched.graph import SchedError
from rlinf_sched.planner import Candidate, Plan, plan
from rlinf_sched.problem import Problem
from rlinf_sched.problemfile import problem_from_dict
from rlinf_sched.profile import ProfileError
from rlinf_sched.replan import Replanner
from rlinf_sched.tree import describe
from rlinf_sched.units import folder, size

if TYPE_CHECKING:
    from rlinf_core.config import Config


def profile_command(argv: list[str]) -> int:
    """``rlinf profile RECIPE [key=value …]``: measure a recipe's stages by a few short runs."""
    parser = argparse.ArgumentParser(
        prog="rlinf profile", description=(profile_command.__doc__ or "").replace("``", "`")
    )
    parser.add_argument("recipe", help="a recipe's name or file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", default=[], help="configuration, as of `rlinf run`"
    )
    parser.add_argument("--devices", help="device counts, e.g. 1,2 (at most three; default: all, half of them, one)")
    parser.add_argument("--portions", help="portions, e.g. all,4 (at most two; default: all, and a quarter)")
    parser.add_argument(
        "--out", type=Path, default=Path("profile"), help="folder for profile.json and problem.json (default: profile)"
    )
    try:
        arguments = parser.parse_intermixed_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    from rlinf_core.config import compose_full

    try:
        composed = compose_full(arguments.recipe, arguments.overrides)
        devices = _numbers(arguments.devices, 3, "--devices") or None
        portions = _portions(arguments.portions)
        folder(arguments.out, "--out")
        files = [arguments.out / name for name in ("profile.json", "problem.json")]
        if any(path.exists() for path in files):
            print(f"{arguments.out} has a profile: {' and '.join(map(str, files))} will be replaced", file=sys.stderr)
        if any(override.startswith("plan=") for override in arguments.overrides):
            print("plan=: not used, the runs of a profile have plans of their own", file=sys.stderr)
        profile, problem = measure(composed.config, composed.name, devices, portions, arguments.out)
        profile.save(arguments.out / "profile.json")
        (arguments.out / "problem.json").write_text(json.dumps(problem, indent=2) + "\n")
        fitted, _ = problem_from_dict(problem, profile)
    except (SchedError, ProfileError) as error:
        print(f"rlinf profile: error: {error}", file=sys.stderr)
        return 2
    print(table(fitted))
    print(f"wrote {files[0]} and {files[1]}", file=sys.stderr)
    print(f"next: rlinf plan {arguments.out}/problem.json --profile {arguments.out}/profile.json --out plan.yaml")
    return 0


def table(problem: Problem) -> str:
    """The stages as fitted: seconds of a step by device count, held-out error, memory, switch."""
    counts = sorted({1, max(1, problem.devices // 4), max(1, problem.devices // 2), problem.devices})
    marked = rough = False
    heads = [f"{n} dev." for n in counts]
    rows = [["stage", *heads, "error", "resident", "switch"]]
    for name, stage in problem.graph.stages.items():
        cost = problem.costs[name]
        cells = []
        for n in counts:
            there = not stage.device or n in stage.accepted(problem.devices)
            at = problem.evaluated(stage, (n,))
            guess = stage.device and there and _guessed(cost, n)
            marked |= guess
            seconds = float(cost.seconds(at, problem.items, cost.options(problem.items)[-1])[0]) if there else 0.0
            cells.append(f"{seconds:.3g} s{'*' if guess else ''}" if there else "-")
        whole = problem.evaluated(stage, (counts[-1],))
        resident = float(cost.resident(whole)[0])
        switch = float(cost.reload(whole)[0]) if stage.device else 0.0
        few = isinstance(cost, FormulaCost) and cost.measured and len(cost.points) < 3
        rough |= few
        rows.append(
            [name, *cells, "-" if few else f"{cost.error:.1%}", size(resident) if resident else "-", f"{switch:.3g} s"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = f"all {problem.items} items of a step at once; CPU stages do not depend on the devices"
    notes = [note]
    if marked:
        notes.append("*: not measured on so many devices, from the formula")
    if rough:
        notes.append("error -: too few points were measured to hold one out")
    return "\n".join([*lines, *notes])


def _guessed(cost: Cost, devices: int) -> bool:
    """Whether a fitted cost was measured on other device counts, but not on this."""
    if not isinstance(cost, FormulaCost) or not cost.points:
        return False
    return devices not in {round(replicas) * cost.replica for replicas, _, _ in cost.points}


def header(found: Plan, chosen: Candidate) -> str:
    """The chosen plan in a line; a second one when a family was asked for and another is faster."""
    line = f"{describe(chosen.tree, found.problem)}: {chosen.rescored:.4g} s ({chosen.family})"
    fastest = min(found.families.values(), key=lambda c: c.rescored)
    if chosen is not found.best and fastest is not chosen:
        faster = 1 - fastest.rescored / chosen.rescored
        line += (
            f"\n{chosen.family} as asked, although {fastest.family} is {faster:.1%} faster ({fastest.rescored:.4g} s)"
        )
    return line


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
    chosen = chosen_of(found, HYBRID if cfg.plan == HYBRID else None)
    print(header(found, chosen), file=sys.stderr)
    print(explain(found).text(), file=sys.stderr)
    path = out / "plan.yaml"
    path.write_text(yaml_text(to_plan(found, chosen)))
    print(f"the plan: {path}; to run it again without these short runs: plan={path}", file=sys.stderr)
    return path, Replanner(found, chosen)


def chosen_of(found: Plan, family: str | None) -> Candidate:
    """The best plan, or the best of one family. Raises SchedError saying why there is none."""
    if family is None:
        return found.best
    if family not in found.families:
        have = ", ".join(found.families)
        raise SchedError(
            f"there is no {family} plan for this problem: {why_absent(family, found.problem)}; there are: {have}"
        )
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
