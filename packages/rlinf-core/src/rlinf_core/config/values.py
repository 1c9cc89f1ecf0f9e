"""Typed nodes of a configuration: YAML values and overrides go in key by key, and every fault names its key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlinf_core.config.node import leaves
from rlinf_core.config.schema import MISSING, UNTYPED, Schema, describe, is_schema, slots_of, unwrap
from rlinf_core.errors import ConfigError, MissingKeys, nearest, synonyms

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


@dataclass(frozen=True)
class RecipeSource:
    """One recipe before composing: its YAML data, its own dataclasses, and where it comes from in words."""

    name: str
    origin: str
    data: dict[str, Any]
    schemas: list[type] = field(default_factory=list)


def new_root(schema: Schema) -> DictConfig:
    from omegaconf import OmegaConf, open_dict

    fields = []
    for name, slot in schema.root.items():
        if name not in schema.groups:
            default = dataclasses.field(default_factory=lambda value=slot.default: value)  # type: ignore[misc]
            fields.append((name, slot.hint, default))
    root: DictConfig = OmegaConf.structured(dataclasses.make_dataclass("Recipe", fields))
    with open_dict(root):
        for path, hint in schema.groups.items():
            node = OmegaConf.structured(hint) if is_schema(hint) else OmegaConf.create({})
            OmegaConf.update(root, path, node, merge=False, force_add=True)
    return root


def put_base(
    root: DictConfig, schema: Schema, recipe: RecipeSource, base: dict[str, Any], swapped: frozenset[str]
) -> None:
    """Values from YAML. A recipe without a dataclass of its own may bring any top-level keys; they stay untyped.

    ``swapped`` are groups whose option an override chose: what the recipe sets there for a key that only its own
    choice has means nothing to the other option and is left out.
    """
    for path in swapped:
        hint = schema.groups[path]
        node: Any = base
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if is_schema(hint) and isinstance(node, dict):
            for key in set(node) - set(slots_of(hint)):
                del node[key]
    for key, value in base.items():
        path = str(key)
        if path not in schema.root and path not in schema.groups and len(schema.roots) == 1:
            schema.groups[path] = UNTYPED
            _set(root, path, value)
        elif schema.slot(path) is not None:
            _put(root, schema, path, value, where=f" ({recipe.origin})", create=True)
        else:
            _unknown_key(root, schema, recipe, path, f" in {recipe.origin}")


def _put(root: DictConfig, schema: Schema, path: str, value: Any, *, where: str = "", create: bool = False) -> None:
    """Assign ``value`` at ``path``; a mapping given for a group of keys is merged key by key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    slot = schema.slot(path)
    if slot is None:
        parent, _, key = path.rpartition(".")
        above = schema.slot(parent) if parent else None
        known = list(slots_of(unwrap(above.hint)[0])) if above and is_schema(unwrap(above.hint)[0]) else []
        raise ConfigError(f"unknown key {path!r}{where}{nearest(key, known)}; keys there: {', '.join(known)}")
    if value == MISSING:
        if create:  # the recipe leaves it to its user, whatever the schema's default is
            _set(root, path, MISSING)
        return
    inner, optional = unwrap(slot.hint)
    untyped = inner is UNTYPED and isinstance(value, Mapping) and OmegaConf.is_dict(_get(root, path))
    if isinstance(value, Mapping) and (is_schema(inner) or untyped):
        if is_schema(inner) and _get(root, path) is None:
            _set(root, path, OmegaConf.structured(inner))
        for key, item in value.items():
            below = f"{path}.{key}"
            if untyped and not create and key not in _get(root, path):
                known = [str(name) for name in _get(root, path)]
                raise ConfigError(f"unknown key {below!r}{nearest(str(key), known)}; keys there: {', '.join(known)}")
            _put(root, schema, below, item, where=where, create=create)
        return
    expected = f"{path}={_shown(value)}{where}: expected {describe(slot.hint)}, got {_type_name(value)}"
    if schema.is_open(path) and value is not None and not isinstance(value, Mapping | list):
        entry = slot.metadata.get("entry", "KEY")
        expected += f"; an entry of it is set with {path}.{entry}={_shown(value)}"
    if value is None and (optional or (path in schema.groups and not is_schema(inner))):
        _set(root, path, None)
        return
    if value is None or (is_schema(inner) and not _is_interpolation(value)):
        raise ConfigError(expected)
    if inner in (str, int, float, bool, Path) and isinstance(value, Mapping | list):
        raise ConfigError(expected)
    if schema.is_open(path) and isinstance(value, Mapping):
        value = {**(OmegaConf.to_container(_get(root, path)) or {}), **value}
    try:
        _set(root, path, value)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(expected) from error


