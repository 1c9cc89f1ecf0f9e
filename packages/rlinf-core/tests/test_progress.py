"""The progress line."""

from __future__ import annotations

import io

import pytest

from rlinf_core.progress import Progress, ProgressState, format_count, format_line, format_seconds, stage_times

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
        "train 12/80 | saving | reward 0.500 | accuracy 25.0% | 12.3k tok/s | devices 75% | 3.0 s/step | 3m24s left"
        " | generate 2.0 s, train 0.50 s"
    )
    assert format_line(state, 20) == "train 12/80 | savin…" and len(format_line(state, 20)) == 20
    assert format_line(ProgressState("train", 3, 0)) == "train 3"


def test_the_line_of_a_run_with_environments() -> None:
    stream = io.StringIO()
    progress = Progress(stream, Clock())
    progress.phase("train", 2)
    progress.step(1, {"return": 237.26, "success_once": 0.5, "env_steps_per_s": 12_345.0})
    progress.step(2, {"return": 500.0, "success_once": 0.0})
    first, second = stream.getvalue().splitlines()
    assert first.startswith("train 1/2 | return 237.3 | success 50.0% | 12.3k env steps/s | ")
    assert second.startswith("train 2/2 | return 500 | 0.00 s/step"), "no success anywhere is not shown"


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
    assert lines[0].startswith("train 1/3 | reward 0.500 | 1234 tok/s | 2.0 s/step | 4.0 s left")
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
