"""``rlinf plugins [GROUP]``."""

from __future__ import annotations

from rlinf_core.cli.main import OK, Parser, UsageError
from rlinf_core.errors import nearest
from rlinf_core.registry import GROUPS, Registry


def command(argv: list[str]) -> int:
    """Print what is installed of one kind, or of all; nothing is imported but conf packages."""
    kinds = [group.removeprefix("rlinf.") for group in GROUPS]
    parser = Parser(prog="rlinf plugins", description="List what is installed, by kind, and what could be.")
    parser.add_argument("group", metavar="GROUP", nargs="?", help=f"one of {', '.join(kinds)}")
    args = parser.parse_args(argv)
    chosen = kinds
    if args.group is not None:
        kind = args.group.removeprefix("rlinf.")
        kind = f"{kind}s" if f"{kind}s" in kinds else kind
        if kind not in kinds:
            raise UsageError(f"unknown kind {args.group!r}{nearest(kind, kinds)}; kinds: {', '.join(kinds)}")
        chosen = [kind]
    for kind in chosen:
        rows = recipe_rows() if kind == "recipes" else plugin_rows(f"rlinf.{kind}")
        if not rows and args.group is None:
            continue
        print(f"{kind}: {GROUPS[f'rlinf.{kind}']}")
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        for name, source, note in rows:
            print(f"  {name:<{widths[0]}}  {source:<{widths[1]}}  {note}".rstrip())
        if not rows:
            print("  none installed")
    return OK


def plugin_rows(group: str) -> list[tuple[str, str, str]]:
    """(name, distribution, what is wrong or how to get it) of every plugin of a group."""
    return [(info.name, info.source, info.status) for info in Registry(group).describe()]


def recipe_rows() -> list[tuple[str, str, str]]:
    """(name, distribution, what is wrong) of every recipe and of every option of a config group."""
    from rlinf_core.config import sources

    rows = [
        (name, package.distribution, f"broken: {package.error}" if package.error else "")
        for name, package in sorted(sources.recipe_names().items())
    ]
    for group, options in sorted(sources.config_groups().items()):
        rows += [(f"{group}={option}", package.distribution, "") for option, package in options.items()]
    shown = {source for _, source, _ in rows}
    rows += [
        (package.module, package.distribution, f"broken: {package.error}")
        for package in sources.broken_packages()
        if package.distribution not in shown
    ]
    return rows
