"""The progress line."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.progress import (
    Progress,
    ProgressState,
    format_count,
    format_line,
    format_record,
    format_seconds,
    stage_times,
)
from rlinf_core.runner import RunListener

METRICS = {"reward/mean": 0.5, "tokens_per_s": 1234.0, "time/generate_s": 2.0, "time/train_s": 0.5, "time/step_s": 2.6}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.416, "0.42 s"), (3.14, "3.1 s"), (59.94, "59.9 s"), (125, "2m05s"), (4020, "1h07m")]
)
def test_times_keep_the_digits_that_matter(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(950, "950"), (12_345, "12.3k"), (4_560_000, "4.56M"), (2e9, "2G")])
def test_counts_are_short(number: float, text: str) -> None:
    assert format_count(number) == text


def test_the_line_shows_what_is_known() -> None:
    assert format_line(ProgressState("train", 0, 80)) == "train 0/80"
    state = ProgressState(
        "train", 12, 80, 0.5, 0.25, 12_345.0, {"generate": 2.0, "train": 0.5}, 3.0, 204.0, 0.75, activity="saving"
    )
    assert format_line(state) == (
        "train 12/80 | saving | reward 0.500 | accuracy 25.0% | 3.0 s/step | 3m24s left | 12.3k tok/s | devices 75%"
        " | generate 2.0 s, train 0.50 s"
    )
    assert format_line(ProgressState("train", 3, 0)) == "train 3"


def test_a_narrow_line_leaves_whole_pieces_out_the_least_wanted_first() -> None:
    stages = {"generate": 2.0, "reward": 0.1, "train": 0.5}
    state = ProgressState("train", 12, 80, 0.5, None, 12_345.0, stages, 3.0, 204.0, 0.75)
    whole = format_line(state)
    assert format_line(state, 80) == "train 12/80 | reward 0.500 | 3.0 s/step | 3m24s left | 12.3k tok/s …"
    pieces = [piece for part in whole.split(" | ") for piece in part.split(", ")]
    for width in range(13, len(whole) + 1):
        line = format_line(state, width)
        assert len(line) <= width
        kept = [p for part in line.removesuffix(" …").split(" | ") for p in part.split(", ")]
        assert kept == pieces[: len(kept)] and (line == whole) == (width == len(whole)), line
    assert format_line(state, 5) == "trai…" and format_line(state, 0) == "…"


def test_the_line_of_a_run_with_environments() -> None:
    stream = io.StringIO()
    progress = Progress(stream, Clock())
    progress.phase("train", 2)
    progress.step(1, {"return": 237.26, "success_once": 0.5, "env_steps_per_s": 12_345.0})
    progress.step(2, {"return": 500.0, "success_once": 0.0})
    first, second = stream.getvalue().splitlines()
    assert first.startswith("train 1/2 | return 237.3 | success 50.0% | 0.00 s/step | 0.00 s left | 12.3k env steps/s")
    assert second.startswith("train 2/2 | return 500 | 0.00 s/step"), "no success anywhere is not shown"


def test_a_phase_of_one_step_that_comes_again_has_no_total() -> None:
    stream = io.StringIO()
    directory: Any = SimpleNamespace(log=lambda *given: None)
    listener = RunListener(directory, Progress(stream, Clock()))
    for phase, index, total in (
        ("warm_start", 0, 1), ("train", 0, 2), ("save", 0, 1), ("train", 1, 2), ("save", 1, 2), ("probe", 0, 3)
    ):  # fmt: skip
        step: Any = SimpleNamespace(phase=phase, index=index, total=total, metrics={})
        listener.step_begins(step)
        listener.step_done(step, {})
    shown = [line.partition(" | ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["warm_start 1", "train 1/2", "save 1", "train 2/2", "save 2", "probe 1/3"]


def test_a_record_shows_what_says_something() -> None:
    found = {"accuracy": 0.33203, "accuracy/low": 0.27714, "accuracy/high": 0.3919, "problems": 256.0}
    same = {"pass@1": 0.33203, "pass@1/low": 0.27714, "pass@1/high": 0.3919, "answers": 256.0}
    faults = {"reward/mean": 0.332, "reward/errors": 0.0, "response/length": 3.96, "response/truncated": 0.0}
    assert format_record({**found, **same, **faults}) == (
        "accuracy 0.332 (0.277 to 0.392), problems 256, reward/mean 0.332, response/length 3.96"
    )
    drawn = {**found, "pass@1": 0.25, "pass@1/low": 0.2, "pass@1/high": 0.3, "answers": 2048.0, "reward/errors": 2.0}
    assert format_record(drawn) == (
        "accuracy 0.332 (0.277 to 0.392), problems 256, pass@1 0.25 (0.2 to 0.3), answers 2048, reward/errors 2"
    )
    assert format_record({"loss": 0.0, "x/low": 1.0}) == "loss 0, x/low 1"


def test_the_whole_step_is_no_stage() -> None:
    assert stage_times({**METRICS, "loss": 1.0}) == {"generate": 2.0, "train": 0.5}


def test_elsewhere_than_on_a_terminal_every_step_is_a_plain_line() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.phase("train", 3)
    progress.tick("generating")
    clock.now += 2
    progress.step(1, METRICS)
    clock.now += 4
    progress.step(2, METRICS)
    progress.note("saved")
    clock.now += 1
    progress.step(3, {})
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and "\r" not in stream.getvalue() and lines[2] == "saved"
    assert lines[0].startswith(
        "train 1/3 | reward 0.500 | 2.0 s/step | 4.0 s left | 1234 tok/s | generate 2.0 s, train 0.50 s"
    )
    assert "3.0 s left" in lines[1] and "left" not in lines[3]


def test_on_a_terminal_the_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    progress = Progress(stream, Clock())
    progress.phase("warm_start", 1)
    progress.tick("launching")
    progress.step(1, METRICS)
    progress.note("accuracy 30.0%")
    progress.phase("train", 2)
    progress.step(1, {})
    progress.close()
    progress.close()
    text = stream.getvalue()
    assert "\rwarm_start 0/1 | launching" in text and text.endswith("\n") and not text.endswith("\n\n")
    assert max(len(part) for line in text.splitlines() for part in line.split("\r")) < 60
    assert "accuracy 30.0%\n" in text
