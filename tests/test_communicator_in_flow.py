"""Workers of a flow that talk to each other through a communicator of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", "./tests/recipes/talking.py", *overrides]
    settings = ["loggers=[jsonl]", f"run_dir={place}", "cluster.virtual_devices=1"]
    return subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("debug", ["true", "false"])
def test_ranks_send_receive_and_broadcast(debug: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"cluster.debug={debug}")
    assert done.returncode == 0, done.stderr
    (place,) = (tmp_path / "talking").iterdir()
    steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [(step["total"], step["said"]) for step in steps] == [(300_000.0, 6.0)] * 2


def test_a_rank_that_dies_is_the_cause_and_not_its_peers_loss_of_it(tmp_path: Path) -> None:
    done = run(tmp_path, "leaves=true")
    assert done.returncode == 1
    assert "talker[1] died" in done.stderr.splitlines()[-1], done.stderr
