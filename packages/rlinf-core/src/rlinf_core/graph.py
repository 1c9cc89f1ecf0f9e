"""The flow as data: stages, and per phase the calls and channels that one traced step made.

Pure and plain: it feeds validation, the planner and the profiler before any process is started.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from rlinf_core.board.dealing import cannot_deal
from rlinf_core.deals import EVERY
from rlinf_core.errors import TraceError, nearest

BARRIERS = ("item", "group", "batch")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One worker group as the scheduler sees it.

    ``ranks_fixed``: number of ranks the program asks for (None: the plan decides). ``device``: it runs on
    devices. ``collective``: its ranks form one replica that is dealt whole portions. ``barrier``: what
    must be complete before it may work (``item``, ``group`` or ``batch``).
    """

    name: str
    ranks_fixed: int | None = None
    device: bool = True
    collective: bool = False
    barrier: str = "item"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One group call of a step. ``ends``: in a cycle of channels, this task is the one that ends it."""

    group: str
    task: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ends: bool = False


@dataclass(frozen=True, slots=True)
class PhaseGraph:
    """The calls of one step of a phase, in program order. ``weights`` are (source, target) groups; ``deals`` are
    (channel, reading group or "" for all of them, way of dealing), of channels that are not shared."""

    name: str
    channels: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()
    calls: tuple[CallSpec, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()
    deals: tuple[tuple[str, str, str], ...] = ()

    def deal(self, channel: str, group: str) -> str:
        """How the channel's items get to the ranks of a group that reads it."""
        named = {of: way for name, of, way in self.deals if name == channel}
        return named.get(group, named.get(EVERY, "shared"))

    def writers(self, channel: str) -> tuple[int, ...]:
        """Indices of the calls that write the channel (feeds not included)."""
        return tuple(i for i, call in enumerate(self.calls) if channel in call.outputs)

    def readers(self, channel: str) -> tuple[int, ...]:
        """Indices of the calls that read the channel."""
        return tuple(i for i, call in enumerate(self.calls) if channel in call.inputs)

    def stage_edges(self) -> tuple[tuple[str, str, str], ...]:
        """(writer group, channel, reader group) of every channel edge, in order, without repeats."""
        edges = {
            (self.calls[w].group, channel, self.calls[r].group): None
            for channel in self.channels
            for w in self.writers(channel)
            for r in self.readers(channel)
        }
        return tuple(edges)

    def deferred(self) -> frozenset[str]:
        """Channels whose reading call can start only after the writing call has returned.

        A rank's tasks run in call order, so nobody drains such a channel while it is written: it must
        take everything.
        """
        data, serial = self._call_edges()
        both = _merge(data, serial)
        late: set[str] = set()
        for channel in self.channels:
            readers = set(self.readers(channel))
            for held in self._held_up(channel, data, serial):
                after = _reachable(both, serial.get(held, ()))
                if readers & after:
                    late.add(channel)
        return frozenset(late)

    def cyclic(self) -> frozenset[str]:
        """Channels inside a cycle: what is read from them decides, in the end, what is put into them."""
        data, _ = self._call_edges()
        home = {i: k for k, part in enumerate(_components(range(len(self.calls)), data)) for i in part}
        return frozenset(
            channel
            for channel in self.channels
            if {home[w] for w in self.writers(channel)} & {home[r] for r in self.readers(channel)}
        )

    def blockers(self, channel: str) -> frozenset[tuple[str, str]]:
        """Pairs (held, needed) of groups: waiting for credit of the channel would hold up ``held``, and it is
        drained only once ``needed`` can work. If both need one device, the channel must take everything."""
        data, serial = self._call_edges()
        up = _reversed(_merge(data, serial))
        needed: set[int] = set()
        for reader in self.readers(channel):
            before = [i for i, later in serial.items() if reader in later]
            needed |= {reader} | _reachable(up, before)
        held_up = self._held_up(channel, data, serial)
        return frozenset((self.calls[x].group, self.calls[y].group) for x in held_up for y in needed)

    def _held_up(
        self, channel: str, data: Mapping[int, Iterable[int]], serial: Mapping[int, Iterable[int]]
    ) -> set[int]:
        """Calls that stand still, sooner or later, when nothing can be put into the channel: its writers and
        what feeds them, but not calls that have returned before the writer starts."""
        both, up = _merge(data, serial), _reversed(data)
        held: set[int] = set()
        for writer in self.writers(channel):
            held.add(writer)
            held |= {x for x in _reachable(up, [writer]) if writer not in _reachable(both, serial.get(x, ()))}
        return held

    def _call_edges(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Edges between calls: through channels, and from each call to the same group's next one."""
        data: dict[int, list[int]] = {}
        for channel in self.channels:
            for w in self.writers(channel):
                data.setdefault(w, []).extend(self.readers(channel))
        serial: dict[int, list[int]] = {}
        last: dict[str, int] = {}
        for i, call in enumerate(self.calls):
            if call.group in last:
                serial.setdefault(last[call.group], []).append(i)
            last[call.group] = i
        return data, serial

    def _check(self, stages: Mapping[str, StageSpec]) -> None:
        where = f"phase {self.name!r}"
        known = set(self.channels)
        for i, call in enumerate(self.calls):
            label = self._label(i)
            if call.group not in stages:
                raise TraceError(f"{where}: {label} is of an unknown group{nearest(call.group, stages)}")
            for channel in (*call.inputs, *call.outputs):
                if channel not in known:
                    raise TraceError(
                        f"{where}: {label} uses channel {channel!r}, which the step did not open"
                        f"{nearest(channel, known)}"
                    )
        for feed in self.feeds:
            if feed not in known:
                raise TraceError(
                    f"{where}: feed of channel {feed!r}, which the step did not open{nearest(feed, known)}"
                )
        for source, target in self.weights:
            for group in (source, target):
                if group not in stages:
                    raise TraceError(f"{where}: publish_weights names unknown group {group!r}{nearest(group, stages)}")
        for channel in self.channels:
            writers, readers = self.writers(channel), self.readers(channel)
            if not writers and channel not in self.feeds:
                names = ", ".join(self._label(r) for r in readers) or "nobody"
                raise TraceError(
                    f"{where}: channel {channel!r} has no writer (read by {names}); feed it, or pass it as an Out"
                )
            if not readers:
                names = ", ".join([*(self._label(w) for w in writers), *(["a feed"] if channel in self.feeds else [])])
                raise TraceError(
                    f"{where}: channel {channel!r} has no reader (written by {names}); pass it as an In, or "
                    "leave it out"
                )
        self._check_deals(where, stages)
        self._check_cycles(where)

    def _check_deals(self, where: str, stages: Mapping[str, StageSpec]) -> None:
        for channel in dict.fromkeys(name for name, _, _ in self.deals):
            readers = list(dict.fromkeys(self.calls[i].group for i in self.readers(channel)))
            for group in (of for name, of, _ in self.deals if name == channel and of != EVERY):
                if group not in readers:
                    raise TraceError(
                        f"{where}: channel {channel!r} is dealt to group {group!r}, which does not read it"
                        f"{nearest(group, readers)}; it is read by {', '.join(readers)}"
                    )
            for group in readers:
                way = self.deal(channel, group)
                wrong = cannot_deal(way, stages[group].collective, stages[group].barrier)
                if wrong:
                    others = ", ".join(f"{name!r}: {way!r}" for name in readers if name != group)
                    hint = f"; name the groups that it is for: deal={{{others}}}" if others else ""
                    raise TraceError(f"{where}: channel {channel!r} cannot be dealt to group {group!r}: {wrong}{hint}")

    def _check_cycles(self, where: str) -> None:
        data, serial = self._call_edges()
        for component in _components(range(len(self.calls)), data):
            cyclic = len(component) > 1 or component[0] in data.get(component[0], ())
            if cyclic and not any(self.calls[i].ends for i in component):
                names = ", ".join(self._label(i) for i in sorted(component))
                raise TraceError(
                    f"{where}: {names} feed each other through channels and none is named as the one that "
                    "ends "
                    "the cycle; name it with @task(ends=True) and let it close its outputs"
                )
        both = _merge(data, serial)
        for component in _components(range(len(self.calls)), both):
            inside = set(component)
            for i in sorted(inside):
                for j in serial.get(i, ()):
                    if j in inside:
                        one, other = self._label(i), self._label(j)
                        raise TraceError(
                            f"{where}: {one} waits for what comes after {other}, which starts only when "
                            f"{one} "
                            "has returned (a rank's tasks run in call order); swap the calls"
                        )

    def _label(self, index: int) -> str:
        call = self.calls[index]
        return f"{call.group}.{call.task}"


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """All stages (in the order of declaration) and all traced phases."""

    stages: Mapping[str, StageSpec]
    phases: Mapping[str, PhaseGraph] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise ``TraceError`` naming the first fault: unknown group or channel, a channel without writer or
        reader, a cycle without a named end, calls that wait for each other, a group that is never used."""
        for name, stage in self.stages.items():
            if stage.name != name:
                raise TraceError(f"group {name!r} is described under another name, {stage.name!r}")
            if stage.barrier not in BARRIERS:
                raise TraceError(
                    f"group {name!r}: barrier {stage.barrier!r} is not one of {', '.join(BARRIERS)}"
                    f"{nearest(stage.barrier, BARRIERS)}"
                )
            if stage.ranks_fixed is not None and stage.ranks_fixed < 1:
                raise TraceError(f"group {name!r}: ranks {stage.ranks_fixed} is not a positive number")
        for phase in self.phases.values():
            phase._check(self.stages)
        used = {call.group for phase in self.phases.values() for call in phase.calls}
        used.update(group for phase in self.phases.values() for edge in phase.weights for group in edge)
        for name in self.stages:
            if name not in used:
                raise TraceError(f"group {name!r} is declared but no step calls it; call it, or leave it out")

    def edges(self) -> dict[str, set[str]]:
        """Stage -> stages that read what it writes, over all phases (weight edges ignored)."""
        found: dict[str, set[str]] = {name: set() for name in self.stages}
        for phase in self.phases.values():
            for writer, _, reader in phase.stage_edges():
                if writer != reader:
                    found.setdefault(writer, set()).add(reader)
        return found

    def downstream(self, stage: str) -> set[str]:
        """Stages that what ``stage`` writes can reach; contains ``stage`` itself only in a cycle."""
        return _reachable(self.edges(), self.edges().get(stage, ()))

    def in_cycle(self, a: str, b: str) -> bool:
        """Whether two stages feed each other."""
        return b in self.downstream(a) and a in self.downstream(b)

    def order(self) -> list[str]:
        """Stages so that producers come before their consumers; a cycle's stages stand together.

        Ties are broken by first call, then by declaration, so the order is a function of the program alone.
        """
        first: dict[str, int] = {}
        for phase in self.phases.values():
            for call in phase.calls:
                first.setdefault(call.group, len(first))
        for name in self.stages:
            first.setdefault(name, len(first))
        edges = self.edges()
        components = _components(sorted(self.stages, key=first.__getitem__), edges)
        home = {name: i for i, component in enumerate(components) for name in component}
        blocked = {i: 0 for i in range(len(components))}
        out: dict[int, set[int]] = {i: set() for i in blocked}
        for source, targets in edges.items():
            out[home[source]].update(home[t] for t in targets if home[t] != home[source])
        for targets_of in out.values():
            for target in targets_of:
                blocked[target] += 1
        result: list[str] = []
        ready = {i for i, count in blocked.items() if count == 0}
        while ready:
            best = min(ready, key=lambda i: min(first[name] for name in components[i]))
            ready.remove(best)
            result.extend(sorted(components[best], key=first.__getitem__))
            for target in out[best]:
                blocked[target] -= 1
                if blocked[target] == 0:
                    ready.add(target)
        return result

    def fingerprint(self) -> str:
        """16 hex digits that change when stages, calls or channels do; how items are dealt is no part of it."""
        phases = {name: asdict(phase) for name, phase in sorted(self.phases.items())}
        for phase in phases.values():
            del phase["deals"]
        data = {"stages": {name: asdict(stage) for name, stage in sorted(self.stages.items())}, "phases": phases}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _merge(a: Mapping[K, Iterable[K]], b: Mapping[K, Iterable[K]]) -> dict[K, list[K]]:
    return {node: [*a.get(node, ()), *b.get(node, ())] for node in {**a, **b}}


def _reversed(edges: Mapping[K, Iterable[K]]) -> dict[K, list[K]]:
    back: dict[K, list[K]] = {}
    for source, targets in edges.items():
        for target in targets:
            back.setdefault(target, []).append(source)
    return back


def _reachable(edges: Mapping[K, Iterable[K]], start: Iterable[K]) -> set[K]:
    """All that is reached from ``start``, which is included."""
    seen: set[K] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(edges.get(node, ()))
    return seen


def _components(nodes: Iterable[K], edges: Mapping[K, Iterable[K]]) -> list[list[K]]:
    """Strongly connected components: nodes that reach each other. Flows are small, so by reachability."""
    order = list(nodes)
    reach = {node: _reachable(edges, edges.get(node, ())) for node in order}
    done: set[K] = set()
    found: list[list[K]] = []
    for node in order:
        if node not in done:
            component = [other for other in order if other == node or (other in reach[node] and node in reach[other])]
            done.update(component)
            found.append(component)
    return found
