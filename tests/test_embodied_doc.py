"""docs/embodied.md says what is so: its environment keeps to the rules, and its commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from rlinf_core.config import compose

DOC = Path(__file__).resolve().parents[1] / "docs" / "embodied.md"
RLINF = [sys.executable, "-m", "rlinf_core.cli.main"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the page's ``my_env.py``."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOC.read_text(), flags=re.MULTILINE | re.DOTALL)
    (module,) = (block for block in blocks if 'entry_point="my_env' in block)
    (tmp_path / "my_env.py").write_text(module)
    return tmp_path


def command(start: str) -> list[str]:
    """The words of the page's one command that begins so."""
    (line,) = re.findall(rf"^PYTHONPATH=\. ({start}.*)$", DOC.read_text(), flags=re.MULTILINE)
    return shlex.split(line)


def run(place: Path, *words: str) -> str:
    done = subprocess.run(
        words,
        cwd=place,
        env={**os.environ, "PYTHONPATH": f".{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_page_s_environment_keeps_to_the_rules(place: Path) -> None:
    said = run(place, sys.executable, *command("python")[1:])
    assert re.search(r"^render\W+ok", said, flags=re.MULTILINE), said
    assert "no picture" not in said


@pytest.mark.ray
def test_the_page_s_command_trains_its_environment(place: Path) -> None:
    short = ["num_steps=2", "rollout_steps=64", "eval.every=1", "eval.episodes=8", "checkpoint.every=1"]
    short += ["cluster.debug=true", "cluster.virtual_devices=1", "run_dir=runs"]
    pytest.importorskip("imageio_ffmpeg")
    run(place, *RLINF, *command("rlinf")[1:], *short)
    (folder,) = (path.parent for path in (place / "runs").rglob("summary.json"))
    first = json.loads((folder / "evaluations" / "before.jsonl").read_text().splitlines()[0])
    assert first["length"] == 50, "the time limit is the environment's own"
    assert (folder / "run.png").stat().st_size and (folder / "evaluations" / "after.mp4").stat().st_size
    assert any((folder / "checkpoints").iterdir())


def test_what_the_recipe_is_told_is_the_environment_s_own_time_limit() -> None:
    assert compose("embodied/ppo_gymnasium", ["env.id=Pendulum-v1"]).env.max_episode_steps is None
