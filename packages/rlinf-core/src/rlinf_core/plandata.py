"""The micro flow as data: a tree that says how stages share devices.

A tree has device stages at its leaves. ``share(first, then)``: both on the same devices, in turn (swapped).
``pipe(up, down, portion)``: on separate devices at the same time, items passing in portions.
``parallel(a, b)``: on separate devices at the same time, nothing passing between them. ``cycle(a, b, portion)``: stages
that feed each other (simulator and policy), loaded together; on separate devices at the same time, on the same ones in
turn without switching. CPU stages are in no tree; the plan gives their number of ranks.

YAML::

    name: my plan
    devices: 2                    # of the cluster it was made for (optional)
    flow: 1f0c9a...               # fingerprint of the flow it was made for (optional)
    cpu: {reward: 1}              # CPU stages: number of ranks
    cpu_portion: {reward: 4}      # CPU stages: items at once (optional)
    order: [generator, actor]     # whose turn is first among device stages that wait (optional; else as they flow)
    portion: null                 # items at once where leaf and pipe do not say; null: everything
    tree:
      pipe:
        up: {leaf: {stage: generator, devices: "0", slots: 16}}
        down: {leaf: {stage: actor, devices: "1", portion: 8}}
        portion: 8

A portion is what one rank takes at once; ranks of a collective group share it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from rlinf_core.errors import PlanError, nearest

# ------------------------------------------------------------------ the tree


@dataclass(frozen=True, slots=True)
class Leaf:
    """One device stage. ``devices``: placement text. ``portion``: items it takes at once (None: as the pipe
    above says, or everything). ``slots``: concurrency slots or micro-batch (None: the engine's own setting).
    ``resident``: it stays loaded while others use its devices (None: only where nobody else does)."""

    stage: str
    devices: str
    portion: int | None = None
    slots: int | None = None
    resident: bool | None = None


@dataclass(frozen=True, slots=True)
class Share:
    first: Node
    then: Node


@dataclass(frozen=True, slots=True)
class Pipe:
    """``portion``: items that pass at once (None: everything), unless the taking leaf says otherwise."""

    up: Node
    down: Node
    portion: int | None = None


@dataclass(frozen=True, slots=True)
class Parallel:
    a: Node
    b: Node


@dataclass(frozen=True, slots=True)
class Cycle:
    """Stages that feed each other. ``portion``: items of one sub-batch (None: everything)."""

    a: Node
    b: Node
    portion: int | None = None


MAX_DEPTH = 50
Branch: TypeAlias = Share | Pipe | Parallel | Cycle
Node: TypeAlias = Leaf | Branch
SIDES = {"share": ("first", "then"), "pipe": ("up", "down"), "parallel": ("a", "b"), "cycle": ("a", "b")}
_KINDS: dict[str, type[Branch]] = {"share": Share, "pipe": Pipe, "parallel": Parallel, "cycle": Cycle}


def leaves(node: Node | None) -> Iterator[Leaf]:
    """The leaves from left to right."""
    if isinstance(node, Leaf):
        yield node
    elif node is not None:
        for side in sides(node):
            yield from leaves(side)


def sides(node: Branch) -> tuple[Node, Node]:
    """Both children, in the order of the flow."""
    if isinstance(node, Share):
        return node.first, node.then
    return (node.up, node.down) if isinstance(node, Pipe) else (node.a, node.b)


def kind_of(node: Branch) -> str:
    """``share``, ``pipe``, ``parallel`` or ``cycle``."""
    return next(name for name, kind in _KINDS.items() if isinstance(node, kind))


def rebuilt(node: Branch, left: Node, right: Node) -> Branch:
    """The same node with other children."""
    if isinstance(node, Share):
        return Share(left, right)
    if isinstance(node, Parallel):
        return Parallel(left, right)
    return Pipe(left, right, node.portion) if isinstance(node, Pipe) else Cycle(left, right, node.portion)


# ------------------------------------------------------------------ the plan

KEYS = ("name", "devices", "flow", "cpu", "cpu_portion", "order", "portion", "predicted", "tree")


@dataclass(frozen=True, slots=True)
class Plan:
    """``tree`` None: the flow has no device stage. ``devices`` and ``flow``: cluster size and fingerprint of the
    flow that it was made for (None and empty: any). ``portion``: items moved at once where neither leaf nor
    pipe says (None: everything). ``cpu_portion``: the same by CPU stage. ``order``: device stages in the order in which
    they get devices that several wait for (empty: as they flow). ``predicted``: seconds by name, as a planner gave
    them."""

    name: str
    tree: Node | None
    cpu: dict[str, int] = field(default_factory=dict)
    devices: int | None = None
    flow: str = ""
    portion: int | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    cpu_portion: dict[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in YAML and JSON."""
        data: dict[str, Any] = {"name": self.name}
        if self.devices is not None:
            data["devices"] = self.devices
        if self.flow:
            data["flow"] = self.flow
        if self.cpu:
            data["cpu"] = dict(self.cpu)
        if self.cpu_portion:
            data["cpu_portion"] = dict(self.cpu_portion)
        if self.order:
            data["order"] = list(self.order)
        if self.portion is not None:
            data["portion"] = self.portion
        if self.predicted:
            data["predicted"] = dict(self.predicted)
        data["tree"] = None if self.tree is None else _node_to_dict(self.tree)
        return data

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: object, *, source: str = "plan") -> Plan:
        """``PlanError`` names the path in the plan, the value and what is right. Unknown keys are refused."""
        fields = _mapping(data, source, KEYS)
        if "tree" not in fields:
            raise PlanError(
                f"{source}: has no key 'tree'; give share, pipe, parallel or leaf (null without device stages)"
            )
        tree = fields["tree"]
        cpu = _mapping(_given(fields, "cpu", {}), f"{source}.cpu", None)
        cpu_portion = _mapping(_given(fields, "cpu_portion", {}), f"{source}.cpu_portion", None)
        order = _given(fields, "order", [])
        if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
            raise PlanError(f"{source}.order: {order!r} is not a list of device stages")
        predicted = _mapping(_given(fields, "predicted", {}), f"{source}.predicted", None)
        for name, value in predicted.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PlanError(f"{source}.predicted.{name}: {value!r} is not a number of seconds")
        return cls(
            name=_text(fields.get("name", "plan"), f"{source}.name"),
            tree=None if tree is None else _node_from(tree, f"{source}.tree", set()),
            cpu={name: _count(value, f"{source}.cpu.{name}", "ranks") for name, value in cpu.items()},
            devices=None
            if fields.get("devices") is None
            else _count(fields["devices"], f"{source}.devices", "devices"),
            flow=_text(fields.get("flow") or "", f"{source}.flow"),
            portion=check_portion(fields.get("portion"), f"{source}.portion"),
            predicted={name: float(value) for name, value in predicted.items()},
            cpu_portion={name: _count(n, f"{source}.cpu_portion.{name}", "items") for name, n in cpu_portion.items()},
            order=tuple(order),
        )

    @classmethod
    def from_yaml(cls, text: str, *, source: str = "plan") -> Plan:
        """From YAML or JSON text."""
        try:
            data = _load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
            problem = getattr(error, "problem", None) or "cannot be read"
            raise PlanError(f"{source}: not valid YAML{place}: {problem}") from error
        except ValueError as error:  # a date or number that is none
            raise PlanError(f"{source}: not valid YAML: {error}") from error
        except RecursionError:
            raise PlanError(f"{source}: nested too deep to be read; a tree has one leaf per stage") from None
        return cls.from_dict(data, source=source)

    def describe(self) -> str:
        """A few lines for people."""
        lines = [f"plan {self.name}"]
        if self.tree is None:
            lines.append("  no device stage")
        else:
            lines.extend(_describe(self.tree, "  "))
        for name, ranks in self.cpu.items():
            portion = f", {_items(self.cpu_portion[name])} at once" if name in self.cpu_portion else ""
            lines.append(f"  {name}: {ranks} rank{'s' if ranks != 1 else ''} on the CPU{portion}")
        for name, seconds in self.predicted.items():
            lines.append(f"  predicted {name}: {seconds:.3g} s")
        return "\n".join(lines)


