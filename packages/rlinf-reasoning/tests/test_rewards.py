"""Reward functions on the agreed cases."""

from __future__ import annotations

import threading

import pytest

from rlinf_reasoning.rewards.exact import ExactReward
from rlinf_reasoning.rewards.math import last_boxed, math_reward
from rlinf_reasoning.rewards.pool import RewardItem, RewardPool, Score

TOWER = r"\boxed{9^{9^{9^{9}}}}"
CASES = [
    (r"Answer: \boxed{5}", "5", 1),
    (r"\boxed{3}. Wait, \boxed{4}", "4", 1),
    (r"\boxed{3}. Wait, \boxed{4}", "3", 0),
    (r"\boxed{\frac12}", r"\frac13", 0),
    (r"\boxed{\frac12}", r"\frac12", 1),
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    ("no answer at all", "7", 0),
    ("", "7", 0),
    (r"\boxed{}", "7", 0),
    (r"\boxed{7", "7", 0),  # cut off before its end
    ("12", "12", 1),
]
MATH = "rlinf_reasoning.rewards.math:MathReward"


@pytest.mark.parametrize(("text", "gold", "score"), CASES)
def test_math_reward(text: str, gold: str, score: float) -> None:
    assert math_reward(text, gold, {}) == score


def test_math_reward_blames_data_for_a_bad_answer() -> None:
    with pytest.raises(ValueError, match="not a mathematical expression"):
        math_reward("5", "", {})


def test_hostile_expression_ends_within_the_limit_and_the_batch_is_scored() -> None:
    texts = [*(RewardItem(t, g, {}) for t, g, _ in CASES), RewardItem(TOWER, "1", {})]
    with RewardPool(MATH, processes=1, timeout_s=2.0) as pool:
        scores = pool.score([texts[-1], *texts])
        again = pool.score(texts[:1])
    assert scores[0].value is None and "longer than 2 s" in scores[0].error
    assert [s.value for s in scores[1:-1]] == [float(c[2]) for c in CASES]
    assert again == [Score(1.0)]


def test_the_same_scores_from_a_thread() -> None:
    expected = [float(c[2]) for c in CASES]
    items = [RewardItem(t, g, {}) for t, g, _ in CASES]
    found: list[float | None] = []

    def run() -> None:
        with RewardPool(MATH, timeout_s=20) as pool:
            found.extend(s.value for s in pool.score(items))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{a} \boxed{b{c}d}", "b{c}d"),
        (r"\boxed {x}", "x"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{done} then \boxed{open", "done"),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_exact_reward() -> None:
    assert ExactReward()(" 12\n", "12", {}) == 1.0
    assert ExactReward()("12 ", "120", {}) == 0.0
