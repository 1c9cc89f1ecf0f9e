"""The recipes: short, traced as meant, and their configurations."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config import Config, compose
from rlinf_core.errors import ConfigError
from rlinf_core.flow import trace
from rlinf_core.graph import FlowGraph
from rlinf_embodied.conf.recipes import Recipe

engines = pytest.mark.skipif(
    importlib.util.find_spec("rlinf_engines") is None, reason="rlinf-engines gives the trainers"
)
RECIPES = {
    "ppo_cartpole": "ppo",
    "ppo_gymnasium": "ppo",
    "ppo_reach": "ppo",
    "ppo_pushcube": "ppo",
    "grpo_libero_vla": "grpo",
}


def program(name: str) -> Any:
    return getattr(importlib.import_module(f"rlinf_embodied.recipes.{name}"), name)


@pytest.mark.parametrize(("recipe", "name"), RECIPES.items())
def test_a_program_is_under_100_lines_and_opens_with_how_to_run_it(recipe: str, name: str) -> None:
    module = importlib.import_module(f"rlinf_embodied.recipes.{name}")
    assert len(Path(str(module.__file__)).read_text().splitlines()) < 100
    assert module.__doc__ is not None and f"rlinf run embodied/{recipe}" in module.__doc__
    assert "departures" in module.__doc__.lower()


def traced(name: str, tmp_path: Path, **changes: Any) -> FlowGraph:
    cfg = Config(
        {
            **asdict(Recipe(num_envs=4, inference="channel")),
            "seed": 0,
            "algorithm": {"group_size": 2} if name == "grpo" else {},
            "checkpoint": {"every": 1},
            **changes,
        }
    )
    return trace(program(name), cfg, seed=0, run_dir=tmp_path)[0]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_trace_shows_a_cycle_that_the_simulator_ends(name: str, tmp_path: Path) -> None:
    graph = traced(name, tmp_path)
    assert set(graph.stages) == {"simulator", "policy", "scorer", "actor"}
    assert set(graph.phases) == {"describe", "begin", "evaluate", "train", "save"}
    train = graph.phases["train"]
    assert [(call.group, call.task, call.ends) for call in train.calls] == [
        ("simulator", "rollout", True),
        ("policy", "act", False),
        ("actor", "train", False),
    ]
    assert set(train.cyclic()) == {"observations", "actions"} and train.feeds == ("slots",)
    assert train.weights == (("actor", "policy"),)
    assert graph.stages["actor"].collective and graph.stages["actor"].barrier == "batch"
    assert not graph.stages["scorer"].device and graph.in_cycle("simulator", "policy")
    assert train.deal("slots", "simulator") == "round_robin"


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_simulators_that_decide_for_themselves_need_no_policy_and_no_cycle(name: str, tmp_path: Path) -> None:
    graph = traced(name, tmp_path, inference="local")
    assert set(graph.stages) == {"simulator", "scorer", "actor"}
    train = graph.phases["train"]
    assert [(call.group, call.task, call.ends) for call in train.calls] == [
        ("simulator", "rollout", False),
        ("actor", "train", False),
    ]
    assert not train.cyclic() and set(train.channels) == {"slots", "trajectories"}
    assert train.weights == (("actor", "simulator"),) and graph.phases["begin"].weights == train.weights
    assert graph.order().index("simulator") < graph.order().index("actor")


def test_importing_the_stages_loads_neither_torch_nor_a_simulator() -> None:
    heavy = "('torch', 'gymnasium', 'metaworld', 'mani_skill', 'transformers')"
    code = (
        "import sys, rlinf_embodied, rlinf_embodied.conf, rlinf_embodied.recipes.ppo, rlinf_embodied.recipes.grpo\n"
        f"loaded = [name for name in {heavy} if name in sys.modules]\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@engines
@pytest.mark.parametrize(("recipe", "simulator"), [("ppo_cartpole", "gymnasium"), ("ppo_reach", "metaworld")])
def test_shipped_recipes_compose(recipe: str, simulator: str) -> None:
    pytest.importorskip(simulator)
    cfg = compose(f"embodied/{recipe}")
    assert cfg.num_envs % cfg.num_stages == 0 and cfg.eval.greedy
    # The learning rate reaches its end with the run.
    batch = cfg.num_envs * cfg.rollout_steps
    steps = cfg.num_steps * cfg.algorithm.epochs * -(-batch // cfg.algorithm.minibatch_size)
    assert cfg.trainer.schedule_steps == steps


@engines
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["num_envs=10", "num_stages=4", "inference=channel"],
            r"num_envs: 10 .* num_stages=4 sub-batches; give 12, or num_stages=2",
        ),
        (["num_stages=2"], r"num_stages: 2 sub-batches have nothing to overlap .* give 1, or inference=channel"),
        (["placement.policy='0'"], r"placement.policy: there is no such group .* remove it, or give inference=channel"),
        (["inference=central"], "inference.*central.*local"),
        (["model.chunk=5"], r"rollout_steps: 64 .* model.chunk=5 steps; give 65"),
        (["eval.videos=60"], r"eval.videos: 60 is more than eval.episodes=50"),
        (["num_env=3"], "num_env.*num_envs"),
        (["eval.num_envs=0"], "eval.num_envs=0"),
    ],
)
def test_impossible_settings_are_refused_by_name(overrides: list[str], message: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=message):
        compose("embodied/ppo_cartpole", overrides)


@engines
def test_a_plan_for_a_policy_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    stages = {"a": {"leaf": {"stage": "simulator", "devices": "0"}}, "b": {"leaf": {"stage": "policy", "devices": "1"}}}
    train = {"leaf": {"stage": "actor", "devices": "0"}}
    path = tmp_path / "hybrid.json"
    path.write_text(json.dumps({"name": "by hand", "tree": {"share": {"first": {"cycle": stages}, "then": train}}}))
    with pytest.raises(ConfigError, match=r"plan: .*hybrid.json' places the group policy, and there is no such group"):
        compose("embodied/ppo_cartpole", [f"plan={path}"])
    assert compose("embodied/ppo_cartpole", [f"plan={path}", "inference=channel"]).num_stages == 1
