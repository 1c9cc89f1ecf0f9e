"""The section *Communication* of ``rlinf doctor``: which transport each kind of pair takes, and why not a better one.

Entry point of the group ``rlinf.doctor``. With ``--measure`` the thresholds are measured anew and kept; with
``--cluster`` every node of the Ray cluster is asked what it has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_comm import slots
from rlinf_comm.devices import cuda_missing
from rlinf_comm.errors import CommError, NoRoute
from rlinf_comm.selection import Other, Summary, Thresholds, candidates, lacking, select
from rlinf_comm.thresholds import load, save
from rlinf_comm.transports import others, sources, unusable, usable
from rlinf_comm.transports.base import Place
from rlinf_core.cli.doctor import Ask


@dataclass(frozen=True, slots=True)
class Node:
    """What one node said. ``missing``: transport to why it cannot be used there."""

    identity: str
    available: frozenset[str]
    missing: Mapping[str, str]
    table: Thresholds
    note: str = ""
    no_cuda: str = ""
    """Why it has no accelerator; empty when it has."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The distributions of the transports that are not built in."""

    def place(self, node: str, pid: int, devices: tuple[str, ...] = ()) -> Place:
        return Place(node, pid, self.available, devices)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Nodes that are equal in this get the same rows."""
        missing = tuple(sorted(self.missing.items()))
        return self.available, missing, self.table.shm_from, self.table.gloo_from, self.no_cuda


def this_node() -> dict[str, Any]:
    """What this node has, as plain data (it also runs on other nodes, through Ray)."""
    table, note = load()
    return {
        "identity": slots.node_id().hex(),
        "available": sorted(usable()),
        "missing": unusable(),
        "table": [table.shm_from, table.gloo_from, table.source],
        "note": note,
        "no_cuda": cuda_missing(),
        "sources": sources(),
    }


def _node(said: Mapping[str, Any]) -> Node:
    table = Thresholds(*said["table"])
    available = frozenset(said["available"])
    return Node(
        said["identity"], available, said["missing"], table, said["note"], said["no_cuda"], said.get("sources", {})
    )


KINDS: tuple[tuple[str, bool, Summary], ...] = (
    ("processes of one node", False, Summary()),
    ("processes of two nodes", True, Summary()),
    ("one accelerator, two processes", False, Summary(0, 0, "A", "A")),
    ("two accelerators of one node", False, Summary(0, 0, "A", "B")),
    ("accelerators of two nodes", True, Summary(0, 0, "A", "B")),
    ("accelerator to host, one node", False, Summary(0, 0, "A", "")),
    ("accelerator to host, two nodes", True, Summary(0, 0, "A", "")),
    ("host to accelerator, one node", False, Summary(0, 0, "", "B")),
    ("host to accelerator, two nodes", True, Summary(0, 0, "", "B")),
)
"""Title, whether the ends are on two nodes, and what moves (its size is put in)."""


def rows(here: Node, there: Node, *, apart: bool | None = None) -> Iterator[tuple[str, str]]:
    """(kind of pair, what it takes). ``apart``: only kinds within one node (False) or between nodes (True)."""
    if not apart:
        yield "one process", "inproc" if "inproc" in here.available else _takes(here, here, False, Summary())
    for title, two_nodes, summary in KINDS:
        if apart is None or apart == two_nodes:
            yield title, _takes(here, there, two_nodes, summary)


def _takes(here: Node, there: Node, two_nodes: bool, summary: Summary) -> str:
    source = here.place("here", 1, ("A",) if summary.source_device else ())
    target = there.place("there" if two_nodes else "here", 2, (summary.target_device,) * bool(summary.target_device))
    table, brought = here.table, others()
    steps = sorted({0, table.shm_from, table.gloo_from or 0})
    parts: list[tuple[int, str]] = []
    for size in steps:
        host, device = (0, size) if summary.source_device else (size, 0)
        sized = Summary(host, device, summary.source_device, summary.target_device)
        try:
            choice = select(source, target, sized, table, others=brought)
        except NoRoute:
            return "nothing: " + _better(source, target, sized, here, there, "", brought)
        name = choice.name + (" by a copy to host memory" if choice.staged else "")
        if not parts or parts[-1][1] != name:
            parts.append((size, name))
    text = parts[0][1] + "".join(f", from {shown(size)} {name}" for size, name in parts[1:])
    better = _better(source, target, sized, here, there, choice.name, brought)
    return f"{text}  ({better})" if better else text


def _better(
    source: Place, target: Place, summary: Summary, here: Node, there: Node, chosen: str, brought: Sequence[Other]
) -> str:
    """What would be preferred to ``chosen`` for a large message, and why it is not to be had."""
    reasons = []
    for choice in candidates(source, target, summary, here.table, brought):
        if choice.name == chosen:
            break
        if lacking(choice.name, source, target):
            why = here.missing.get(choice.name) or there.missing.get(choice.name) or "it is not installed"
            reasons.append(f"{choice.name} is missing: {why}")
    return "; ".join(dict.fromkeys(reasons))


def shown(nbytes: int) -> str:
    """A size for people: 4 KiB, 1.5 MiB."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def section(ask: Ask) -> Iterator[str]:
    """The lines of the section."""
    if ask.measure:
        yield from _measure()
    if ask.on_each_node is not None:
        yield from _cluster({name: _node(said) for name, said in ask.on_each_node(this_node).items()})
        return
    here = _node(this_node())
    yield from _describe(here)
    yield from _table(list(rows(here, here)), here.no_cuda)


