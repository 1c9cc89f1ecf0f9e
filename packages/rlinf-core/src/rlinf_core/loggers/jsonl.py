"""``metrics.jsonl``: one JSON object per step and phase."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class JsonlLogger:
    """Appends ``{"step": 3, "phase": "train", "time": …, "reward/mean": 0.5}`` and flushes each line.

    ``time`` is in seconds since the epoch. JSON has no NaN or infinity: they are ``null``, and the names of such
    metrics are listed under ``non_finite`` in the line.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = open(run_dir / FILE, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, step: int, phase: str, metrics: dict[str, float]) -> None:
        line: dict[str, Any] = {"step": step, "phase": phase, "time": round(time.time(), 3)}
        bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        line.update((name, None if name in bad else value) for name, value in metrics.items())
        if bad:
            line["non_finite"] = bad
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``; a last line that was cut short by a crash is left out."""
    lines = (run_dir / FILE).read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise
    return rows
