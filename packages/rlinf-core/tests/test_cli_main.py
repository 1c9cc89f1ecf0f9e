"""The command line: commands, exit codes, and one clear error as the last line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rlinf_core
from rlinf_core import registry
from rlinf_core.cli.main import main
from rlinf_core.config import Config, sources
from rlinf_core.errors import ConfigError, MissingExtraError, RunDirectoryError, WorkerError
from rlinf_core.registry import Entry, install_command, installed_entries

CONF = """
from dataclasses import dataclass, field
@dataclass
class Toy:
    size: int = field(default=8, metadata={"min": 1, "help": "how many"})
SCHEMAS = {"toys/count": Toy}
"""

COMMANDS = """
def hello(argv):
    print('hello', *argv)
    return 3

def greet(argv):
    '''``rlinf greet``: say hello.

    At length.'''

not_callable = 1
"""

Outcome = Callable[..., str]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Entry]]:
    """A conf package with one recipe, and commands, found as if they were installed."""
    folder = tmp_path / "cli_conf"
    (folder / "toys").mkdir(parents=True)
    (folder / "__init__.py").write_text(CONF)
    (folder / "toys" / "count.yaml").write_text("program: a:b\nnum_steps: 3\n")
    (tmp_path / "cli_commands.py").write_text(COMMANDS)
    (tmp_path / "cli_package").mkdir()
    (tmp_path / "cli_package" / "__init__.py").write_text("raise RuntimeError\n")
    (tmp_path / "cli_package" / "inner.py").write_text(COMMANDS)
    (tmp_path / "cli_broken.py").write_text("import nothing_like_this\n")
    found = [Entry("rlinf.recipes", "cli", "cli_conf", "dist-cli", "1.0")]
    found += [
        Entry("rlinf.commands", "hello", "cli_commands:hello", "dist-cli", "1.0"),
        Entry("rlinf.commands", "greet", "cli_commands:greet", "dist-cli", "1.0"),
        Entry("rlinf.commands", "wave", "cli_package.inner:greet", "dist-cli", "1.0"),
        Entry("rlinf.commands", "constant", "cli_commands:not_callable", "dist-cli", "1.0"),
        Entry("rlinf.commands", "broken", "cli_broken:command", "dist-broken", "1.0"),
    ]
    found += [e for e in installed_entries() if e.group == "rlinf.loggers"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "installed_entries", lambda: tuple(found))
    monkeypatch.setattr(sources, "installed_entries", lambda: tuple(found))
    monkeypatch.setattr(sources, "_loaded", {})
    yield found
    for name in ("cli_conf", "cli_commands", "cli_broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("rlinf_core.runner")
    monkeypatch.setitem(sys.modules, "rlinf_core.runner", module)
    monkeypatch.setattr(rlinf_core, "runner", module, raising=False)
    return module


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.rstrip("\n").splitlines()[-1]


def test_help_lists_commands_without_importing_them(entries: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for part in ("run ", "plugins", "doctor", "plot", "hello", "(from dist-cli 1.0)", "dist-broken"):
        assert part in out
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  ")}
    assert lines["greet"] == lines["wave"] == "rlinf greet: say hello"
    assert lines["hello"] == "(from dist-cli 1.0)"
    assert not {"cli_commands", "cli_package"} & set(sys.modules)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert main(["run", "--help"]) == 0


def test_commands_of_other_packages_are_run(entries: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "a", "--b"]) == 3
    assert capsys.readouterr().out == "hello a --b\n"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["rum"], ["unknown command 'rum'", "did you mean 'run'", "hello"]),
        (["--nope"], ["unknown option '--nope'"]),
        (["broken"], ["dist-broken 1.0", "nothing_like_this"]),
        (["constant"], ["dist-cli 1.0", "is not a function"]),
        (["run"], ["which recipe?"]),
        (["run", "seed=3"], ["the recipe comes first"]),
        (["run", "toys/cuont"], ["did you mean 'toys/count'"]),
        (["run", "toys/count", "sise=3"], ["unknown key 'sise'", "did you mean 'size'"]),
        (["run", "toys/count", "size=0"], ["size=0: must be at least 1"]),
        (["run", "toys/count", "--cfgs"], ["--cfgs"]),
        (["plugins", "rolouts"], ["did you mean 'rollouts'"]),
        (["doctor", "now"], ["unrecognized arguments: now"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    entries: list[Entry], capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("rlinf: error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


def test_the_configuration_and_its_keys_are_shown(entries: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert main(["run", "toys/count", "--cfg", "size=5"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["size"] == 5 and shown["cluster"]["virtual_devices"] is None
    assert main(["run", "toys/count", "--keys"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["size"] == ["size", "int", "8", "how", "many"] and lines["portion"][1:5] == [
        "int",
        "|",
        "None",
        "null",
    ]


def test_keys_that_must_be_set_are_shown_in_place(entries: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    conf = sys.modules.get("cli_conf") or importlib.import_module("cli_conf")
    recipe = Path(str(conf.__file__)).parent / "toys" / "count.yaml"
    recipe.write_text("program: a:b\n")
    assert main(["run", "toys/count", "--cfg", "size=5"]) == 2
    shown = capsys.readouterr()
    data = yaml.safe_load(shown.out)
    assert data["num_steps"] == "???" and data["size"] == 5 and data["seed"] == 0
    assert shown.err.startswith("rlinf: error: toys/count: not set and without a default: num_steps (an integer)")
    assert main(["run", "toys/count", "--cfg", "siize=5"]) == 2 and capsys.readouterr().out == ""


def test_plugins_are_listed_by_kind(entries: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    entries += [
        Entry("rlinf.rewards", "own", "m:A", "dist-cli", "1.0"),
        Entry("rlinf.rewards", "own", "m:B", "rival", "2.0"),
        Entry("rlinf.recipes", "sick", "no_such_conf", "dist-sick", "1.0"),
    ]
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "toys/count" in out and "claimed twice" in out and "rival 2.0" in out
    assert "dist-sick 1.0" in out and "broken: ModuleNotFoundError" in out
    assert main(["plugins", "reward"]) == 0
    assert "(not installed)" in capsys.readouterr().out
    assert main(["plugins", "transports"]) == 0
    assert "none installed" in capsys.readouterr().out


def test_a_run_gets_the_configuration_and_gives_its_exit_code(entries: list[Entry], runner: types.ModuleType) -> None:
    calls = []

    def run(cfg: Config, recipe: str) -> int:
        calls.append((cfg.size, recipe))
        return 1

    runner.run = run  # type: ignore[attr-defined]
    assert main(["run", "toys/count", "size=4"]) == 1
    assert calls == [(4, "toys/count")]


@pytest.mark.parametrize(
    ("error", "code", "last", "above"),
    [
        (ConfigError("plan: no"), 2, "rlinf: error: plan: no", ""),
        (MissingExtraError("needs x"), 2, "rlinf: error: needs x", ""),
        (RunDirectoryError("cannot write d"), 1, "rlinf: error: cannot write d", ""),
        (KeyboardInterrupt(), 130, "rlinf: error: interrupted", ""),
        (ZeroDivisionError("by zero"), 1, "rlinf: error: ZeroDivisionError: by zero", "Traceback"),
        (
            WorkerError("actor[1] raised in train", member="actor[1]", traceback_text="Traceback:\n  far away\n"),
            1,
            "rlinf: error: actor[1] raised in train",
            "  far away",
        ),
        (
            WorkerError("actor[1] failed: no such model", traceback_text="Traceback:\n  far away\n", bad_input=True),
            2,
            "rlinf: error: actor[1] failed: no such model",
            "",
        ),
    ],
)
def test_a_failed_run_ends_with_one_clear_error(
    entries: list[Entry],
    runner: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    last: str,
    above: str,
) -> None:
    def run(cfg: Config, recipe: str) -> int:
        print("progress")
        raise error

    runner.run = run  # type: ignore[attr-defined]
    assert main(["run", "toys/count"]) == code
    err = capsys.readouterr().err
    assert err.endswith(f"{last}\n") and above in err and err.count("rlinf: error:") == 1
    assert bool(above) or err == f"{last}\n"


@pytest.mark.parametrize(
    ("error", "hinted"),
    [
        (WorkerError("a[0] failed in setup: ModuleNotFoundError: No module named 'rlinf_absent'", member="a[0]"), True),
        (ModuleNotFoundError("No module named 'rlinf_absent'", name="rlinf_absent"), True),
        (ConfigError("No module named 'rlinf_absent'; install it with: tools/install rlinf-absent"), False),
        (ModuleNotFoundError("No module named 'rlinf_absent.part'"), False),  # the package itself is there
        (ModuleNotFoundError("No module named 'rlinf_stranger'"), False),
    ],
)
def test_a_package_of_ours_that_is_not_there_can_be_installed(
    entries: list[Entry],
    runner: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    hinted: bool,
) -> None:
    def run(cfg: Config, recipe: str) -> int:
        raise error

    runner.run = run  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "OURS", ("rlinf_absent",))
    assert main(["run", "toys/count"]) in (1, 2)
    line = last_line(capsys)
    said = str(error.args[0])
    command = install_command("rlinf-absent")
    assert line.endswith(f"{said}; install it with: {command}" if hinted else said)


def test_a_recipe_that_needs_a_package_of_ours_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "OURS", ("rlinf_absent",))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "needy_recipe.py"
    path.write_text("\nimport rlinf_absent.codec\n")
    assert main(["run", str(path)]) == 2
    line = last_line(capsys)
    command = install_command("rlinf-absent")
    assert line.endswith(f"ModuleNotFoundError: No module named 'rlinf_absent' (line 2); install it with: {command}")


@pytest.mark.parametrize("kind", [ConfigError, ZeroDivisionError])
def test_an_endless_message_is_cut_in_the_last_line(
    entries: list[Entry], runner: types.ModuleType, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def run(cfg: Config, recipe: str) -> int:
        raise kind("begin " + "x" * 1_000_000 + " end")

    runner.run = run  # type: ignore[attr-defined]
    main(["run", "toys/count"])
    err = capsys.readouterr().err.rstrip("\n")
    last = err.splitlines()[-1]
    assert last.startswith("rlinf: error: ") and "begin xxx" in last and last.endswith("xxx end")
    assert len(last) < 4200 and "characters left out" in last
    assert ("x" * 1_000_000 in err) == (kind is ZeroDivisionError)  # a traceback stays whole


@pytest.mark.parametrize("closed", [">&-", "<&-", ">&- <&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_standard_streams(closed: str) -> None:
    code = """
