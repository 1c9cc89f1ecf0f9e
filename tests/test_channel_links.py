"""Channels with and without the shared-memory link, in processes and in threads: everything arrives as it was put."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
COUNT = 40


def rows(place: Path, *overrides: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", "./tests/recipes/linked.py", *overrides]
    done = subprocess.run(
        [*command, f"count={COUNT}", "loggers=[jsonl]", f"run_dir={place}", "cluster.virtual_devices=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (place / "linked").iterdir()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("link", "debug"), [("auto", "false"), ("auto", "true"), ("socket", "true")])
def test_everything_arrives_and_nothing_is_shared_by_mistake(link: str, debug: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    steps = rows(tmp_path, f"channels.link={link}", f"cluster.debug={debug}")
    assert len(steps) == 3
    for index, step in enumerate(steps):
        for group in ("left", "right", "sole"):
            assert step[f"{group}/seen"] == 2 * COUNT
            assert step[f"{group}/wrong"] == 0
        assert step["sole/version"] == 2 * index, "both ranks have the weights of the step before"
        mapped = [step[f"{group}/mapped"] for group in ("left", "right", "sole")]
        assert all(mapped) if link == "auto" else not any(mapped), mapped
    assert {name for name in os.listdir("/dev/shm") if "rlinf" in name} <= before


def test_a_link_with_little_memory_goes_on_over_sockets(tmp_path: Path) -> None:
    steps = rows(tmp_path, "channels.link_bytes=4000000", "cluster.debug=true", "num_steps=1")
    assert steps[0]["sole/seen"] == 2 * COUNT
    assert steps[0]["sole/wrong"] == steps[0]["left/wrong"] == 0


def test_an_unknown_link_is_named_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", "./tests/recipes/linked.py", "channels.link=smh"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "channels.link: no link 'smh' is installed (did you mean 'shm'?)" in done.stderr
