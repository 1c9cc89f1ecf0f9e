"""A plan as the runtime reads it: plain data in the format of ``rlinf run plan=FILE``."""

from __future__ import annotations

from typing import Any

from rlinf_sched.costmodel import SplitCost
from rlinf_sched.graph import Stage
from rlinf_sched.planner import Candidate, Plan
from rlinf_sched.tree import Leaf, Node, Parallel, Pipe, Share, devices, leaves, sides


def to_plan(plan: Plan, candidate: Candidate | None = None) -> dict[str, Any]:
    """The chosen plan, or another candidate of it, with its predicted times. CPU stages get their ranks."""
    chosen = candidate or plan.best
    data: dict[str, Any] = {"name": chosen.family, "devices": plan.problem.devices}
    if plan.problem.graph.flow:
        data["flow"] = plan.problem.graph.flow
    cpu = {name: stage.ranks or 1 for name, stage in plan.original.graph.stages.items() if not stage.device}
    if cpu:
        data["cpu"] = cpu
    data["predicted"] = {"step": round(chosen.rescored, 6)} | {
        name: round(seconds, 6) for name, seconds in chosen.run.busy.items()
    }
    export = _Export(plan, chosen)
    if export.common is not None:
        data["portion"] = export.common
    data["tree"] = export.node(chosen.tree, 0)
    return data


class _Export:
    def __init__(self, plan: Plan, chosen: Candidate) -> None:
        self.plan = plan
        self.items = plan.problem.items
        stages = plan.problem.graph.stages
        cpu = [(leaf.portion, stages[leaf.stage]) for leaf in leaves(chosen.tree) if not stages[leaf.stage].device]
        small = [max(1, round(portion * stage.per_item)) for portion, stage in cpu if portion < self.items]
        # CPU stages have no leaf to say their portion: it is the plan's, and what takes everything must say so.
        self.common = min(small, default=None)

    def node(self, node: Node, first: int) -> dict[str, Any] | None:
        """Plain data of a part whose devices begin at ``first``; None when it has only CPU stages."""
        if isinstance(node, Leaf):
            return self._leaf(node, first)
        one, other = sides(node)
        shift = 0 if isinstance(node, Share) else devices(one)
        left, right = self.node(one, first), self.node(other, first + shift)
        if left is None or right is None:
            return left or right
        if isinstance(node, Share):
            return {"share": {"first": left, "then": right}}
        if isinstance(node, Parallel):
            return {"parallel": {"a": left, "b": right}}
        return {"pipe": self._portion({"up": left, "down": right}, node)}

    def _portion(self, body: dict[str, Any], node: Pipe) -> dict[str, Any]:
        said = node.portion != self.items or self.common is not None
        return {**body, "portion": node.portion} if said else body

    def _leaf(self, leaf: Leaf, first: int) -> dict[str, Any] | None:
        cost = self.plan.problem.costs[leaf.stage]
        if isinstance(cost, SplitCost):
            return self._cycle(leaf, cost, first)
        stage = self.plan.original.graph.stages[leaf.stage]
        return self._stage(stage, leaf.devices, leaf.portion, first) if stage.device else None

    def _stage(self, stage: Stage, count: int, portion: int, first: int) -> dict[str, Any]:
        ranks = stage.ranks or count // stage.multiple
        text = str(first) if count == 1 else f"{first}-{first + count - 1}"
        if ranks != count:
            text += ":0" if ranks == 1 else f":0-{ranks - 1}"
        body: dict[str, Any] = {"stage": stage.name, "devices": text}
        if stage.barrier != "batch" and (portion != self.items or self.common is not None):
            body["portion"] = max(1, round(portion * stage.per_item))
        return {"leaf": body}

    def _cycle(self, leaf: Leaf, cost: SplitCost, first: int) -> dict[str, Any] | None:
        a, b, k = cost.table[leaf.portion, leaf.option][3][leaf.devices]
        cycle = next(cycle for cycle in self.plan.original.graph.cycles if cycle.name == leaf.stage)
        one, two = (self.plan.original.graph.stages[name] for name in cycle.members)
        portion = leaf.portion // max(k, 1)
        left = self._stage(one, a, portion, first) if one.device else None
        right = self._stage(two, b, portion, first + (a if k else 0)) if two.device else None
        if left is None or right is None:
            return left or right
        if not k:
            return {"share": {"first": left, "then": right}}
        return {"pipe": {"up": left, "down": right, "portion": portion}}
