"""Plugins by name, through entry points: read without importing, loaded one at a time, explained on a miss.

A package adds a plugin with one line of its ``pyproject.toml`` and nothing here::

    [project.entry-points."rlinf.rewards"]
    my_reward = "my_package.rewards:MyReward"

A class may say what it needs beyond its distribution's own dependencies with ``requires: tuple[str, ...]`` (import
names); a module may say it for all its plugins with ``REQUIRES = {"import name": "extra"}``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlinf_core.errors import MissingExtraError, PluginError, nearest

GROUPS: dict[str, str] = {
    "rlinf.recipes": "conf packages: recipes and config-group options",
    "rlinf.trainers": "trainer backends",
    "rlinf.rollouts": "rollout backends",
    "rlinf.tasks": "sources of prompts",
    "rlinf.rewards": "reward functions",
    "rlinf.advantages": "advantage estimators",
    "rlinf.losses": "losses",
    "rlinf.envs": "environments",
    "rlinf.policies": "embodied policies",
    "rlinf.transports": "ways to move bytes between workers",
    "rlinf.links": "ways for channel items between workers of one machine",
    "rlinf.schedulers": "planners",
    "rlinf.loggers": "metric loggers",
    "rlinf.commands": "subcommands of rlinf",
    "rlinf.doctor": "sections of rlinf doctor",
}
"""Entry-point groups and what each holds."""

OURS = tuple(f"rlinf_{part}" for part in ("core", "comm", "sched", "algos", "engines", "embodied", "reasoning"))
"""The packages of the project, as they are imported."""


def kind_of(group: str) -> str:
    """What one plugin of a group is called: ``trainer`` of ``rlinf.trainers``."""
    plural = group.removeprefix("rlinf.")
    return {"policies": "policy", "losses": "loss"}.get(plural, plural.removesuffix("s"))


@dataclass(frozen=True, slots=True)
class KnownPlugin:
    """A first-party plugin: the distribution that ships it, the extra it needs, what that extra brings."""

    distribution: str
    extra: str = ""
    imports: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.distribution}[{self.extra}]" if self.extra else self.distribution


KNOWN: dict[str, dict[str, KnownPlugin]] = {
    "rlinf.trainers": {
        "torch": KnownPlugin("rlinf-engines", "torch", ("transformers", "safetensors")),
        "deepspeed": KnownPlugin("rlinf-engines", "deepspeed", ("deepspeed",)),
        "megatron": KnownPlugin("rlinf-engines", "megatron", ("megatron.core",)),
    },
    "rlinf.rollouts": {
        "transformers": KnownPlugin("rlinf-engines", "torch", ("transformers", "safetensors")),
        "vllm": KnownPlugin("rlinf-engines", "vllm", ("vllm",)),
    },
    "rlinf.tasks": {
        "jsonl": KnownPlugin("rlinf-reasoning"),
        "reasoning_gym": KnownPlugin("rlinf-reasoning", "", ("reasoning_gym",)),
    },
    "rlinf.rewards": {
        "exact": KnownPlugin("rlinf-reasoning"),
        "math": KnownPlugin("rlinf-reasoning", "", ("math_verify",)),
    },
    "rlinf.envs": {
        "gymnasium": KnownPlugin("rlinf-embodied", "gymnasium", ("gymnasium",)),
        "metaworld": KnownPlugin("rlinf-embodied", "metaworld", ("metaworld",)),
        "maniskill": KnownPlugin("rlinf-embodied", "maniskill", ("mani_skill", "sapien")),
        "libero": KnownPlugin("rlinf-embodied"),
    },
    "rlinf.policies": {
        "mlp": KnownPlugin("rlinf-embodied"),
        "vla": KnownPlugin("rlinf-embodied", "vla", ("transformers", "safetensors")),
    },
    "rlinf.links": {"shm": KnownPlugin("rlinf-comm")},
    "rlinf.loggers": {
        "jsonl": KnownPlugin("rlinf-core"),
        "tensorboard": KnownPlugin("rlinf-core", "", ("tensorboard",)),
        "wandb": KnownPlugin("rlinf-core", "wandb", ("wandb",)),
        "mlflow": KnownPlugin("rlinf-core", "mlflow", ("mlflow", "sqlalchemy", "alembic")),
    },
}
"""What the project itself ships, so that a miss can name the command that gives it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point: where it comes from and what it names. ``value`` is ``module:attribute`` or a module."""

    group: str
    name: str
    value: str
    distribution: str
    version: str = ""

    @property
    def source(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def load(self) -> Any:
        """Import the module and return the attribute (the module itself when none is named)."""
        module_name, _, attribute = self.value.partition(":")
        target: Any = importlib.import_module(module_name.strip())
        for part in filter(None, attribute.strip().split(".")):
            target = getattr(target, part)
        return target


def described(entry: Entry) -> str:
    """The first line of the docstring of what ``entry`` names, read from its source: nothing is imported. Empty where
    there is none to be found."""
    module, _, attribute = entry.value.partition(":")
    top, *parts = module.strip().split(".")
    try:
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            return ""
        path = Path(spec.origin).parent.joinpath(*parts) if parts else Path(spec.origin)
        if parts:
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return _docstring(ast.parse(path.read_text(encoding="utf-8")), attribute.strip())
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""


def _docstring(tree: ast.Module, name: str) -> str:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0].replace("``", "")
    return ""


@cache
def installed_entries() -> tuple[Entry, ...]:
    """Every ``rlinf.*`` entry point that is installed. Metadata is read once per process; nothing is imported."""
    from importlib.metadata import entry_points

    found = []
    points = entry_points()
    for group in points.groups:
        if group.startswith("rlinf."):
            for point in points.select(group=group):
                name, version = (point.dist.name, point.dist.version) if point.dist else ("(unknown)", "")
                found.append(Entry(group, point.name, point.value, name, version))
    return tuple(sorted(found, key=lambda entry: (entry.group, entry.name, entry.distribution)))


def install_command(requirement: str) -> str:
    """The command that installs one of the project's own distributions, e.g. ``rlinf-engines[vllm]``."""
    quoted = f"'{requirement}'" if "[" in requirement else requirement
    checkout = Path(__file__).resolve().parents[4]
    if (checkout / "tools" / "install").is_file():
        tool = checkout / "tools" / "install"
        shown = "tools/install" if Path.cwd() == checkout else str(tool)
        return f"{shown} {quoted}"
    return f"tools/install {quoted}   (in a checkout of the project)"


