"""``rlinf run RECIPE [key=value ...]``."""

from __future__ import annotations

import sys
from typing import Any

from rlinf_core.cli.main import OK, Parser

DESCRIPTION = """Run a recipe.

RECIPE is the name of an installed one (rlinf plugins recipes lists them) or the path of a Python file of your own
with a function decorated @recipe. Values are set with key=value, options of config groups with group=name
(rollout=vllm), entries of mappings are removed with ~key."""


def command(argv: list[str]) -> int:
    """Compose and run; ConfigError for bad input, whatever the run raises otherwise."""
    parser = Parser(prog="rlinf run", description=DESCRIPTION)
    parser.add_argument("words", metavar="RECIPE [key=value ...]", nargs="*")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--cfg", action="store_true", help="print the composed configuration (??? is to be set) and stop")
    show.add_argument("--keys", action="store_true", help="list the keys with type, value and meaning and stop")
    args = parser.parse_intermixed_args(argv)
    if not args.words:
        parser.error("which recipe? rlinf run RECIPE [key=value ...]; rlinf plugins recipes lists them")
    recipe, *overrides = args.words
    if "=" in recipe:
        parser.error(f"the recipe comes first, before {recipe!r}")
    from rlinf_core.config import compose_full
    from rlinf_core.errors import MissingKeys

    try:
        composed = compose_full(recipe, overrides, allow_missing=args.keys)
    except MissingKeys:
        if args.cfg:  # what there is of it, with ??? where something is to be set
            print_config(compose_full(recipe, overrides, allow_missing=True).config)
        raise
    if args.keys:
        _print_keys([(key.path, key.type, key.default, key.help) for key in composed.list_keys()])
        return OK
    if args.cfg:
        print_config(composed.config)
        return OK
    from rlinf_core import runner

    return int(runner.run(composed.config, composed.name))


def print_config(config: Any) -> None:
    """A composed configuration as YAML on stdout."""
    import yaml

    from rlinf_core.rundir import to_json

    yaml.safe_dump(to_json(config.to_dict())[0], sys.stdout, sort_keys=False, allow_unicode=True)


def _print_keys(rows: list[tuple[str, str, Any, str]]) -> None:
    shown = [(path, kind, _value(default), text) for path, kind, default, text in rows]
    widths = [min(max(len(row[i]) for row in shown), limit) for i, limit in enumerate((44, 22, 28))]
    for row in shown:
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row[:3], widths, strict=True))
        print(f"{cells}  {row[3]}".rstrip())


def _value(value: Any) -> str:
    if value == "???":
        return "(required)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if value == "" or (isinstance(value, str) and value != value.strip()) else str(value)
