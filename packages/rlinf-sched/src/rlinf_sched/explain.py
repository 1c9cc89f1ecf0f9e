"""Why a plan was chosen: the best of each family side by side, why each other loses, and what would flip it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlinf_sched.costmodel import Cost, Floats, Ints
from rlinf_sched.planner import Candidate, Plan
from rlinf_sched.problem import Problem
from rlinf_sched.tree import describe, leaves, price

FAMILIES = ("temporal", "spatial", "hybrid")
_RANGE = 8.0


@dataclass(frozen=True)
class Line:
    """One family's best plan. Seconds: ``busy`` by stage, ``fill`` until the last stage has begun, ``drain`` after the
    first stage has ended, ``switching``. ``idle``: share of all device-seconds without work. ``peak``: bytes.
    ``changes``: portions of its plan file that the tree does not show."""

    family: str
    seconds: float
    tree: str
    busy: Mapping[str, float]
    bottleneck: str
    fill: float
    drain: float
    switching: float
    idle: float
    peak: float
    loses: str
    changes: str = ""


@dataclass(frozen=True)
class Explanation:
    """``lines``: the fastest first. ``flips``: facts that would make another family win. ``absent``: why a family has
    no plan. ``notes``: what else to know."""

    lines: tuple[Line, ...]
    flips: tuple[str, ...]
    absent: tuple[str, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """For people."""
        rows = []
        for line in self.lines:
            busy = ", ".join(f"{name} {seconds:.4g}" for name, seconds in line.busy.items())
            rows.append(f"{line.family}: {line.seconds:.4g} s  {line.tree}")
            rows.append(
                f"    busy {busy}; bottleneck {line.bottleneck}; fill {line.fill:.4g}, drain {line.drain:.4g}, "
                f"switching {line.switching:.4g} s; idle {line.idle:.0%}; peak {line.peak:.4g} bytes"
            )
            if line.changes:
                rows.append(f"    {line.changes}")
            if line.loses:
                rows.append(f"    loses: {line.loses}")
        return "\n".join([*rows, *self.flips, *self.absent, *self.notes])


@dataclass(frozen=True, kw_only=True)
class Scaled(Cost):
    """Another cost with its times and its switches multiplied."""

    of: Cost
    factor: float = 1.0

    @property
    def streams(self) -> bool:
        return self.of.streams

    def released(self, parts: Floats, share: float | None = None) -> Floats:
        return self.of.released(parts, share)

    def options(self, portion: int) -> tuple[int, ...]:
        return self.of.options(portion)

    def seconds(self, devices: Ints, portion: float, option: int) -> Floats:
        return self.factor * self.of.seconds(devices, portion, option)

    def alone(self, devices: Ints, portion: float, option: int) -> Floats:
        return self.factor * self.of.alone(devices, portion, option)

    def scatter(self, items: float) -> float:
        return self.of.scatter(items)

    def release(self, devices: int, portion: int, parts: int, option: int) -> Floats:
        return self.factor * self.of.release(devices, portion, parts, option)

    def release_table(self, devices: Ints, portion: int, parts: int, option: int) -> Floats:
        return self.factor * self.of.release_table(devices, portion, parts, option)

    def resident(self, devices: Ints, option: int = 0) -> Floats:
        return self.of.resident(devices, option)

    def working(self, devices: Ints, portion: int, option: int) -> Floats:
        return self.of.working(devices, portion, option)


def rescaled(cost: Cost, factor: float, switch: float = 1.0) -> Cost:
    """The cost with its times and its switches multiplied."""
    if isinstance(cost, Scaled):
        factor *= cost.factor
        cost = cost.of
    return Scaled(
        of=cost,
        factor=factor,
        load=cost.load * switch,
        offload=cost.offload * switch,
        reload_each=cost.reload_each * switch,
        memory=cost.memory,
        replica=cost.replica,
        error=cost.error,
        curve=cost.curve,
        curves=cost.curves,
        measured=cost.measured,
    )


def scaled(problem: Problem, stage: str | None = None, factor: float = 1.0, switch: float = 1.0) -> Problem:
    """The problem with one stage's times (None: none) and all switches multiplied."""
    costs: dict[str, Cost] = {
        name: rescaled(cost, factor if name == stage else 1.0, switch) for name, cost in problem.costs.items()
    }
    return replace(problem, costs=costs)


