"""``rlinf eval``: what it takes over from a recipe, a run or a model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf_core.cli.main import main
from rlinf_core.config import Config, compose
from rlinf_core.errors import ConfigError
from rlinf_core.flow import trace
from rlinf_core.rundir import to_json
from rlinf_reasoning.commands import compose_eval, eval_command
from rlinf_reasoning.recipes import evaluate as recipe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("rlinf_engines") is None, reason="rlinf-engines gives the groups model and rollout"
)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(5)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no weights, in good order
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def run_dir(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    changes = ["seed=7", "eval.problems=9", "sampling.max_new_tokens=4", "reward=exact", "task.pool=5000"]
    cfg = compose("reasoning/grpo_arithmetic", changes)
    (path / "config.yaml").write_text(yaml.safe_dump(to_json(cfg.to_dict())[0]))
    model.rename(path / "export")
    return path


def composed(what: str, *overrides: str) -> Config:
    cfg: Config = compose_eval(what, overrides).config
    return cfg


def test_a_model_and_a_file_are_enough(model: Path, problems: Path) -> None:
    plain = composed("", f"model.path={model}", f"task.path={problems}", "eval.samples=8", "eval.k=[1,4,8]")
    assert (plain.task.name, plain.reward.name, plain.eval.problems) == ("jsonl", "math", None)
    assert composed(str(model), f"task.path={problems}").model.path == str(model)


def test_a_recipe_gives_its_task_reward_and_sampling(model: Path, problems: Path) -> None:
    cfg = composed("reasoning/grpo_math", f"model.path={model}", f"task.path={problems}", "sampling.top_p=0.5")
    assert cfg.sampling.max_new_tokens == compose_defaults("reasoning/grpo_math")["sampling"]["max_new_tokens"]
    assert cfg.sampling.top_p == 0.5 and cfg.reward.name == "math"
    assert cfg.program.endswith(":evaluate") and "trainer" not in cfg
    assert cfg.eval.problems is None  # five are there: all of them
    other = composed("reasoning/grpo_arithmetic", f"model.path={model}", "task=jsonl", f"task.path={problems}")
    assert other.task.template == "{prompt}" and other.reward.name == "exact"


def test_keys_that_must_be_set_are_shown_in_place(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", f"task.path={problems}", "--cfg"]) == 2
    shown = capsys.readouterr()
    data = yaml.safe_load(shown.out)
    assert data["model"]["path"] == "???" and data["task"]["path"] == str(problems)
    assert shown.err.startswith("rlinf: error: reasoning/eval: not set and without a default: model.path")


def compose_defaults(name: str) -> dict[str, Any]:
    from rlinf_core.config import compose_full

    return compose_full(name, allow_missing=True).config.to_dict()


def test_a_run_gives_its_model_and_the_problems_that_it_did_not_train_on(run_dir: Path, problems: Path) -> None:
    cfg = composed(str(run_dir))
    assert cfg.model.path == str(run_dir / "export")
    assert (cfg.seed, cfg.eval.problems, cfg.task.pool, cfg.task.template) == (7, 9, 5000, "{a}+{b}=")
    assert (cfg.reward.name, cfg.sampling.max_new_tokens) == ("exact", 4)
    other = composed(str(run_dir), "task=jsonl", f"task.path={problems}", "reward=math")
    assert (other.eval.problems, other.reward.name, other.reward.on_error) == (None, "math", "zero")


def test_another_file_takes_the_place_of_the_runs_own(run_dir: Path, problems: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    own = tmp_path / "own.jsonl"
    own.write_text(problems.read_text())
    config["task"] = {"name": "jsonl", "path": str(own), "eval_path": str(own), "prompt_field": "prompt"}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert composed(str(run_dir)).task.eval_path == str(own)
    cfg = composed(str(run_dir), f"task.path={problems}")
    assert (cfg.task.path, cfg.task.eval_path, cfg.eval.problems) == (str(problems), None, None)


@pytest.mark.parametrize(
    ("what", "overrides", "said"),
    [
        ("reasoning/grpo_mth", [], "did you mean 'reasoning/grpo_math'"),
        ("someone/model", [], "Nor is there a directory someone/model .*nothing is downloaded"),
        ("/absent/run", [], "^/absent/run does not exist; give a run directory"),
        (".", [], "neither a run directory"),
        ("", ["model.path=/absent", "task.path=p.jsonl"], "/absent does not exist"),
        ("", ["model.path=/absent"], "task.path"),
        ("", ["eval.k=[1,4]", "model.path=m", "task.path=p"], "pass@4 needs at least 4"),
        ("", ["trainer.lr=1", "model.path=m", "task.path=p"], "unknown key 'trainer.lr'"),
    ],
)
def test_faults_are_named(what: str, overrides: list[str], said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        composed(what, *overrides)


def test_a_task_that_is_not_installed_here_is_named(run_dir: Path, problems: Path) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["task"] = {"name": "riddles", "path": "x"}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="its task 'riddles' is no option of config group 'task'"):
        composed(str(run_dir))
    assert composed(str(run_dir), "task=jsonl", f"task.path={problems}").task.name == "jsonl"


def test_a_run_without_an_export_or_without_a_model_is_named(run_dir: Path) -> None:
    (run_dir / "export" / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no exported model"):
        composed(str(run_dir))
    (run_dir / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ConfigError, match="has no model and no rollout"):
        composed(str(run_dir))


def test_the_command_prints_its_configuration(model: Path, problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_command([str(model), f"task.path={problems}", "--cfg"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["task"]["path"] == str(problems)
    with pytest.raises(ConfigError, match="of which model"):
        eval_command([])


def test_the_program_asks_for_every_answer(model: Path, problems: Path, tmp_path: Path) -> None:
    cfg = composed(str(model), f"task.path={problems}", "eval.samples=3")
    graph, groups = trace(recipe.evaluate, cfg, seed=0, run_dir=tmp_path)
    assert set(groups) == {"generator", "reward"}
    assert [(c.group, c.task) for c in graph.phases["evaluate"].calls] == [
        ("generator", "generate"),
        ("reward", "evaluate"),
    ]
