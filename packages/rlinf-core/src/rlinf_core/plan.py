"""Plans: made from the config, checked against flow and cluster, and the flat view that a run works from.

The tree and its YAML are in ``plandata``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_core.devicelock import ReplicaSpec
from rlinf_core.errors import PlacementError, PlanError, nearest
from rlinf_core.graph import FlowGraph, StageSpec
from rlinf_core.placement import ClusterInfo, Placement, format_placement, parse_placement
from rlinf_core.plancheck import PlanCheck, cpu_ranks
from rlinf_core.plandata import (
    Cycle,
    Leaf,
    Node,
    Parallel,
    Pipe,
    Plan,
    Share,
    check_portion,
    leaves,
    rebuilt,
    sides,
)
from rlinf_core.spill import spills

__all__ = [
    "DEFAULT_PORTION",
    "MODES",
    "SCHEDULED",
    "Cycle",
    "FlatPlan",
    "GroupPlan",
    "Leaf",
    "Node",
    "Parallel",
    "Pipe",
    "Plan",
    "Share",
    "check_spec",
    "flatten",
    "leaves",
    "make_plan",
    "validate",
]

DEFAULT_PORTION = 8
"""Items moved at once between pipelined stages when neither plan nor config says."""
MODES = ("temporal", "spatial")
SCHEDULED = ("auto", "hybrid")
"""What a scheduler plugin finds by profiling: the best plan, and the best one of the hybrid family."""


# ------------------------------------------------------------------ the flat view


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's ranks: ``processes[rank]`` are its device ids (``()`` for a CPU stage). ``order``: place of
    the stage in the flow, or in the plan's own order. ``resident``: it is never offloaded. ``together``: the set of
    stages that are loaded at the same time. ``slots``: what the plan chose for the engine."""

    name: str
    processes: tuple[tuple[int, ...], ...]
    resident: bool
    order: int
    collective: bool = False
    together: str = ""
    slots: int | None = None

    @property
    def devices(self) -> frozenset[int]:
        return frozenset(device for process in self.processes for device in process)

    def replica(self, rank: int) -> tuple[str, int]:
        """Name of the rank's replica in the device lock, and the rank inside it."""
        return (self.name, rank) if self.collective else (f"{self.name}[{rank}]", 0)

    def spec(self, devices: frozenset[int], ranks: int) -> ReplicaSpec:
        """What the device lock knows of one of its replicas."""
        return ReplicaSpec(devices, ranks, self.order, self.resident, self.together)


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """What a run needs. ``portion`` is by ``"phase:channel"`` and by ``"phase:channel>group"``, ``spill`` by
    ``"phase:channel"``; read them through ``portion_for`` and ``spills``."""

    groups: dict[str, GroupPlan]
    portion: dict[str, int | None] = field(default_factory=dict)
    spill: frozenset[str] = frozenset()
    alternating: dict[str, frozenset[str]] = field(default_factory=dict)
    """By group: those that share its devices and take what it makes, to which it gives way after each portion because
    others wait for what comes out (a share upstream of a pipe). Other holders keep devices while they have input."""

    def portion_for(self, phase: str, channel: str, group: str) -> int | None:
        """Items that ``group`` takes from the channel at once; None is everything."""
        return self.portion[f"{phase}:{channel}>{group}"]

    def spills(self, phase: str, channel: str) -> bool:
        """Whether the channel must take items beyond its limits: its writer holds a device (or a rank) that
        the reader waits for, so waiting for credit would be for ever."""
        return f"{phase}:{channel}" in self.spill

    def gives_way(self) -> dict[str, tuple[str, ...]]:
        """``alternating`` by member (rank of a group): only ranks that share its replica's devices count."""
        found: dict[str, tuple[str, ...]] = {}
        for name, others in self.alternating.items():
            mine = self.groups[name]
            for rank, process in enumerate(mine.processes):
                devices = mine.devices if mine.collective else frozenset(process)
                found[f"{name}[{rank}]"] = tuple(
                    f"{other}[{place}]"
                    for other in sorted(others)
                    for place, theirs in enumerate(self.groups[other].processes)
                    if devices & (self.groups[other].devices if self.groups[other].collective else frozenset(theirs))
                )
        return found

    def shares(self, group: str) -> bool:
        """Whether other groups use its devices too."""
        mine = self.groups[group].devices
        return any(mine & other.devices for name, other in self.groups.items() if name != group)

    def replica_specs(self) -> dict[str, ReplicaSpec]:
        """What the device lock is made from: one replica per collective group, one per rank of the others."""
        specs: dict[str, ReplicaSpec] = {}
        for group in self.groups.values():
            if group.collective:
                specs[group.name] = group.spec(group.devices, len(group.processes))
            else:
                for rank, process in enumerate(group.processes):
                    name, _ = group.replica(rank)
                    specs[name] = group.spec(frozenset(process), 1)
        return specs


