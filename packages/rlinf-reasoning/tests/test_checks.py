"""Impossible configurations, refused before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_reasoning.conf import (
    SCHEMAS,
    Algorithm,
    Evaluation,
    FunctionReward,
    IsolatedReward,
    Jsonl,
    Reward,
    Sampling,
    WarmStart,
)
from rlinf_reasoning.conf.checks import (
    check_function,
    check_jsonl,
    check_pattern,
    check_recipe,
    check_stop,
    check_template,
)


def recipe(**changes: Any) -> Config:
    """The recipe's defaults, with ``group__key=value`` changes."""
    data: dict[str, Any] = {
        "seed": 0,
        "prompts_per_step": 64,
        "algorithm": vars(Algorithm()),
        "sampling": vars(Sampling()),
        "warm_start": vars(WarmStart()),
        "eval": vars(Evaluation()),
        "model": {"path": None, "tiny": {"max_positions": 64, "characters": "0123456789+="}},
        "task": {"path": "", "template": "{prompt}"},
        "cluster": {"debug": False},
        "trainer": {"name": "deepspeed"},
        "rollout": {"name": "vllm", "engine_process": False},
    }
    for name, value in changes.items():
        group, _, key = name.partition("__")
        if key:
            data[group] = {**data[group], key: value}
        else:
            data[group] = value
    return Config(data)


@pytest.mark.parametrize(
    ("stop", "tiny", "said"),
    [
        ([""], False, "an empty text"),
        (["a", "b", "a"], False, "'a' is there twice"),
        (["1="], True, ""),
        (["1", "\n"], True, "the tiny model has no '\\n'"),
        (["\n"], False, ""),
        (["</answer>", "er>"], False, "'</answer>' never comes up, its part 'er>'"),
    ],
)
def test_stop_texts_that_make_no_sense_are_named(stop: list[str], tiny: bool, said: str) -> None:
    model = {"path": None if tiny else "somewhere", "tiny": {"characters": "0123456789+="}}
    problems = check_stop(stop, Config({"model": model}).model)
    assert len(problems) == bool(said) and all(said in problem for problem in problems)


def test_a_response_that_fills_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    model = {"path": str(tmp_path)}
    assert check_recipe(recipe(model=model, sampling__max_new_tokens=63)) == []
    for changes in ({"sampling__max_new_tokens": 64}, {"sampling__max_new_tokens": 20, "rollout__max_model_len": 20}):
        (problem,) = check_recipe(recipe(model=model, **changes))
        assert problem.startswith("sampling.max_new_tokens: ") and "leaves no room for a prompt" in problem
        assert ("rollout.max_model_len" in problem) == ("rollout__max_model_len" in changes)  # a key of vLLM's alone


def test_the_defaults_are_possible() -> None:
    assert check_recipe(recipe()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warm_start__problems": 300}, ["warm_start.problems: 300", "at least 328"]),
        ({"warm_start__held_out": 0}, ["warm_start.held_out: 0"]),
        ({"cluster__debug": True}, ["rollout.engine_process: with cluster.debug=true", "=true"]),
        ({"sampling__max_new_tokens": 64}, ["sampling.max_new_tokens: 64", "64 positions"]),
    ],
)
def test_impossible_combinations_are_named(changes: dict[str, Any], said: list[str]) -> None:
    (problem,) = check_recipe(recipe(**changes))
    assert all(part in problem for part in said)


def test_a_skipped_warm_start_needs_no_problems() -> None:
    assert check_recipe(recipe(warm_start__problems=0, warm_start__max_steps=0)) == []


def test_patterns_templates_and_functions() -> None:
    assert check_pattern(None) == check_pattern(r"\d+") == []
    assert "task.pattern" in check_pattern("(")[0]
    assert check_template("{a}+{b}=") == []
    assert "task.template" in check_template("{a")[0]
    assert "all prompts would be equal" in check_template("What is it?")[0]
    assert check_function("a.b:c") == []
    assert "module:function" in check_function("a.b.c")[0]


def test_rewards_that_are_not_there() -> None:
    def problems(reward: Reward) -> list[str]:
        return type(reward).validate(Config(vars(reward)), recipe())

    assert problems(Reward()) == problems(IsolatedReward()) == problems(FunctionReward(function="a:b")) == []
    (problem,) = problems(Reward("exakt"))
    assert problem.startswith("reward.name: no reward 'exakt' is installed (did you mean 'exact'?)")
    (problem,) = problems(IsolatedReward("maths"))
    assert "did you mean 'math'" in problem
    assert problems(Reward("math")) == ["reward.name: 'math' has keys of its own; choose it with reward=math"]
    for reward in (Reward("function"), IsolatedReward("function")):
        assert "choose it with reward=function" in problems(reward)[0]


def test_jsonl_faults_are_found_from_the_config(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [f'{{"prompt": "{i}", "answer": "{i}"}}' for i in range(400)]
    path.write_text("\n".join(lines))
    cfg = recipe(task=vars(Jsonl(path=str(path))), warm_start__max_steps=0)
    assert check_jsonl(str(path), "{prompt}", cfg) == []
    path.write_text("\n".join(lines[:300]))
    (problem,) = check_jsonl(str(path), "{prompt}", cfg)
    assert "300 distinct problems" in problem and "320 needed" in problem
    path.write_text("\n".join([*lines[:6], "{", *lines]))
    (problem,) = check_jsonl(str(path), "{prompt}", cfg)
    assert "p.jsonl:7" in problem
    path.write_text("\n".join(lines))
    (problem,) = check_jsonl(str(path), "{prompt}", recipe(task=vars(Jsonl(path=str(path), template="{prmpt}"))))
    assert "'prompt'" in problem
    (problem,) = check_jsonl("", "{prompt}", recipe(task=vars(Jsonl(path=""))))
    assert problem == "task.path: the path is empty; give a file with one JSON object per line"


def test_keys_of_a_file_that_contradict_one_another(tmp_path: Path) -> None:
    node = Jsonl(path=str(tmp_path / "absent.jsonl"), prompt_field="text", answer_field="text")
    (problem,) = node.validate(recipe())
    assert problem.startswith("task.answer_field: 'text' is the field of the prompt")
    node = Jsonl(path=node.path, chat_options={"enable_thinking": False, "tokenize": False})
    (problem,) = node.validate(recipe())
    assert problem.startswith("task.chat_options.tokenize: ")


def test_every_schema_has_its_file_and_help() -> None:
    import rlinf_reasoning.conf as conf

    folder = Path(conf.__file__).parent
    assert {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml")} == set(SCHEMAS)
    for schema in SCHEMAS.values():
        for field in schema.__dataclass_fields__.values():
            assert field.metadata.get("help") or field.default_factory is not None, field.name
