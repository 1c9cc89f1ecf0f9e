"""What an evaluation comes to: metrics, intervals, files."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from channel_lists import Items, worker

from rlinf_embodied.data import Finished
from rlinf_embodied.episodes import Episode
from rlinf_embodied.evaluation import estimates, line, student, t_quantile, wilson
from rlinf_embodied.workers import Scorer


def finished(k: int, ret: float, once: bool = False, frames: Any = None) -> Finished:
    return Finished(f"eval/{k:05d}", Episode(k, ret, k + 1, once, once and k % 2 == 0, not once), 100 + k, frames)


def scorer(run_dir: Path, videos: int = 0) -> Any:
    return worker(Scorer, {"eval": {"videos": videos, "video_fps": 10}}, run_dir)


def test_metrics_and_the_file_of_episodes(tmp_path: Path) -> None:
    made = scorer(tmp_path)
    report = made.evaluate(Items([finished(k, float(k), once=k < 3) for k in (2, 0, 3, 1)]), "step 10", 4)
    assert report["episodes"] == 4 and report["success_once"] == 0.75 and report["success_at_end"] == 0.5
    assert report["return"] == 1.5 and report["length"] == 2.5
    assert report["success_once/low"] == pytest.approx(0.3006, abs=1e-4)
    assert report["success_once/high"] == pytest.approx(0.9544, abs=1e-4)
    assert report["return/high"] == pytest.approx(1.5 + 3.18245 * math.sqrt(5 / 3) / 2, rel=1e-3)
    rows = [json.loads(text) for text in (tmp_path / "evaluations" / "step-10.jsonl").read_text().splitlines()]
    assert [row["episode"] for row in rows] == [0, 1, 2, 3] and rows[2]["seed"] == 102
    assert rows[0] == {
        "episode": 0,
        "seed": 100,
        "return": 0.0,
        "length": 1,
        "success_once": True,
        "success_at_end": True,
        "truncated": False,
    }
    assert sorted(i for _, ids, _ in made._ctx.accounted for i in ids) == [f"eval/{k:05d}" for k in range(4)]


def test_films_go_into_one_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    video = ModuleType("rlinf_embodied.video")
    video.write_tiled = lambda path, clips, success, fps: written.append((path, clips, success, fps))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlinf_embodied.video", video)
    clips = [np.full((2 + k, 8, 8, 3), k, dtype=np.uint8) for k in range(2)]
    episodes = [finished(0, 1.0, frames=clips[0]), finished(1, 2.0, True, clips[1]), finished(2, 1.0)]
    scorer(tmp_path, videos=2).evaluate(Items(episodes), "after")
    ((path, shown, success, fps),) = written
    assert path == tmp_path / "evaluations" / "after.mp4" and fps == 10
    assert len(shown) == 2 and shown[1] is clips[1] and success == [False, True]


def test_an_evaluation_without_an_episode() -> None:
    assert estimates([]) == {"episodes": 0.0}
    assert line({"episodes": 0.0}) == "no episode ended"
    one = estimates([Episode(0, 5.0, 3, True, True, False)])
    assert one["return"] == 5.0 and "return/low" not in one and one["success_once/high"] == 1.0
    assert all(math.isfinite(value) for value in one.values())
    assert "return 5" in line(one)


def test_wilson() -> None:
    assert wilson(0, 50) == (0.0, 0.0, pytest.approx(0.07135, abs=1e-5))
    assert wilson(50, 50) == (1.0, pytest.approx(0.92865, abs=1e-5), 1.0)
    assert all(math.isnan(value) for value in wilson(0, 0))


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (49, 2.00958)]
)
def test_quantiles_of_student(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, rel=1.5e-3)


def test_student_covers() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        _, low, high = student([draw.gauss(2.0, 3.0) for _ in range(5)])
        hits += low <= 2.0 <= high
    assert 0.935 < hits / 2000 < 0.965
