"""Metric loggers: what they write can be read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.loggers.jsonl import JsonlLogger, read_metrics


def test_jsonl_lines_hold_numbers_and_name_what_json_cannot(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log(0, "train", {"reward/mean": 0.1, "kl": float("inf")})
    first = (tmp_path / "metrics.jsonl").read_text()  # flushed before the run goes on
    logger.log(1, "evaluate", {"accuracy": 1.0})
    logger.close()
    row = json.loads(first)
    assert (row["step"], row["phase"], row["reward/mean"], row["kl"]) == (0, "train", 0.1, None)
    assert row["non_finite"] == ["kl"] and row["time"] > 0
    assert [row["phase"] for row in read_metrics(tmp_path)] == ["train", "evaluate"]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(tmp_path) == [{"step": 0}]
    (tmp_path / "metrics.jsonl").write_text('{"step": \n{"step": 1}\n')
    with pytest.raises(ValueError, match="Expecting"):
        read_metrics(tmp_path)


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    """In a process of its own, which shows that neither torch nor tensorflow is loaded."""
    code = f"""
import sys
from pathlib import Path
from rlinf_core.loggers.tensorboard import TensorBoardLogger
folder = Path({str(tmp_path)!r})
logger = TensorBoardLogger(folder)
logger.log(3, "train", {{"reward/mean": 0.25, "loss": float("nan")}})
logger.log(4, "train", {{"reward/mean": 0.5}})
logger.close()
print(sorted({{"torch", "tensorflow", "ray"}} & set(sys.modules)))
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
file, = folder.glob("events.out.tfevents.*")
for event in EventFileLoader(str(file)).Load():
    for value in event.summary.value:
        print(event.step, value.tag, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines == ["[]", "3 train/reward/mean 0.25", "3 train/loss nan", "4 train/reward/mean 0.5"]
