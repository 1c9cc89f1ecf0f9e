"""Recipes that are a user's own Python file: ``rlinf run ./my_recipe.py key=value``."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, overload

from rlinf_core.errors import ConfigError
from rlinf_core.registry import install_hint

Program = Callable[..., Any]


@dataclass(frozen=True)
class RecipeInfo:
    """What ``@recipe`` was given."""

    schema: type | None = None
    groups: Mapping[str, str] = field(default_factory=dict)


@overload
def recipe(function: Program) -> Program: ...


@overload
def recipe(*, schema: type | None = None, groups: Mapping[str, str] | None = None) -> Callable[[Program], Program]: ...


def recipe(
    function: Program | None = None, *, schema: type | None = None, groups: Mapping[str, str] | None = None
) -> Program | Callable[[Program], Program]:
    """Mark the one function of a file that is the program: ``def my_program(flow, cfg)``.

    ``schema`` is a dataclass of the recipe's own keys beside those that every recipe has (it may set another
    default for one of those, e.g. ``num_steps: int = 20``). ``groups`` chooses config-group options, such as
    ``{"trainer": "torch", "rollout": "transformers"}``; each can be changed with an override (``rollout=vllm``).
    """
    if schema is not None and not (isinstance(schema, type) and is_dataclass(schema)):
        raise ConfigError(f"@recipe(schema=…) takes a dataclass, not {schema!r}")
    info = RecipeInfo(schema, dict(groups or {}))

    def mark(program: Program) -> Program:
        program.__rlinf_recipe__ = info  # type: ignore[attr-defined]
        return program

    return mark if function is None else mark(function)


def load_user_module(path: Path) -> ModuleType:
    """Import a recipe file by its stem with its folder first on ``sys.path`` (workers import it the same way).

    Raises ConfigError when it is absent, has a name that cannot be imported, hides another module, or fails.
    """
    file = path.expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"recipe file {path} does not exist")
    name = file.stem
    if not name.isidentifier():
        raise ConfigError(f"recipe file {path}: rename it, {name!r} is not a Python module name")
    if str(file.parent) in sys.path:
        sys.path.remove(str(file.parent))
    sys.path.insert(0, str(file.parent))
    loaded = sys.modules.get(name)
    if (loaded is not None and _file_of(loaded) != file) or name in sys.stdlib_module_names:
        raise ConfigError(f"recipe file {path}: rename it, there is already a module {name!r}")
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"recipe file {path} cannot be imported: {_where(error, file)}") from error
    if _file_of(module) != file:
        raise ConfigError(f"recipe file {path}: rename it, module {name!r} is {_file_of(module) or 'built in'}")
    return module


def _file_of(module: ModuleType) -> Path | None:
    found = getattr(module, "__file__", None)
    return Path(found).resolve() if found else None


def _where(error: Exception, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    at = f" (line {lines[-1]})" if lines else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{at}{install_hint(text)}"


def find_recipe(module: ModuleType, path: Path) -> tuple[Program, RecipeInfo]:
    """The one function of ``module`` that is marked with ``@recipe``."""
    marked = {
        name: value
        for name, value in vars(module).items()
        if hasattr(value, "__rlinf_recipe__") and getattr(value, "__module__", None) == module.__name__
    }
    functions = list({id(value): value for value in marked.values()}.values())
    if len(functions) != 1:
        found = f"has {len(functions)} ({', '.join(marked)})" if functions else "has none"
        raise ConfigError(f"recipe file {path}: exactly one function must be decorated with @recipe, the file {found}")
    return functions[0], functions[0].__rlinf_recipe__


def load_program(program: str) -> Program:
    """The function that a configuration's ``program`` names: ``module:function`` or ``/path/file.py:function``."""
    where, _, name = program.rpartition(":")
    if not where or not name:
        raise ConfigError(f"program={program!r}: write module:function")
    if where.endswith(".py"):
        module = load_user_module(Path(where))
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
                raise
            raise ConfigError(f"program={program!r}: there is no module {error.name!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"program={program!r}: module {where!r} has no function {name!r}")
    return function
