"""Reward functions on the agreed cases."""

from __future__ import annotations

import threading

import pytest

from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_reasoning.rewards.exact import ExactReward
from rlinf_reasoning.rewards.math import MathReward, last_boxed, math_reward
from rlinf_reasoning.rewards.pool import RewardItem, RewardPool, Score
from rlinf_reasoning.rewards.scorer import Scorer

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
    ("#### 18", "18", 1),
    ("16 - 3 - 4 = 9, 9 * 2 = 18\n#### 1,018\nDone.", "1018", 1),
    ("#### three", "3", 0),
    ("#### 5 m", "5", 1),
    ("The answer is $18.", "18", 1),
    ("**Answer:** **1,234** dollars", "1234", 1),
    ("The final answer is: 5 apples.", "5", 1),
    ("Answer: $5.50 per hour", "5.5", 1),
    ("I thought the answer is 10. But no, the answer is 12!", "12", 1),
    ("The answer is 16 - 3 = 13.", "13", 1),
    ("The answer is -$5.", "-5", 1),
    ("The answer is 5.", "-5", 0),
    ("The answer is 20 cm^2.", "20", 1),
    ("The answer is 25 km/h.", "25", 1),
    ("The answer is 12.5%.", "12.5", 1),
    ("The answer is 3/4", "0.75", 1),
    ("The answer is 1 1/2", "1.5", 1),
    ("The answer is x^2", "x^2", 1),
    (r"The answer is \(\frac{1}{2}\).", "0.5", 1),
    ("answer: 1, 2, 3", "2", 0),
    ("She makes $18 every day at the market.", "18", 1),
    ("So it is 17, after 18 tries", "17", 0),
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{18 \text{ dollars}}", "18", 1),
    (r"\boxed{1{,}234}", "1234", 1),
    (r"\boxed{(1,234)}", "1234", 0),
    (r"\boxed{x = 5}", "5", 1),
    (r"\boxed{5x}", "5", 0),
    (r"\boxed{18}", "She sells 9.\n#### 18", 1),  # the reference is a whole solution
    (r"\boxed{70000}", "$70,000", 1),
]
MATH = "rlinf_reasoning.rewards.math:MathReward"


@pytest.mark.parametrize(("text", "gold", "score"), CASES)
def test_math_reward(text: str, gold: str, score: float) -> None:
    assert math_reward(text, gold, {}) == score


def test_math_reward_blames_data_for_a_bad_answer() -> None:
    with pytest.raises(ValueError, match="not a mathematical expression"):
        math_reward("5", "", {})


@pytest.mark.parametrize(
    ("format", "text", "score"),
    [
        ("boxed", r"\boxed{18}", 1.0),
        ("boxed", "#### 18", 0.0),
        ("hashes", "#### 18", 1.0),
        ("hashes", r"\boxed{18}", 0.0),
        ("last_number", r"first \boxed{3}, then 18 of them", 1.0),
        ("last_number", "none", 0.0),
    ],
)
def test_the_format_says_where_the_answer_counts(format: str, text: str, score: float) -> None:
    assert math_reward(text, "18", {}, format=format) == score


def test_a_wrong_answer_in_the_right_form_may_have_a_score_of_its_own() -> None:
    reward = MathReward("boxed", 0.1)
    found = [reward(text, "4", {}) for text in (r"\boxed{4}", r"\boxed{3}", "4", r"\boxed{}")]
    assert found == [1.0, 0.1, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"reward\.format=box: .*did you mean 'boxed'"):
        MathReward("box")


def test_settings_reach_the_processes() -> None:
    cfg = Config(
        {"name": "math", "format": "boxed", "format_score": 0.25, "processes": 1, "timeout_s": 20.0, "memory_mb": 0}
    )
    scorer = Scorer(cfg)
    try:
        scores = scorer.score([RewardItem(t, "4", {}) for t in (r"\boxed{4}", r"\boxed{3}", "4")])
    finally:
        scorer.close()
    assert [s.value for s in scores] == [1.0, 0.25, 0.0]


def test_hostile_expression_ends_within_the_limit_and_the_batch_is_scored() -> None:
    texts = [*(RewardItem(t, g, {}) for t, g, _ in CASES), RewardItem(TOWER, "1", {})]
    with RewardPool(MATH, processes=1, timeout_s=3.0) as pool:
        scores = pool.score([texts[-1], *texts])
        again = pool.score(texts[:1])
    assert scores[0].value is None and "longer than 3 s" in scores[0].error
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
