"""Where recipes and config-group options come from: the conf packages behind ``rlinf.recipes`` entry points."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlinf_core.registry import Entry, installed_entries

CORE_MODULE = "rlinf_core.conf"


@dataclass(frozen=True)
class ConfPackage:
    """One conf package. ``error`` says why its module cannot be imported; its YAML can be listed all the same."""

    module: str
    distribution: str
    folder: Path | None
    schemas: dict[str, type]
    error: str = ""

    def files(self) -> list[str]:
        """Its YAML files as ``group/name``, without the ending."""
        if self.folder is None:
            return []
        return sorted(path.relative_to(self.folder).with_suffix("").as_posix() for path in self.folder.rglob("*.yaml"))


def _installed() -> tuple[Entry, ...]:
    return tuple(entry for entry in installed_entries() if entry.group == "rlinf.recipes")


_entries: Callable[[], tuple[Entry, ...]] = _installed
_loaded: dict[tuple[Entry, ...], list[ConfPackage]] = {}


def conf_packages() -> list[ConfPackage]:
    """Every conf package but core's own. A broken one is in the list with its ``error`` and no schemas."""
    entries = _entries()
    if entries not in _loaded:
        packages: dict[str, ConfPackage] = {}
        for entry in entries:
            if entry.value != CORE_MODULE and entry.value not in packages:
                packages[entry.value] = _load(entry)
        _loaded[entries] = list(packages.values())
    return _loaded[entries]


def _load(entry: Entry) -> ConfPackage:
    folder = _find_folder(entry.value)
    try:
        module = importlib.import_module(entry.value)
        schemas = dict(getattr(module, "SCHEMAS", {}))
        for name, schema in schemas.items():
            if not (isinstance(schema, type) and hasattr(schema, "__dataclass_fields__")):
                raise TypeError(f"SCHEMAS[{name!r}] is not a dataclass")
    except Exception as error:  # any fault of a plugin is reported by name and must not kill other commands
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return ConfPackage(entry.value, entry.source, folder, {}, error=reason)
    return ConfPackage(entry.value, entry.source, folder, schemas)


def _find_folder(module: str) -> Path | None:
    """The folder of a package, found without running any of its code."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location, *below)
        if folder.is_dir():
            return folder
    return None


def recipe_names() -> dict[str, ConfPackage]:
    """Every recipe that is installed: its name and the package that ships it."""
    found = {}
    for package in conf_packages():
        files = package.files()
        for name in files:
            if package.folder is not None and is_recipe(package.folder / f"{name}.yaml"):
                found[name] = package
    return found


def is_recipe(path: Path) -> bool:
    """A YAML file is a recipe when it has a ``program``, or builds on another file in the global package."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return bool(re.search(r"^program\s*:|^\s*-\s*[^#\n]*@_global_\s*(#.*)?$", text, re.MULTILINE))


def find_file(name: str) -> tuple[ConfPackage, Path] | None:
    """The package and path of the YAML file ``group/name``."""
    for package in conf_packages():
        if package.folder is not None and (path := package.folder / f"{name}.yaml").is_file():
            return package, path
    return None


def config_groups() -> dict[str, dict[str, ConfPackage]]:
    """Config groups (folders of YAML files that are not recipes): option name -> the package that ships it."""
    groups: dict[str, dict[str, ConfPackage]] = {}
    for package in conf_packages():
        for name in package.files():
            group, _, option = name.rpartition("/")
            if group and package.folder is not None and not is_recipe(package.folder / f"{name}.yaml"):
                groups.setdefault(group, {})[option] = package
    return groups


def schema_of(name: str) -> type | None:
    """The dataclass that types the YAML file ``group/name``, if its package has one."""
    for package in conf_packages():
        if name in package.schemas:
            return package.schemas[name]
    return None


def broken_packages() -> list[ConfPackage]:
    return [package for package in conf_packages() if package.error]
