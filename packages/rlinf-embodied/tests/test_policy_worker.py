"""The policy worker: block by block, keyed random numbers, weights, numbers that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from channel_lists import Items, worker

from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_embodied import noise, policies
from rlinf_embodied.data import Asked
from rlinf_embodied.envs import Box, EnvSpec
from rlinf_embodied.policies.base import Decision
from rlinf_embodied.specfile import write_spec
from rlinf_embodied.workers import PolicyWorker

SPEC = EnvSpec({"state": Box(np.zeros(2), np.ones(2))}, Box(-np.ones(1), np.ones(1)), 5)


class Affine(torch.nn.Module):
    """Acts with the sum of what it sees, times a weight, plus the uniform number."""

    chunk, tokens, value_level = 2, 1, "chunk"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.tied = self.weight
        self.register_buffer("seen", torch.zeros(3))
        self.training_seen: list[bool] = []

    def act(self, obs: Any, uniform: Any, *, greedy: bool = False) -> Decision:
        self.training_seen.append(self.training or torch.is_grad_enabled())
        base = obs["state"].sum(1)[:, None, None] * float(self.weight)
        actions = np.broadcast_to(base, uniform.shape) + (0.0 if greedy else uniform)
        return Decision(actions, actions, -actions.astype(np.float32), self.value(obs))

    def value(self, obs: Any) -> Any:
        return obs["state"][:, :1].astype(np.float32)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(policies, "load_policy", lambda cfg, spec, seed: Affine())
    write_spec(tmp_path, SPEC)
    found = worker(PolicyWorker, {"model": {"name": "affine"}}, tmp_path)
    found.setup()
    found.begin()
    return found


def asked(k: int, rows: int = 2, **more: Any) -> Asked:
    keys = np.array([[3, 10 * k + i, 7] for i in range(rows)])
    return Asked((0, k), {"state": np.full((rows, 2), k, dtype=np.float32)}, keys, **more)


def answers(made: Any, *questions: Asked) -> Any:
    out = Items()
    report = made.act(questions, out)
    assert report["rollout/inference_s"] > 0
    return out


def test_each_block_is_answered_by_its_keys(made: Any) -> None:
    first, second = answers(made, asked(1), asked(2, rows=3))
    assert first.place == (0, 1) and second.place == (0, 2) and first.version == 0
    assert np.array_equal(first.actions, 2.0 + noise.uniforms(5, asked(1).keys, 2, 1))
    assert second.actions.shape == (3, 2, 1) and second.values.tolist() == [[2.0]] * 3
    assert first.final_values is None and not any(made.replica.policy.training_seen)


def test_greedy_and_values(made: Any) -> None:
    final = {"state": np.array([[8.0, 0.0]], dtype=np.float32)}
    greedy, worth = answers(made, asked(1, greedy=True, final=final), asked(2, act=False))
    assert (greedy.actions == 2.0).all() and greedy.final_values.tolist() == [[8.0]]
    assert worth.actions is None and worth.logprobs is None and worth.values.tolist() == [[2.0], [2.0]]


def test_weights_and_buffers_are_installed(made: Any) -> None:
    made.install_weights(6, [("weight", torch.full((1,), 3.0)), ("seen", torch.ones(3))])
    (answer,) = answers(made, asked(1, greedy=True))
    assert (answer.actions == 6.0).all() and answer.version == 6 and made.replica.policy.seen.tolist() == [1.0] * 3


def test_weights_that_do_not_fit_are_refused(made: Any) -> None:
    with pytest.raises(RLinfError, match="version 2 of the policy came without seen"):
        made.install_weights(2, [("weight", torch.ones(1))])
    with pytest.raises(
        RLinfError, match=r"weight 'bias' \[1\] cannot be installed: policy 'affine' has no such weight"
    ):
        made.install_weights(2, [("bias", torch.ones(1))])
    with pytest.raises(RLinfError, match=r"'weight' \[2\] .* has it as \[1\]"):
        made.install_weights(2, [("weight", torch.ones(2))])


def test_numbers_that_are_not_finite_name_their_environments(made: Any) -> None:
    question = asked(1, rows=3)
    question.obs["state"][1, 1] = np.nan
    with pytest.raises(NonFiniteError, match=r"actions that are not finite in environment\(s\) 11, decision 7 of step"):
        answers(made, question)
    made.replica.policy.value = lambda obs: 1.0 / obs["state"][:, :1]
    with pytest.raises(NonFiniteError, match="last observations"), np.errstate(divide="ignore"):
        answers(made, asked(1, greedy=True, act=False, final={"state": np.zeros((1, 2))}))
