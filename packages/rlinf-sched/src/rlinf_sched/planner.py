"""From a problem to a plan: the best tree of each family, the choice among near ties, and why.

A coarse search over few device counts gives incumbents, a second one around them better ones, and the last one over
all counts is exact, bounded by them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf_sched.costmodel import StreamCost
from rlinf_sched.cycles import collapse
from rlinf_sched.export import plan_data
from rlinf_sched.graph import SchedError
from rlinf_sched.moves import difference
from rlinf_sched.predict import SEEDS, followed, predict
from rlinf_sched.problem import Problem
from rlinf_sched.refine import SCREEN, beyond, effort, refined
from rlinf_sched.search import NAMES, Search
from rlinf_sched.simulator import Run, simulate
from rlinf_sched.tree import Leaf, Node, Parallel, Pipe, Price, devices, family, leaves, price, sides, switches
from rlinf_sched.units import counted, size

COARSE = 16
"""Device counts of a stage up to which the first search is left out."""
BINDING = 64
"""Device counts of a stage that are considered where memory binds; on more devices they are thinned out."""
EXACT = {1: 4096, 2: 4096, 3: 1024, 4: 256, 5: 128}
"""By the number of stages: device counts of a stage up to which the search is exact. Beyond, that many evenly spread
counts are searched, and then those near the best plans."""
EXACT_REST = 48
WIDTHS = (0.12, 0.03, 0.008)
"""Relative distances of the device counts that the refinements look at."""
CAP = 12
"""Points for one device count where memory binds and the search is not small enough to keep all."""
SEEDS_GIVEN = 3
"""Draws of the lengths of streaming stages over which a plan is re-scored where costs are given."""
TIE, MOST_TIE = 0.01, 0.10
DOUBT = 0.05
"""See ``Candidate.doubt``: of a plan with portions far below those that were profiled."""
RETRIED = 24
"""Plans of a family that are tried when the runtime cannot keep the price of the best."""
FINALISTS, REFINED = 8, 3
"""Plans that are predicted over more draws in the end, and those of them whose portions are refined."""
ROOM, ROOM_EACH = 40_000, 30_000
"""What predicting all finalists may take, and refining the portions of one (see ``refine.effort``)."""


@dataclass(frozen=True)
class Candidate:
    """One plan: ``seconds`` as priced, ``rescored`` as the runtime would carry it out: with its lock, the mean over
    draws where times scatter, and rank by rank (portions, releases as they are made) where costs come from a profile.
    ``run``: that run. ``data``: the plan file, where portions were changed after the search (``changes``: which)."""

    family: str
    tree: Node
    seconds: float
    rescored: float
    price: Price
    switches: int
    run: Run
    data: Mapping[str, Any] | None = None
    changes: str = ""
    doubt: float = 0.0
    """By how much, relatively, it must be better than a plan whose portions are near what was profiled."""


@dataclass(frozen=True)
class Plan:
    """``best``: the chosen candidate. ``families``: the best of each, the chosen one first, then the fastest;
    ``least``: priced seconds of the fastest of each and ``cheapest`` its tree, before ties were broken. ``tie``:
    relative difference below which plans count as equal. ``exact``: no device count and no point was left out.
    ``problem``: what was planned, cycles as one stage each."""

    best: Candidate
    families: Mapping[str, Candidate]
    least: Mapping[str, float]
    tie: float
    exact: bool
    close: bool
    problem: Problem
    original: Problem
    search_seconds: float
    cheapest: Mapping[str, Node] = field(default_factory=dict)


def plan(problem: Problem, *, seeds: int = SEEDS_GIVEN, limit: int | None = None) -> Plan:
    """The plan with the least predicted time. Raises SchedError when there is none, naming what does not fit.

    ``seeds``: draws of the lengths of streaming stages over which a plan is re-scored. ``limit``: device counts of a
    stage up to which the search is exact (None: ``EXACT``).
    """
    began = time.perf_counter()
    problem.validate()
    original, problem = problem, collapse(problem)
    binding = memory_binds(problem)
    counts, thinned = _counts(problem, binding)
    tie = min(max(TIE, *(cost.error / 2 for cost in problem.costs.values())), MOST_TIE)
    found, cut = _search(problem, counts, binding, limit)
    if not any(found.values()):
        raise SchedError(_nothing(problem))
    near = [c for trees in found.values() for c in _realised(problem, original, trees, tie, seeds)]
    if _by_rank(original):
        near = _finished(problem, original, near, seeds)
    best, families = _chosen(problem, near, tie)
    if seeds and _by_rank(original):  # where fewer draws were used to compare many, the last word is `predict`'s
        few = [_predicted(problem, original, c) for c in families.values()]
        best, families = _chosen(problem, few, tie)
    rivals = [c for name, c in families.items() if name != best.family]
    close_call = any(c.rescored <= best.rescored * (1 + tie) for c in rivals)
    took = time.perf_counter() - began
    least = {NAMES[kind]: trees[0][0] for kind, trees in found.items() if trees}
    cheapest = {NAMES[kind]: trees[0][1] for kind, trees in found.items() if trees}
    exact = not thinned and not cut
    return Plan(best, families, least, tie, exact, close_call, problem, original, took, cheapest)


def memory_binds(problem: Problem) -> bool:
    """Whether it could matter: all stages loaded and at work at once do not fit on one device."""
    total = 0.0
    for name, stage in problem.graph.stages.items():
        if stage.device and math.isfinite(problem.device_bytes):
            cost = problem.costs[name]
            counts = np.array(stage.accepted(problem.devices), dtype=np.int64)
            portions = [c for c in problem.sizes() if stage.takes(c, problem.items)]
            total += max(
                (
                    float((cost.resident(counts, option) + cost.working(counts, c, option)).max())
                    for c in portions
                    for option in cost.options(c)
                ),
                default=0.0,
            )
    return total > problem.device_bytes


def _counts(problem: Problem, binding: bool) -> tuple[dict[str, tuple[int, ...]], bool]:
    accepted = {name: stage.accepted(problem.devices) for name, stage in problem.graph.stages.items()}
    if not binding:
        return accepted, False
    thin = {name: _thin(all_of, BINDING) for name, all_of in accepted.items()}
    return thin, thin != accepted


def _thin(counts: tuple[int, ...], most: int) -> tuple[int, ...]:
    """About ``most`` of the counts, evenly over their range, the round ones (multiples of powers of two) first."""
    if len(counts) <= most:
        return counts
    step = 2 ** math.ceil(math.log2(counts[-1] / most))
    kept = {n for n in counts if n % step == 0} | {counts[0], counts[-1]}
    kept |= {n for n in counts if n & (n - 1) == 0}
    return tuple(sorted(kept))


def _rough(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Very few of the counts: the ends, and near half, a quarter and an eighth of the largest."""
    kept = {counts[0], counts[-1]}
    for part in (2, 4, 8):
        kept.add(max(n for n in counts if n <= max(counts[-1] / part, counts[0])))
    return tuple(sorted(kept))


