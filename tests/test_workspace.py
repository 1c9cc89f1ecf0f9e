"""The workspace: every package has the same shape, versions move together, contracts and tools do what they
say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(file.parent for file in (ROOT / "packages").glob("*/pyproject.toml"))
NAMES = [path.name for path in PACKAGES]
# What holds for one package alone runs once for each, under its name.
each_package = pytest.mark.parametrize("path", PACKAGES, ids=NAMES)


def project(path: Path) -> dict[str, Any]:
    return tomllib.loads((path / "pyproject.toml").read_text())["project"]


def run(*command: object, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    import os

    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=os.environ | environ, capture_output=True, text=True, timeout=240)


def tracked() -> list[Path]:
    """Files under version control or about to be; in an exported tree, all of them."""
    done = run("git", "ls-files", "-co", "--exclude-standard")
    if done.returncode != 0:
        return [file for file in ROOT.rglob("*") if file.is_file() and ".venv" not in file.parts]
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def copy_workspace(to: Path) -> Path:
    """A checkout with everything but the environment and the caches."""
    for file in tracked():
        target = to / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    return to


def test_the_seven_packages_are_there() -> None:
    parts = ("algos", "comm", "core", "embodied", "engines", "reasoning", "sched")
    assert set(NAMES) >= {f"rlinf-{part}" for part in parts}


@each_package
def test_every_package_has_the_same_shape(path: Path) -> None:
    module = path.name.replace("-", "_")
    facts = project(path)
    assert facts["name"] == path.name
    assert facts["license"] == "Apache-2.0"
    assert facts["requires-python"] == ">=3.11"
    assert "test" in facts["optional-dependencies"]
    assert (path / "README.md").read_text().startswith(f"# {path.name}\n")
    assert (path / "src" / module / "__init__.py").exists()
    assert (path / "src" / module / "py.typed").exists()
    assert list((path / "tests").glob("test_*.py"))


@each_package
def test_versions_and_siblings_move_in_lockstep(path: Path) -> None:
    versions = {other.name: project(other)["version"] for other in PACKAGES}
    facts = project(path)
    assert facts["version"] == versions["rlinf-core"]
    every = [*facts.get("dependencies", []), *(x for xs in facts["optional-dependencies"].values() for x in xs)]
    for line in every:
        name = re.split(r"[\[=<>!~; ]", line)[0]
        if name in versions:
            assert line.split("]")[-1].removeprefix(name) == f"=={versions[name]}", line


def test_every_package_is_named_where_packages_are_named_one_by_one() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules = {name.replace("-", "_") for name in NAMES}
    assert set(settings["tool"]["importlinter"]["root_packages"]) == modules
    sources = [m for contract in settings["tool"]["importlinter"]["contracts"] for m in contract["source_modules"]]
    assert modules <= set(sources)
    assert set(settings["tool"]["uv"]["sources"]) == set(NAMES)
    asked = (ROOT / "requirements/run.txt").read_text() + (ROOT / "requirements/dev.txt").read_text()
    owners = (ROOT / "CODEOWNERS").read_text()
    for name in NAMES:
        assert re.search(rf"^-e \./packages/{name}(\[|$)", asked, re.M), f"{name} is in no requirements file"
        assert f"/packages/{name}/ " in owners


@each_package
def test_entry_points_name_what_is_there(path: Path) -> None:
    groups = project(path).get("entry-points", {})
    values = [value for group in groups.values() for value in group.values()]
    values += project(path).get("scripts", {}).values()
    for value in values:
        module = value.split(":")[0].split(".")
        folder = path / "src" / Path(*module)
        assert folder.with_suffix(".py").exists() or (folder / "__init__.py").exists(), value


def test_no_two_packages_ship_the_same_recipe_file() -> None:
    """One search path is made of them all: the second of two equal names would never be read."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for path in PACKAGES:
        for conf in (path / "src").glob("*/conf"):
            for file in conf.rglob("*.y*ml"):
                owners[str(file.relative_to(conf).with_suffix(""))].append(path.name)
    assert owners, "no package ships a recipe"
    assert {name: names for name, names in owners.items() if len(names) > 1} == {}