import os, sys
from rlinf_core.cli import main as cli
def command(argv):
    print("hello")
    sys.stdin.read()
    report = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
    raise cli.ConfigError(f"the end {report}")
cli.BUILT_IN["probe"] = (command, "")
sys.exit(cli.main(["probe"]))
"""
    words = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    if "2>&-" not in closed:
        assert done.stderr.startswith("rlinf: error: the end [") and done.stderr.count("\n") == 1
        assert done.stderr.count("/dev/null") == (2 if ">&-" in closed else 1)


def test_a_run_directory_is_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path / "absent")]) == 1
    assert "nothing to plot" in last_line(capsys)


def test_a_config_error_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "my_recipe.py").write_text(
        "from rlinf_core.config import recipe\n@recipe\ndef program(flow, cfg): ...\n"
    )
    code = (
        "import sys\nfrom rlinf_core.cli.main import main\n"
        "rc = main(sys.argv[1:])\nprint(rc, sorted({'ray', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", code, "run", "./my_recipe.py", "num_steps=3", "seeed=3"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    assert done.stdout == "2 []\n"
    assert done.stderr.startswith("rlinf: error: unknown key 'seeed' (did you mean 'seed'?)")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_fault() -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "rlinf_core.cli.main", "--help"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.returncode == 1 and done.stderr == ""
