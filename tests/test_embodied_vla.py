"""The vision-language-action policy as a trainer's network: it is trained, and its directory is loaded again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_core.types import ParallelInfo
from rlinf_embodied.conf.vla import TinyVla, Vla
from rlinf_embodied.envs.base import Box, EnvSpec, Observation, Text
from rlinf_embodied.policies.vla import VlaPolicy
from rlinf_embodied.training.network import INPUT, load_trainer
from rlinf_engines.conf import TorchTrainer

SIDE = 16
SPEC = EnvSpec(
    {"image": Box(np.zeros((SIDE, SIDE, 3)), np.full((SIDE, SIDE, 3), 255.0), "uint8"), "instruction": Text()},
    Box(-np.ones(3), np.ones(3)),
    10,
)
MODEL = Vla(
    tiny=TinyVla(image_size=SIDE, patch_size=8, vision_size=16, hidden_size=32, heads=2, kv_heads=1, vision_heads=2),
    chunk=2,
    dtype="float64",
)


def observation(count: int) -> Observation:
    images = np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)
    return {"image": images, "instruction": ["push the cube", "open the top drawer"] * (count // 2)}


def test_a_trainer_makes_a_likely_action_likelier_and_its_directory_acts_alike(tmp_path: Path) -> None:
    cfg: Any = SimpleNamespace(model=MODEL, trainer=TorchTrainer(lr=3e-3))
    trainer, learner = load_trainer(cfg, SPEC, ParallelInfo(), 5)
    policy = VlaPolicy(MODEL, SPEC, 5)
    obs = observation(4)
    uniform = np.random.default_rng(1).random((4, 2, 3))
    decision = policy.act(obs, uniform)
    batch = {"ids": ["a", "b", "c", "d"], "taken": torch.from_numpy(decision.taken)}
    batch |= {INPUT + name: value for name, value in learner.prepare(obs).items()}

    def loss(outputs: dict[str, torch.Tensor], _: Any) -> tuple[torch.Tensor, float, dict[str, float]]:
        return (outputs["values"] ** 2).sum() - outputs["logprobs"].sum(), 24.0, {}

    (before,) = trainer.forward([batch])
    np.testing.assert_allclose(before["logprobs"].numpy(), decision.logprobs, atol=1e-5)
    for _ in range(4):
        trainer.accumulate([batch], loss)
        assert trainer.step(24.0).grad_norm > 0.0
    (after,) = trainer.forward([batch])
    assert float(after["logprobs"].mean()) > float(before["logprobs"].mean()) + 0.1

    there = policy.state_dict()
    weights = dict(trainer.weights())
    assert set(weights) == set(there)
    for name, tensor in weights.items():
        assert not torch.equal(tensor, there[name]), name
        there[name].copy_(tensor)
    changed = policy.act(obs, uniform, greedy=True)
    found = policy.evaluate(policy.prepare(obs), batch["taken"])["logprobs"].detach()
    np.testing.assert_allclose(found.numpy(), after["logprobs"].numpy(), atol=1e-9)

    trainer.export(tmp_path / "model")
    loaded = VlaPolicy(replace(MODEL, path=str(tmp_path / "model"), tiny=TinyVla()), SPEC, 0)
    np.testing.assert_array_equal(loaded.act(obs, uniform, greedy=True).taken, changed.taken)
    for name, tensor in weights.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    trainer.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_torch(checkpointing: bool) -> None:
    trainer_cfg = TorchTrainer(lr=1e-3, activation_checkpointing=checkpointing)
    cfg: Any = SimpleNamespace(model=MODEL, trainer=trainer_cfg)
    trainer, learner = load_trainer(cfg, SPEC, ParallelInfo(), 5)
    policy = VlaPolicy(MODEL, SPEC, 5)
    obs = observation(4)
    taken = torch.from_numpy(policy.act(obs, np.full((4, 2, 3), 0.5)).taken)
    inputs = learner.prepare(obs)
    batches = [
        {"ids": [str(i)], "taken": taken[i : i + 1]} | {INPUT + k: v[i : i + 1] for k, v in inputs.items()}
        for i in range(4)
    ]
    trainer.accumulate(batches, lambda outputs, _: (-outputs["logprobs"].sum() - outputs["values"].sum(), 4.0, {}))
    norm = trainer.step(4.0).grad_norm
    found = policy(policy.prepare(obs), taken)
    ((-found["logprobs"].sum() - found["values"].sum()) / 4.0).backward()
    wanted = torch.stack([parameter.grad.norm() for parameter in policy.parameters() if parameter.grad is not None])
    assert norm == pytest.approx(float(wanted.norm()), rel=1e-9)
    trainer.close()