def carry(root: DictConfig, schema: Schema, data: Mapping[str, Any], prefix: str = "") -> None:
    """Values of another configuration, where this one has the key; the others are left out."""
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        slot = schema.slot(path)
        if slot is None:
            continue
        inner, _ = unwrap(slot.hint)
        if isinstance(value, Mapping) and (is_schema(inner) or (inner is UNTYPED and not schema.is_open(prefix))):
            carry(root, schema, value, path)
        else:
            _put(root, schema, path, value, create=True)


def apply(root: DictConfig, schema: Schema, recipe: RecipeSource, override: Override) -> None:
    path, line = override.key_or_group, str(override.input_line)
    if override.package is not None:
        raise ConfigError(f"override {line!r}: {path!r} is not a config group, so '@' cannot follow it")
    parent, _, key = path.rpartition(".")
    slot = schema.slot(path)
    if override.is_delete():
        if not (parent and schema.is_open(parent)) or key not in (_get(root, parent) or {}):
            raise ConfigError(f"override {line!r}: only entries of a mapping can be deleted, not the key {path!r}")
        del _get(root, parent)[key]
        return
    typed = slot is not None and unwrap(slot.hint)[0] is not UNTYPED
    declared = typed or _exists(root, path) or (bool(parent) and schema.is_open(parent))
    if slot is None or not declared:
        _unknown_key(root, schema, recipe, path)
    value = override.value()
    if override.is_sweep_override():
        if unwrap(slot.hint)[0] is not str:
            raise ConfigError(f"override {line!r}: sweeps are not supported; write {path}=[a,b] for a list")
        value = line.partition("=")[2]  # `0,2` is plain text where the key takes text
    _materialise(root, schema, parent)
    _put(root, schema, path, value)


def _materialise(root: DictConfig, schema: Schema, parent: str) -> None:
    """Switch on optional groups of keys above an override (``early_stop.patience=3`` where it was null)."""
    from omegaconf import OmegaConf

    path = ""
    for part in parent.split(".") if parent else []:
        path = f"{path}.{part}" if path else part
        slot = schema.slot(path)
        if slot is not None and _get(root, path) is None and is_schema(inner := unwrap(slot.hint)[0]):
            _set(root, path, OmegaConf.structured(inner))


def _unknown_key(root: DictConfig, schema: Schema, recipe: RecipeSource, path: str, where: str = "") -> NoReturn:
    known = [info.path for info in schema.keys(_container(root))]
    last = path.rpartition(".")[2]
    beside = [key for key in synonyms(path, known) if key.rpartition(".")[0] == path.rpartition(".")[0]]
    same = beside or [key for key in known if key.rpartition(".")[2] == last]
    hint = f" (did you mean {' or '.join(repr(key) for key in same[:3])}?)" if same else nearest(path, known)
    parent = path.rpartition(".")[0]
    while parent and not any(key.startswith(f"{parent}.") for key in known):
        parent = parent.rpartition(".")[0]
    below = [
        key.removeprefix(f"{parent}.") if parent else key for key in known if not parent or key.startswith(f"{parent}.")
    ]
    there = list(dict.fromkeys(key.partition(".")[0] for key in below))
    place = f"under {parent!r}" if parent else f"of {recipe.name}"
    raise ConfigError(
        f"unknown key {path!r}{where}{hint}; keys {place}: {', '.join(there)} "
        f"(all of them: rlinf run {recipe.name if not recipe.origin.endswith('.py') else recipe.origin} --keys)"
    )


def resolve(root: DictConfig, schema: Schema, recipe: RecipeSource, allow_missing: bool) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    missing = [path for path, value in leaves(_container(root)) if value == MISSING]
    if missing and not allow_missing:
        texts = []
        for key in missing:
            slot = schema.slot(key)
            texts.append(f"{key} ({describe(slot.hint)})" if slot else key)
        give = " ".join(f"{key}=…" for key in missing)
        raise MissingKeys(f"{recipe.name}: not set and without a default: {', '.join(texts)}; give {give}")
    try:
        data = OmegaConf.to_container(root, resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or error.key
        raise ConfigError(f"{key}: its value cannot be resolved: {first_line(error)}") from error
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _container(root: DictConfig) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(root, resolve=False)


def _get(root: DictConfig, path: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.select(root, path, throw_on_resolution_failure=False, throw_on_missing=False)


def _exists(root: DictConfig, path: str) -> bool:
    parent, _, key = path.rpartition(".")
    node = _get(root, parent) if parent else root
    return (isinstance(node, Mapping) and key in node) or (key.isdigit() and node is not None)


def _set(root: DictConfig, path: str, value: Any) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(root, path, value, merge=False, force_add=True)


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _type_name(value: Any) -> str:
    names = {bool: "true/false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def first_line(error: BaseException) -> str:
    """The first sentence of a library's message, without its search paths and links."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("See ", "full_key", "object_type", "reference_type"))]
    return " ".join(kept[:3]) or type(error).__name__
