"""A plan as the runtime reads it: plain data in the format of ``rlinf run plan=FILE``.

The planner's portions are items of the step for a whole stage. A plan file says what one rank takes of its own items
at once; only a collective group's portion is for all its ranks together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlinf_sched.costmodel import SplitCost
from rlinf_sched.graph import Stage
from rlinf_sched.problem import Problem
from rlinf_sched.tree import Leaf, Node, Parallel, Pipe, Share, devices, family, sides

if TYPE_CHECKING:
    from rlinf_sched.planner import Candidate, Plan


def to_plan(plan: Plan, candidate: Candidate | None = None) -> dict[str, Any]:
    """The chosen plan, or another candidate of it, with its predicted times. CPU stages get their ranks."""
    chosen = candidate or plan.best
    data = dict(chosen.data) if chosen.data is not None else plan_data(plan.problem, plan.original, chosen.tree)
    predicted = {"step": round(chosen.rescored, 6)}
    predicted |= {name: round(seconds, 6) for name, seconds in chosen.run.busy.items()}
    tree = data.pop("tree")
    return {**data, "predicted": predicted, "tree": tree}


def plan_data(problem: Problem, original: Problem, tree: Node) -> dict[str, Any]:
    """The tree as plain data. ``problem``: the one that was planned, cycles as one stage each; ``original``: as it
    was given."""
    data: dict[str, Any] = {"name": family(tree), "devices": problem.devices}
    if problem.graph.flow:
        data["flow"] = problem.graph.flow
    stages = original.graph.stages
    cpu = {name: stage.ranks or 1 for name, stage in stages.items() if not stage.device}
    if cpu:
        data["cpu"] = cpu
    export = _Export(problem, original)
    data["tree"] = export.node(tree, 0, False)
    if export.cpu:
        data["cpu_portion"] = dict(export.cpu)
    return data


class _Export:
    def __init__(self, problem: Problem, original: Problem) -> None:
        self.problem = problem
        self.original = original
        self.items = problem.items
        self.cpu: dict[str, int] = {}

    def node(self, node: Node, first: int, swapped: bool, shared: bool = False) -> dict[str, Any] | None:
        """Plain data of a part whose devices begin at ``first``; None when it has only CPU stages. ``swapped``: it is
        offloaded for others; ``shared``: others use its devices."""
        if isinstance(node, Leaf):
            return self._leaf(node, first, swapped, shared)
        one, other = sides(node)
        share = isinstance(node, Share)
        shift = 0 if share else devices(one)
        out = (node.swap_first, node.swap_then) if isinstance(node, Share) else (False, False)
        left = self.node(one, first, swapped or out[0], shared or share)
        right = self.node(other, first + shift, swapped or out[1], shared or share)
        if left is None or right is None:
            return left or right
        if share:
            return {"share": {"first": left, "then": right}}
        if isinstance(node, Parallel):
            return {"parallel": {"a": left, "b": right}}
        assert isinstance(node, Pipe)
        return {"pipe": {"up": left, "down": right} | self._said(self._pipe_portion(node))}

    def _pipe_portion(self, node: Pipe) -> int | None:
        """What a stage below that says nothing itself takes at once."""
        return node.portion if node.portion != self.items else None

    @staticmethod
    def _said(portion: int | None) -> dict[str, int]:
        return {} if portion is None else {"portion": portion}

    def _leaf(self, leaf: Leaf, first: int, swapped: bool, shared: bool) -> dict[str, Any] | None:
        cost = self.problem.costs[leaf.stage]
        stays = True if shared and not swapped else None
        if isinstance(cost, SplitCost):
            return self._cycle(leaf, cost, first, stays)
        stage = self.original.graph.stages[leaf.stage]
        if not stage.device:
            portion = self._portion(stage, stage.ranks or 1, leaf.portion)
            if portion is not None:
                self.cpu[stage.name] = portion
            return None
        option = leaf.option if cost.options(leaf.portion) != (0,) else 0
        return self._stage(stage, leaf.devices, leaf.portion, first, option, stays)

    def _portion(self, stage: Stage, ranks: int, portion: int) -> int | None:
        return own_portion(stage, ranks, portion, self.items)

    def _stage(
        self, stage: Stage, count: int, portion: int, first: int, option: int, stays: bool | None
    ) -> dict[str, Any]:
        ranks = stage.ranks or count // stage.multiple
        text = str(first) if count == 1 else f"{first}-{first + count - 1}"
        if ranks != count:
            text += ":0" if ranks == 1 else f":0-{ranks - 1}"
        body: dict[str, Any] = {"stage": stage.name, "devices": text}
        body |= self._said(self._portion(stage, ranks, portion))
        if option:
            body["slots"] = option
        if stays:
            body["resident"] = True
        return {"leaf": body}

    def _cycle(self, leaf: Leaf, cost: SplitCost, first: int, stays: bool | None) -> dict[str, Any] | None:
        a, b, k = cost.table[leaf.portion, leaf.option][3][leaf.devices]
        cycle = next(cycle for cycle in self.original.graph.cycles if cycle.name == leaf.stage)
        one, two = (self.original.graph.stages[name] for name in cycle.members)
        portion = leaf.portion // max(k, 1)
        parts: list[dict[str, Any] | None] = []
        said: list[int] = []
        for stage, count, place in ((one, a, first), (two, b, first + (a if k else 0))):
            ranks = (stage.ranks or count // stage.multiple) if stage.device else stage.ranks or 1
            mine = self._portion(stage, ranks, portion) if k > 1 else None
            if mine is not None:
                said.append(mine)
                if not stage.device:
                    self.cpu[stage.name] = mine
            size = portion if k > 1 else self.items
            parts.append(self._stage(stage, count, size, place, 0, stays) if stage.device else None)
        left, right = parts
        if left is None or right is None:
            return left or right
        return {"cycle": {"a": left, "b": right} | self._said(said[0] if said else None)}


_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
"""What YAML takes for something else than a text."""


def yaml_text(data: Mapping[str, Any], indent: int = 0) -> str:
    """A plan as YAML; keys and values are written as in JSON where YAML reads the same, so no library is needed."""
    lines = []
    for key, value in data.items():
        name = key if key.isidentifier() and key.lower() not in _WORDS else json.dumps(key)
        if isinstance(value, Mapping) and value:
            lines.append(f"{'  ' * indent}{name}:\n")
            lines.append(yaml_text(value, indent + 1))
        else:
            lines.append(f"{'  ' * indent}{name}: {json.dumps(value)}\n")
    return "".join(lines)


def own_portion(stage: Stage, ranks: int, portion: int, items: int) -> int | None:
    """What a rank (of a collective group: all of them) takes at once, in its own items, when the stage takes
    ``portion`` of the ``items`` of the step; None: everything."""
    if stage.barrier == "batch" or portion == items:
        return None
    each = 1 if stage.collective else ranks
    return max(1, math.ceil(portion * stage.per_item / each - 1e-9))
