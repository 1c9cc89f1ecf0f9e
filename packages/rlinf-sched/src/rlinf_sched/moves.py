"""Plans near a plan: other portions, and other orders of independent stages, on the same devices."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from rlinf_sched.export import own_portion
from rlinf_sched.graph import Graph
from rlinf_sched.planread import leaf_bodies, read_plan
from rlinf_sched.problem import Problem

_ORDERS = 24
"""Orders of independent stages that are tried."""


def neighbours(problem: Problem, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Plans with other portions (of one stage, or of all together), and with another order of independent stages."""
    names = [name for name, stage in problem.graph.stages.items() if stage.barrier != "batch"]
    sizes = problem.sizes()
    for size in sizes:
        yield with_portions(problem, data, dict.fromkeys(names, size))
    for name in names:
        for size in sizes:
            yield with_portions(problem, data, {name: size})
    for a, b in problem.graph.edges:  # what is made and what is taken, together
        if a in names and b in names:
            for size in sizes[1:]:
                yield with_portions(problem, data, {a: size, b: size})
    for order in orders(problem.graph):
        yield {**copy.deepcopy(dict(data)), "order": order}


def with_portions(problem: Problem, data: Mapping[str, Any], portions: Mapping[str, int]) -> dict[str, Any]:
    """The plan with other portions, given in items of the step for the whole stage."""
    changed = copy.deepcopy(dict(data))
    placed = read_plan(data, problem).stages
    bodies = {body["stage"]: body for body in leaf_bodies(changed["tree"])}
    for name, size in portions.items():
        stage = problem.graph.stages[name]
        own = own_portion(stage, len(placed[name].processes), size, problem.items)
        if stage.device:
            place = bodies[name]
            key = "portion"
        else:
            place, key = changed.setdefault("cpu_portion", {}), name
        place.pop(key, None)
        if own is None and read_plan(changed, problem).stages[name].portion is not None:
            own = max(1, round(problem.items * stage.per_item))  # a pipe above would set what says nothing
        if own is not None:
            place[key] = own
    if not changed.get("cpu_portion", True):
        del changed["cpu_portion"]
    return changed


def orders(graph: Graph) -> Iterator[list[str]]:
    """Orders of the device stages that the flow allows, other than its own."""
    names = [name for part in graph.components() for name in part if graph.stages[name].device]
    home = {name: set(part) for part in graph.components() for name in part}
    before = {name: graph.reachable([name]) - home[name] for name in names}
    count = 0
    for order in permutations(names):
        if list(order) == names:
            continue
        if any(earlier in before[later] for i, earlier in enumerate(order) for later in order[i + 1 :]):
            continue
        yield list(order)
        count += 1
        if count == _ORDERS:
            return


def key_of(data: Mapping[str, Any]) -> str:
    """The same for plans that run alike."""
    kept = {name: value for name, value in data.items() if name in ("tree", "cpu", "cpu_portion", "order", "portion")}
    return json.dumps(kept, sort_keys=True)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What changes, in words."""
    if old.get("order") != new.get("order"):
        return f"the devices go to {', '.join(new['order'])} in this order"
    before = {body["stage"]: body.get("portion") for body in leaf_bodies(old["tree"])} | old.get("cpu_portion", {})
    after = {body["stage"]: body.get("portion") for body in leaf_bodies(new["tree"])} | new.get("cpu_portion", {})
    parts = []
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        if one != other:
            parts.append(f"{name} takes {other or 'everything'} at once instead of {one or 'everything'}")
    return ", ".join(parts)
