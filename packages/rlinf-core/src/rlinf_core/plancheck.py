"""Whether a plan fits a flow and a cluster: every fault by its place in the plan."""

from __future__ import annotations

from rlinf_core.errors import ConfigError, PlacementError, PlanError, nearest
from rlinf_core.graph import FlowGraph, StageSpec
from rlinf_core.placement import ClusterInfo, Placement, parse_placement
from rlinf_core.plandata import SIDES, Leaf, Node, Plan, kind_of, leaves, sides

MAX_RANKS_PER_NODE = 1024
"""Most ranks of a CPU stage per node: beyond, a slip of the pen is likelier than a wish."""


PLANNED = "train"
"""The phase that plans are made for; others run with what it leaves."""


def cpu_ranks(plan: Plan, graph: FlowGraph, name: str) -> int | None:
    """Ranks of a CPU stage. One that the planned phase does not call (an evaluation's) need not be named in the plan;
    ``None``: it must be, and is not."""
    phase = graph.phases.get(PLANNED)
    aside = phase is not None and all(call.group != name for call in phase.calls)
    return plan.cpu.get(name, graph.stages[name].ranks_fixed or 1 if aside else None)


class PlanCheck:
    """Collects the faults of one plan."""

    def __init__(self, plan: Plan, graph: FlowGraph, cluster: ClusterInfo) -> None:
        self.plan = plan
        self.graph = graph
        self.cluster = cluster
        self.faults: list[ConfigError] = []
        self.placed: dict[str, Placement] = {}

    def run(self) -> None:
        plan, graph = self.plan, self.graph
        have = len(self.cluster.devices)
        if plan.flow and plan.flow != graph.fingerprint():
            self._fault(
                "flow",
                f"{plan.flow!r} is another flow than this one ({graph.fingerprint()}); plan again, or remove the key",
            )
        if plan.devices is not None and plan.devices != have:
            self._fault("devices", f"the plan was made for {plan.devices} devices, and the cluster has {have}")
        if plan.tree is not None:
            self._node(plan.tree, "tree")
        for name, stage in graph.stages.items():
            if stage.device and not any(leaf.stage == name for leaf in leaves(plan.tree)):
                self._fault("tree", f"device stage {name!r} has no leaf")
            if not stage.device:
                self._cpu(stage)
        for key, names in (("cpu", plan.cpu), ("cpu_portion", plan.cpu_portion)):
            for name in names:
                if name not in graph.stages:
                    self._fault(f"{key}.{name}", f"the flow has no stage {name!r}{nearest(name, graph.stages)}")
                elif graph.stages[name].device:
                    self._fault(f"{key}.{name}", f"{name!r} is a device stage; give it a leaf in the tree")
        for name in plan.cpu_portion:
            if name in graph.stages and graph.stages[name].barrier == "batch":
                self._fault(f"cpu_portion.{name}", f"would break the barrier of {name!r}, which needs the whole batch")
        if plan.order:
            self._order()

    def _order(self) -> None:
        order, graph = self.plan.order, self.graph
        mine = [name for name in graph.order() if graph.stages[name].device]
        if sorted(order) != sorted(mine):
            self._fault("order", f"names {', '.join(order)}; it must name each device stage once: {', '.join(mine)}")
            return
        for place, name in enumerate(order):
            for later in order[place + 1 :]:
                if name in graph.downstream(later) and later not in graph.downstream(name):
                    self._fault("order", f"{later!r} makes what {name!r} takes, so it must come before it")

    def _cpu(self, stage: StageSpec) -> None:
        ranks = cpu_ranks(self.plan, self.graph, stage.name)
        if ranks is None:
            self._fault("cpu", f"CPU stage {stage.name!r} has no number of ranks")
            return
        nodes = len({device.node for device in self.cluster.devices} | {node.name for node in self.cluster.nodes})
        if ranks > MAX_RANKS_PER_NODE * max(1, nodes):
            self._fault(
                f"cpu.{stage.name}", f"{ranks} ranks are more than {MAX_RANKS_PER_NODE} processes on each of the nodes"
            )
        self._ranks(stage, ranks, f"cpu.{stage.name}")

    def _ranks(self, stage: StageSpec, ranks: int, where: str) -> None:
        if stage.ranks_fixed is not None and ranks != stage.ranks_fixed:
            self._fault(where, f"{stage.name!r} gets {ranks} ranks but the program fixes {stage.ranks_fixed}")
        if stage.barrier == "batch" and not stage.collective and ranks > 1:
            self._fault(
                where,
                f"{stage.name!r} needs the whole batch at once (barrier 'batch') and its ranks work alone: "
                f"{ranks} ranks cannot share it; give it one rank, or make the worker collective",
            )

    def _node(self, node: Node, where: str) -> None:
        if isinstance(node, Leaf):
            self._leaf(node, f"{where}.leaf")
            return
        kind = kind_of(node)
        where = f"{where}.{kind}"
        names = SIDES[kind]
        one, other = sides(node)
        self._node(one, f"{where}.{names[0]}")
        self._node(other, f"{where}.{names[1]}")
        left = [leaf.stage for leaf in leaves(one) if leaf.stage in self.placed]
        right = [leaf.stage for leaf in leaves(other) if leaf.stage in self.placed]
        if left and right and not set(left) & set(right):
            self._devices(kind, where, left, right)
            self._flow(kind, where, left, right)

    def _devices(self, kind: str, where: str, left: list[str], right: list[str]) -> None:
        for a in left if kind in ("pipe", "parallel") else ():
            for b in right:
                common = sorted(self.placed[a].devices & self.placed[b].devices)
                if common:
                    self._fault(
                        where,
                        f"{a!r} and {b!r} run at the same time but both are placed on device "
                        f"{', '.join(map(str, common))}; give them separate devices, or use share",
                    )
        if kind == "share" and not any(self.placed[a].devices & self.placed[b].devices for a in left for b in right):
            self._fault(
                where,
                f"{_names(left)} and {_names(right)} are to take turns but have no device in common; place "
                "them on "
                "the same devices, or use pipe (plan=spatial) or parallel",
            )

    def _flow(self, kind: str, where: str, left: list[str], right: list[str]) -> None:
        for a in left:
            for b in right:
                forth, back = b in self.graph.downstream(a), a in self.graph.downstream(b)
                if kind == "cycle":
                    if not (forth and back):
                        self._fault(where, f"{a!r} and {b!r} do not feed each other; use pipe or share")
                elif kind == "parallel" and (forth or back):
                    up, down = (a, b) if forth else (b, a)
                    self._fault(where, f"{down!r} takes what {up!r} makes, so they are not parallel; use pipe or share")
                elif kind == "share" and forth and back:
                    self._fault(
                        where, f"{a!r} and {b!r} feed each other, so they cannot be offloaded in turn; use cycle"
                    )
                elif kind != "parallel" and back and not forth:
                    self._fault(where, f"{a!r} takes what {b!r} makes, so {b!r} must come first; swap the two sides")

    def _leaf(self, leaf: Leaf, where: str) -> None:
        stage = self.graph.stages.get(leaf.stage)
        if stage is None:
            known = nearest(leaf.stage, self.graph.stages)
            self._fault(f"{where}.stage", f"the flow has no stage {leaf.stage!r}{known}")
            return
        if not stage.device:
            self._fault(f"{where}.stage", f"{leaf.stage!r} runs on the CPU; give its ranks under 'cpu'")
            return
        if leaf.stage in self.placed:
            self._fault(f"{where}.stage", f"{leaf.stage!r} has a leaf already")
            return
        if leaf.portion is not None and stage.barrier == "batch":
            self._fault(
                f"{where}.portion",
                f"{leaf.portion} would break the barrier of {leaf.stage!r}, which needs the whole batch; remove it",
            )
        try:
            placement = parse_placement(leaf.devices, self.cluster, where=f"plan {self.plan.name}: {where}.devices")
        except PlacementError as error:
            self.faults.append(error)
            return
        self.placed[leaf.stage] = placement
        self._ranks(stage, len(placement.processes), f"{where}.devices")

    def _fault(self, where: str, what: str) -> None:
        self.faults.append(PlanError(f"plan {self.plan.name}: {where}: {what}"))


def _names(stages: list[str]) -> str:
    return " and ".join(repr(stage) for stage in stages)
