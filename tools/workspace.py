"""What the tools know about the packages of this checkout: read from their pyproject.toml, nothing else."""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent


def die(message: str) -> NoReturn:
    """Print one clear line and leave with 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@dataclass(frozen=True)
class Package:
    """One package of the workspace; ``siblings`` are the packages of ours that it declares."""

    name: str
    path: Path
    version: str
    siblings: tuple[str, ...]
    extras: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


def requirement_name(requirement: str) -> str:
    """``"rlinf-core[x]==0.1.0; marker"`` -> ``"rlinf-core"`` (normalised)."""
    return re.split(r"[\s\[<>=!~;@]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


def read_package(path: Path, siblings_among: set[str]) -> Package:
    """Read one package; siblings that only an extra names count as well."""
    project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
    optional: dict[str, list[str]] = project.get("optional-dependencies", {})
    every = [*project.get("dependencies", []), *(line for lines in optional.values() for line in lines)]
    siblings = {requirement_name(line) for line in every} & siblings_among - {project["name"]}
    extras = tuple(sorted(optional))
    return Package(project["name"], path, project["version"], tuple(sorted(siblings)), extras)


@functools.cache
def packages(root: Path = ROOT) -> dict[str, Package]:
    """Name -> package for every folder of packages/ that has a pyproject.toml."""
    paths = sorted(file.parent for file in (root / "packages").glob("*/pyproject.toml"))
    names = {path.name for path in paths}
    found = [read_package(path, names) for path in paths]
    return {package.name: package for package in found}


def closure(name: str, root: Path = ROOT) -> list[Package]:
    """The package and its siblings, siblings of siblings included, dependencies first."""
    known = packages(root)
    if name not in known:
        die(f"no package {name!r} in this checkout; there are: {', '.join(known)}")
    order: list[Package] = []

    def visit(package: Package) -> None:
        for sibling in package.siblings:
            visit(known[sibling])
        if package not in order:
            order.append(package)

    visit(known[name])
    return order