def _describe(node: Node, indent: str) -> list[str]:
    if isinstance(node, Leaf):
        portion = "" if node.portion is None else f", {_items(node.portion)} at once"
        slots = "" if node.slots is None else f", {node.slots} slots"
        stays = ", stays loaded" if node.resident else ""
        return [f"{indent}{node.stage} on {node.devices}{portion}{slots}{stays}"]
    if isinstance(node, Share):
        head = "in turn on the same devices:"
    elif isinstance(node, Pipe):
        head = f"pipelined, {_items(node.portion)} at once:"
    elif isinstance(node, Cycle):
        head = f"feeding each other, {_items(node.portion)} at once:"
    else:
        head = "side by side:"
    one, other = sides(node)
    return [f"{indent}{head}", *_describe(one, indent + "  "), *_describe(other, indent + "  ")]


def _items(portion: int | None) -> str:
    return "everything" if portion is None else f"{portion} item{'s' if portion != 1 else ''}"


# ------------------------------------------------------------------ plain data


def _load(text: str) -> object:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            pass  # YAML in braces
    return yaml.safe_load(text)


def _node_to_dict(node: Node) -> dict[str, Any]:
    if isinstance(node, Leaf):
        body: dict[str, Any] = {"stage": node.stage, "devices": node.devices}
        body |= {key: value for key in _LEAF[2:] if (value := getattr(node, key)) is not None}
        return {"leaf": body}
    kind = kind_of(node)
    body = {name: _node_to_dict(side) for name, side in zip(SIDES[kind], sides(node), strict=True)}
    if isinstance(node, Pipe | Cycle) and node.portion is not None:
        body["portion"] = node.portion
    return {kind: body}