def test_test_folders_are_no_packages() -> None:
    """Tests are imported by path (importlib mode): an __init__.py would give them names that can clash. A folder
    ``fake_NAME`` is left out: it stands in for somebody else's package."""
    folders = [ROOT / "tests", *(path / "tests" for path in PACKAGES)]
    found = [file for folder in folders for file in folder.rglob("__init__.py")]
    assert [str(file) for file in found if not any(part.startswith("fake_") for part in file.parts)] == []


def test_ignored_patterns_catch_no_package_data() -> None:
    """The build obeys .gitignore: what it ignores below src/ vanishes from the wheel."""
    below = [str(file) for path in PACKAGES for file in (path / "src").rglob("*") if file.is_file()]
    below = [name for name in below if "__pycache__" not in name]
    names = [f"packages/rlinf-core/src/rlinf_core/{name}/x.yaml" for name in ("conf", "runs", "build", "dist", "data")]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=ROOT,
        input="\n".join([*below, *names]),
        capture_output=True,
        text=True,
    )
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout == ""


def test_files_name_no_machine() -> None:
    """No absolute path of the machine it was written on, no host of a package index."""
    patterns = r"(?<![\w.$-])/(root|home/\w+|Users/\w+|work)/|/opt/(pypi|wheels)|pypi\.org|files\.pythonhosted"
    kinds = {".md", ".toml", ".txt", ".yaml", ".yml", ".py", ".json", ""}
    found = []
    for file in tracked():
        if file.suffix in kinds and file != Path(__file__).resolve():
            try:
                text = file.read_text()
            except UnicodeDecodeError:
                continue
            found += [f"{file.relative_to(ROOT)}: {match[0]}" for match in re.finditer(patterns, text)]
    assert found == []


def test_light_imports_stay_light() -> None:
    """Also covers what a contract cannot see: imports of parent packages, and those under TYPE_CHECKING."""
    heavy = "{'ray', 'torch', 'transformers', 'vllm'}"
    for modules in (
        "rlinf_core, rlinf_core.types, rlinf_core.errors, rlinf_core.plan, rlinf_core.board",
        "rlinf_sched",
    ):
        code = f"import sys, {modules}; found = {heavy} & sys.modules.keys(); sys.exit(', '.join(sorted(found)) or 0)"
        done = run(sys.executable, "-c", code)
        assert done.returncode == 0, f"import {modules} loads {done.stderr}"


BREACHES = [
    ("core", "rlinf_core/plan.py", "def f():\n    import rlinf_sched\n"),
    ("comm", "rlinf_comm/codec.py", "import rlinf_engines\n"),
    ("sched", "rlinf_sched/profile.py", "def f():\n    import rlinf_core.errors\n"),
    ("algos", "rlinf_algos/__init__.py", "import rlinf_core\n"),
    ("engines", "rlinf_engines/__init__.py", "def f():\n    from rlinf_algos import kl\n"),
    ("embodied", "rlinf_embodied/episodes.py", "import rlinf_reasoning\n"),
    ("reasoning", "rlinf_reasoning/__init__.py", "class C:\n    def f(self):\n        import rlinf_engines\n"),
    ("pure", "rlinf_core/errors.py", "def f():\n    import torch\n"),
    ("config", "rlinf_core/conf/__init__.py", "import ray\n"),
]


def lint_imports(copy: Path) -> str:
    """The output of import-linter over the packages of a copied checkout."""
    sources = ":".join(str(path / "src") for path in sorted((copy / "packages").iterdir()))
    tool = Path(sys.executable).parent / "lint-imports"
    done = run(tool, "--no-cache", cwd=copy, PYTHONPATH=sources, COLUMNS="200", NO_COLOR="1")
    return done.stdout + done.stderr


def test_contracts_catch_planted_breaches(tmp_path: Path) -> None:
    """One breach for each contract, all at once, most of them inside functions: every contract must break."""
    copy = copy_workspace(tmp_path)
    settings = tomllib.loads((copy / "pyproject.toml").read_text())
    contracts = {contract["id"]: contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]}
    planted = [identity for identity, _, _ in BREACHES]
    assert set(planted) <= set(contracts)
    clean = lint_imports(copy)
    assert "0 broken" in clean, clean
    for _, file, code in BREACHES:
        (target,) = copy.glob(f"packages/*/src/{file}")
        with target.open("a") as stream:
            stream.write("\n\n" + code)
    verdicts = " ".join(lint_imports(copy).split())
    assert [identity for identity in planted if f"{contracts[identity]} BROKEN" not in verdicts] == []
