"""``rlinf eval``: how good a model is on problems of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_core.cli.main import OK, Parser
from rlinf_core.errors import ConfigError

RECIPE = "reasoning/eval"
DESCRIPTION = """Estimate pass@1 and pass@k of a model on problems, with 95 % intervals; every answer is kept.

WHAT is one of
  a recipe        its task, reward, sampling and engine are taken, with model.path=DIR and task.path=FILE
  a run directory the model that it has exported, on the problems that it did not train on (task.path=FILE: on others)
  a model         a Hugging Face directory, with task.path=FILE
  nothing         model.path=DIR task.path=FILE

One answer per problem is greedy; eval.samples=8 eval.k=[1,4,8] draws eight. The directory of the evaluation holds
evaluations/evaluation.jsonl (prompt, response, reward, length, finish reason), metrics.jsonl and summary.json.
Exit codes: 0 done, 1 it failed, 2 bad input, 130 interrupted."""

GROUPS = ("model", "rollout", "task", "reward")
"""Config groups that are taken over, each with the option that was chosen there."""
SHARED = ("seed", "sampling", "cluster", "channels", "eval")
"""Other keys that are taken over, where both recipes have them."""


@dataclass
class Origin:
    """What is evaluated: the values to take over, the options of their groups, and where they come from."""

    name: str
    values: dict[str, Any]
    options: dict[str, str]


def eval_command(argv: list[str]) -> int:
    """``rlinf eval [WHAT] [key=value ...]``: pass@1 and pass@k of a model on problems, every answer kept."""
    parser = Parser(prog="rlinf eval", description=DESCRIPTION)
    parser.add_argument("words", metavar="[WHAT] [key=value ...]", nargs="*")
    parser.add_argument("--cfg", action="store_true", help="print the composed configuration and stop")
    args = parser.parse_intermixed_args(argv)
    if not args.words:
        parser.error("of which model, on which problems? rlinf eval model.path=DIR task.path=problems.jsonl")
    what, overrides = ("", args.words) if "=" in args.words[0] else (args.words[0], args.words[1:])
    from rlinf_core.cli.run import print_config
    from rlinf_core.errors import MissingKeys

    try:
        composed = compose_eval(what, overrides)
    except MissingKeys:
        if args.cfg:
            print_config(compose_eval(what, overrides, allow_missing=True).config)
        raise
    if args.cfg:
        print_config(composed.config)
        return OK
    from rlinf_core import runner

    return int(runner.run(composed.config, composed.name))


def compose_eval(what: str, overrides: Sequence[str], *, allow_missing: bool = False) -> Any:
    """The configuration of an evaluation of ``what`` (see ``DESCRIPTION``), as ``compose_full`` gives it.

    Raises:
        ConfigError: ``what`` is nothing that can be evaluated, and all that composing finds.
    """
    from rlinf_core.config import compose_full

    origin = origin_of(what)
    given = {word.partition("=")[0].lstrip("+~") for word in overrides}
    carried = {key: origin.values[key] for key in SHARED if key in origin.values}
    chosen = []
    for group in GROUPS:
        if group in given or group not in origin.values:  # another option: what was set for the old one says nothing
            continue
        carried[group] = origin.values[group]
        if group in origin.options:
            chosen.append(f"{group}={origin.options[group]}")
        elif group != "model":
            name = origin.values[group].get("name") if isinstance(origin.values[group], Mapping) else None
            raise ConfigError(
                f"{origin.name}: its {group} {name!r} is no option of config group {group!r} here; "
                f"choose one with {group}=NAME (rlinf plugins recipes lists them)"
            )
    if "task" in given or "task.path" in given:  # other problems: all of them, and no second file
        carried["eval"] = {k: v for k, v in carried.get("eval", {}).items() if k != "problems"}
        if "task.eval_path" not in given and "task" in carried:
            carried["task"] = {k: v for k, v in carried["task"].items() if k != "eval_path"}
    return compose_full(RECIPE, [*chosen, *overrides], carried=carried, allow_missing=allow_missing)


def origin_of(what: str) -> Origin:
    """Read a recipe, a run directory or a model directory."""
    if not what:
        return Origin(RECIPE, {}, {})
    path = Path(what).expanduser()
    if path.is_dir():
        if (path / "config.yaml").is_file():
            return _of_run(path)
        if (path / "config.json").is_file():
            return Origin(what, {"model": {"path": str(path)}}, {})
        raise ConfigError(
            f"{what} is neither a run directory (config.yaml) nor a Hugging Face model (config.json); "
            "rlinf eval --help says what can be evaluated"
        )
    if not what.endswith(".py") and (what.startswith(("/", ".", "~")) or path.exists()):
        why = "is not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"{what} {why}; give a run directory, a Hugging Face model directory or a recipe")
    from rlinf_core.config import compose_full

    try:
        composed = compose_full(what, allow_missing=True)
    except ConfigError as error:
        if "unknown recipe" not in str(error):
            raise
        raise ConfigError(
            f"{error}. Nor is there a directory {what} (a run's, or a model's: nothing is downloaded)"
        ) from error
    values = _without_missing(composed.config.to_dict())
    if values.get("model", {}).get("path", "") is None:
        del values["model"]["path"]  # a model that nobody has trained: model.path is the user's to give
    missing = [group for group in GROUPS if group not in values]
    if missing:
        raise ConfigError(
            f"recipe {what!r} chooses no {' and no '.join(missing)}: it has no model that answers problems of a task"
        )
    return Origin(what, values, {g: composed.choices[g] for g in GROUPS if g in composed.choices})


def _without_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that a recipe leaves to its user."""
    return {
        key: _without_missing(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value != "???"
    }


def _of_run(path: Path) -> Origin:
    import yaml

    from rlinf_core.config import sources

    try:
        values = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path / 'config.yaml'} cannot be read: {error}") from error
    missing = [group for group in GROUPS if group not in values] if isinstance(values, dict) else list(GROUPS)
    if missing:
        raise ConfigError(
            f"{path / 'config.yaml'} has no {' and no '.join(missing)}: the run trained no language model"
        )
    export = path / "export"
    if not (export / "config.json").is_file():
        raise ConfigError(
            f"{path} has no exported model ({export}): the run did not come to its end, or its recipe exports none; "
            "evaluate another model with model.path=DIR"
        )
    values["model"] = {**values["model"], "path": str(export.resolve())}
    groups = sources.config_groups()
    names = {group: str(values[group].get("name", "")) for group in GROUPS}
    return Origin(str(path), values, {g: name for g, name in names.items() if name in groups.get(g, {})})