def _search(
    problem: Problem, counts: dict[str, tuple[int, ...]], binding: bool, limit: int | None
) -> tuple[dict[int, list[tuple[float, Node]]], bool]:
    many = max(len(some) for some in counts.values())
    small = many <= 8 and len(counts) <= 4
    cap = None if small else CAP
    if many <= COARSE:
        search = Search(problem, counts, {}, binding, cap)
        return search.run(), search.cut
    sizes = problem.sizes()
    few = replace(problem, portions=tuple({sizes[0], sizes[len(sizes) // 2], sizes[-1]}))
    found = Search(few, {name: _rough(some) for name, some in counts.items()}, {}, binding, CAP).run()
    upper = _upper(found) if len(found) >= 3 else {}
    thin = {name: _thin(some, COARSE) for name, some in counts.items()}
    found = _both(found, Search(problem, thin, upper, binding, CAP).run())
    if not found:
        search = Search(problem, counts, {}, binding, cap)
        return search.run(), search.cut
    most = limit or EXACT.get(len(counts), EXACT_REST)
    found = _refined(problem, counts, binding, found, WIDTHS[:1] if many > most else WIDTHS[:2])
    search = Search(problem, {name: _thin(some, most) for name, some in counts.items()}, _upper(found), binding, cap)
    found = _both(found, search.run())
    if many > most:
        found = _refined(problem, counts, binding, found, WIDTHS[1:])
    return found, search.cut or many > most


def _refined(
    problem: Problem,
    counts: dict[str, tuple[int, ...]],
    binding: bool,
    found: dict[int, list[tuple[float, Node]]],
    widths: tuple[float, ...],
) -> dict[int, list[tuple[float, Node]]]:
    """Better plans, with device counts ever closer to those of the best so far."""
    for width in widths:
        some = {name: _around(counts[name], found, name, width) for name in counts}
        found = _both(found, Search(problem, some, _upper(found), binding, CAP).run())
    return found


def _both(
    a: Mapping[int, list[tuple[float, Node]]], b: Mapping[int, list[tuple[float, Node]]]
) -> dict[int, list[tuple[float, Node]]]:
    """The plans of two searches by kind, best first. Those of coarse searches stay as candidates for ties."""
    merged = {}
    for kind in {**a, **b}:
        trees = {tree: seconds for seconds, tree in (*a.get(kind, ()), *b.get(kind, ()))}
        merged[kind] = sorted(((seconds, tree) for tree, seconds in trees.items()), key=lambda pair: pair[0])
    return merged


def _upper(found: Mapping[int, list[tuple[float, Node]]]) -> dict[int, float]:
    """Seconds that a plan of each kind may take: what is reached, and for the losers no more than 1.5 times the best.
    A family that is further behind keeps the plan that the coarser search found."""
    best = min(trees[0][0] for trees in found.values() if trees)
    return {kind: min(trees[0][0], 1.5 * best) * (1 + 1e-9) for kind, trees in found.items() if trees}


def _around(
    counts: tuple[int, ...], found: Mapping[int, list[tuple[float, Node]]], name: str, width: float
) -> tuple[int, ...]:
    """Counts near those that the best plans give the stage."""
    chosen = {leaf.devices for trees in found.values() for leaf in leaves(trees[0][1]) if leaf.stage == name}
    kept: set[int] = set(chosen)
    for n in chosen:
        band = [m for m in counts if abs(m - n) <= max(width * n, 2)]
        kept.update(band[:: max(1, len(band) // 12)])
    return tuple(sorted(kept & set(counts)))


def _near(trees: list[tuple[float, Node]], tie: float) -> list[tuple[float, Node]]:
    least = trees[0][0]
    return [pair for pair in trees if pair[0] <= least * (1 + tie)][:8]


def _realised(
    problem: Problem, original: Problem, trees: list[tuple[float, Node]], tie: float, seeds: int
) -> list[Candidate]:
    """The near best as the runtime carries them out. When it cannot keep what the best was priced at (a share above a
    pipe does not take turns for every portion), those that were priced a little higher are tried too."""
    close = [_candidate(problem, original, tree, seeds) for _, tree in _near(trees, tie)]
    best = min(close, key=lambda c: c.rescored)
    if _expected(problem, original, best) > trees[0][0] * (1 + tie):
        tried = {c.tree for c in close}
        close += [_candidate(problem, original, tree, seeds) for _, tree in trees[:RETRIED] if tree not in tried]
    return close


def _chosen(problem: Problem, near: Sequence[Candidate], tie: float) -> tuple[Candidate, dict[str, Candidate]]:
    """The best, by preference among ties, and the best of each family, it first."""
    families = _firsts(near)
    fastest = min(c.rescored * (1 + c.doubt) for c in near)
    equal = [c for c in near if c.rescored * (1 + c.doubt) <= fastest * (1 + tie)]
    best = min(equal, key=lambda c: preference(c, problem))
    families[best.family] = best
    return best, dict(sorted(families.items(), key=lambda item: (item[1] is not best, item[1].rescored)))


def _predicted(problem: Problem, original: Problem, c: Candidate) -> Candidate:
    """The candidate with what `rlinf simulate --plan` says of its plan file."""
    run = predict(original, c.data if c.data is not None else plan_data(problem, original, c.tree))
    return replace(c, rescored=run.seconds, run=run)


def _firsts(near: Sequence[Candidate]) -> dict[str, Candidate]:
    """The fastest of each family."""
    firsts: dict[str, Candidate] = {}
    for c in sorted(near, key=lambda c: (c.rescored, c.seconds)):
        firsts.setdefault(c.family, c)
    return firsts


def _finished(problem: Problem, original: Problem, near: list[Candidate], seeds: int) -> list[Candidate]:
    """The best of each family and the fastest of all others, with refined portions, over more draws."""
    ranked = sorted(near, key=lambda c: (c.rescored, c.seconds))
    firsts = list(_firsts(near).values())
    chosen = [*firsts, *(c for c in ranked if all(c is not first for first in firsts))][:FINALISTS]
    each = sum(effort(original, c.run) for c in chosen)
    draws = max(seeds, min(SEEDS, ROOM // each)) if seeds else 0
    alone = followed(problem.devices)
    found = []
    for number, c in enumerate(chosen):
        data = plan_data(problem, original, c.tree)
        run = predict(original, data, seeds=draws, alone=alone) if draws > seeds else c.run
        done = replace(c, rescored=run.seconds, run=run)
        if number < REFINED:
            changed = refined(original, data, alone=alone, draws=SCREEN if seeds else 0, room=ROOM_EACH)
            if changed is not None:
                run = predict(original, changed, seeds=draws, alone=alone)
                if run.seconds < done.rescored * (1 - TIE):
                    done = replace(done, rescored=run.seconds, run=run, data=changed, changes=difference(data, changed))
        found.append(replace(done, doubt=DOUBT * beyond(original, done.data or data)))
    return found


def _expected(problem: Problem, original: Problem, candidate: Candidate) -> float:
    """What the runtime would take if nothing scattered."""
    if not _by_rank(original):
        return candidate.run.seconds
    data = plan_data(problem, original, candidate.tree)
    return predict(original, data, seeds=0, alone=followed(problem.devices)).seconds - problem.overhead


def _by_rank(problem: Problem) -> bool:
    return all(cost.measured for cost in problem.costs.values())


def _candidate(problem: Problem, original: Problem, tree: Node, seeds: int) -> Candidate:
    found = price(tree, problem.items, problem)
    loads = switches(tree, problem.items, problem.items)
    if _by_rank(original):
        data = plan_data(problem, original, tree)
        run = predict(original, data, seeds=seeds, alone=followed(problem.devices))
        return Candidate(family(tree), tree, found.latency, run.seconds, found, loads, run)
    run = simulate(tree, problem, rule="lock")
    return Candidate(family(tree), tree, found.latency, rescore(tree, problem, seeds), found, loads, run)


def rescore(tree: Node, problem: Problem, seeds: int = SEEDS_GIVEN) -> float:
    """Seconds of a tree under the runtime's lock, where costs are given and not measured."""
    if seeds and any(isinstance(problem.costs[leaf.stage], StreamCost) for leaf in leaves(tree)):
        return problem.overhead + float(
            np.mean([simulate(tree, problem, rule="lock", seed=seed).seconds for seed in range(seeds)])
        )
    return problem.overhead + simulate(tree, problem, rule="lock").seconds


def preference(c: Candidate, problem: Problem) -> tuple[float, ...]:
    """The least wins among ties: fewer switches, larger portion, lower peak, node-aligned, then the faster."""
    return (
        c.switches,
        -smallest_portion(c.tree, problem.items),
        c.price.peak,
        misaligned(c.tree, problem.node),
        c.rescored,
    )


def smallest_portion(node: Node, portion: int) -> int:
    """The smallest portion that passes anywhere in the tree."""
    if isinstance(node, Leaf):
        return portion
    inner = node.portion if isinstance(node, Pipe) else portion
    return min(inner, *(smallest_portion(side, inner) for side in sides(node)))


def misaligned(node: Node, size: int, first: int = 0) -> int:
    """Leaves that begin or end inside a node of ``size`` devices, beyond what their number forces."""
    if isinstance(node, Leaf):
        crosses = node.devices and first // size != (first + node.devices - 1) // size
        return int(bool(crosses and (first % size or node.devices % size)))
    one, other = sides(node)
    shift = devices(one) if isinstance(node, Pipe | Parallel) else 0
    return misaligned(one, size, first) + misaligned(other, size, first + shift)


def _nothing(problem: Problem) -> str:
    """Why there is no plan, by name."""
    need: list[tuple[float, str]] = []
    for name, stage in problem.graph.stages.items():
        if not stage.device:
            continue
        cost = problem.costs[name]
        counts = np.array(stage.accepted(problem.devices), dtype=np.int64)
        portion = min((c for c in problem.sizes() if stage.takes(c, problem.items)), default=problem.items)
        work = min(
            float((cost.resident(counts) + cost.working(counts, portion, o)).min()) for o in cost.options(portion)
        )
        whole = float(cost.resident(counts).min())
        need.append((work - (min(cost.memory.remainder, whole) if stage.swappable else whole), name))
    if not math.isfinite(problem.device_bytes):
        return "no portion is allowed by all barriers; give other portions, or a number of items that divides"
    rest = 0.0
    for name, stage in problem.graph.stages.items():
        if stage.device:
            counts = np.array(stage.accepted(problem.devices), dtype=np.int64)
            held = problem.costs[name].resident(counts)
            keeps = np.minimum(problem.costs[name].memory.remainder, held) if stage.swappable else held
            rest += float(keeps.min())
    most, name = max(need)
    short = most + rest - problem.device_bytes
    if short > 0:
        return (
            f"stage {name!r} does not fit beside the others on {counted(problem.devices, 'device')}: it needs "
            f"{size(most + rest)} on device 0 with what the others leave there, and a device has "
            f"{size(problem.device_bytes)}: {size(short)} short; let the others be offloaded, or give more devices"
        )
    return (
        f"no plan fits on {counted(problem.devices, 'device')} of {size(problem.device_bytes)} with "
        f"{size(problem.host_bytes)} of host memory for each; stage {name!r} needs most on device 0; give more host "
        "memory or devices"
    )