def install_hint(text: str) -> str:
    """``; install it with: …`` for a text in which Python says that a package of the project is not there (``No module
    named 'rlinf_comm'``); an empty string for others, and for those that say how already."""
    found = re.search(r"No module named '(rlinf_\w+)'", text)
    if found is None or found[1] not in OURS or "install it with" in text:
        return ""
    return f"; install it with: {install_command(found[1].replace('_', '-'))}"


def missing_imports(names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that cannot be found, without importing anything. A top-level package stands for what is below
    it, but for one that is a mere folder (``megatron``): there the package below (``megatron.core``) is looked for."""
    return tuple(name for name in names if not _is_there(name))


def _is_there(name: str) -> bool:
    top, *below = name.split(".")
    if sys.modules.get(name) is not None:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that was put together by hand
        return sys.modules.get(top) is not None
    if spec is None:
        return False
    # A folder without __init__ and without the package that is asked for is what an uninstall leaves behind.
    places = spec.submodule_search_locations or ()
    return spec.origin is not None or (
        bool(below) and any(Path(place, *below, "__init__.py").is_file() for place in places)
    )


def lacking(group: str, installed: Iterable[str]) -> dict[str, KnownPlugin]:
    """The plugins that the project ships of ``group`` and that cannot be used here: their names are not among those
    ``installed``, or what they need is not there. Nothing is imported."""
    here = set(installed)
    known = KNOWN.get(group, {})
    return {name: plugin for name, plugin in known.items() if name not in here or missing_imports(plugin.imports)}


def check_name(group: str, name: str, key: str) -> list[str]:
    """What is wrong with plugin ``name``, the value of config key ``key``, without importing it (for ``validate``)."""
    try:
        Registry(group).entry(name)
    except PluginError as error:
        return [f"{key}: {error}"]
    return []


def check_plugin(group: str, name: str, key: str) -> list[str]:
    """As ``check_name``, and what it is known to need (``KNOWN``) must be found in this environment."""
    try:
        Registry(group).check_imports(name)
    except PluginError as error:
        return [f"{key}: {error}"]
    return []


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One line of ``rlinf plugins``. ``status`` is empty when nothing is known to be wrong."""

    name: str
    source: str
    value: str
    status: str = ""


class Registry:
    """The plugins of one entry-point group.

    ``entries`` replaces the installed entry points (for tests). Nothing is imported before ``load``.
    """

    def __init__(self, group: str, entries: Iterable[Entry] | None = None) -> None:
        if group not in GROUPS:
            raise PluginError(f"unknown plugin group {group!r}{nearest(group, GROUPS)}; groups: {', '.join(GROUPS)}")
        self.group = group
        self._entries: dict[str, list[Entry]] = {}
        for entry in installed_entries() if entries is None else entries:
            if entry.group == group:
                same = self._entries.setdefault(entry.name, [])
                if all(other.distribution != entry.distribution for other in same):
                    same.append(entry)

    @property
    def _kind(self) -> str:
        return kind_of(self.group)

    def names(self) -> list[str]:
        """Names of the installed plugins, sorted."""
        return sorted(self._entries)

    def entry(self, name: str) -> Entry:
        """The entry of ``name``.

        Raises PluginError when it is unknown or claimed by two distributions, MissingExtraError when the project
        ships it in a distribution that is not installed.
        """
        found = self._entries.get(name, [])
        if len(found) == 1:
            return found[0]
        if found:
            owners = " and ".join(f"{entry.source} ({entry.value})" for entry in found)
            raise PluginError(f"{self._kind} {name!r} is claimed by {owners}; uninstall one of them")
        known = KNOWN.get(self.group, {})
        if name in known:
            command = install_command(known[name].requirement)
            raise MissingExtraError(
                f"{self._kind} {name!r} is part of {known[name].distribution}, which is not installed; "
                f"install it with: {command}"
            )
        raise PluginError(self.unknown(name))

    def check_imports(self, name: str) -> None:
        """Raises what ``entry`` does, and MissingExtraError when something is not installed that ``name`` is known to
        need. Nothing is imported."""
        entry, known = self.entry(name), KNOWN.get(self.group, {}).get(name)
        ours = known is not None and known.distribution == entry.distribution
        if known is not None and ours and (missing := missing_imports(known.imports)):
            raise self._missing_extra(entry, missing, {})

    def unknown(self, name: str, built_in: Iterable[str] = ()) -> str:
        """That there is no plugin ``name``: the nearest one and all that there are. ``built_in``: values that need no
        plugin."""
        known = lacking(self.group, self._entries)
        installed = ", ".join(
            f"{key} ({' and '.join(entry.source for entry in found)})"
            for key, found in sorted(self._entries.items())
            if key not in known
        )
        near = nearest(name, [*built_in, *self.names(), *known])
        text = f"no {self._kind} {name!r} is installed{near}; installed: {installed or 'none'}"
        if built_in:
            text += f"; always there: {', '.join(built_in)}"
        if known:
            others = ", ".join(f"{key} with {install_command(value.requirement)}" for key, value in known.items())
            text += f"; also available: {others}"
        return text

    def load(self, name: str) -> Any:
        """Import and return the plugin ``name``.

        Raises PluginError (unknown, claimed twice, cannot be imported) or MissingExtraError (something it needs is
        not installed; the message ends with the command that installs it).
        """
        entry = self.entry(name)
        try:
            target = entry.load()
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            own = entry.value.partition(".")[0].partition(":")[0]
            if missing and missing != own:
                raise self._missing_extra(entry, (missing,), {}) from error
            raise self._broken(entry, error) from error
        except Exception as error:
            raise self._broken(entry, error) from error
        module = sys.modules.get(entry.value.partition(":")[0].strip())
        extras: Mapping[str, str] = getattr(module, "REQUIRES", {})
        requires = tuple(getattr(target, "requires", ())) or tuple(extras)
        if missing_names := missing_imports(requires):
            raise self._missing_extra(entry, missing_names, extras)
        return target

    def _broken(self, entry: Entry, error: BaseException) -> PluginError:
        return PluginError(
            f"{self._kind} {entry.name!r} ({entry.value}) of {entry.source} cannot be imported: "
            f"{type(error).__name__}: {error}"
        )

    def _missing_extra(self, entry: Entry, missing: tuple[str, ...], extras: Mapping[str, str]) -> MissingExtraError:
        known = KNOWN.get(self.group, {}).get(entry.name)
        what = f"{self._kind} {entry.name!r} of {entry.source} needs {', '.join(missing)}, which is not installed"
        extra = next((extras[name] for name in missing if extras.get(name)), "")
        if known is not None and known.distribution == entry.distribution:
            how = install_command(known.requirement)
        elif extra:
            how = f"pip install '{entry.distribution}[{extra}]'"
        elif set(missing) <= set(OURS):
            how = install_command(" ".join(name.replace("_", "-") for name in missing))
        else:
            how = f"pip install {' '.join(missing)}"
        return MissingExtraError(f"{what}; install it with: {how}")

    def describe(self) -> list[PluginInfo]:
        """What is installed, from where, and what is known to be missing, without importing any plugin."""
        rows: list[PluginInfo] = []
        for name, found in sorted(self._entries.items()):
            status = ""
            known = KNOWN.get(self.group, {}).get(name)
            if len(found) > 1:
                status = "claimed twice: uninstall one of them"
            elif known is not None and (missing := missing_imports(known.imports)):
                status = f"needs {', '.join(missing)}: {install_command(known.requirement)}"
            rows.extend(PluginInfo(name, entry.source, entry.value, status) for entry in found)
        for name, known in sorted(KNOWN.get(self.group, {}).items()):
            if name not in self._entries:
                rows.append(PluginInfo(name, "(not installed)", "", install_command(known.requirement)))
        return rows