def _measure() -> Iterator[str]:
    from rlinf_comm.measure import measure  # it brings in all that moves messages

    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        yield f"the load is {load:.1f} on {_count(cores, 'core')}: measure again when the machine is idle"
    try:
        table, points = measure()
    except CommError as error:
        yield f"not measured: {error}"
        return
    try:
        path = save(table, points)
    except OSError as error:
        yield f"measured, but it could not be kept: {error}"
    else:
        yield f"measured and kept in {path}:"
    yield "      size    stream  shared memory  (µs per message)"
    for point in points:
        mark = "  <- shared memory from here" if point.nbytes == table.shm_from else ""
        yield f"{shown(point.nbytes):>10} {point.stream_us:>9.1f} {point.shm_us:>14.1f}{mark}"


def _describe(node: Node) -> Iterator[str]:

    def titled(name: str) -> str:
        return f"{name} ({node.sources[name]})" if name in node.sources else name

    yield f"transports: {', '.join(titled(name) for name in sorted(node.available)) or 'none'}"
    yield from (f"not here: {titled(name)}: {why}" for name, why in sorted(node.missing.items()))
    table = node.table
    between = f"; gloo between nodes from {shown(table.gloo_from)}" if table.gloo_from is not None else ""
    advice = "; rlinf doctor --measure measures this machine" if table.source == Thresholds().source else ""
    yield f"thresholds: shared memory from {shown(table.shm_from)}{between} ({table.source}{advice})"
    if node.note:
        yield f"not used: {node.note}"


def _table(lines: Sequence[tuple[str, str]], no_cuda: str) -> Iterator[str]:
    if no_cuda:
        lines = [line for line in lines if "accelerator" not in line[0]]
    width = max(len(title) for title, _ in lines)
    yield from (f"{title:<{width}}  {takes}" for title, takes in lines)
    if no_cuda:
        yield f"pairs with accelerators are not shown: {no_cuda}"


def _cluster(nodes: Mapping[str, Node]) -> Iterator[str]:
    """Nodes that have the same get one table; between different ones, a table for each pair of kinds."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, node in nodes.items():
        alike.setdefault(node.kind, []).append(name)
    groups = [(names, nodes[names[0]]) for names in alike.values()]
    groups.sort(key=lambda group: bool(group[1].no_cuda))  # rows are read from the first end to the second
    machines = len({node.identity for node in nodes.values()})
    yield f"cluster: {_count(len(nodes), 'node')} on {_count(machines, 'machine')}"
    for names, node in groups:
        yield f"on {', '.join(names)}:"
        yield from (f"  {line}" for line in _describe(node))
        apart = None if len(names) > 1 else False
        yield from (f"  {line}" for line in _table(list(rows(node, node, apart=apart)), node.no_cuda))
    for i, (names, node) in enumerate(groups):
        for names_there, other in groups[i + 1 :]:
            yield f"between {', '.join(names)} and {', '.join(names_there)}:"
            lines = list(rows(node, other, apart=True))
            yield from (f"  {line}" for line in _table(lines, node.no_cuda and other.no_cuda))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
