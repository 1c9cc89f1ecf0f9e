"""Thresholds as data: measured, kept, and not believed on another machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlinf_comm import thresholds
from rlinf_comm.measure import measure
from rlinf_comm.selection import Thresholds
from rlinf_comm.thresholds import Point, crossing


def curve(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(1 << i, stream, shm) for i, (stream, shm) in enumerate(pairs)]


def test_the_crossing_is_where_shared_memory_begins_to_win() -> None:
    assert crossing(curve((1, 9), (2, 9), (12, 9), (30, 9))) == 4
    assert crossing(curve((10, 1), (10, 1))) == 1
    assert crossing(curve((1, 10), (1, 10))) == 4


def test_one_noisy_point_does_not_move_the_crossing_far() -> None:
    clean = [(1.0, 9.0), (2.0, 9.0), (20.0, 9.0), (40.0, 9.0), (80.0, 9.0)]
    noisy = [*clean[:3], (40.0, 44.0), clean[4]]
    assert crossing(curve(*noisy)) == crossing(curve(*clean)) == 4


def test_a_measurement_here_gives_a_threshold_among_its_sizes(tmp_path: Path) -> None:
    sizes = (1 << 14, 1 << 20)
    table, points = measure(sizes, rounds=3)
    assert [p.nbytes for p in points] == list(sizes)
    assert all(p.stream_us > 0 and p.shm_us > 0 for p in points)
    assert table.shm_from in (*sizes, 1 << 21)
    path = thresholds.save(table, points, tmp_path / "new" / "comm.json")
    assert thresholds.load(path) == (table, "")
    assert [p.name for p in path.parent.iterdir()] == ["comm.json"]


def test_without_a_file_the_built_in_values_count(tmp_path: Path) -> None:
    assert thresholds.load(tmp_path / "absent.json") == (Thresholds(), "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 99}, "has the format 99, not 1"),
        ({"machine": "another"}, r"measured on another machine \(another\)"),
        ({"shm_from": -5}, "damaged: ValueError: shm_from must not be negative"),
        ({"shm_from": "many"}, "damaged: ValueError: sizes must be whole numbers"),
        ({"gloo_from": 1.5}, "damaged: ValueError: sizes must be whole numbers"),
        ({"when": None, "shm_from": None}, "damaged"),
    ],
)
def test_a_file_that_does_not_fit_is_not_used_and_says_why(tmp_path: Path, change: dict[str, object], why: str) -> None:
    path = thresholds.save(Thresholds(77), [], tmp_path / "comm.json")
    assert thresholds.load(path)[0].shm_from == 77
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    table, reason = thresholds.load(path)
    assert table == Thresholds()
    assert re.search(why, reason)


@pytest.mark.parametrize("text", ["", "[]", "not json", '{"format": 1}', "[" * 100_000])
def test_a_damaged_file_is_not_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "comm.json").write_text(text)
    table, reason = thresholds.load(tmp_path / "comm.json")
    assert table == Thresholds()
    assert "is damaged" in reason


def test_the_cache_follows_the_users_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert thresholds.cache_file() == tmp_path / "rlinf" / "comm.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert thresholds.cache_file() == tmp_path / "home" / ".cache" / "rlinf" / "comm.json"
