"""The types of a composed configuration: dataclasses at the root and where a config group was chosen."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from rlinf_core.config.node import RESERVED
from rlinf_core.errors import ConfigError

if TYPE_CHECKING:
    from rlinf_core.config.node import Config

MISSING = "???"
UNTYPED = Any


@dataclass(frozen=True)
class Slot:
    """One key of a schema: its resolved type hint, default and metadata."""

    hint: Any
    default: Any = MISSING
    metadata: Mapping[str, Any] = field(default_factory=dict)


@cache
def slots_of(cls: type) -> dict[str, Slot]:
    """The keys of a schema dataclass, in order. Raises ConfigError when a name would hide a method of ``Config``."""
    hints = typing.get_type_hints(cls)
    slots = {}
    for item in dataclasses.fields(cls):
        if item.name in RESERVED or item.name.startswith("_"):
            raise ConfigError(
                f"schema {cls.__module__}.{cls.__qualname__} may not have a field {item.name!r}: {_taken(item.name)}"
            )
        if item.default is not dataclasses.MISSING:
            default = item.default
        elif item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        else:
            default = MISSING
        slots[item.name] = Slot(hints[item.name], default, item.metadata)
    return slots


def _taken(name: str) -> str:
    if name.startswith("_"):
        return "names that begin with '_' are not for keys"
    other = f"num_{name}" if name in ("keys", "values", "items") else f"{name}_"
    return f"{name!r} is the name of a method of the configuration node; choose another name, e.g. {other}"


def is_schema(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def unwrap(hint: Any) -> tuple[Any, bool]:
    """(the hint without None, whether None is allowed)."""
    if get_origin(hint) in (Union, types.UnionType):
        rest = tuple(arg for arg in get_args(hint) if arg is not type(None))
        optional = len(rest) < len(get_args(hint))
        return (rest[0] if len(rest) == 1 else Union[rest]), optional  # noqa: UP007 - built from a runtime tuple
    return hint, hint is Any


_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", Path: "a path", bytes: "bytes"}


def describe(hint: Any) -> str:
    """The type in a user's words: ``an integer``, ``a list of text, or null``."""
    inner, optional = unwrap(hint)
    origin, args = get_origin(inner), get_args(inner)
    if inner is Any:
        return "anything"
    if inner in _WORDS:
        text = _WORDS[inner]
    elif origin in (Union, types.UnionType):
        text = " or ".join(describe(arg) for arg in args)
    elif origin in (list, tuple) or inner in (list, tuple):
        text = f"a list of {_plural(args[0])}" if args else "a list"
    elif origin is dict or inner is dict:
        text = f"a mapping to {_plural(args[1])}" if len(args) == 2 else "a mapping"
    elif is_schema(inner):
        text = f"a group of keys ({', '.join(slots_of(inner))})"
    elif isinstance(inner, type) and issubclass(inner, enum.Enum):
        text = f"one of {', '.join(inner.__members__)}"
    else:
        text = getattr(inner, "__name__", str(inner))
    return f"{text}, or null" if optional else text


def _plural(hint: Any) -> str:
    plain = {int: "integers", float: "numbers", str: "text", Any: "anything"}
    return plain[hint] if hint in plain else describe(hint)


def short_type(hint: Any) -> str:
    """The type as Python writes it: ``int``, ``list[str]``, ``str | None``."""
    inner, optional = unwrap(hint)
    if isinstance(inner, type) and not get_args(inner):
        text = inner.__name__
    else:
        text = str(inner).replace("typing.", "")
    return f"{text} | None" if optional and inner is not Any else text


@dataclass(frozen=True)
class KeyInfo:
    """One key that a recipe has, for ``rlinf run RECIPE --keys``."""

    path: str
    type: str
    default: Any
    help: str = ""