_LEAF = ("stage", "devices", "portion", "slots", "resident")


def _node_from(data: object, where: str, seen: set[int], depth: int = 1) -> Node:
    if depth > MAX_DEPTH:
        raise PlanError(
            f"{where.partition('.tree.')[0]}.tree: more than {MAX_DEPTH} nodes deep; a tree has one leaf per stage"
        )
    if isinstance(data, Mapping):
        if id(data) in seen:
            raise PlanError(
                f"{where}: a YAML alias puts a node there that is in the tree already; write each node once"
            )
        seen.add(id(data))
    kinds = ("leaf", *SIDES)
    outer = _mapping(data, where, kinds)
    if len(outer) != 1:
        raise PlanError(f"{where}: {sorted(outer)} must be exactly one of {', '.join(kinds)}")
    kind, body = next(iter(outer.items()))
    where = f"{where}.{kind}"
    if kind == "leaf":
        fields = _mapping(body, where, _LEAF)
        for key in ("stage", "devices"):
            if key not in fields:
                raise PlanError(f"{where}: has no key {key!r}")
        devices = fields["devices"]
        if isinstance(devices, int) and not isinstance(devices, bool):
            devices = str(devices)
        slots, resident = fields.get("slots"), fields.get("resident")
        if resident is not None and not isinstance(resident, bool):
            raise PlanError(f"{where}.resident: {resident!r} is neither true nor false")
        return Leaf(
            _text(fields["stage"], f"{where}.stage"),
            _text(devices, f"{where}.devices"),
            check_portion(fields.get("portion"), f"{where}.portion"),
            None if slots is None else _count(slots, f"{where}.slots", "slots"),
            resident,
        )
    one, other = SIDES[kind]
    portioned = kind in ("pipe", "cycle")
    fields = _mapping(body, where, (one, other, "portion") if portioned else (one, other))
    for key in (one, other):
        if key not in fields:
            raise PlanError(f"{where}: has no key {key!r}; {kind} has {one} and {other}")
    left = _node_from(fields[one], f"{where}.{one}", seen, depth + 1)
    right = _node_from(fields[other], f"{where}.{other}", seen, depth + 1)
    if kind == "share":
        return Share(left, right)
    if kind == "parallel":
        return Parallel(left, right)
    portion = check_portion(fields.get("portion"), f"{where}.portion")
    return Pipe(left, right, portion) if kind == "pipe" else Cycle(left, right, portion)


def _mapping(data: object, where: str, known: tuple[str, ...] | None) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise PlanError(f"{where}: {data!r} is not a mapping" + (f" with the keys {', '.join(known)}" if known else ""))
    for key in data:
        if not isinstance(key, str) or (known is not None and key not in known):
            hint = f"{nearest(str(key), known)}; known are {', '.join(known)}" if known else ""
            raise PlanError(f"{where}: unknown key {key!r}{hint}")
    return dict(data)


def _given(fields: Mapping[str, Any], key: str, default: object) -> object:
    """The value of a key; absent and null are the default."""
    value = fields.get(key)
    return default if value is None else value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{where}: {value!r} is not text; put it in quotes")
    return value


def _count(value: object, where: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{where}: {value!r} is not a number of {what} (1 or more)")
    return value


def check_portion(value: object, where: str) -> int | None:
    """A portion as given (None: everything); ``PlanError`` naming ``where``."""
    return None if value is None else _count(value, where, "items")