# ------------------------------------------------------------------ making


def make_plan(
    spec: str,
    graph: FlowGraph,
    cluster: ClusterInfo,
    *,
    portion: int | None = None,
    placement: Mapping[str, str] | None = None,
    most_ranks: Mapping[str, int] | None = None,
) -> Plan:
    """The plan that the config asks for, validated.

    ``spec`` (config key ``plan``): ``temporal``, ``spatial`` or the path of a YAML file. ``portion`` (config
    key ``portion``): items moved at once in place of the plan's. ``placement`` (config key ``placement``):
    group -> placement text in place of the plan's (a device stage), or number of ranks (a CPU stage).
    ``most_ranks``: group -> ranks that a mode gives it at most (``Worker.most_ranks``).
    Raises ``PlanError`` or ``PlacementError`` naming key, value and what would be right.
    """
    check_portion(portion, "portion")
    written = check_spec(spec)
    if written is None:
        plan = _mode_plan(spec, graph, cluster, portion, most_ranks or {})
    else:
        plan = written
        if portion is not None:
            tree = None if plan.tree is None else _with_portion(plan.tree, portion, graph)
            plan = dataclasses.replace(plan, tree=tree, portion=portion)
    if placement:
        plan = _override(plan, graph, cluster, placement)
    validate(plan, graph, cluster)
    return plan


def check_spec(spec: str) -> Plan | None:
    """Whether ``spec`` can be a plan at all, before flow and cluster are known: the plan of a file, None for a mode.

    Raises ``PlanError`` for a misspelt mode, a file that is not there, and a fault of its text.
    """
    if spec in MODES:
        return None
    if spec in SCHEDULED:
        raise PlanError(f"plan: {spec!r} is found by profiling, which `rlinf run` does before anything is planned")
    return _file_plan(spec)


