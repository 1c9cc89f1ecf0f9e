"""The update over a torch loop: ranks and micro-batches change nothing, checkpoints go on, faults are named."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from learning import PlainTrainer, batches, config, grpo, made, ppo, rollout, trained

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_core.types import Trajectory
from rlinf_embodied.training import load_update

WHOLE = {"minibatch_size": 10_000, "epochs": 1}


ALGORITHMS = {
    "ppo": (ppo(scale_rewards=True, entropy_coef=0.01), {"normalise_observations": True}),
    "chunks": (ppo(reward_level="chunk", logprob_level="token"), {"chunk": 3, "value_level": "chunk"}),
    "by episode": (ppo(length_normalised=True, value_clip=0.2), {"chunk": 2}),
    "grpo": (grpo(group_size=3, success_filter=True), {"value_level": "none", "chunk": 2}),
    "early stop": (ppo(target_kl=1e-4, epochs=5), {"shared": True}),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("ranks", "limit", "deal"),
    [
        (1, 7, lambda i, ranks: i % ranks),
        (2, 10_000, lambda i, ranks: i % ranks),
        (3, 11, lambda i, ranks: min(i // 3, 1)),  # the last rank gets nothing
    ],
)
def test_ranks_and_micro_batches_change_nothing(name, ranks, limit, deal):
    algorithm, model = ALGORITHMS[name]
    cfg = config(algorithm, **model)
    steps = batches(cfg)
    alone, others = trained(cfg, steps), trained(cfg, steps, ranks=ranks, limit=limit, deal=deal)
    for one, two in zip(alone[0], others[0], strict=True):
        assert two == pytest.approx(one, rel=1e-9, abs=1e-9)
    assert len(alone[1]) == len(others[1])
    for x, y in zip(alone[1], others[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    for key, value in alone[2].items():
        torch.testing.assert_close(value, others[2][key], rtol=1e-9, atol=1e-9)
    assert others[3] == alone[3]  # what a checkpoint keeps is equal to the last bit


def test_steps_of_two_ranks_stay_together():
    cfg = config(ppo(minibatch_size=12, epochs=2))
    steps = batches(cfg, 6)
    alone, others = trained(cfg, steps), trained(cfg, steps, ranks=2)
    for key, value in alone[2].items():
        torch.testing.assert_close(value, others[2][key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_state_is_plain_and_goes_on(name):
    algorithm, model = ALGORITHMS[name]
    cfg = config(algorithm, **model)
    steps = batches(cfg, 4)
    policy = made(cfg)
    trainer = PlainTrainer(policy)
    update = load_update(cfg, trainer, policy, seed=3)
    whole = [update(part, number) for number, part in enumerate(steps)]
    policy = made(cfg)
    trainer = PlainTrainer(policy)
    update = load_update(cfg, trainer, policy, seed=3)
    first = [update(part, number) for number, part in enumerate(steps[:2])]
    state = json.loads(json.dumps(update.state()))
    update = load_update(cfg, trainer, policy, seed=3)
    update.restore(state)
    rest = [update(part, 2 + number) for number, part in enumerate(steps[2:])]
    assert first + rest == whole


def test_running_statistics_are_updated_after_the_update():
    cfg = config(ppo(**WHOLE), normalise_observations=True)
    steps = batches(cfg, 1)
    _, _, weights, _ = trained(cfg, steps, ranks=2)
    everything = np.concatenate([t.arrays["obs/state"] for t in steps[0]]).astype(np.float64)
    np.testing.assert_allclose(weights["norm.mean"], everything.mean(0), rtol=1e-12)
    _, gradients, _, _ = trained(cfg, steps)
    _, plain, _, _ = trained(config(ppo(**WHOLE)), steps)
    torch.testing.assert_close(gradients[0], plain[0])


def test_without_anything_to_train_on_nothing_changes():
    cfg = config(ppo())
    before = made(cfg).state_dict()
    metrics, gradients, weights, state = trained(cfg, [[], []], ranks=2)
    assert not gradients
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    assert [m["nothing_to_train_on"] for m in metrics] == [1.0, 2.0]
    assert metrics[0]["decisions"] == metrics[0]["optimizer_steps"] == metrics[0]["episodes"] == 0.0
    assert state["idle"] == 2
    idle = rollout(made(cfg))
    for t in idle:
        t.arrays["mask"][:] = False
    metrics, gradients, _, _ = trained(cfg, [idle])
    assert not gradients
    assert metrics[0]["nothing_to_train_on"] == 1.0


@pytest.mark.parametrize("name", ["rewards", "values", "logprobs", "obs/state", "final_values", "last_values"])
def test_numbers_that_are_none_are_named_by_slot(name):
    cfg = config(ppo())
    trajectories = rollout(made(cfg))
    arrays = trajectories[2].arrays
    if name == "final_values":
        arrays["truncated"][4, 0] = True
    arrays[name][0 if name == "last_values" else 4] = math.nan
    with pytest.raises(NonFiniteError, match=r"in 1 slots: 000000/00002 \(environment 2\)"):
        trained(cfg, [trajectories])


def test_numbers_of_steps_that_were_not_made_are_not_read():
    cfg = config(ppo(), chunk=3)
    steps = [rollout(made(cfg), ends=0.4)]
    expected = trained(cfg, steps)
    for t in steps[0]:
        idle = ~t.arrays["mask"]
        for name in ("rewards", "values", "final_values"):
            t.arrays[name][idle] = math.nan
        t.arrays["logprobs"][idle] = math.inf
        t.arrays["terminated"][idle] = True
    found = trained(cfg, steps)
    assert found[0] == expected[0]
    assert all(torch.equal(x, y) for x, y in zip(found[1], expected[1], strict=True))


def test_micro_batches_name_their_slots():
    cfg = config(ppo())
    policy = made(cfg)
    trainer = PlainTrainer(policy, limit=8)
    load_update(cfg, trainer, policy, seed=0)(rollout(policy), 0)
    assert all(set(batch["ids"]) <= {f"000000/{i:05d}" for i in range(6)} for batch in trainer.batches)
    assert len(trainer.batches[0]["ids"]) >= 1
    assert trainer.batches[0]["ids"][0] in list(trainer.batches[0]["ids"])
    assert all(len(batch["taken"]) <= 4 for batch in trainer.batches)  # two numbers each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("values"), "no array 'values'"),
        (lambda a: a.update(rewards=np.zeros((10, 2))), r"'rewards' has shape \(10, 2\).*\[T, 1\]"),
    ],
)
def test_trajectories_of_another_make_are_refused(change, message):
    cfg = config(ppo())
    trajectories = rollout(made(cfg))
    change(trajectories[0].arrays)
    with pytest.raises(RLinfError, match=f"slot 000000/00000: .*{message}"):
        trained(cfg, [trajectories])


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("gspo", {}),
        ("ppo", {"aggregation": "sequence_mean_of_token_sums"}),
        ("ppo", {"aggregation": "constant", "divisor": 4.0}),
        ("policy_gradient", {}),
    ],
)
def test_other_losses_are_divided_by_what_they_count(loss, options):
    keys = {"loss": loss, "loss_options": options, "entropy_coef": 0.1, "logprob_level": "token"}
    cfg = config(ppo(**keys), chunk=2)
    steps = batches(cfg, 2)
    alone, others = trained(cfg, steps), trained(cfg, steps, ranks=2, limit=9)
    for x, y in zip(alone[1], others[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    # What is counted does not depend on how many tokens a decision has, but on how many decisions there are.
    doubled = trained(config(ppo(**keys, minibatch_size=10_000, epochs=1), chunk=2), [steps[0] + again(steps[0])])
    once = trained(config(ppo(**keys, minibatch_size=10_000, epochs=1), chunk=2), [steps[0]])
    torch.testing.assert_close(doubled[1][0], once[1][0], rtol=1e-9, atol=1e-9)


def again(trajectories: list[Trajectory]) -> list[Trajectory]:
    """The same under other names."""
    return [Trajectory(f"{t.id}+", t.arrays, t.info) for t in trajectories]


def test_a_loss_that_counts_otherwise_is_refused(monkeypatch):
    from rlinf_algos import LossSum
    from rlinf_algos.composition import _plain
    from rlinf_embodied.training import losses

    def by_slots(inputs: Any) -> LossSum:
        return LossSum(inputs.logprobs.sum(), 1.0, {"tokens": inputs.mask.sum()})

    monkeypatch.setattr(losses, "_chosen", lambda algorithm: (_plain(by_slots), {}))
    cfg = config(ppo())
    with pytest.raises(ConfigError, match="algorithm.loss: it counts otherwise"):
        trained(cfg, batches(cfg, 1))


@pytest.mark.parametrize("level", ["chunk", "none"])
def test_values_of_another_level_are_refused(level):
    cfg = config(ppo(), value_level=level)
    policy = made(cfg)
    with pytest.raises(ConfigError, match=f"algorithm.reward_level: action, but the policy mlp .* level {level}"):
        load_update(cfg, PlainTrainer(policy), policy, seed=0)
