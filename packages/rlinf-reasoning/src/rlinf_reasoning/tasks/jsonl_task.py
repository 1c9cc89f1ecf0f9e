"""Problems from a JSON Lines file. Standard library only, so that faults are found when composing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_core.errors import ConfigError, nearest
from rlinf_reasoning.tasks.base import Problem
from rlinf_reasoning.tasks.chat import check_messages, text_of

USUAL = {"prompt_field": ("prompt", "question", "problem"), "answer_field": ("answer", "solution")}


@dataclass(frozen=True)
class Layout:
    """What the lines of a file look like.

    ``prompt``, ``answer``: names of the fields. ``pattern``: a regular expression whose last match in the answer field
    (its first group, where it has one) is the answer that counts.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    pattern: str | None = None

    def example(self) -> str:
        return f'{{"{self.prompt}": "1 + 1 =", "{self.answer}": "2"}}'


def read_jsonl(path: str | Path, layout: Layout | None = None, *, key: str = "task.path") -> list[Problem]:
    """Read a file with one JSON object a line: a prompt (a string, or a list of messages), an answer (a string or a
    number) and any extra fields.

    Blank lines are skipped. A byte-order mark is allowed. Extra fields are kept in ``Problem.fields``, and so is the
    whole answer field when a pattern takes a part of it.

    Raises:
        ConfigError: naming ``file:line`` for a broken line, a missing field, a field of the wrong type, an answer
            without a match; naming the file when it is absent, unreadable, not UTF-8, or has no line at all. ``key``
            is the config key that the message begins with.
    """
    path, layout = Path(path).expanduser(), layout or Layout()
    problems = list(_problems(path, layout, key))
    if not problems:
        raise ConfigError(f"{key}: {path} has no line at all; it needs one JSON object per line: {layout.example()}")
    return problems


def _problems(path: Path, layout: Layout, key: str) -> Iterator[Problem]:
    number = 0
    pattern = re.compile(layout.pattern) if layout.pattern else None
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _problem(line, f"{key}: {path}:{number}", layout, pattern)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path}:{_undecodable(path, number + 1)}: not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror or error}") from error


def _undecodable(path: Path, reached: int) -> int:
    """The number of the first line that is not UTF-8; a file is decoded in blocks, so that it may be far behind
    ``reached``, which is given back where no single line is at fault."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return reached


def _problem(line: str, where: str, layout: Layout, pattern: re.Pattern[str] | None) -> Problem:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); expected {layout.example()}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; brackets nested as deep
        raise ConfigError(f"{where}: {type(error).__name__} when it is read as JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a {_kind(row)} where an object is needed, like {layout.example()}")
    roles = (("prompt_field", layout.prompt, layout.answer), ("answer_field", layout.answer, layout.prompt))
    for key, name, other in roles:
        if name not in row:
            has = ", ".join(row) or "no fields"
            raise ConfigError(
                f"{where}: field {name!r} is missing{_likely(key, name, [n for n in row if n != other])}; the line has "
                f"{has} (task.{key} names another)"
            )
    if "\\ud" in line.lower():
        _check_surrogates(row, where)
    prompt, messages = _prompt(row.pop(layout.prompt), where, layout.prompt)
    answer = _answer(row[layout.answer], where, layout.answer)
    if pattern is None:
        del row[layout.answer]
    else:
        answer = _matched(answer, pattern, where)
    return Problem(prompt, answer, row, messages)


def _likely(key: str, name: str, others: list[str]) -> str:
    """Which of the ``others`` may be meant by ``name``: the usual name of such a field before one that looks alike."""
    usual = next((word for word in USUAL[key] if word in others), None)
    return f" (did you mean {usual!r}?)" if usual is not None else nearest(name, others)


def _check_surrogates(row: dict[str, Any], where: str) -> None:
    """Refuse half of a character (an escape like backslash-ud83d alone), which no tokenizer and no file can take."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ConfigError(
                f"{where}: field {name!r} has half of a character ({half}, one of a pair that was cut); repair the text"
            ) from error


def _prompt(value: Any, where: str, name: str) -> tuple[str, tuple[dict[str, str], ...] | None]:
    """(text, messages) of a prompt field."""
    if isinstance(value, str):
        if not value:
            raise ConfigError(f"{where}: field {name!r} is empty")
        return value, None
    if not isinstance(value, list):
        raise ConfigError(f"{where}: field {name!r} is a {_kind(value)}, it must be a string or a list of messages")
    if problem := check_messages(value):
        raise ConfigError(f"{where}: field {name!r} {problem}")
    messages = tuple({str(k): v for k, v in message.items()} for message in value)
    return text_of(messages), messages


def _answer(value: Any, where: str, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: field {name!r} is {value}, it must be a string or a finite number")
        return str(value)
    raise ConfigError(f"{where}: field {name!r} is a {_kind(value)}, it must be a string or a number")


def _matched(answer: str, pattern: re.Pattern[str], where: str) -> str:
    matches = list(pattern.finditer(answer))
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    if found is None or not found.strip():
        raise ConfigError(
            f"{where}: task.answer_pattern {pattern.pattern!r} finds nothing in the answer {answer[-200:]!r}"
        )
    return found.strip()


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


class JsonlTask:
    """Problems of the file ``task.path``; ``task.template`` is formatted with the fields of a line.

    ``task.prompt_field``, ``task.answer_field`` and ``task.answer_pattern`` say where prompt and answer are (also of
    ``task.eval_path``, the file of the problems for evaluation, where one is given). In the template ``{prompt}`` is
    the prompt, whatever its field is called; of a list of messages, the content of the last one.
    """

    def __init__(self, cfg: Any) -> None:
        if not cfg.path:  # which would be the directory that the run was started in
            raise ConfigError("task.path: the path is empty; give a file with one JSON object per line")
        self.path = Path(cfg.path)
        self.eval_path = Path(cfg.eval_path) if cfg.eval_path else None
        self.template: str = cfg.template
        self.layout = Layout(cfg.prompt_field, cfg.answer_field, cfg.answer_pattern)
        self.source = str(self.path)

    def problems(self, seed: int) -> list[Problem]:
        """All lines in file order; ``seed`` is not used (the split is seeded)."""
        return [self._filled(problem) for problem in read_jsonl(self.path, self.layout)]

    def eval_problems(self, seed: int) -> list[Problem] | None:
        """All lines of the file for evaluation, ``None`` without one."""
        if self.eval_path is None:
            return None
        return [self._filled(p) for p in read_jsonl(self.eval_path, self.layout, key="task.eval_path")]

    def _filled(self, problem: Problem) -> Problem:
        if self.template == "{prompt}":
            return problem
        if problem.messages is None:
            values = {**problem.fields, self.layout.prompt: problem.prompt, "prompt": problem.prompt}
            return Problem(apply_template(self.template, values), problem.answer, problem.fields)
        last = problem.messages[-1]
        values = {**problem.fields, self.layout.prompt: last["content"], "prompt": last["content"]}
        messages = (*problem.messages[:-1], {**last, "content": apply_template(self.template, values)})
        return Problem(text_of(messages), problem.answer, problem.fields, messages)


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
