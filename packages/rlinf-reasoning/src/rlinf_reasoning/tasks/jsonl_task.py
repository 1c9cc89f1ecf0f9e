"""Problems from a JSON Lines file. Standard library only, so that faults are found when composing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf_core.errors import ConfigError, nearest
from rlinf_reasoning.tasks.base import Problem

REQUIRED = ("prompt", "answer")


def read_jsonl(path: str | Path) -> list[Problem]:
    """Read a file with one JSON object a line: ``prompt`` and ``answer`` (strings) and any extra fields.

    Blank lines are skipped. A byte-order mark is allowed. Extra fields are kept in ``Problem.fields``.

    Raises:
        ConfigError: naming ``file:line`` for a broken line, a missing field, a field of the wrong type; naming
            the file when it is absent, unreadable, not UTF-8, or has no line at all.
    """
    path = Path(path)
    problems = list(_problems(path))
    if not problems:
        raise ConfigError(f"task.path: {path} has no line at all; it needs one JSON object per line: {_EXAMPLE}")
    return problems


_EXAMPLE = '{"prompt": "1 + 1 =", "answer": "2"}'


def _problems(path: Path) -> Iterator[Problem]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _problem(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"task.path: {path}:{number + 1}: not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ConfigError(f"task.path: cannot read {path}: {error.strerror or error}") from error


def _problem(line: str, where: str) -> Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"task.path: {where}: not valid JSON ({error.msg} at column {error.colno}); expected {_EXAMPLE}"
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(f"task.path: {where}: a {_kind(row)} where an object is needed, like {_EXAMPLE}")
    for name in REQUIRED:
        if name not in row:
            has = ", ".join(row) or "no fields"
            raise ConfigError(f"task.path: {where}: field {name!r} is missing{nearest(name, row)}; the line has {has}")
        if not isinstance(row[name], str):
            raise ConfigError(f"task.path: {where}: field {name!r} is a {_kind(row[name])}, it must be a string")
    if not row["prompt"]:
        raise ConfigError(f"task.path: {where}: field 'prompt' is empty")
    return Problem(row.pop("prompt"), row.pop("answer"), row)


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


class JsonlTask:
    """Problems of the file ``task.path``; ``task.template`` is formatted with the fields of a line."""

    def __init__(self, cfg: Any) -> None:
        self.path = Path(cfg.path)
        self.template: str = cfg.template
        self.source = str(self.path)

    def problems(self, seed: int) -> list[Problem]:
        """All lines in file order; ``seed`` is not used (the split is seeded)."""
        return [
            Problem(apply_template(self.template, {**p.fields, "prompt": p.prompt}), p.answer, p.fields)
            for p in read_jsonl(self.path)
        ]


def apply_template(template: str, values: dict[str, Any]) -> str:
    """Format a prompt template; a name in it that is unknown is a ``ConfigError`` with the nearest known one."""
    try:
        return template.format_map(values)
    except KeyError as error:
        name = str(error.args[0])
        raise ConfigError(
            f"task.template: unknown name {{{name}}}{nearest(name, values)}; known: {', '.join(values)}"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f"task.template: {template!r} is not a format string: {error}") from error
