"""The recipe: short, traced as meant, composed with the engines' groups where they are installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config import Config, compose
from rlinf_core.errors import ConfigError
from rlinf_core.flow import trace
from rlinf_reasoning.conf import Algorithm, Evaluation, Sampling, WarmStart
from rlinf_reasoning.recipes import grpo_arithmetic as recipe

engines = pytest.mark.skipif(importlib.util.find_spec("rlinf_engines") is None, reason="rlinf-engines gives the groups")
NAME = "reasoning/grpo_arithmetic"


def test_the_program_is_under_100_lines_and_opens_with_how_to_run_it() -> None:
    source = Path(recipe.__file__).read_text().splitlines()
    assert len(source) < 100
    assert f"rlinf run {NAME}" in "\n".join(source[:6])
    assert recipe.__doc__ is not None and "departures" in recipe.__doc__


def config(**changes: Any) -> Config:
    return Config(
        {
            "seed": 0,
            "num_steps": 3,
            "prompts_per_step": 4,
            "algorithm": vars(Algorithm()),
            "sampling": vars(Sampling()),
            "warm_start": {**vars(WarmStart()), "problems": 8},
            "eval": {**vars(Evaluation()), "problems": 4, "every": 1},
            "model": {"path": None, "tiny": {"max_positions": 64, "characters": "0123456789+-= "}},
            "checkpoint": {"every": 1, "keep_last": 1},
            "task": {
                "name": "reasoning_gym",
                "dataset": "chain_sum",
                "options": {},
                "pool": 60,
                "pattern": r"\d+ [+-] \d+ =",
                "template": "{question}",
            },
            **changes,
        }
    )


def test_the_trace_shows_the_flow(tmp_path: Path) -> None:
    graph, groups = trace(recipe.grpo_arithmetic, config(), seed=0, run_dir=tmp_path)
    assert set(groups) == {"generator", "reward", "actor"}
    assert set(graph.phases) == {"warm_start", "evaluate", "train", "save"}
    train = graph.phases["train"]
    assert [(c.group, c.task) for c in train.calls] == [
        ("generator", "generate"),
        ("reward", "score"),
        ("actor", "train"),
    ]
    assert train.channels == ("prompts", "samples", "scored")
    assert graph.stages["actor"].collective and graph.stages["actor"].barrier == "batch"
    assert not graph.stages["reward"].device


def test_data_faults_are_found_while_tracing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="distinct problems"):
        trace(recipe.grpo_arithmetic, config(prompts_per_step=64), seed=0, run_dir=tmp_path)


@engines
def test_the_recipe_composes() -> None:
    cfg = compose(NAME, ["seed=3", "task.options.max_digits=1", "num_steps=2"])
    assert cfg.seed == 3
    assert cfg.task.options.max_digits == 1
    assert cfg.task.options.min_terms == 2
    assert cfg.algorithm.group_size == 8


@engines
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.group_size=1"], "algorithm.group_size: 1"),
        (["algorithm.minibatches=5"], "multiple of algorithm.minibatches=5"),
        (["sampling.max_new_tokens=100"], "sampling.max_new_tokens: 100"),
        (["algorithm.gruop_size=4"], "algorithm.group_size"),
        (["algorithm.clip_low=much"], "algorithm.clip_low"),
        (["reward.on_error=ignore"], "fail, drop, zero"),
        (["reward=maths"], "math"),
        (["reward=function", "reward.function=nothing"], "module:function"),
        (["task=jsonl", "task.path=/absent.jsonl"], "/absent.jsonl"),
        (["task=jsonl"], "task.path"),
    ],
)
def test_faults_are_refused_when_composing(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(NAME, overrides)


@engines
def test_composing_loads_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n')
    program = f"""
import sys
from rlinf_core.config import compose
from rlinf_core.errors import ConfigError
try:
    compose({NAME!r}, ["task=jsonl", "task.path={path}"])
except ConfigError as error:
    assert "1 distinct problems" in str(error), error
else:
    raise AssertionError("not refused")
heavy = {{"torch", "ray", "transformers", "reasoning_gym", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
