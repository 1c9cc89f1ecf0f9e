"""Which channels must take items beyond their limits, because waiting for credit inside a section could be for ever."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from rlinf_core.graph import FlowGraph


class Placed(Protocol):
    """What matters of a group's place in the plan (``plan.GroupPlan``)."""

    @property
    def devices(self) -> frozenset[int]: ...

    @property
    def order(self) -> int: ...

    @property
    def together(self) -> str: ...


Turns = Mapping[str, Collection[str]]
"""By group: those that it gives way to after each portion (``plan.FlatPlan.alternating``)."""


def spills(graph: FlowGraph, groups: Mapping[str, Placed], turns: Turns) -> Iterator[str]:
    """``phase:channel`` of each such channel.

    A writer that waits for credit keeps its devices (``put`` is no safe point). The channel is drained once its readers
    can work, so the writer must not be among those for whom they could, in the end, be waiting. With several steps open
    a reader may first have to end its call of an earlier step, which awaits all that its input is made from.
    """
    up = {name: {other for other in graph.stages if name in graph.downstream(other)} for name in graph.stages}
    for phase in graph.phases.values():
        deferred = phase.deferred()
        for channel in phase.channels:
            before = {name for reader in phase.readers(channel) for name in up[phase.calls[reader].group]}
            pairs = {(h, n) for h, needed in phase.blockers(channel) for n in (needed, *before) if n != h}
            if channel in deferred or any(h in _awaited(graph, groups, turns, h, n) for h, n in pairs):
                yield f"{phase.name}:{channel}"


def _awaited(graph: FlowGraph, groups: Mapping[str, Placed], turns: Turns, held: str, needed: str) -> set[str]:
    """Groups for whose devices or credit ``needed`` could be waiting while ``held`` is inside its section.

    Another group has what one needs if it can be at work beside ``held``, or if it comes first, in the flow or because
    one gives way to it, and has reserved it. It may in turn wait for devices, or for credit from what takes its output.
    """
    found = {needed}
    stack = [needed]
    while stack:
        name = stack.pop()
        for other, place in groups.items():
            if other in found or not groups[name].devices & _kept(groups, other):
                continue
            beside = not place.devices & groups[held].devices
            first = place.order < groups[name].order or other in turns.get(name, ())
            if other == held or beside or first:
                stack.append(other)
                stack += [reader for reader in graph.downstream(other) if groups[reader].devices]
        found.update(stack)
        if held in found - {needed}:
            break
    return found - {needed}


def _kept(groups: Mapping[str, Placed], name: str) -> frozenset[int]:
    """Devices that are not free while the group is at work: its own, and those of its set, offloaded as a whole."""
    mine = groups[name]
    mates = (o.devices for o in groups.values() if mine.together and o.together == mine.together)
    return mine.devices.union(*mates)