def explain(plan: Plan) -> Explanation:
    """The explanation of a plan; the trees are those found, priced again where a fact is changed."""
    lines = tuple(_line(plan, candidate) for candidate in plan.families.values())
    notes = []
    if plan.close:
        notes.append(
            f"too close to call: the difference is within {plan.tie:.1%}; the plan with fewer switches is taken"
        )
    if not plan.exact:
        notes.append("the search looked at a part of the device counts, then at those near the best plans")
    absent = [
        f"no {family} plan: {_why_absent(family, plan.problem)}"
        for family in FAMILIES
        if family not in plan.families and "single" not in plan.families
    ]
    return Explanation(lines, tuple(_flips(plan)), tuple(absent), tuple(notes))


def _why_absent(family: str, problem: Problem) -> str:
    on_devices = [stage for stage in problem.graph.stages.values() if stage.device]
    need = sum(stage.accepted(problem.devices)[0] for stage in on_devices)
    if family == "spatial" and need > problem.devices:
        return f"its stages need {need} devices at least and there are {problem.devices}"
    if family == "hybrid" and len(on_devices) < 3:
        return "it needs three stages on devices"
    return "none fits into memory, or no split is accepted by the stages"


def _line(plan: Plan, candidate: Candidate) -> Line:
    run, problem = candidate.run, plan.problem
    order = [leaf.stage for leaf in leaves(candidate.tree)]
    work = [bar for bar in run.bars if bar.what == "work"]
    fill = min(bar.start for bar in work if bar.stage == order[-1])
    drain = run.seconds - max(bar.end for bar in work if bar.stage == order[0])
    line = Line(
        candidate.family,
        candidate.rescored,
        describe(candidate.tree, problem),
        dict(run.busy),
        max(run.busy, key=lambda name: run.busy[name]),
        fill,
        drain,
        run.switching,
        run.idle(problem.devices),
        candidate.price.peak,
        "",
        candidate.changes,
    )
    return line if candidate is plan.best else replace(line, loses=_loses(plan, candidate, line))


def _loses(plan: Plan, candidate: Candidate, line: Line) -> str:
    best = plan.best
    difference = candidate.rescored / best.rescored - 1
    if abs(difference) <= plan.tie:
        return f"{difference:+.1%}, too close to call; it switches {candidate.switches} times, the best {best.switches}"
    reasons = []
    if line.switching > best.run.switching * 1.05 + 1e-9:
        reasons.append(f"switching takes {line.switching:.4g} s, in the best plan {best.run.switching:.4g} s")
    idle = best.run.idle(plan.problem.devices)
    if line.idle > idle + 0.01:
        reasons.append(f"devices idle for {line.idle:.0%} of the time ({idle:.0%} in the best)")
    slower = {name: seconds - best.run.busy[name] for name, seconds in line.busy.items()}
    name = max(slower, key=lambda key: slower[key])
    if slower[name] > 0.01 * best.rescored:
        count = next(leaf.devices for leaf in leaves(candidate.tree) if leaf.stage == name)
        theirs = next(leaf.devices for leaf in leaves(best.tree) if leaf.stage == name)
        reasons.append(
            f"{name} takes {line.busy[name]:.4g} s on {count} devices ({best.run.busy[name]:.4g} s on {theirs})"
        )
    return f"{difference:+.1%}: " + ("; ".join(reasons) or "nothing overlaps that would make up for the rest")


def _flips(plan: Plan) -> list[str]:
    """Which change of one fact alone makes another family's plan the faster one."""
    facts = []
    best = plan.best
    for name, rival in plan.families.items():
        if name == best.family:
            continue
        free = scaled(plan.problem, switch=0.0)
        if _seconds(rival, free) < _seconds(best, free) * (1 - 1e-9):
            facts.append(f"{name} would win if switching were free")
        for stage in plan.problem.graph.stages:
            factor = _crossing(plan, rival, stage)
            if factor is not None:
                facts.append(f"{name} would win if {stage} took {factor:.2f} times as long")
    return facts


def _crossing(plan: Plan, rival: Candidate, stage: str) -> float | None:
    """The factor nearest to 1 on this stage's time at which the rival's tree overtakes (None: up to 8 none)."""

    def ahead(factor: float) -> bool:
        changed = scaled(plan.problem, stage, factor)
        return _seconds(rival, changed) < _seconds(plan.best, changed)

    found = []
    for end in (1 / _RANGE, _RANGE):
        if ahead(end) and not ahead(1.0):
            inside, outside = 1.0, end
            for _ in range(20):
                middle = (inside * outside) ** 0.5
                inside, outside = (inside, middle) if ahead(middle) else (middle, outside)
            found.append(outside)
    return min(found, key=lambda f: max(f, 1 / f), default=None)


def _seconds(candidate: Candidate, problem: Problem) -> float:
    return price(candidate.tree, problem.items, problem).latency
