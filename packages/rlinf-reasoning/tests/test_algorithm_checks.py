"""Every combination of algorithm keys that cannot work is refused when composing, by name."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_reasoning.conf import Algorithm, AsyncPpo, Dapo, Ppo
from rlinf_reasoning.conf.algorithm_checks import check_algorithm, check_critic, check_flow
from rlinf_reasoning.conf.recipes import RECIPES


def root(schema: type = Algorithm, **changes: Any) -> Config:
    """A recipe with these algorithm keys; ``group__key`` sets others."""
    data: dict[str, Any] = {
        "prompts_per_step": 64,
        "algorithm": vars(schema()),
        "sampling": {"max_new_tokens": 5},
        "reward": {"on_error": "fail"},
        "task": {"too_long": "refuse"},
        "trainer": {
            "name": "torch",
            "lr": 1e-4,
            "betas": [0.9, 0.99],
            "warmup_steps": 10,
            "schedule": "constant",
            "schedule_steps": 0,
        },
    }
    for name, value in changes.items():
        group, _, key = name.rpartition("__")
        data[group or "algorithm"] = {**data[group or "algorithm"], key: value}
    return Config(data)


def problems(*args: Any, **changes: Any) -> list[str]:
    cfg = root(*args, **changes)
    return check_algorithm(cfg.algorithm, cfg)


@pytest.mark.parametrize("schema", [Algorithm, Dapo, Ppo, AsyncPpo])
def test_the_defaults_are_possible(schema: type) -> None:
    assert problems(schema) == []
    sampler, critic = schema is Dapo, schema is Ppo
    assert check_flow(root(schema), RECIPES, critic=critic, sampler=sampler) == []


@pytest.mark.parametrize(
    ("schema", "changes", "said"),
    [
        (Algorithm, {"group_size": 1}, ["algorithm.group_size: 1", "at least 2"]),
        (Algorithm, {"advantage": "grup"}, ["algorithm.advantage", "grup", "did you mean 'group'"]),
        (Algorithm, {"advantage": "remax"}, ["algorithm.advantage: 'remax'", "greedy"]),
        (Algorithm, {"advantage": "reinforce_pp"}, ["algorithm.advantage: 'reinforce_pp'"]),
        (Algorithm, {"advantage": "gae"}, ["algorithm.advantage: gae has keys of its own", "algorithm=ppo"]),
        (Algorithm, {"advantage": "pass_at_k"}, ["algorithm.advantage_options.k"]),
        (Algorithm, {"advantage": "rloo", "normalise_std": False}, ["algorithm.normalise_std", "advantage=rloo"]),
        (Algorithm, {"loss": "pppo"}, ["algorithm.loss", "pppo", "did you mean 'ppo'"]),
        (Algorithm, {"loss": "sft"}, ["algorithm.loss: 'sft' learns from given responses"]),
        (Algorithm, {"loss": "kl"}, ["algorithm.loss: 'kl'", "algorithm.kl_coef"]),
        (Algorithm, {"loss": "gspo", "clip_high": 0.3}, ["algorithm.clip_low", "loss=gspo", "algorithm.loss_options"]),
        (Algorithm, {"loss": "gspo", "dual_clip": 3.0}, ["algorithm.dual_clip: 3.0 is not read by loss=gspo"]),
        (Algorithm, {"dual_clip": 1.1}, ["algorithm.dual_clip: 1.1", "1.2"]),
        (Algorithm, {"aggregation": "constant"}, ["algorithm.divisor: aggregation=constant needs it"]),
        (Algorithm, {"divisor": 5.0}, ["algorithm.divisor", "not by token_mean"]),
        (Algorithm, {"kl_coef": 0.1, "kl_kind": "k1"}, ["algorithm.kl_kind", "k2 or k3", "algorithm.kl_in=reward"]),
        (Algorithm, {"loss": "decoupled_ppo"}, ["algorithm.old_logprobs", "use recompute"]),
        (Algorithm, {"correction": "tis"}, ["algorithm.correction", "twice", "algorithm.old_logprobs=recompute"]),
        (AsyncPpo, {"correction": "mask"}, ["algorithm.correction", "behaviour_cap"]),
        (
            Algorithm,
            {"correction": "mask", "correction_cap": 0.5, "old_logprobs": "recompute"},
            ["algorithm.correction_cap: 0.5"],
        ),
        (Algorithm, {"overlong_cache": 6}, ["algorithm.overlong_cache: 6", "sampling.max_new_tokens=5"]),
        (Algorithm, {"minibatches": 3}, ["prompts_per_step: 64", "algorithm.minibatches=3", "try 63"]),
        (Algorithm, {"minibatches": 100}, ["prompts_per_step: 64", "try 100"]),
        (Ppo, {"advantage": "group"}, ["algorithm.advantage: 'group' reads no values", "algorithm=grpo"]),
    ],
)
def test_impossible_combinations_are_named(schema: type, changes: dict[str, Any], said: list[str]) -> None:
    (problem,) = problems(schema, **changes)
    assert all(part in problem for part in said), problem


def test_possible_combinations_are_not_refused() -> None:
    assert problems(kl_coef=0.1, kl_kind="k1", kl_in="reward") == []
    assert problems(correction="tis", old_logprobs="recompute", correction_cap=0.5) == []
    assert problems(aggregation="constant", divisor=5.0, normalise_std=False) == []
    assert problems(advantage="pass_at_k", advantage_options={"k": 2}) == []
    assert problems(loss="gspo") == problems(loss="cispo", loss_options={"clip_high": 3.0}) == []
    assert problems(dual_clip=3.0, epochs=3, entropy_coef=0.1) == []
    assert problems(Ppo, group_size=1) == [], "a critic needs no peers"


@pytest.mark.parametrize(
    ("schema", "changes", "program", "said"),
    [
        (Ppo, {}, {}, ["algorithm.advantage: gae needs a critic", "reasoning/ppo_arithmetic"]),
        (
            Algorithm,
            {},
            {"critic": True},
            ["algorithm.advantage: 'group' reads no values", "reasoning/grpo_arithmetic"],
        ),
        (Dapo, {}, {}, ["algorithm.dynamic_sampling", "reasoning/dapo_arithmetic", "dynamic_sampling=false"]),
        (
            Dapo,
            {"dynamic_sampling": False},
            {"sampler": True},
            ["without dynamic sampling", "reasoning/grpo_arithmetic"],
        ),
        (Algorithm, {}, {"sampler": True}, ["without dynamic sampling", "algorithm=dapo"]),
        (Dapo, {"reward__on_error": "drop"}, {"sampler": True}, ["reward.on_error", "use zero or fail"]),
        (Dapo, {"task__too_long": "drop"}, {"sampler": True}, ["task.too_long", "use refuse or truncate"]),
    ],
)
def test_a_program_refuses_what_it_cannot_do(
    schema: type, changes: dict[str, Any], program: dict[str, bool], said: list[str]
) -> None:
    (problem,) = check_flow(root(schema, **changes), RECIPES, **program)
    assert all(part in problem for part in said), problem


def test_dapo_without_dynamic_sampling_runs_in_the_plain_program() -> None:
    assert check_flow(root(Dapo, dynamic_sampling=False), RECIPES) == []


def critic(**keys: Any) -> list[str]:
    cfg = root()
    return check_critic(Config(keys), cfg.trainer, cfg)


def test_critic_keys_are_those_of_the_trainer() -> None:
    assert critic() == critic(lr=1, warmup_steps=0, betas=[0.9, 0.95]) == []
    for keys, said in (
        ({"lrr": 0.1}, ["critic.lrr: no key of the critic", "did you mean 'lr'"]),
        ({"name": "deepspeed"}, ["critic.name", "the backend of trainer"]),
        ({"lr": "high"}, ["critic.lr: 'high' is a str"]),
        ({"warmup_steps": True}, ["critic.warmup_steps: True is a bool"]),
        ({"warmup_steps": 0.5}, ["critic.warmup_steps: 0.5 is a float"]),
    ):
        (problem,) = critic(**keys)
        assert all(part in problem for part in said), problem


def test_critic_values_are_in_the_trainer_s_limits() -> None:
    pytest.importorskip("rlinf_engines", reason="rlinf-engines gives the schema")
    for keys, said in (
        ({"lr": -1.0}, "critic.lr=-1.0: must be at least 0"),
        ({"schedule": "cos"}, "critic.schedule=cos: must be one of constant"),
        ({"schedule": "cosine"}, "critic.schedule_steps"),
        ({"betas": [0.9]}, "critic.betas"),
    ):
        (problem,) = critic(**keys)
        assert said in problem
