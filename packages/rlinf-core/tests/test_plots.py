"""The picture of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf_core.errors import RLinfError
from rlinf_core.plots import plot_run, series, smooth, stage_series

ROWS = [
    {"step": 0, "phase": "evaluate", "accuracy": 0.25},
    {"step": 0, "phase": "train", "reward/mean": 0.1, "time/generate_s": 2.0, "time/step_s": 3.0, "non_finite": ["kl"]},
    {"step": 1, "phase": "train", "reward/mean": None, "time/generate_s": 1.0, "time/train_s": 0.5},
    {"step": 2, "phase": "train", "reward/mean": 0.3, "response/length": 4.0},
    {"step": 3, "phase": "evaluate", "accuracy": 0.75},
]


def write(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_series_leave_out_what_was_not_logged() -> None:
    assert series(ROWS, "train", "reward/mean") == ([0.0, 2.0], [0.1, 0.3])
    assert series(ROWS, "evaluate", "accuracy") == ([0.0, 3.0], [0.25, 0.75])
    assert stage_series(ROWS) == ([0.0, 1.0], {"generate": [2.0, 1.0], "train": [0.0, 0.5]})
    assert smooth([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_a_run_is_drawn(tmp_path: Path) -> None:
    write(
        tmp_path,
        [*ROWS, *({"step": i, "phase": "train", "reward/mean": i / 40, "accuracy": 0.5} for i in range(4, 40))],
    )
    path = plot_run(tmp_path)
    data = path.read_bytes()
    assert path == tmp_path / "run.png" and data.startswith(b"\x89PNG") and len(data) > 10_000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(RLinfError, match=r"metrics\.jsonl does not exist"):
        plot_run(tmp_path)
    write(tmp_path, [{"step": 0, "phase": "warm_start"}])
    with pytest.raises(RLinfError, match="no line of phase train or evaluate"):
        plot_run(tmp_path)
