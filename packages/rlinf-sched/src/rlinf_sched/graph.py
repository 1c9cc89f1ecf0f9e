"""The flow as a scheduler sees it: stages, edges and cycles, as plain data.

Weight edges (trainer to generator) end a step and are not part of the graph. A cycle (simulator and policy) is named,
with the number of rounds after which it ends, and is planned as one stage.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

BARRIERS = ("item", "group", "batch")


class SchedError(ValueError):
    """What was asked for cannot be planned; the message names the stage or key and what would be right."""


class GraphError(SchedError):
    """The graph is not what it must be."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One component.

    ``barrier``: what must be complete before it may work: an item, a group of ``group`` items, the batch.
    ``device``: it runs on devices; otherwise on ``ranks`` CPU processes. ``counts``: device counts that it accepts
    (None: all multiples of ``multiple``, its model-parallel size, from ``least`` to ``most``). ``ranks``: number of
    processes fixed by the program (None: one for every ``multiple`` devices). ``swappable``: it can be offloaded.
    ``per_item``: items of its own input for each item of the step (samples for a prompt, say), in which plans say
    portions. ``collective``: its ranks share each portion; otherwise each takes portions of its own.
    """

    name: str
    barrier: str = "item"
    group: int = 1
    device: bool = True
    counts: tuple[int, ...] | None = None
    multiple: int = 1
    least: int = 1
    most: int | None = None
    ranks: int | None = None
    swappable: bool = True
    per_item: float = 1.0
    collective: bool = False

    def __post_init__(self) -> None:
        if self.barrier not in BARRIERS:
            raise GraphError(
                f"stage {self.name!r}: barrier {self.barrier!r} is not one of {', '.join(BARRIERS)}"
                f"{near(self.barrier, BARRIERS)}"
            )
        for name in ("group", "multiple", "least", "most", "ranks"):
            value = getattr(self, name)
            if value is None and name in ("most", "ranks"):
                continue
            if type(value) is not int or value < 1:
                raise GraphError(f"stage {self.name!r}: {name} is an integer of at least 1, not {value!r}")
        if isinstance(self.per_item, bool) or not isinstance(self.per_item, int | float) or not self.per_item > 0:
            raise GraphError(f"stage {self.name!r}: per_item is a positive number, not {self.per_item!r}")
        if self.counts is not None and (not self.counts or any(type(n) is not int or n < 1 for n in self.counts)):
            raise GraphError(f"stage {self.name!r}: counts are positive device counts, not {self.counts!r}")

    def accepted(self, devices: int) -> tuple[int, ...]:
        """Device counts up to ``devices`` that the stage accepts, rising; ``(0,)`` for a CPU stage."""
        if not self.device:
            return (0,)
        found: Iterable[int] = self.counts if self.counts is not None else range(self.multiple, devices + 1)
        return tuple(
            sorted(
                {
                    n
                    for n in found
                    if n <= devices
                    and n % self.multiple == 0
                    and n >= self.least
                    and (self.most is None or n <= self.most)
                    and (self.ranks is None or n % self.ranks == 0 or self.ranks % n == 0)
                }
            )
        )

    def takes(self, portion: int, items: int) -> bool:
        """Whether the barrier allows portions of this size, of ``items`` in the step."""
        if self.barrier == "batch":
            return portion == items
        return self.barrier == "item" or portion % self.group == 0


@dataclass(frozen=True, slots=True)
class Cycle:
    """Two stages that feed each other for ``rounds`` rounds; ``ends`` is the one that ends it. ``collocate``: they may
    also take turns, both resident, on the same devices."""

    members: tuple[str, str]
    rounds: int
    ends: str
    collocate: bool = False

    @property
    def name(self) -> str:
        """What the cycle is called where it stands for one stage."""
        return "+".join(self.members)


@dataclass(frozen=True, slots=True)
class Graph:
    """Stages in the order of their declaration, edges (producer, consumer), named cycles. ``inputs``: stages that are
    fed from outside (empty: those that nothing else feeds)."""

    stages: Mapping[str, Stage]
    edges: tuple[tuple[str, str], ...] = ()
    cycles: tuple[Cycle, ...] = ()
    inputs: tuple[str, ...] = ()
    flow: str = field(default="", compare=False)

    def validate(self) -> None:
        """Raise GraphError naming the first fault: unknown stage, a cycle without an end, an unreachable stage."""
        if not self.stages:
            raise GraphError("the graph has no stage")
        for name, stage in self.stages.items():
            if name != stage.name:
                raise GraphError(f"stage {name!r} is described under another name, {stage.name!r}")
        for what, names in (
            ("an edge", [name for edge in self.edges for name in edge]),
            ("inputs", list(self.inputs)),
            ("a cycle", [name for cycle in self.cycles for name in (*cycle.members, cycle.ends)]),
        ):
            for name in names:
                if name not in self.stages:
                    raise GraphError(f"{what} names stage {name!r}, which there is not{near(name, self.stages)}")
        self._check_cycles()
        self._check_reach()

    def _check_cycles(self) -> None:
        declared = {frozenset(cycle.members): cycle for cycle in self.cycles}
        for part in self.components():
            if len(part) == 1 and (part[0], part[0]) not in self.edges:
                continue
            names = " and ".join(repr(name) for name in part)
            cycle = declared.pop(frozenset(part), None)
            if cycle is None:
                raise GraphError(
                    f"{names} feed each other and nothing ends it; name the cycle with its rounds and the stage that "
                    "ends it (cycles: two members, rounds, ends)"
                )
            if type(cycle.rounds) is not int or cycle.rounds < 1:
                raise GraphError(f"the cycle of {names} has no end: rounds is {cycle.rounds!r}, not 1 or more")
            if cycle.ends not in cycle.members:
                raise GraphError(f"the cycle of {names} is ended by {cycle.ends!r}, which is not one of them")
        for cycle in declared.values():
            raise GraphError(f"the cycle of {' and '.join(cycle.members)} is named, but they do not feed each other")

    def _check_reach(self) -> None:
        if self.inputs:
            fed = self.reachable(self.inputs)
            lost = [name for name in self.stages if name not in fed]
        else:
            used = {name for edge in self.edges for name in edge}
            lost = [name for name in self.stages if name not in used] if len(self.stages) > 1 else []
        if lost:
            raise GraphError(
                f"stage {lost[0]!r} is unreachable: nothing feeds it; connect it by an edge, name it in inputs, or "
                "leave it out"
            )

    def reachable(self, start: Iterable[str]) -> set[str]:
        """``start`` and all that it feeds, directly or not."""
        seen: set[str] = set()
        stack = list(start)
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack.extend(b for a, b in self.edges if a == name)
        return seen

    def components(self) -> list[tuple[str, ...]]:
        """Sets of stages that feed each other, producers first; most have one stage."""
        reach = {name: self.reachable([name]) for name in self.stages}
        found: list[tuple[str, ...]] = []
        left = list(self.stages)
        while left:
            # A stage comes next when all that feed it are in its own set or done.
            head = next(name for name in left if all(other in reach[name] for other in left if name in reach[other]))
            part = tuple(name for name in left if name in reach[head] and head in reach[name])
            found.append(part)
            left = [name for name in left if name not in part]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data; defaults are left out."""
        stages = {}
        for name, stage in self.stages.items():
            stages[name] = {
                f.name: list(value) if isinstance(value, tuple) else value
                for f in fields(Stage)
                if f.name != "name" and (value := getattr(stage, f.name)) != f.default
            }
        data: dict[str, Any] = {"stages": stages, "edges": [list(edge) for edge in self.edges]}
        if self.cycles:
            data["cycles"] = [{**asdict(cycle), "members": list(cycle.members)} for cycle in self.cycles]
        if self.inputs:
            data["inputs"] = list(self.inputs)
        if self.flow:
            data["flow"] = self.flow
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "graph") -> Graph:
        """The reverse of ``to_dict``, validated. Unknown keys are refused by name."""
        known(data, ("stages", "edges", "cycles", "inputs", "flow"), source)
        raw = data.get("stages")
        if not isinstance(raw, Mapping):
            raise GraphError(f"{source}.stages: a mapping from names to stages, not {raw!r}")
        names = tuple(f.name for f in fields(Stage) if f.name != "name")
        stages = {}
        for name, body in raw.items():
            body = dict(body or {})
            known(body, names, f"{source}.stages.{name}")
            if body.get("counts") is not None:
                body["counts"] = tuple(body["counts"])
            stages[str(name)] = Stage(str(name), **body)
        cycles = []
        for index, body in enumerate(data.get("cycles") or ()):
            where = f"{source}.cycles[{index}]"
            known(body, ("members", "rounds", "ends", "collocate"), where)
            missing = [key for key in ("members", "rounds", "ends") if key not in body]
            if missing:
                raise GraphError(f"{where} lacks {', '.join(missing)}")
            if not isinstance(body["members"], list | tuple) or len(body["members"]) != 2:
                raise GraphError(f"{where}.members: two stages, not {body['members']!r}")
            cycles.append(Cycle(tuple(body["members"]), body["rounds"], body["ends"], bool(body.get("collocate"))))
        edges = []
        for edge in data.get("edges") or ():
            if not isinstance(edge, list | tuple) or len(edge) != 2:
                raise GraphError(f"{source}.edges: pairs of producer and consumer, not {edge!r}")
            edges.append((str(edge[0]), str(edge[1])))
        graph = cls(stages, tuple(edges), tuple(cycles), tuple(data.get("inputs") or ()), str(data.get("flow") or ""))
        graph.validate()
        return graph


def near(name: str, among: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    found = difflib.get_close_matches(str(name), [str(other) for other in among], n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def known(data: object, names: Iterable[str], where: str) -> None:
    """Refuse what is no mapping and keys that there are not."""
    if not isinstance(data, Mapping):
        raise GraphError(f"{where}: a mapping, not {data!r}")
    for key in data:
        if key not in names:
            raise GraphError(f"{where}: unknown key {key!r}{near(str(key), names)}; known are {', '.join(names)}")
