"""Weights between two splits in a real flow: two trainer ranks to three rollout ranks, in one process and with Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", "./tests/recipes/sharded_weights.py"]
    options = ["num_steps=4", f"run_dir={tmp_path}", *overrides]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=240)


def rows(tmp_path: Path, *overrides: str) -> list[dict[str, float]]:
    """What the recipe's steps say about the weights (the mean over the ranks)."""
    done = run(tmp_path, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.rglob("metrics.jsonl")
    return [row for row in map(json.loads, file.read_text().splitlines()) if "equal" in row]


@pytest.mark.parametrize("debug", ["true", pytest.param("false", marks=pytest.mark.ray)])
def test_every_rank_has_its_part_of_every_version(tmp_path: Path, debug: str) -> None:
    found = rows(tmp_path, f"cluster.debug={debug}", "cluster.virtual_devices=1")
    assert [row["version"] for row in found] == [1, 2, 3]
    assert all(row["equal"] == row["increasing"] == 1.0 and row["ranks"] == 3 for row in found)


def test_groups_that_take_turns_on_the_same_devices_hand_over_their_weights(tmp_path: Path) -> None:
    found = rows(tmp_path, "cluster.debug=true", "cluster.virtual_devices=2", "plan=temporal", "on_devices=true")
    assert [row["version"] for row in found] == [1, 2, 3]
    assert all(row["equal"] == row["increasing"] == 1.0 and row["ranks"] == 2 for row in found)


def test_a_trainer_rank_that_fails_while_it_publishes_is_what_the_run_fails_of(tmp_path: Path) -> None:
    done = run(tmp_path, "cluster.debug=true", "cluster.virtual_devices=1", "fail_at=1")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "trainer[1] failed in publish_weights of train/1" in done.stderr
    assert "the weights are not finite" in last
