"""The critic: values of states, returns, its loss by hand, and independence of ranks and cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_trainer import Model, SmallTrainer, equal, over_ranks, recipe, samples

from rlinf_core.types import Sample
from rlinf_reasoning.batch import Row, collate
from rlinf_reasoning.conf import Ppo
from rlinf_reasoning.training import ValueUpdate, add_values


def critic(**how: Any) -> SmallTrainer:
    return SmallTrainer(role="critic", **how)


def test_values_are_of_the_states_before_the_tokens() -> None:
    trainer, batch = critic(), samples()
    add_values(trainer, batch)
    for sample in batch:
        tokens = [*sample.prompt_ids, *sample.response_ids]
        for k, value in enumerate(sample.info["values"]):
            before = tokens[: len(sample.prompt_ids) + k]
            alone = collate([Row("x", before, [0])])  # what is predicted next is not looked at
            assert value == pytest.approx(float(trainer.forward([alone])[0]["values"][0]), abs=1e-12)
        if sample.finish_reason == "length":
            whole = collate([Row("x", tokens, [0])])
            assert sample.info["last_value"] == pytest.approx(
                float(trainer.forward([whole])[0]["values"][0]), abs=1e-12
            )
        else:
            assert "last_value" not in sample.info


def test_every_rank_gets_the_values_of_its_own_samples() -> None:
    expected = samples()
    add_values(critic(), expected)

    def run(trainer: SmallTrainer, own: list[Sample]) -> dict[str, Any]:
        add_values(trainer, own)
        return {s.id: s.info["values"] for s in own}

    batch = samples()
    for together, parts in ((1, [batch[::2], batch[1::2]]), (2, [batch[:3], batch[3:]]), (1, [batch, []])):
        found: dict[str, Any] = {}
        for _, mine in over_ranks(parts, run, together=together, role="critic"):
            found.update(mine)
        assert found == {s.id: pytest.approx(s.info["values"], abs=1e-12) for s in expected}


def by_hand(batch: list[Sample], returns: dict[str, list[float]]) -> list[torch.Tensor]:
    model = Model(1)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample in batch:
        values = model(collate([Row("x", sample.prompt_ids, sample.response_ids)]))[:, 0]
        total = total + 0.5 * (values - torch.tensor(returns[sample.id], dtype=torch.float64)).square().sum()
        tokens += len(sample.response_ids)
    (total / tokens).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_the_first_update_goes_towards_the_returns() -> None:
    """With lambda = gamma = 1 every return is the reward; at its own values the clip is not felt."""
    batch, trainer = samples(), critic()
    add_values(trainer, batch)
    metrics = ValueUpdate(trainer, recipe(Ppo))(batch)
    returns = {s.id: [float(s.reward or 0.0)] * len(s.response_ids) for s in batch}
    assert equal(trainer.gradients, [by_hand(batch, returns)])
    flat = [(r, v) for s in batch for r, v in zip(returns[s.id], s.info["values"], strict=True)]
    mean = sum(r for r, _ in flat) / len(flat)
    left = [r - v for r, v in flat]
    off = sum(left) / len(left)
    spread = sum((r - mean) ** 2 for r, _ in flat)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - sum((e - off) ** 2 for e in left) / spread)
    assert metrics["critic/return"] == pytest.approx(mean)
    assert metrics["critic/loss"] == pytest.approx(sum(e**2 for e in left) / len(left) / 2)
    assert metrics["critic/error"] == pytest.approx((sum(e**2 for e in left) / len(left)) ** 0.5)
    assert metrics["critic/clipped"] == 0.0


def test_a_response_that_was_cut_off_is_bootstrapped_when_told() -> None:
    batch = [s for s in samples() if s.finish_reason == "length"][:1]
    for bootstrap, target in ((False, 1.0), (True, 1.0 + 0.5)):
        batch[0].reward, batch[0].info = 1.0, {"values": [0.25], "last_value": 0.5}
        trainer = critic()
        ValueUpdate(trainer, recipe(Ppo, bootstrap_truncated=bootstrap, value_clip=None))(batch)
        assert equal(trainer.gradients, [by_hand(batch, {batch[0].id: [target]})])


def test_values_may_move_by_the_clip() -> None:
    batch = samples()
    for sample in batch:  # far from what the model says: the clipped loss is the larger one, without gradient
        sample.reward, sample.info["values"] = 9.0, [5.0] * len(sample.response_ids)
    trainer = critic()
    metrics = ValueUpdate(trainer, recipe(Ppo, value_clip=20.0))(batch)
    assert metrics["critic/clipped"] == 0.0 and metrics["critic/grad_norm"] > 0.0
    for sample in batch:
        sample.reward, sample.info["values"] = -9.0, [5.0] * len(sample.response_ids)
    bound = critic()
    metrics = ValueUpdate(bound, recipe(Ppo, value_clip=0.2))(batch)
    assert metrics["critic/clipped"] == 1.0 and metrics["critic/grad_norm"] == 0.0


@pytest.mark.parametrize("cfg", [recipe(Ppo, value_loss="huber"), recipe(Ppo, minibatches=2, epochs=2, lam=0.9)])
def test_ranks_replicas_and_cuts_give_the_same_gradient(cfg: Any) -> None:
    def batch() -> list[Sample]:
        made = samples()
        add_values(critic(), made)
        return made

    one = critic()
    expected = ValueUpdate(one, cfg, seed=3)(batch())
    for together, tokens, parts in (
        (1, 10_000, [batch()]),
        (1, 40, [batch()[::2], batch()[1::2]]),
        (2, 40, [batch()[:5], batch()[5:9], [], batch()[9:]]),
    ):
        for trainer, found in over_ranks(
            parts, lambda t, own: ValueUpdate(t, cfg, seed=3)(own), together=together, role="critic", tokens=tokens
        ):
            assert found == pytest.approx(expected, abs=1e-9)
            assert equal(trainer.gradients, one.gradients)


def test_several_updates_learn_the_returns() -> None:
    trainer, made, explained = critic(), None, []
    for _ in range(60):
        batch = samples(reward=lambda g, i: float(g % 2))
        add_values(trainer, batch)
        made = made or ValueUpdate(trainer, recipe(Ppo, value_clip=None))
        explained.append(made(batch)["critic/explained_variance"])
    assert explained[0] < 0.2 and explained[-1] > 0.6


def test_a_step_without_samples_does_nothing() -> None:
    trainer = critic()
    assert ValueUpdate(trainer, recipe(Ppo))([]) == {}
    assert not trainer.steps