def _file_plan(spec: str) -> Plan:
    path = Path(spec)
    looks_like_file = path.suffix in (".yaml", ".yml", ".json") or len(path.parts) > 1
    if not spec or (not _exists(path) and not looks_like_file):
        known = (*MODES, *SCHEDULED)
        raise PlanError(
            f"plan: {spec!r} is not a mode{nearest(spec, known)}; give {', '.join(known)}, or the path of a YAML file"
        )
    if not _exists(path):
        raise PlanError(f"plan: there is no file {spec!r}")
    if path.is_dir():
        raise PlanError(f"plan: {spec!r} is a directory; give the path of a plan's YAML file")
    if not path.is_file():
        raise PlanError(f"plan: {spec!r} is not a regular file; give the path of a plan's YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"plan: {spec!r} cannot be read: {error}") from error
    return Plan.from_yaml(text, source=f"plan {spec}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _mode_plan(
    mode: str, graph: FlowGraph, cluster: ClusterInfo, portion: int | None, most_ranks: Mapping[str, int]
) -> Plan:
    order = graph.order()
    on_devices = [graph.stages[name] for name in order if graph.stages[name].device]
    total = len(cluster.devices)
    if on_devices and not total:
        names = ", ".join(stage.name for stage in on_devices)
        raise PlanError(f"plan: {names} need devices and the cluster has none; set cluster.virtual_devices")
    tree: Node | None = None
    if mode == "temporal" or len(on_devices) == 1:
        everywhere = [
            Leaf(
                stage.name,
                _spread(stage, list(range(total)), most_ranks.get(stage.name)),
                _leaf_portion(stage, portion, mode),
            )
            for stage in on_devices
        ]
        for part in reversed(_cycles(graph, everywhere, portion)):
            tree = part if tree is None else Share(part, tree)
    elif on_devices:
        if total < len(on_devices):
            names = ", ".join(stage.name for stage in on_devices)
            raise PlanError(
                f"plan: 'spatial' gives each device stage its own devices, but there are {len(on_devices)} stages "
                f"({names}) and {total} device{'s' if total != 1 else ''}; set cluster.virtual_devices to at least "
                f"{len(on_devices)}, or plan=temporal"
            )
        each, more = divmod(total, len(on_devices))
        apart: list[Leaf] = []
        end = total
        for index in range(len(on_devices) - 1, -1, -1):
            stage = on_devices[index]
            start = end - each - (index < more)
            devices = _spread(stage, list(range(start, end)), most_ranks.get(stage.name))
            leaf = Leaf(stage.name, devices, _leaf_portion(stage, portion, mode))
            apart.insert(0, leaf)
            end = start
        for part in reversed(_side_by_side(graph, _cycles(graph, apart, portion or DEFAULT_PORTION))):
            tree = part if tree is None else Pipe(part, tree, portion or DEFAULT_PORTION)
    cpu = {name: graph.stages[name].ranks_fixed or 1 for name in order if not graph.stages[name].device}
    if portion is None and mode == "spatial":
        portion = DEFAULT_PORTION
    return Plan(mode, tree, cpu, total, graph.fingerprint(), portion)


def _cycles(graph: FlowGraph, found: list[Leaf], portion: int | None) -> list[Node]:
    """The leaves in the order of the flow, those that feed each other joined."""
    parts: list[Node] = []
    for leaf in found:
        last = parts[-1] if parts else None
        if last is not None and all(graph.in_cycle(leaf.stage, other.stage) for other in leaves(last)):
            parts[-1] = Cycle(last, leaf, portion)
        else:
            parts.append(leaf)
    return parts


def _side_by_side(graph: FlowGraph, parts: list[Node]) -> list[Node]:
    """Neighbours between which nothing passes, joined."""
    found: list[Node] = []
    for part in parts:
        mine = _stages(part)
        apart = found and not any(
            a in graph.downstream(b) or b in graph.downstream(a) for a in mine for b in _stages(found[-1])
        )
        if apart:
            found[-1] = Parallel(found[-1], part)
        else:
            found.append(part)
    return found


def _leaf_portion(stage: StageSpec, portion: int | None, mode: str) -> int | None:
    if stage.barrier == "batch":
        return None
    if portion is not None or mode == "temporal":
        return portion
    return 1 if stage.barrier == "group" else DEFAULT_PORTION  # 1 item is rounded up to a whole group


def _spread(stage: StageSpec, devices: list[int], most: int | None) -> str:
    """Placement text that puts the stage's ranks, at most so many, on these devices, evenly; some may stay idle."""
    ranks = stage.ranks_fixed
    if ranks is None:
        # A stage that must see the whole batch at once cannot be split over ranks that work alone.
        ranks = 1 if stage.barrier == "batch" and not stage.collective else min(len(devices), most or len(devices))
    if ranks >= len(devices):
        while ranks % len(devices):
            devices = devices[:-1]
        each = ranks // len(devices)
        return format_placement([(devices[rank // each],) for rank in range(ranks)])
    if stage.ranks_fixed is None:
        return format_placement([(device,) for device in devices[:ranks]])
    each = len(devices) // ranks
    return format_placement([tuple(devices[rank * each : (rank + 1) * each]) for rank in range(ranks)])


def _with_portion(node: Node, portion: int, graph: FlowGraph) -> Node:
    if isinstance(node, Leaf):
        stage = graph.stages.get(node.stage)
        batch = stage is not None and stage.barrier == "batch"
        return node if batch else dataclasses.replace(node, portion=portion)
    left, right = (_with_portion(side, portion, graph) for side in sides(node))
    new = rebuilt(node, left, right)
    return dataclasses.replace(new, portion=portion) if isinstance(new, Pipe | Cycle) else new


def _override(plan: Plan, graph: FlowGraph, cluster: ClusterInfo, placement: Mapping[str, str]) -> Plan:
    cpu = dict(plan.cpu)
    moved: dict[str, str] = {}
    for name, value in placement.items():
        if name not in graph.stages:
            raise PlacementError(
                f"placement.{name}: the flow has no group {name!r}{nearest(name, graph.stages)}; "
                f"groups: {', '.join(graph.stages)}"
            )
        if graph.stages[name].device:
            parse_placement(str(value), cluster, where=f"placement.{name}")
            moved[name] = str(value)
        elif str(value).isdecimal() and len(str(value)) < 10 and int(value) > 0:
            cpu[name] = int(value)
        else:
            raise PlacementError(
                f"placement.{name}: {value!r}: {name!r} runs on the CPU and has no devices; give its number of ranks"
            )
    tree = None if plan.tree is None else _moved(plan.tree, moved)
    return dataclasses.replace(plan, tree=tree, cpu=cpu)


def _moved(node: Node, moved: Mapping[str, str]) -> Node:
    if isinstance(node, Leaf):
        return dataclasses.replace(node, devices=moved.get(node.stage, node.devices))
    left, right = (_moved(side, moved) for side in sides(node))
    return rebuilt(node, left, right)


# ------------------------------------------------------------------ checking


def validate(plan: Plan, graph: FlowGraph, cluster: ClusterInfo) -> None:
    """Raise ``PlanError`` (``PlacementError`` when that is all) naming every fault of the plan."""
    flatten(plan, graph, cluster)


def flatten(plan: Plan, graph: FlowGraph, cluster: ClusterInfo) -> FlatPlan:
    """The flat view of a plan, after checking it; raises like ``validate``."""
    check = PlanCheck(plan, graph, cluster)
    check.run()
    if check.faults:
        kind = PlacementError if all(isinstance(fault, PlacementError) for fault in check.faults) else PlanError
        texts = list(dict.fromkeys(str(fault) for fault in check.faults))
        raise kind(texts[0] if len(texts) == 1 else f"plan {plan.name}: {len(texts)} faults\n- " + "\n- ".join(texts))
    groups = _groups(plan, graph, check.placed)
    portion: dict[str, int | None] = {}
    for phase in graph.phases.values():
        for channel in phase.channels:
            found: list[int | None] = []
            for index in phase.readers(channel):
                group = phase.calls[index].group
                writers = {phase.calls[w].group for w in phase.writers(channel)}
                found.append(_portion_of(plan, graph, writers, group))
                portion[f"{phase.name}:{channel}>{group}"] = found[-1]
            known = [n for n in found if n is not None]
            portion[f"{phase.name}:{channel}"] = min(known) if known else None
    turns = _alternating(plan.tree, graph, False)
    return FlatPlan(groups, portion, frozenset(spills(graph, groups, turns)), turns)


def _groups(plan: Plan, graph: FlowGraph, placed: Mapping[str, Placement]) -> dict[str, GroupPlan]:
    groups: dict[str, GroupPlan] = {}
    turns = {name: turn for turn, name in enumerate(plan.order)}
    mates = _sets(plan.tree)
    for order, name in enumerate(graph.order()):
        stage = graph.stages[name]
        if stage.device:
            mine = placed[name]
            leaf = next(leaf for leaf in leaves(plan.tree) if leaf.stage == name)
            alone = not any(mine.devices & other.devices for rival, other in placed.items() if rival != name)
            resident = alone if leaf.resident is None else leaf.resident or alone
            turn = turns.get(name, order)
            together = mates.get(name, "")
            groups[name] = GroupPlan(name, mine.processes, resident, turn, stage.collective, together, leaf.slots)
        else:
            ranks = cpu_ranks(plan, graph, name)
            assert ranks is not None, "the check has found it"
            groups[name] = GroupPlan(name, ((),) * ranks, True, order, stage.collective)
    return groups


def _alternating(node: Node | None, graph: FlowGraph, feeds: bool) -> dict[str, frozenset[str]]:
    """Producers in shares whose output goes on to a stage that runs at the same time (``feeds``)."""
    if node is None or isinstance(node, Leaf):
        return {}
    one, other = sides(node)
    found = _alternating(one, graph, feeds or isinstance(node, Pipe)) | _alternating(other, graph, feeds)
    if isinstance(node, Share) and feeds:
        for name in _stages(one):
            takers = frozenset(b for b in _stages(other) if b in graph.downstream(name))
            found[name] = found.get(name, frozenset()) | takers
    return found


def _sets(node: Node | None) -> dict[str, str]:
    """By stage: the name of the outermost cycle that it is in."""
    if node is None or isinstance(node, Leaf):
        return {}
    if isinstance(node, Cycle):
        members = [leaf.stage for leaf in leaves(node)]
        return dict.fromkeys(members, "+".join(members))
    return {name: found for side in sides(node) for name, found in _sets(side).items()}


def _portion_of(plan: Plan, graph: FlowGraph, writers: set[str], reader: str) -> int | None:
    """The leaf's own portion, else that of the innermost pipe between what feeds the channel and what takes
    from it, else the plan's."""
    if graph.stages[reader].barrier == "batch":
        return None
    if reader in plan.cpu_portion:
        return plan.cpu_portion[reader]
    for leaf in leaves(plan.tree):
        if leaf.stage == reader and leaf.portion is not None:
            return leaf.portion
    above = writers | {name for name in graph.stages if graph.downstream(name) & writers}
    below = {reader} | graph.downstream(reader)
    found = max(_pipes_between(plan.tree, above, below, 0), key=lambda pair: pair[0], default=(0, plan.portion))
    return found[1]


def _pipes_between(node: Node | None, above: set[str], below: set[str], depth: int) -> Iterator[tuple[int, int | None]]:
    """(depth, portion) of the pipes that have a stage of ``above`` upstream and one of ``below`` downstream."""
    if node is None or isinstance(node, Leaf):
        return
    one, other = sides(node)
    ways = [(one, other)] if isinstance(node, Pipe) else [(one, other), (other, one)] if isinstance(node, Cycle) else []
    if isinstance(node, Pipe | Cycle) and any(_stages(up) & above and _stages(down) & below for up, down in ways):
        yield depth, node.portion
    yield from _pipes_between(one, above, below, depth + 1)
    yield from _pipes_between(other, above, below, depth + 1)


def _stages(node: Node) -> set[str]:
    return {leaf.stage for leaf in leaves(node)}