class Schema:
    """The typed keys of one recipe. ``groups`` maps a dotted path to the dataclass of the chosen option there, or
    to ``Any`` when that option has no schema."""

    def __init__(self, roots: list[type], groups: Mapping[str, Any]) -> None:
        self.roots = roots
        self.root: dict[str, Slot] = {}
        for cls in roots:
            for name, slot in slots_of(cls).items():
                known = self.root.get(name)
                if known is not None and known.hint != slot.hint:
                    raise ConfigError(
                        f"schema {cls.__module__}.{cls.__qualname__} changes the type of {name!r} "
                        f"from {short_type(known.hint)} to {short_type(slot.hint)}"
                    )
                metadata = {**known.metadata, **slot.metadata} if known is not None else slot.metadata
                self.root[name] = Slot(slot.hint, slot.default, metadata)
        self.groups = dict(groups)

    def slot(self, path: str) -> Slot | None:
        """What is declared at a dotted path; None when no such key can exist."""
        if path in self.groups:
            return Slot(self.groups[path])
        parent, _, key = path.rpartition(".")
        if not parent:
            if path in self.root:
                return self.root[path]
            below = any(group.startswith(f"{path}.") for group in self.groups)
            return Slot(UNTYPED) if below else None
        above = self.slot(parent)
        if above is None:
            return None
        inner, _ = unwrap(above.hint)
        args = get_args(inner)
        if is_schema(inner):
            return slots_of(inner).get(key)
        if inner is Any:
            return Slot(UNTYPED)
        if get_origin(inner) is dict or inner is dict:
            return Slot(args[1] if len(args) == 2 else UNTYPED)
        if get_origin(inner) in (list, tuple) or inner in (list, tuple):
            return Slot(args[0] if args else UNTYPED) if key.isdigit() else None
        return None

    def is_open(self, path: str) -> bool:
        """Whether the node at ``path`` takes keys that nobody declared (a ``dict`` field)."""
        slot = self.slot(path)
        if slot is None:
            return False
        inner, _ = unwrap(slot.hint)
        return get_origin(inner) is dict or inner is dict

    def keys(self, data: Mapping[str, Any]) -> Iterator[KeyInfo]:
        """Every key that can be set, with the value it has in ``data`` (the configuration before any override)."""
        yield from self._keys(data, "")

    def _keys(self, data: Mapping[str, Any], prefix: str) -> Iterator[KeyInfo]:
        for key, value in data.items():
            path = f"{prefix}.{key}" if prefix else str(key)
            slot = self.slot(path) or Slot(UNTYPED)
            inner, _ = unwrap(slot.hint)
            if isinstance(value, Mapping) and (is_schema(inner) or (inner is Any and value)):
                yield from self._keys(value, path)
                continue
            text = str(slot.metadata.get("help", ""))
            if choices := slot.metadata.get("choices"):
                text = f"{text} [{', '.join(map(str, choices))}]".strip()
            yield KeyInfo(path, short_type(slot.hint), value, text)
            if value is None and is_schema(inner):  # an optional group that is off: show what it would take
                for name, below in slots_of(inner).items():
                    yield KeyInfo(
                        f"{path}.{name}", short_type(below.hint), below.default, below.metadata.get("help", "")
                    )

    def problems(self, config: Config) -> list[str]:
        """Everything wrong with the values: choices, limits, and what the ``validate`` hooks say."""
        found = list(self._not_finite("", config.to_dict(), False))
        for path, cls, node in self._nodes(config) if not found else ():
            for name, slot in slots_of(cls).items():
                key = f"{path}.{name}" if path else name
                if name in node and key not in self.groups:
                    metadata = self.root[name].metadata if not path else slot.metadata
                    found += _limits(key, node[name], metadata)
        if found:  # hooks may rely on single values being in range
            return list(dict.fromkeys(found))  # a key of core's that the recipe declares too is met twice
        for _, cls, node in self._nodes(config):
            if callable(hook := getattr(cls, "validate", None)):
                try:
                    found += hook(node, config)
                except Exception as error:
                    where = f"{cls.__module__}.{cls.__qualname__}.validate"
                    raise ConfigError(f"{where} failed: {type(error).__name__}: {error}") from error
        return list(dict.fromkeys(found))

    def _not_finite(self, path: str, value: Any, allowed: bool) -> Iterator[str]:
        """Infinities where they are not allowed, and NaN, anywhere below ``path``."""
        if isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                below = f"{path}.{key}" if path else str(key)
                slot = self.slot(below)
                yield from self._not_finite(below, item, allowed or (slot is not None and _takes_inf(slot)))
        elif isinstance(value, float) and not (allowed if math.isinf(value) else math.isfinite(value)):
            yield f"{path}={value}: must be a finite number"

    def _nodes(self, config: Config) -> Iterator[tuple[str, type, Config]]:
        for cls in self.roots:
            yield "", cls, config
            for name in slots_of(cls):
                if name in config and name not in self.groups:
                    yield from _below(name, self.root[name].hint, config[name])
        for path, hint in self.groups.items():
            node: Any = config
            for part in path.split("."):
                node = node[part] if node is not None and part in node else None
            yield from _below(path, hint, node)


def _below(path: str, hint: Any, value: Any) -> Iterator[tuple[str, type, Config]]:
    inner, _ = unwrap(hint)
    if value is None:
        return
    args = get_args(inner)
    if is_schema(inner):
        yield path, inner, value
        for name, slot in slots_of(inner).items():
            if name in value:
                yield from _below(f"{path}.{name}", slot.hint, value[name])
    elif get_origin(inner) is dict and len(args) == 2:
        for key in value:
            yield from _below(f"{path}.{key}", args[1], value[key])
    elif get_origin(inner) in (list, tuple) and args:
        for index, item in enumerate(value):
            yield from _below(f"{path}.{index}", args[0], item)


def _takes_inf(slot: Slot) -> bool:
    return bool(slot.metadata.get("allow_inf", False))


def _limits(key: str, value: Any, metadata: Mapping[str, Any]) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [problem for i, item in enumerate(value) for problem in _limits(f"{key}.{i}", item, metadata)]
    choices, low, high = metadata.get("choices"), metadata.get("min"), metadata.get("max")
    if choices is not None and value not in choices:
        from rlinf_core.errors import nearest

        options = ", ".join(str(choice) for choice in choices)
        return [f"{key}={value}: must be one of {options}{nearest(str(value), map(str, choices))}"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and low is not None and not value >= low:  # also true for NaN
        return [f"{key}={value}: must be at least {low}"]
    if number and high is not None and not value <= high:
        return [f"{key}={value}: must be at most {high}"]
    return []
