"""The tools of the workspace: install, new_package, setup_env, evidence."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def run(*command: object, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=os.environ | environ, capture_output=True, text=True, timeout=240)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A copy of the files that the tools read and change, without any environment."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "packages", copy / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tools", copy / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "requirements", copy / "requirements")
    for name in ("pyproject.toml", "constraints.txt", "CODEOWNERS"):
        shutil.copy(ROOT / name, copy)
    return copy


def install(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ROOT / "tools/install", *arguments, "--dry-run")


def test_install_takes_siblings_along_in_one_command() -> None:
    done = install("rlinf-reasoning", "rlinf-engines[torch]", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    names = ["rlinf-core", "rlinf-algos", "rlinf-reasoning", "'./packages/rlinf-engines[torch]'"]
    assert all(name in line for name in names)
    assert " -e " not in line
    assert line.index("rlinf-core") < line.index("rlinf-reasoning")


def test_install_puts_vllm_in_by_itself_and_last() -> None:
    lines = install("rlinf-engines[vllm]").stdout.splitlines()
    assert len(lines) == 3
    assert "-e './packages/rlinf-engines[vllm]'" in lines[0]
    assert "-r requirements/vllm.txt" in lines[1]
    assert "--no-deps -r requirements/vllm-nodeps.txt" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["rlinf-engine"], "no package 'rlinf-engine' in this checkout; there are: rlinf-algos, "),
        (
            ["rlinf-engines[vlm]"],
            "rlinf-engines has no extra 'vlm'; it has: all, deepspeed, gguf, megatron, test, torch, vllm",
        ),
        (["rlinf engines"], "cannot read 'rlinf engines'"),
        (["rlinf-algos", "--python", "/does/not/exist"], "/does/not/exist: there is no such file"),
        (["rlinf-algos", "--env", "../x"], "--env '../x': letters, digits"),
    ],
)
def test_install_refuses_by_name(arguments: list[str], why: str) -> None:
    done = install(*arguments)
    assert done.returncode == 2
    assert why in done.stderr


def test_a_new_package_passes_its_checks_at_once(workspace: Path) -> None:
    done = run(sys.executable, workspace / "tools/new_package", "rlinf-world-model")
    assert done.returncode == 0, done.stderr
    folder = workspace / "packages/rlinf-world-model"
    site = workspace / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    made = run(*pip, "--disable-pip-version-check", "--target", site, folder)
    assert made.returncode == 0, made.stderr
    tests = run(sys.executable, "-m", "pytest", "-q", folder / "tests", cwd=workspace, PYTHONPATH=str(site))
    assert tests.returncode == 0, tests.stdout
    checks = (["ruff", "format", "--check"], ["ruff", "check"], ["mypy"], ["deptry"])
    for tool, *rest in checks:
        target = "src" if tool in ("mypy", "deptry") else "."
        checked = run(BIN / tool, *rest, target, cwd=folder)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    (workspace / "tests").mkdir()
    shutil.copy(ROOT / "tests/test_workspace.py", workspace / "tests")
    named = ["-k", "rlinf-world-model or named_one_by_one"]
    shape = run(sys.executable, "-m", "pytest", "-q", *named, "tests", cwd=workspace)
    assert shape.returncode == 0, shape.stdout
    sources = ":".join(str(path / "src") for path in sorted((workspace / "packages").iterdir()))
    contracts = run(BIN / "lint-imports", "--no-cache", cwd=workspace, PYTHONPATH=sources)
    assert contracts.returncode == 0, contracts.stdout
    again = run(sys.executable, workspace / "tools/new_package", "rlinf-world-model")
    assert again.returncode == 2
    assert "exists already" in again.stderr


PLUGINS = {
    "acme-track": ("rlinf.envs", "AcmeTrack"),
    "acme-praise": ("rlinf.rewards", "AcmePraise"),
    "acme-line": ("rlinf.transports", "AcmeLine"),
    "acme-bond": ("rlinf.links", "AcmeBond"),
    "acme-check": ("rlinf.doctor", "section"),
}


def test_new_plugins_pass_their_checks_at_once_and_are_found(tmp_path: Path) -> None:
    for name, (group, _) in PLUGINS.items():
        arguments = [name, "--plugin", "--group", group, "--into", tmp_path]
        done = run(sys.executable, ROOT / "tools/new_package", *arguments)
        assert done.returncode == 0, done.stderr
    folders, site = [tmp_path / name for name in PLUGINS], tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    made = run(*pip, "--disable-pip-version-check", "--target", site, *folders)
    assert made.returncode == 0, made.stderr
    for folder in folders:
        tests = run(sys.executable, "-m", "pytest", "-q", cwd=folder, PYTHONPATH=str(site))
        assert tests.returncode == 0, tests.stdout
        for tool, *rest in (["ruff", "format", "--check", "."], ["ruff", "check", "."], ["deptry", "src"]):
            checked = run(BIN / tool, *rest, cwd=folder)
            assert checked.returncode == 0, checked.stdout + checked.stderr
        # What mypy has found out of the libraries is the same for all.
        strict = run(BIN / "mypy", "--strict", "src", cwd=folder, MYPY_CACHE_DIR=str(tmp_path / "mypy"))
        assert strict.returncode == 0, strict.stdout
    find = "from rlinf_core.registry import Registry\n" + "".join(
        f"print(Registry({group!r}).load({name.replace('-', '_')!r}).__name__)\n"
        for name, (group, _) in PLUGINS.items()
    )
    found = run(sys.executable, "-c", find, PYTHONPATH=str(site))
    assert found.stdout.split() == [what for _, what in PLUGINS.values()], found.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["world-model"], "called rlinf-..., not 'world-model'"),
        (["Rlinf_X"], "not a name of small letters"),
        (["x", "--plugin", "--group", "rlinf.env"], "no entry-point group 'rlinf.env'; there are: "),
    ],
)
def test_new_package_refuses_by_name(arguments: list[str], why: str) -> None:
    done = run(sys.executable, ROOT / "tools/new_package", *arguments)
    assert done.returncode == 2
    assert why in done.stderr


def test_set_up_that_is_there_is_not_done_again_and_a_change_is_noticed(workspace: Path) -> None:
    """Without pip: the decision alone, by the stamp and what it stands for."""
    code = (
        "import runpy, sys; sys.path.insert(0, 'tools'); m = runpy.run_path('tools/setup_env');"
        "w = m['digest'](); m['STAMPS'].mkdir(parents=True, exist_ok=True); m['PYTHON'].parent.mkdir(exist_ok=True);"
        "m['PYTHON'].touch(); before = m['ready']('run', w);"
        "(m['STAMPS'] / 'test').write_text(w); after = m['ready']('run', w), m['ready']('test', w);"
        "open('packages/rlinf-core/pyproject.toml', 'a').write('\\n');"
        "print(before, *after, m['ready']('run', m['digest']()))"
    )
    done = run(sys.executable, "-c", code, cwd=workspace)
    assert done.stdout.split() == ["False", "True", "True", "False"], done.stderr


def test_set_up_says_what_it_can_do() -> None:
    done = run(sys.executable, ROOT / "tools/setup_env", "package", "rlinf-nothing")
    assert done.returncode == 2
    assert "no package 'rlinf-nothing' in this checkout" in done.stderr
    assert run(sys.executable, ROOT / "tools/setup_env", "all").returncode == 2


def test_set_up_parses_on_an_old_python() -> None:
    """It has to say that the Python is too old, so nothing newer than 3.7 may be in its syntax."""
    import ast

    ast.parse((ROOT / "tools/setup_env").read_text(), feature_version=(3, 7))


def test_evidence_names_the_experiments() -> None:
    done = run(sys.executable, ROOT / "tools/evidence", "nothing-of-the-kind")
    assert done.returncode == 2
    assert "which experiment?" in done.stderr


def test_check_wheels_notices_an_undeclared_requirement(workspace: Path) -> None:
    """A wheel whose code needs what it does not declare must fail alone, however much is installed here."""
    source = workspace / "packages/rlinf-sched/src/rlinf_sched/profile.py"
    source.write_text(source.read_text() + "\nimport psutil\n")
    done = run(sys.executable, workspace / "tools/check_wheels", "rlinf-sched", cwd=workspace)
    assert done.returncode == 1
    assert "No module named 'psutil'" in done.stdout
    assert "rlinf-sched: a module of it does not load" in done.stderr


def test_on_a_wheel_each_file_is_used_by_its_first_tests(tmp_path: Path) -> None:
    choose = runpy.run_path(str(ROOT / "tools/wheel_tests.py"))["pytest_collection_modifyitems"]
    names = ["a::one[1]", "a::one[2]", "a::two", "a::three", "a::four", "b::one", "test_planner_exact.py::one"]
    items = [SimpleNamespace(nodeid=name, path=tmp_path / name.partition(":")[0]) for name in names]
    left: list[SimpleNamespace] = []
    choose(SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items))), items)
    assert [item.nodeid for item in items] == ["a::one[1]", "a::two", "a::three", "b::one"]
    assert [item.nodeid for item in left] == ["a::one[2]", "a::four", "test_planner_exact.py::one"]


def test_files_that_are_left_out_on_a_wheel_are_there() -> None:
    for name in runpy.run_path(str(ROOT / "tools/wheel_tests.py"))["LEFT_OUT"]:
        assert list(ROOT.glob(f"packages/*/tests/{name}")), name
