"""Why a plan was chosen: the best of each family side by side, why each other loses, and what would flip it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlinf_sched.costmodel import Cost, Floats, Ints, StreamCost
from rlinf_sched.export import plan_data
from rlinf_sched.planner import Candidate, Plan, preference, rescore
from rlinf_sched.predict import predict
from rlinf_sched.problem import Problem
from rlinf_sched.tree import describe, leaves, price
from rlinf_sched.units import counted, size

FAMILIES = ("temporal", "spatial", "hybrid")
_RANGE = 8.0
_CLOSER = 5
"""Halvings of the distance to a factor that prices do not know, by predictions."""
_SHOWN = 5e-4
"""Relative difference below which two times are the same as printed."""


@dataclass(frozen=True)
class Line:
    """One family's best plan. Seconds: ``busy`` by stage, ``fill`` until the last stage has begun, ``drain`` after the
    first stage has ended, ``switching``. ``idle``: share of all device-seconds without work. ``peak``: bytes.
    ``changes``: portions of its plan file that the tree does not show. ``loses``: why it is not the best; ``wins``: why
    the best was taken although others are about as fast; ``equal``: it is within the tie."""

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
    wins: str = ""
    equal: bool = False


@dataclass(frozen=True)
class Explanation:
    """``lines``: the chosen one first, then the fastest. ``flips``: facts that would make
    another family win. ``absent``: why a family has no plan. ``notes``: what else to know."""

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
                f"switching {line.switching:.4g} s; idle {line.idle:.0%}; peak {size(line.peak)}"
            )
            if line.changes:
                rows.append(f"    {line.changes}")
            if line.wins:
                rows.append(f"    chosen: {line.wins}")
            if line.loses:
                rows.append(f"    {'as good' if line.equal else 'loses'}: {line.loses}")
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
    if isinstance(cost, StreamCost):  # stays one, so that its lengths are drawn
        return replace(
            cost,
            alpha=cost.alpha * factor,
            beta=cost.beta * factor,
            fixed=cost.fixed * factor,
            load=cost.load * switch,
            offload=cost.offload * switch,
            reload_each=cost.reload_each * switch,
        )
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
            f"too close to call by time: within {plan.tie:.1%} fewer switches decide, then larger portions, less "
            "memory, devices along nodes"
        )
    if not plan.exact:
        notes.append("the search looked at a part of the device counts, then at those near the best plans")
    absent = [
        f"no {family} plan: {why_absent(family, plan.problem)}"
        for family in FAMILIES
        if family not in plan.families and "single" not in plan.families
    ]
    return Explanation(lines, tuple(_flips(plan)), tuple(absent), tuple(notes))


def why_absent(family: str, problem: Problem) -> str:
    """Why a family has no plan."""
    on_devices = [stage for stage in problem.graph.stages.values() if stage.device]
    need = sum(stage.accepted(problem.devices)[0] for stage in on_devices)
    if family == "spatial" and need > problem.devices:
        return f"its stages need {counted(need, 'device')} at least and there are {problem.devices}"
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
    if candidate is plan.best:
        return replace(line, wins=_wins(plan))
    return replace(line, loses=_loses(plan, candidate, line), equal=_tied(plan, candidate))


def _tied(plan: Plan, rival: Candidate) -> bool:
    """Whether time did not decide between it and the best."""
    best = plan.best
    return rival.rescored * (1 + rival.doubt) <= best.rescored * (1 + best.doubt) * (1 + plan.tie)


def _wins(plan: Plan) -> str:
    """What decided for the best against those that are about as fast, or faster."""
    reasons = []
    for name, rival in plan.families.items():
        if rival is plan.best:
            continue
        if _tied(plan, rival):
            reasons.append(f"{name} is {_apart(plan, rival, within=True)}: {_decided(plan, rival)}")
        elif rival.rescored < plan.best.rescored:
            reasons.append(
                f"{name} is {_apart(plan, rival)}, but takes portions far below those that were profiled, for which it "
                f"must be {rival.doubt:.0%} better"
            )
    return "; ".join(reasons)


def _apart(plan: Plan, rival: Candidate, within: bool = False) -> str:
    difference = rival.rescored / plan.best.rescored - 1
    if abs(difference) < _SHOWN:
        return "as fast"
    if within:
        return f"{_apart(plan, rival)}, within {plan.tie:.1%}"
    return f"{abs(difference):.1%} {'faster' if difference < 0 else 'slower'}"


def _decided(plan: Plan, rival: Candidate) -> str:
    """Which tie-break was the first that differed, and how."""
    mine, theirs = preference(plan.best, plan.problem), preference(rival, plan.problem)
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine) - 1)
    a, b = mine[at], theirs[at]
    reasons = (
        lambda: f"fewer switches ({a:g}, not {b:g})",
        lambda: f"larger portions (at least {-a:g} items at once, not {-b:g})",
        lambda: f"a lower peak of memory ({size(a)}, not {size(b)})",
        lambda: f"fewer stages across nodes ({a:g}, not {b:g})",
        lambda: "the faster of the two",
    )
    return reasons[at]()


def _loses(plan: Plan, candidate: Candidate, line: Line) -> str:
    best = plan.best
    difference = candidate.rescored / best.rescored - 1
    if _tied(plan, candidate):
        return f"{_apart(plan, candidate)}; the best has {_decided(plan, candidate)}"
    if difference < 0:
        return f"{_apart(plan, candidate)}, but its portions are far below those that were profiled"
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
            f"{name} takes {line.busy[name]:.4g} s on {counted(count, 'device')} "
            f"({best.run.busy[name]:.4g} s on {theirs})"
        )
    return f"{difference:+.1%}: " + ("; ".join(reasons) or "nothing overlaps that would make up for the rest")


def _flips(plan: Plan) -> list[str]:
    """Which change of one fact alone makes another family's plan the faster one, by the times that are shown: both
    plans are predicted again with the changed fact."""
    facts = []
    for name, rival in plan.families.items():
        if rival is plan.best or rival.rescored <= plan.best.rescored:
            continue  # the faster one already, and not chosen
        switches = plan.best.run.switching > 0 or rival.run.switching > 0
        if switches and _ahead(plan, rival, None, 1.0, switch=0.0):
            facts.append(f"{name} would win if switching were free")
        for stage in plan.problem.graph.stages:
            factor = _crossing(plan, rival, stage)
            if factor is not None:
                facts.append(f"{name} would win if {stage} took {factor:.2f} times as long")
    return facts


def _crossing(plan: Plan, rival: Candidate, stage: str) -> float | None:
    """A factor near to 1 on this stage's time at which the rival overtakes (None: none was found up to 8).

    Prices, brought to what is shown without a change, say where to look; predictions decide."""

    def guessed(factor: float) -> bool:
        changed = scaled(plan.problem, stage, factor)
        return _priced(rival, changed) < _priced(plan.best, changed)

    found = []
    for end in (1 / _RANGE, _RANGE):
        if not guessed(end):
            continue
        inside, outside = 1.0, end
        for _ in range(20):
            middle = (inside * outside) ** 0.5
            inside, outside = (inside, middle) if guessed(middle) else (middle, outside)
        outside = _shown_factor(outside, end)
        if _ahead(plan, rival, stage, outside):
            found.append(outside)
        elif _ahead(plan, rival, stage, end):
            inside, outside = outside, end
            for _ in range(_CLOSER):
                middle = _shown_factor((inside * outside) ** 0.5, end)
                inside, outside = (inside, middle) if _ahead(plan, rival, stage, middle) else (middle, outside)
            found.append(outside)
    return min(found, key=lambda f: max(f, 1 / f), default=None)


def _shown_factor(factor: float, end: float) -> float:
    """The factor as it is printed, on the side where the rival is ahead."""
    step = math.ceil if end > 1 else math.floor
    return step(factor * 100 + (1e-6 if end > 1 else -1e-6)) / 100


def _priced(candidate: Candidate, problem: Problem) -> float:
    found: float = price(candidate.tree, problem.items, problem).latency
    return found * candidate.rescored / max(candidate.seconds, 1e-12)


def _ahead(plan: Plan, rival: Candidate, stage: str | None, factor: float, switch: float = 1.0) -> bool:
    times = [shown(plan, candidate, stage, factor, switch) for candidate in (rival, plan.best)]
    return times[0] < times[1] * (1 - 1e-9)


def shown(
    plan: Plan, candidate: Candidate, stage: str | None = None, factor: float = 1.0, switch: float = 1.0
) -> float:
    """Seconds as shown for a candidate, with one stage's times (None: none; a cycle's name: its members') and all
    switches multiplied."""
    if not all(cost.measured for cost in plan.original.costs.values()):
        return rescore(candidate.tree, scaled(plan.problem, stage, factor, switch))
    problem = scaled(plan.original, None, 1.0, switch)
    names = next((c.members for c in plan.original.graph.cycles if c.name == stage), (stage,))
    for name in names:
        problem = scaled(problem, name, factor)
    tree = plan_data(plan.problem, plan.original, candidate.tree)
    return predict(problem, candidate.data if candidate.data is not None else tree).seconds
