"""How measurements are made and what the page says of them, with a contender whose clock is set by hand."""

from __future__ import annotations

import dataclasses

import pytest
from ways.cases import CASES, Case
from ways.pair import Contender, Sample
from ways.run import Figures, counted, lasting, measure
from ways.table import conclusion, page

FACTS = {"command": "c", "commit": "d", "rounds": 1, "seconds": 0.5, "cores": 2}


class Clock(Contender):
    """Each call takes a fixed time and one for each item; the first calls are quicker, or slower, than later ones."""

    name = "rlinf_comm.Communicator"
    kind = "ours"

    def __init__(self, per_item: float, per_call: float = 0.0, quicker: int = 0, most_bytes: int = 1 << 30) -> None:
        self.per_item, self.per_call, self.quicker = per_item, per_call, quicker
        self.calls: list[int] = []
        self.most_bytes = most_bytes  # type: ignore[misc]  # of this one

    def throughput(self, case: Case, count: int) -> Sample:
        self.calls.append(count)
        speed = 0.25 if len(self.calls) <= self.quicker else 1.0
        return Sample(count, self.per_call + speed * count * self.per_item, 0.5 * count * self.per_item)

    def pingpong(self, case: Case, count: int) -> list[float]:
        return [1e-4] * count


def test_a_count_is_of_a_batch_at_least_and_lasts_about_the_time() -> None:
    assert counted(Clock(1e-3), CASES["4 B"], 0.5) in range(499, 503)
    slow = Clock(1.0)
    assert counted(slow, CASES["64 KiB"], 0.1) == 64 and set(slow.calls) == {64}
    assert counted(Clock(1.0), CASES["64 MiB"], 0.1) == 1


def test_a_measurement_that_was_too_short_is_made_again_with_more_items() -> None:
    clock = Clock(1e-3)
    sample = lasting(clock, CASES["4 B"], 64, 0.5)
    assert sample.seconds >= 0.5 and clock.calls == [64, sample.count]
    assert lasting(Clock(1e-3), CASES["4 B"], 600, 0.5).count == 600


def test_where_a_call_may_not_move_so_many_several_are_added() -> None:
    clock = Clock(1e-2, most_bytes=512 << 20)
    sample = lasting(clock, CASES["64 MiB"], 5, 0.3)
    assert clock.calls == [5, 8, 8, 8, 8]
    assert (sample.count, sample.seconds, sample.cpu) == (32, pytest.approx(0.32), pytest.approx(0.16))


def test_every_figure_of_a_run_lasts_as_long_as_was_asked() -> None:
    """The trial, which sets the count, is four times as quick as what follows the trial, or four times as slow."""
    for clock in (Clock(1e-3, quicker=3), Clock(2.5e-4, per_call=1e-2)):
        figures = measure([clock], [CASES["4 B"], CASES["64 MiB"]], rounds=2, seconds=0.5, trips_s=1e-6)
        assert all(figure.seconds >= 0.5 for figure in figures) and len(figures) == 4
        assert [bool(figure.trips) for figure in figures] == [True, False] * 2


def figure(contender: str, kind: str, case: str, rate: float, seconds: float = 1.0) -> Figures:
    return Figures(contender, kind, case, 0, int(rate * seconds), seconds, 0.1, (), 1.0)


FIGURES = [
    figure("rlinf_comm.Communicator", "ours", "4 B", 1000),
    figure("rlinf channel", "ours", "4 B", 500),
    figure("gloo", "peer", "4 B", 250),
    figure("ray", "peer", "4 B", 100),
    figure("SimpleQueue", "reference", "4 B", 2000),
    figure("Queue", "reference", "4 B", 500),
    figure("bare ring (limit)", "limit", "4 B", 10_000),
    figure("memcpy", "limit", "4 B", 100_000),
    figure("rlinf_comm.Communicator", "ours", "64 KiB", 300),
    figure("gloo", "peer", "64 KiB", 600),
]


def test_the_page_begins_with_what_the_numbers_say() -> None:
    lines = conclusion(FIGURES).split("\n- ")
    assert len(lines) == 3
    assert "a Communicator is faster at 4 B (4 times the rate of gloo); slower at 64 KiB (0.5 times the" in lines[0]
    assert "it is slower at 4 B (0.5 times the rate of SimpleQueue). They" in lines[1] and "no deadlines" in lines[1]
    assert "it reaches 10% at 4 B;" in lines[2] and "moves 0.5 to 0.5 times what" in lines[2]
    text = page(FIGURES, FACTS, "chart.png")
    assert text.index(lines[0]) < text.index("`c` at commit d")
    assert "### 4 B: a numpy array of 4 bytes" in text and "| gloo | 250 | 250 |" in text
    assert "64 MiB has none" in text


def test_the_page_refuses_what_was_measured_too_shortly() -> None:
    short = dataclasses.replace(FIGURES[2], seconds=0.49, count=7)
    with pytest.raises(ValueError, match=r"shorter than 0.5 s: gloo, 4 B, round 0: 7 items in 0.49 s"):
        page([*FIGURES, short], FACTS, "chart.png")
