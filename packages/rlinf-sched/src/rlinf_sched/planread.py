"""Plans of the runtime, read back: which stage has which devices and takes how much at once.

Reads what ``rlinf run plan=FILE`` reads and what a run writes into its directory, as plain data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_sched.graph import Graph, SchedError, known, near
from rlinf_sched.problem import Problem

_SIDES = {"share": ("first", "then"), "pipe": ("up", "down"), "parallel": ("a", "b"), "cycle": ("a", "b")}
_LEAF = ("stage", "devices", "portion", "slots", "resident")
_TOP = ("name", "devices", "flow", "cpu", "cpu_portion", "order", "portion", "predicted", "tree")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Placed:
    """One stage. ``processes[rank]``: its devices (none for a CPU stage). ``portion``: items of its own that a rank (or
    a collective group) takes at once; None: everything. ``resident``: it is never offloaded."""

    name: str
    processes: tuple[tuple[int, ...], ...]
    portion: int | None = None
    slots: int | None = None
    resident: bool = False

    @property
    def devices(self) -> frozenset[int]:
        return frozenset(device for process in self.processes for device in process)


@dataclass(frozen=True)
class FlatPlan:
    """All stages of a plan; ``order``: their place in the flow; ``loops``: pairs that feed each other; ``gives_way``:
    by stage, those to which it leaves its devices after each portion."""

    stages: Mapping[str, Placed]
    order: Mapping[str, int]
    loops: tuple[tuple[str, str], ...]
    devices: int
    gives_way: Mapping[str, frozenset[str]]
    warnings: tuple[str, ...] = ()


def read_plan(data: Mapping[str, Any], problem: Problem, *, source: str = "plan") -> FlatPlan:
    """Raises SchedError naming unknown keys and stages, stages without a place, and placements that are none.

    ``problem``: the whole one, with cycles as two stages each.
    """
    known(data, _TOP, source)
    graph = problem.graph
    bodies = {body["stage"]: body for body in _leaves(data.get("tree"), f"{source}.tree")}
    cpu, small = data.get("cpu") or {}, data.get("cpu_portion") or {}
    for what, names in (("tree", bodies), ("cpu", cpu), ("cpu_portion", small)):
        for name in names:
            if name not in graph.stages:
                raise SchedError(f"{source}.{what}: there is no stage {name!r}{near(name, graph.stages)}")
    total = data.get("devices") or problem.devices
    placed: dict[str, Placed] = {}
    for name, stage in graph.stages.items():
        portion = _portion(data, graph, name)
        if not stage.device:
            ranks = cpu.get(name, stage.ranks or 1)
            placed[name] = Placed(name, ((),) * ranks, small.get(name, portion))
            continue
        if name not in bodies:
            raise SchedError(f"{source}.tree: device stage {name!r} has no leaf")
        body = bodies[name]
        ranks = processes(str(body["devices"]), total, f"{source}: devices of {name!r}")
        placed[name] = Placed(name, ranks, portion, body.get("slots"), bool(body.get("resident")))
    order = {part: i for i, part in enumerate(name for group in graph.components() for name in group)}
    order |= {name: i for i, name in enumerate(data.get("order") or ())}
    warnings = []
    if data.get("flow") and graph.flow and data["flow"] != graph.flow:
        warnings.append(f"{source} is for the flow {data['flow']!r}, this is {graph.flow!r}: its times may not hold")
    used = max((d for p in placed.values() for d in p.devices), default=-1) + 1
    if used > total:
        name = next(p.name for p in placed.values() if used - 1 in p.devices)
        raise SchedError(f"{source}: {name!r} is placed on device {used - 1} and there are {total}")
    pairs = tuple(cycle.members for cycle in graph.cycles)
    return FlatPlan(placed, order, pairs, total, _alternating(data.get("tree"), graph, False), tuple(warnings))


def processes(text: str, total: int, where: str) -> tuple[tuple[int, ...], ...]:
    """Devices of each process from a placement's text: ``0-3``, ``0,2``, ``0-3:0-1``, ``all``, ``all:0``."""
    found: list[tuple[int, ...]] = []
    for segment in text.replace(" ", "").split(","):
        head, _, tail = segment.partition(":")
        devices = list(range(total)) if head == "all" else _span(head, where, text)
        if not tail:
            found += [(device,) for device in devices]
            continue
        ranks = len(_span(tail, where, text))
        if len(devices) % ranks and ranks % len(devices):
            raise SchedError(f"{where}: {text!r}: {len(devices)} devices do not go evenly with {ranks} processes")
        for rank in range(ranks):
            if ranks >= len(devices):
                found.append((devices[rank // (ranks // len(devices))],))
            else:
                each = len(devices) // ranks
                found.append(tuple(devices[rank * each : (rank + 1) * each]))
    return tuple(found)


def _span(text: str, where: str, whole: str) -> list[int]:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise SchedError(
            f"{where}: {whole!r} is no placement that can be predicted; give devices such as 0-3 or 0-3:0-1"
        )
    return list(range(int(match[1]), int(match[2] or match[1]) + 1))


def _leaves(node: Any, where: str) -> Iterator[dict[str, Any]]:
    if node is None:
        return
    if not isinstance(node, Mapping) or len(node) != 1:
        raise SchedError(f"{where}: one of leaf, {', '.join(_SIDES)}, not {node!r}")
    kind, body = next(iter(node.items()))
    where = f"{where}.{kind}"
    if kind == "leaf":
        known(body, _LEAF, where)
        if "stage" not in body or "devices" not in body:
            raise SchedError(f"{where}: needs stage and devices")
        yield dict(body)
        return
    if kind not in _SIDES:
        raise SchedError(f"{where}: one of leaf, {', '.join(_SIDES)}, not {kind!r}{near(kind, ('leaf', *_SIDES))}")
    known(body, (*_SIDES[kind], "portion"), where)
    for side in _SIDES[kind]:
        if body.get(side) is None:
            raise SchedError(f"{where}: lacks {side!r}")
        yield from _leaves(body[side], f"{where}.{side}")


def _portion(data: Mapping[str, Any], graph: Graph, reader: str) -> int | None:
    """As the runtime finds it: the leaf's own, else that of the innermost pipe between what feeds it and it, else the
    plan's."""
    if graph.stages[reader].barrier == "batch":
        return None
    for body in _leaves(data.get("tree"), "tree"):
        if body["stage"] == reader and body.get("portion") is not None:
            return int(body["portion"])
    writers = {a for a, b in graph.edges if b == reader}
    above = {name for name in graph.stages if graph.reachable([name]) & writers}
    below = graph.reachable([reader])
    found = max(_pipes(data.get("tree"), above, below, 0), key=lambda pair: pair[0], default=(0, data.get("portion")))
    return found[1]


def _pipes(node: Any, above: set[str], below: set[str], depth: int) -> Iterator[tuple[int, int | None]]:
    if node is None or "leaf" in node:
        return
    kind, body = next(iter(node.items()))
    one, other = (body[side] for side in _SIDES[kind])
    ways = [(one, other)] if kind == "pipe" else [(one, other), (other, one)] if kind == "cycle" else []
    if any(_names(up) & above and _names(down) & below for up, down in ways):
        yield depth, body.get("portion")
    yield from _pipes(one, above, below, depth + 1)
    yield from _pipes(other, above, below, depth + 1)


def _alternating(node: Any, graph: Graph, feeds: bool) -> dict[str, frozenset[str]]:
    """Producers in shares whose output goes on to a stage that runs at the same time (``feeds``), with those that take
    it on their devices."""
    if node is None or "leaf" in node:
        return {}
    kind, body = next(iter(node.items()))
    one, other = (body[side] for side in _SIDES[kind])
    found = _alternating(one, graph, feeds or kind == "pipe") | _alternating(other, graph, feeds)
    if kind == "share" and feeds:
        for name in _names(one):
            takers = frozenset(_names(other) & (graph.reachable([name]) - {name}))
            found[name] = found.get(name, frozenset()) | takers
    return found


def leaf_bodies(tree: Any) -> list[dict[str, Any]]:
    """The leaves of a tree of plain data themselves, from left to right; to be changed in place."""
    if tree is None:
        return []
    kind, body = next(iter(tree.items()))
    return [body] if kind == "leaf" else [leaf for side in _SIDES[kind] for leaf in leaf_bodies(body[side])]


def _names(node: Any) -> set[str]:
    return {body["stage"] for body in _leaves(node, "tree")}
