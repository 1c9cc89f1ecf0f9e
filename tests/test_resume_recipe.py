"""The main recipe, killed in the middle, comes to the metrics of the run that was left alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
SMALL = (
    "cluster.debug=true",
    "cluster.virtual_devices=1",
    "prompts_per_step=8",
    "algorithm.group_size=4",
    "warm_start.max_steps=3",
    "warm_start.batch_size=16",
    "eval.problems=8",
    "eval.every=2",
    "checkpoint.every=2",
    "num_steps=5",
    "loggers=[jsonl]",
    "resume=auto",
)
TIMES = ("time", "wait/", "device/", "tokens_per_s")


def command(folder: Path, recipe: str, *overrides: str) -> list[str]:
    words = ["run", recipe, *SMALL, f"run_dir={folder}", *overrides]
    return [sys.executable, "-m", "rlinf_core.cli.main", *words]


def lines(folder: Path, recipe: str) -> list[dict[str, Any]]:
    files = list((folder / recipe).glob("*/metrics.jsonl"))
    if not files:
        return []
    (file,) = files
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def curve(folder: Path, recipe: str) -> list[dict[str, Any]]:
    """What training and evaluation came to, in order; times left out."""
    return [
        {key: value for key, value in line.items() if not key.startswith(TIMES)}
        for line in lines(folder, recipe)
        if line["phase"] in ("train", "evaluate")
    ]


def samples(folder: Path, recipe: str) -> list[Any]:
    (file,) = (folder / recipe).glob("*/samples.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted((row["id"], row["response_ids"], row["reward"], row["versions"]) for row in rows)


@pytest.mark.parametrize("recipe", ["reasoning/grpo_arithmetic", "reasoning/ppo_arithmetic"])
def test_a_killed_run_comes_to_the_same_metrics(recipe: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with ThreadPoolExecutor(1) as pool:
        left_alone = pool.submit(finish, whole, recipe)
        kill_and_go_on(killed, recipe)
        done = left_alone.result()
    assert done.returncode == 0, done.stderr
    assert curve(killed, recipe) == curve(whole, recipe)
    assert samples(killed, recipe) == samples(whole, recipe)
    finished = finish(killed, recipe)
    assert finished.returncode == 0 and "nothing to do" in finished.stderr, finished.stderr


def finish(folder: Path, recipe: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, recipe), capture_output=True, text=True, timeout=PATIENCE_S)


def kill_and_go_on(killed: Path, recipe: str) -> None:
    run = subprocess.Popen(command(killed, recipe), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    # Killed when step 3 of 5 is done: the last checkpoint is that after step 2, or that after 4 if we are slow.
    while not any(line["phase"] == "train" and line["step"] == 2 for line in lines(killed, recipe)):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)  # another process's file: there is nothing to wait on
    run.kill()
    run.wait(30)
    again = finish(killed, recipe)
    assert again.returncode == 0, again.stderr
    assert "going on with" in again.stderr
