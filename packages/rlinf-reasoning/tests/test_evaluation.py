"""pass@k, its intervals, and where answers are kept."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from rlinf_reasoning.evaluation import answers_file, estimates, interval, pass_at, table


def by_subsets(right: int, total: int, k: int) -> float:
    """The share of k-subsets of the answers with a right one, counted."""
    subsets = list(itertools.combinations([True] * right + [False] * (total - right), k))
    return sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(k: int) -> None:
    counts = [(right, 6) for right in range(7)]
    assert pass_at(counts, k) == pytest.approx([by_subsets(right, 6, k) for right in range(7)])
    assert pass_at([(1, k - 1), (1, 6)], k) == pytest.approx([by_subsets(1, 6, k)])  # too few answers: left out


def test_the_interval_of_right_and_wrong_is_wilsons() -> None:
    # 18 of 20: the figures of Wilson's formula, worked out by hand with z = 1.959964
    assert interval([1.0] * 18 + [0.0] * 2) == pytest.approx((0.9, 0.698966, 0.972133), abs=1e-5)
    assert interval([1.0] * 10) == pytest.approx((1.0, 0.722467, 1.0), abs=1e-5)
    assert interval([0.0] * 10) == pytest.approx((0.0, 0.0, 0.277533), abs=1e-5)
    assert all(map(math.isnan, interval([])))


def test_several_answers_per_problem_make_the_interval_narrower() -> None:
    _, low, high = interval([0.25, 0.75] * 50)
    assert high - low == pytest.approx(2 * 1.96 * 0.25 / 10, rel=0.01)  # mean of 100 values with deviation 0.25
    assert 0.0 <= low < 0.5 < high <= 1.0


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(400):  # problems of different difficulty, mean 1/2; four answers each
        values = [sum(rng.random() < p for _ in range(4)) / 4 for p in (rng.random() for _ in range(60))]
        _, low, high = interval(values)
        hits += low <= 0.5 <= high
    assert 0.92 <= hits / 400 <= 0.98


def test_estimates_and_table() -> None:
    found = estimates([(4, 4), (1, 4), (0, 4), (2, 4)], [1, 4])
    assert found["accuracy"] == found["pass@1"] == pytest.approx(7 / 16)
    assert found["pass@4"] == pytest.approx(3 / 4)
    assert found["pass@4/low"] < 0.75 < found["pass@4/high"]
    assert estimates([], [1]) == {}
    extra = {"problems": 4.0, "answers": 16.0, "response/length": 9.5, "response/truncated": 0.0, "prompt/dropped": 2.0}
    lines = table({**found, **extra}).splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["pass@1", "43.8%"], ["pass@4", "75.0%"]]
    assert lines[-1] == "2 prompts dropped as too long"


def test_files_are_named_after_the_evaluation() -> None:
    folder = Path("run")
    assert answers_file(folder, "step 20") == folder / "evaluations" / "step-20.jsonl"
    assert answers_file(folder, "../x") == folder / "evaluations" / "-x.jsonl"
    assert answers_file(folder, "") == folder / "evaluations" / "evaluation.jsonl"
