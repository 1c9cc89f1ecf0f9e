"""The examples that use rlinf-algos in other loops: both train."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(path):
    """Lines that are neither blank nor comment nor docstring."""
    inside, count = False, 0
    for line in path.read_text().splitlines():
        text = line.strip()
        quotes = text.count('"""')
        if quotes == 1:
            inside = not inside
        elif not (inside or quotes or not text or text.startswith("#")):
            count += 1
    return count


def test_the_bare_torch_loop_trains():
    history = load("algos_torch_loop").train(steps=120)
    assert sum(history[:5]) / 5 < 0.1
    assert sum(history[-5:]) / 5 > 0.5


def test_the_bare_torch_loop_is_short():
    assert code_lines(EXAMPLES / "algos_torch_loop.py") <= 60


@pytest.mark.filterwarnings("default")  # TRL's and its dependencies' own
def test_inside_trls_trainer_it_trains():
    pytest.importorskip("trl", reason="the example is for those who have TRL")
    rewards = load("algos_trl_grpo").train(steps=20)
    assert len(rewards) == 20
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
