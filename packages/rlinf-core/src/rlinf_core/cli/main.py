"""Entry of ``rlinf``. Everything is imported late: ``--help`` and a config error must answer at once."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlinf_core.errors import ConfigError, PluginError, RLinfError, nearest

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
MESSAGE_LIMIT = 4000
"""Characters of an error's last line; a traceback above it is printed whole."""
Command = Callable[[list[str]], int]
"""A subcommand takes the arguments after its name and returns the exit code. An entry point of ``rlinf.commands``
names one; it may raise RLinfError, whose message is printed as the last line."""


class UsageError(ConfigError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    """Reports faults the way every other fault is reported: one line, exit code 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def _run(argv: list[str]) -> int:
    from rlinf_core.cli.run import command

    return command(argv)


def _plugins(argv: list[str]) -> int:
    from rlinf_core.cli.plugins import command

    return command(argv)


def _doctor(argv: list[str]) -> int:
    from rlinf_core.cli.doctor import command

    return command(argv)


def _plot(argv: list[str]) -> int:
    parser = Parser(prog="rlinf plot", description="Draw a run's metrics into run.png in its directory.")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    args = parser.parse_args(argv)
    from rlinf_core.plots import plot_run

    print(plot_run(args.run_dir))
    return OK


def _head(argv: list[str]) -> int:
    from rlinf_core.cli.node import head

    return head(argv)


def _worker(argv: list[str]) -> int:
    from rlinf_core.cli.node import worker

    return worker(argv)


BUILT_IN: dict[str, tuple[Command, str]] = {
    "run": (_run, "run a recipe: rlinf run RECIPE [key=value ...]"),
    "plugins": (_plugins, "list what is installed, by kind"),
    "doctor": (_doctor, "say what is installed, what is missing, and what in the machine will hurt"),
    "plot": (_plot, "draw the metrics of a run directory"),
    "head": (_head, "start a cluster's first node on this machine"),
    "worker": (_worker, "let this machine join a cluster"),
}

USAGE = """usage: rlinf COMMAND ...

Run reinforcement-learning recipes.

commands:
{commands}

options:
  -h, --help     show this help
  --version      show the version

rlinf COMMAND --help says more. Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""


def _help() -> str:
    from rlinf_core.registry import Registry, described

    rows = [(name, text) for name, (_, text) in BUILT_IN.items()]
    registry = Registry("rlinf.commands")
    for info in registry.describe():
        if info.name not in BUILT_IN:
            said = described(registry.entry(info.name)).rstrip(".") if not info.status else ""
            origin = f"(from {info.source}{': ' + info.status if info.status else ''})"
            rows.append((info.name, said[:1].lower() + said[1:] if said else origin))
    width = max(len(name) for name, _ in rows) + 2
    return USAGE.format(commands="\n".join(f"  {name:<{width}}{text}" for name, text in rows))


def _command(name: str) -> Command:
    if name in BUILT_IN:
        return BUILT_IN[name][0]
    from rlinf_core.registry import Registry

    registry = Registry("rlinf.commands")
    if name not in registry.names():
        known = [*BUILT_IN, *registry.names()]
        raise UsageError(f"unknown command {name!r}{nearest(name, known)}; commands: {', '.join(known)}")
    command = registry.load(name)
    if not callable(command):
        raise PluginError(f"command {name!r} of {registry.entry(name).source} is not a function")
    return command


def dispatch(argv: Sequence[str]) -> int:
    """Run one command line; raises what went wrong."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return OK if argv else BAD_INPUT
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"rlinf-core {version('rlinf-core')}")
        return OK
    if argv[0].startswith("-"):
        raise UsageError(f"unknown option {argv[0]!r} (see: rlinf --help)")
    return int(_command(argv[0])(list(argv[1:])) or OK)


def report(error: BaseException) -> int:
    """Print ``error`` as the last thing on stderr, a remote or unexpected traceback above it (none for bad input); the
    exit code."""
    if isinstance(error, KeyboardInterrupt):
        _print_error(f"interrupted ({error})" if str(error) else "interrupted")
        return INTERRUPTED
    if isinstance(error, RLinfError):
        remote = getattr(error, "traceback_text", "")
        message = str(error.args[0]) if remote and error.args else str(error)
        if remote and not error.bad_input:
            sys.stderr.write(remote.rstrip() + "\n\n")
        _print_error(message.rstrip() or type(error).__name__)
        return BAD_INPUT if error.bad_input or isinstance(error, ConfigError) else FAILED
    traceback.print_exception(error, file=sys.stderr)
    _print_error(f"{type(error).__name__}: {error}".rstrip(": "))
    return FAILED


def _print_error(message: str) -> None:
    if len(message) > MESSAGE_LIMIT:
        head, tail = message[: MESSAGE_LIMIT * 3 // 4], message[-MESSAGE_LIMIT // 4 :]
        message = f"{head} […{len(message) - len(head) - len(tail)} characters left out…] {tail}"
    if "No module named" in message:
        from rlinf_core.registry import install_hint

        message += install_hint(message)
    try:
        sys.stdout.flush()
    except OSError:
        pass  # nobody reads stdout any more; stderr still gets the message
    sys.stderr.write(f"rlinf: error: {message}\n")
    sys.stderr.flush()


def _open_streams() -> None:
    """Give standard streams that the caller has closed (``>&-``) a place, before other files take their numbers."""
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, flags)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, "r" if name == "stdin" else "w", encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """The ``rlinf`` script: returns the exit code."""
    _open_streams()
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader of our output went away (`rlinf plugins | head`): not a fault, but the interpreter's own flush
        # at exit would print one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except SystemExit as error:  # argparse after --help
        return error.code if isinstance(error.code, int) else OK if error.code is None else FAILED
    except BaseException as error:
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
