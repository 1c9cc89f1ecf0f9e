"""Problems from reasoning-gym by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_reasoning.tasks.reasoning_gym_task import ReasoningGymTask

TWO = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def task(**changes: Any) -> ReasoningGymTask:
    node = {"dataset": "chain_sum", "options": TWO, "pool": 400, "pattern": None, "template": "{question}", **changes}
    return ReasoningGymTask(Config(node))


def test_the_whole_question_without_a_pattern() -> None:
    found = task().problems(seed=1)
    assert len(found) == 400
    assert found[0].prompt.endswith("=") and "problem" in found[0].prompt


def test_pattern_and_template_cut_to_what_matters() -> None:
    found = task(pattern=r"\b(?P<a>\d+) \+ (?P<b>\d+) =", template="{a}+{b}=").problems(seed=1)
    assert 100 < len(found) < 300
    for problem in found:
        match = re.fullmatch(r"(\d+)\+(\d+)=", problem.prompt)
        assert match is not None
        assert problem.answer == str(int(match[1]) + int(match[2]))
    assert task(pattern=r"\d+ \+ \d+ =").problems(seed=1)[0].prompt.count(" ") == 3


def test_problems_are_a_function_of_the_seed() -> None:
    first = task().problems(seed=1)
    assert task().problems(seed=2) != first
    assert task().problems(seed=1) == first


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dataset": "chain_sums"}, ["task.dataset", "'chain_sums'", "did you mean 'chain_sum'"]),
        ({"options": {"max_term": 2}}, ["task.options.max_term", "did you mean 'max_terms'"]),
        ({"options": {"min_terms": 3, "max_terms": 2}}, ["task.options", "max_terms must be"]),
        ({"pattern": "nothing like this"}, ["task.pattern", "matches none", "problem"]),
        ({"template": "{quest}"}, ["task.template", "{quest}", "did you mean 'question'"]),
    ],
)
def test_faults_are_named(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        task(**changes).problems(seed=0)
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize("name", ["basic_arithmetic", "gcd", "spell_backward"])
def test_other_datasets_load_by_name(name: str) -> None:
    found = task(dataset=name, options={}, pool=5).problems(seed=0)
    assert len(found) == 5 and all(p.prompt and p.answer for p in found)
