"""The recipes: short, traced as meant, composed with the engines' groups where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config import Config, compose
from rlinf_core.errors import ConfigError
from rlinf_core.flow import trace
from rlinf_core.graph import FlowGraph
from rlinf_reasoning.conf import Algorithm, AsyncPpo, Dapo, Evaluation, Ppo, ReasoningGym, Sampling, WarmStart

engines = pytest.mark.skipif(importlib.util.find_spec("rlinf_engines") is None, reason="rlinf-engines gives the groups")
NAME = "reasoning/grpo_arithmetic"
PROGRAMS = ("grpo_arithmetic", "dapo_arithmetic", "ppo_arithmetic", "grpo_math")


def program(name: str) -> Any:
    return getattr(importlib.import_module(f"rlinf_reasoning.recipes.{name}"), name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_under_100_lines_and_opens_with_how_to_run_it(name: str) -> None:
    module = importlib.import_module(f"rlinf_reasoning.recipes.{name}")
    source = Path(str(module.__file__)).read_text().splitlines()
    assert len(source) < 100
    assert f"rlinf run reasoning/{name}" in "\n".join(source[:6])
    assert module.__doc__ is not None and "departures" in module.__doc__.lower()


def config(schema: type = Algorithm, **changes: Any) -> Config:
    task = ReasoningGym(pool=60, pattern=r"\d+ [+-] \d+ =")
    return Config(
        {
            "seed": 0,
            "num_steps": 3,
            "prompts_per_step": 4,
            "algorithm": vars(schema()),
            "sampling": vars(Sampling()),
            "warm_start": {**vars(WarmStart()), "problems": 8},
            "eval": {**vars(Evaluation()), "problems": 4, "every": 1},
            "model": {"path": None, "tiny": {"max_positions": 64, "characters": "0123456789+-= "}},
            "checkpoint": {"every": 1, "keep_last": 1},
            "task": vars(task),
            "critic": {},
            **changes,
        }
    )


def traced(name: str, tmp_path: Path, cfg: Config, **how: Any) -> FlowGraph:
    return trace(program(name), cfg, seed=0, run_dir=tmp_path, **how)[0]


def calls(graph: FlowGraph, phase: str) -> list[tuple[str, str]]:
    return [(c.group, c.task) for c in graph.phases[phase].calls]


@pytest.mark.parametrize("schema", [Algorithm, AsyncPpo])
def test_the_trace_shows_the_flow(tmp_path: Path, schema: type) -> None:
    graph = traced("grpo_arithmetic", tmp_path, config(schema))
    assert set(graph.stages) == {"generator", "reward", "actor"}
    assert set(graph.phases) == {"warm_start", "evaluate", "train", "save"}
    train = graph.phases["train"]
    assert calls(graph, "train") == [("generator", "generate"), ("reward", "score"), ("actor", "train")]
    assert train.channels == ("prompts", "samples", "scored")
    assert graph.stages["actor"].collective and graph.stages["actor"].barrier == "batch"
    assert not graph.stages["reward"].device


def test_dapo_is_a_cycle_that_the_sampler_ends(tmp_path: Path) -> None:
    graph = traced("dapo_arithmetic", tmp_path, config(Dapo))
    train = graph.phases["train"]
    assert train.cyclic() == {"prompts", "samples", "scored"}
    assert [c.group for c in train.calls if c.ends] == ["sampler"]
    assert calls(graph, "train")[0] == ("sampler", "sample")
    assert train.feeds == () and train.deal("prompts", "generator") == "round_robin"
    assert not graph.stages["sampler"].device and graph.stages["sampler"].ranks_fixed == 1


def test_ppo_hands_the_values_to_both_updates(tmp_path: Path) -> None:
    graph = traced("ppo_arithmetic", tmp_path, config(Ppo))
    train = graph.phases["train"]
    assert [(c.group, c.task) for c in train.calls if "valued" in c.inputs] == [("actor", "train"), ("critic", "train")]
    assert [(c.group, c.task) for c in train.calls if "valued" in c.outputs] == [("critic", "value")]
    assert calls(graph, "warm_start") == [("actor", "warm_start"), ("actor", "export")]
    assert calls(graph, "critic") == [("critic", "begin")]
    assert calls(graph, "save") == [("actor", "save_checkpoint"), ("critic", "save_checkpoint"), ("actor", "export")]
    shaped = config(Ppo, algorithm={**vars(Ppo()), "kl_coef": 0.1, "kl_in": "reward"})
    graph = traced("ppo_arithmetic", tmp_path, shaped)
    assert calls(graph, "train")[2:4] == [("actor", "reference"), ("critic", "value")]


@pytest.mark.parametrize(
    ("name", "schema", "groups"),
    [
        ("grpo_arithmetic", Algorithm, ["actor"]),
        ("dapo_arithmetic", Dapo, ["actor"]),
        ("ppo_arithmetic", Ppo, ["actor", "critic"]),
        ("grpo_math", Algorithm, ["actor"]),
    ],
)
def test_a_run_that_goes_on_loads_and_skips_what_was_before(
    tmp_path: Path, name: str, schema: type, groups: list[str]
) -> None:
    graph = traced(name, tmp_path, config(schema), resumed=(2, str(tmp_path)))
    assert set(graph.phases) == {"resume", "evaluate", "train", "save"}
    assert calls(graph, "resume") == [(group, "load_checkpoint") for group in groups]
    assert graph.phases["resume"].weights == (("actor", "generator"),)


def test_data_faults_are_found_while_tracing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="distinct problems"):
        traced("grpo_arithmetic", tmp_path, config(prompts_per_step=64))


@engines
def test_the_recipe_composes() -> None:
    cfg = compose(NAME, ["seed=3", "task.options.max_digits=1", "num_steps=2"])
    assert cfg.seed == 3
    assert cfg.task.options.max_digits == 1
    assert cfg.task.options.min_terms == 2
    assert cfg.algorithm.group_size == 8
    known = {  # what a run of this recipe computes, unless told otherwise
        "advantage": "group",
        "normalise_std": True,
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "kl_kind": "k3",
        "minibatches": 2,
        "epochs": 1,
        "max_staleness": 0,
        "old_logprobs": "rollout",
        "correction": "none",
        "entropy_coef": 0.0,
        "overlong_cache": 0,
        "overlong_filter": False,
    }
    assert {name: cfg.algorithm[name] for name in known} == known


@engines
def test_the_other_recipes_compose(tmp_path: Path) -> None:
    dapo = compose("reasoning/dapo_arithmetic", ["algorithm.max_refills=2"])
    assert (dapo.algorithm.clip_high, dapo.algorithm.max_refills, dapo.algorithm.overlong_cache) == (0.28, 2, 1)
    ppo = compose("reasoning/ppo_arithmetic", ["critic.lr=1e-2", "critic.warmup_steps=3"])
    assert ppo.critic.to_dict() == {"lr": 1e-2, "warmup_steps": 3}
    stale = compose("reasoning/async_arithmetic", ["algorithm.max_staleness=2"])
    assert (stale.algorithm.loss, stale.algorithm.max_staleness) == ("decoupled_ppo", 2)
    other = compose(NAME, ["algorithm=dapo", "algorithm.dynamic_sampling=false", "algorithm.minibatches=1"])
    assert (other.algorithm.name, other.algorithm.minibatches) == ("dapo", 1)
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"model\.path"):
        compose("reasoning/grpo_math", [f"task.path={tmp_path}/problems.jsonl"])


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """``model.path`` and ``task.path`` of a model that only its config says something of, and of 400 problems."""
    rows = "".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(400))
    (tmp_path / "problems.jsonl").write_text(rows)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 1024}')
    (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (model / "tokenizer.json").write_text("{}")
    return [f"task.path={tmp_path}/problems.jsonl", f"model.path={model}"]


@engines
def test_the_recipes_of_a_model_of_your_own(files: list[str]) -> None:
    plain = compose("reasoning/grpo_math", files)
    for name, algorithm in (("dapo_math", "dapo"), ("ppo_math", "ppo")):
        with pytest.raises(ConfigError, match=r"not set and without a default: model\.path"):
            compose(f"reasoning/{name}", files[:1])
        with pytest.raises(ConfigError, match=r"model\.path: this recipe trains a pretrained model"):
            compose(f"reasoning/{name}", [*files[:1], "model.path=null"])
        cfg = compose(f"reasoning/{name}", files)
        assert cfg.algorithm.name == algorithm and cfg.program.endswith(f":{algorithm}_arithmetic")
        assert cfg.warm_start.max_steps == 0
        for key in (
            "num_steps",
            "prompts_per_step",
            "sampling",
            "trainer",
            "task",
            "reward",
            "rollout",
            "model",
            "eval",
        ):
            assert cfg[key] == plain[key], key
        with pytest.raises(ConfigError, match=f"run reasoning/{name}"):
            compose("reasoning/grpo_math", [*files, f"algorithm={algorithm}"])
        with pytest.raises(ConfigError, match="reasoning/grpo_math"):
            compose(f"reasoning/{name}", [*files, "algorithm=grpo"])


@pytest.mark.parametrize(
    ("name", "schema"), [("grpo_arithmetic", Algorithm), ("dapo_arithmetic", Dapo), ("ppo_arithmetic", Ppo)]
)
def test_without_warm_start_there_is_no_phase_of_it(tmp_path: Path, name: str, schema: type) -> None:
    cfg = config(schema, warm_start={**vars(WarmStart()), "problems": 0, "max_steps": 0})
    assert set(traced(name, tmp_path, cfg).phases) == {"evaluate", "train", "save"}


@engines
@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        (NAME, ["algorithm.group_size=1"], "algorithm.group_size: 1"),
        (NAME, ["algorithm.minibatches=5"], "multiple of algorithm.minibatches=5"),
        (NAME, ["sampling.max_new_tokens=100"], "sampling.max_new_tokens: 100"),
        (NAME, ["algorithm.gruop_size=4"], "algorithm.group_size"),
        (NAME, ["algorithm.clip_low=much"], "algorithm.clip_low"),
        (NAME, ["algorithm=grop"], "grpo"),
        (NAME, ["algorithm=ppo"], "reasoning/ppo_arithmetic"),
        (NAME, ["algorithm=dapo"], "reasoning/dapo_arithmetic"),
        (NAME, ["algorithm.gamma=0.9"], "algorithm.gamma"),
        (NAME, ["algorithm.correction=tis"], "algorithm.old_logprobs=recompute"),
        (NAME, ["algorithm.loss=bogus"], "algorithm.loss"),
        (NAME, ["critic.lr=0.1"], "critic"),
        (NAME, ["reward.on_error=ignore"], "fail, drop, zero"),
        (NAME, ["reward=maths"], "math"),
        (NAME, ["reward=function", "reward.function=nothing"], "module:function"),
        (NAME, ["task=jsonl", "task.path=/absent.jsonl"], "/absent.jsonl"),
        (NAME, ["task=jsonl"], "task.path"),
        ("reasoning/dapo_arithmetic", ["reward=math", "reward.on_error=drop"], "reward.on_error"),
        ("reasoning/dapo_arithmetic", ["algorithm.max_refills=-1"], "algorithm.max_refills"),
        ("reasoning/dapo_arithmetic", ["algorithm.on_shortage=wait"], "train, fail"),
        ("reasoning/ppo_arithmetic", ["algorithm=grpo"], "reasoning/grpo_arithmetic"),
        ("reasoning/ppo_arithmetic", ["critic.lrr=0.1"], "critic.lrr"),
        ("reasoning/ppo_arithmetic", ["critic.lr=-1"], "critic.lr"),
        ("reasoning/async_arithmetic", ["algorithm.old_logprobs=rollout"], "algorithm.old_logprobs"),
    ],
)
def test_faults_are_refused_when_composing(name: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(name, overrides)


@engines
def test_composing_loads_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n')
    source = f"""
import sys
from rlinf_core.config import compose
from rlinf_core.errors import ConfigError
for name in ("dapo_arithmetic", "ppo_arithmetic", "async_arithmetic"):
    compose(f"reasoning/{{name}}", ["algorithm.entropy_coef=0.1"])
try:
    compose({NAME!r}, ["task=jsonl", "task.path={path}"])
except ConfigError as error:
    assert "1 distinct problems" in str(error), error
else:
    raise AssertionError("not refused")
heavy = {{"torch", "ray", "transformers", "reasoning_gym", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
