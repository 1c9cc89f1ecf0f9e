"""GRPO on episodes from equal initial states: scores, filters, counts, the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from learning import DISCRETE, PlainTrainer, config, grpo, rollout

from rlinf_core.errors import ConfigError
from rlinf_core.types import Trajectory
from rlinf_embodied.policies.mlp import MlpPolicy
from rlinf_embodied.training import GrpoUpdate, load_update
from rlinf_embodied.training.advantages import InGroups
from rlinf_embodied.training.batch import collect

MODEL = {"value_level": "none"}


def policy(cfg: Any) -> MlpPolicy:
    return MlpPolicy(cfg.model, DISCRETE, 0)


def episodes(scores: list[float], successes: list[list[bool]], group: int = 2) -> list[Trajectory]:
    """One episode per slot, with the score in its first reward; a second one follows that must not count."""
    cfg = config(grpo(), **MODEL)
    found = rollout(policy(cfg), slots=len(scores), decisions=4, ends=0.0, group=group)
    for t, score, success in zip(found, scores, successes, strict=True):
        t.arrays["rewards"][:, 0] = [score, 0.0, 100.0, 100.0]
        t.arrays["terminated"][:, 0] = [False, True, False, False]
        t.arrays["success"][:, 0] = [*success, True, True]
    return found


NO, ONCE, END = [False, False], [True, False], [False, True]


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("return", [0.5, -0.5, 2.0, -2.0, 0.0, 0.0]),
        ("success_once", [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]),
        ("success_at_end", [0.0, 0.0, 0.5, -0.5, 0.0, 0.0]),
    ],
)
def test_scores_of_the_first_episode_are_compared(score, expected):
    cfg = config(grpo(score=score, normalise_std=False), **MODEL)
    made = policy(cfg)
    trajectories = episodes([2.0, 1.0, 5.0, 1.0, 3.0, 3.0], [ONCE, NO, END, ONCE, NO, NO])
    part = collect(trajectories, made, first_only=True)
    found = InGroups(cfg.algorithm)(PlainTrainer(made), part)
    assert len(found.advantages) == 12
    assert found.advantages[:, 0].tolist() == [x for x in expected for _ in range(2)]
    with_signal = len({i // 2 for i, x in enumerate(expected) if x})
    assert found.metrics == {
        "groups": 3.0,
        "groups/all_failed": 1.0,
        "groups/all_succeeded": 1.0,
        "groups/without_signal": 3.0 - with_signal,
        "groups/trained": float(with_signal),
    }


def test_groups_that_all_failed_or_all_succeeded_are_left_out():
    trajectories = episodes([2.0, 1.0, 5.0, 1.0, 3.0, 1.0], [NO, NO, END, ONCE, NO, END])
    results = {}
    for filtered in (False, True):
        cfg = config(grpo(success_filter=filtered, minibatch_size=100, epochs=1), **MODEL)
        made = policy(cfg)
        trainer = PlainTrainer(made)
        results[filtered] = load_update(cfg, trainer, made, 0)(trajectories, 0), trainer.gradients
    metrics, gradients = results[True]
    assert (metrics["groups/all_failed"], metrics["groups/all_succeeded"], metrics["groups/trained"]) == (1, 1, 1)
    assert metrics["groups/without_signal"] == 0.0
    assert (metrics["decisions"], metrics["env_steps"]) == (4.0, 12.0)
    assert results[False][0]["groups/all_failed"] == 1.0
    assert results[False][0]["decisions"] == 12.0
    cfg = config(grpo(minibatch_size=100, epochs=1), **MODEL)
    made = policy(cfg)
    trainer = PlainTrainer(made)
    load_update(cfg, trainer, made, 0)(trajectories[4:], 0)
    assert torch.equal(trainer.gradients[0], gradients[0])


def test_gradient_against_the_formula():
    cfg = config(grpo(minibatch_size=100, epochs=1), **MODEL)
    made = policy(cfg)
    trainer = PlainTrainer(made)
    trajectories = episodes([2.0, 1.0, 5.0, 1.0], [NO, NO, NO, NO])
    assert isinstance(load_update(cfg, trainer, made, 0), GrpoUpdate)
    load_update(cfg, trainer, made, 0)(trajectories, 0)
    reference = policy(cfg)
    total = torch.zeros(())
    for t, advantage in zip(trajectories, [1.0, -1.0, 1.0, -1.0], strict=True):
        spread = np.sqrt(0.5) if t.info["group"].endswith("0") else np.sqrt(8.0)
        scaled = advantage * (0.5 if t.info["group"].endswith("0") else 2.0) / (spread + 1e-6)
        arrays = t.arrays
        inputs = reference.prepare({"state": arrays["obs/state"]})
        found = reference.evaluate(inputs, torch.from_numpy(arrays["taken"]))
        ratio = (found["logprobs"][:2, 0, 0] - torch.from_numpy(arrays["logprobs"][:2, 0, 0])).exp()
        total = total - torch.minimum(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).sum()
    (total / 8).backward()
    gradient = torch.cat([p.grad.flatten() for p in reference.parameters()])
    torch.testing.assert_close(trainer.gradients[0], gradient, rtol=1e-9, atol=1e-12)


def test_a_step_whose_groups_say_nothing_trains_nothing():
    cfg = config(grpo(), **MODEL)
    made = policy(cfg)
    trainer = PlainTrainer(made)
    metrics = load_update(cfg, trainer, made, 0)(episodes([1.0] * 4, [NO, NO, END, END]), 0)
    assert not trainer.gradients
    assert (metrics["groups/without_signal"], metrics["groups/trained"]) == (2.0, 0.0)
    assert metrics["nothing_to_train_on"] == 1.0
    assert metrics["env_steps"] == 8.0


def test_a_group_that_lost_a_slot_is_compared_with_the_rest():
    cfg = config(grpo(group_size=3, normalise_std=False), **MODEL)
    made = policy(cfg)
    trajectories = episodes([2.0, 1.0, 9.0], [NO, NO, NO], group=3)[:2]
    found = InGroups(cfg.algorithm)(PlainTrainer(made), collect(trajectories, made, first_only=True))
    assert found.advantages[:, 0].tolist() == [0.5, 0.5, -0.5, -0.5]


def test_other_advantages_by_name():
    cfg = config(grpo(advantage="pass_at_k", advantage_options={"k": 1}), **MODEL)
    made = policy(cfg)
    part = collect(episodes([1.0, 0.0], [END, NO]), made, first_only=True)
    assert InGroups(cfg.algorithm)(PlainTrainer(made), part).advantages[:, 0].tolist() == [1.0, 1.0, -1.0, -1.0]
    with pytest.raises(ConfigError, match=r"algorithm.advantage \(rloo\): .*no option 'k'"):
        InGroups(config(grpo(advantage="rloo", advantage_options={"k": 1}), **MODEL).algorithm)
