"""The update over a torch loop, against the formulas."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from learning import DISCRETE, PlainTrainer, batches, config, made, ppo, rollout, trained

from rlinf_core.types import Trajectory
from rlinf_embodied.episodes import summarise
from rlinf_embodied.policies.mlp import MlpPolicy
from rlinf_embodied.training import load_update

WHOLE = {"minibatch_size": 10_000, "epochs": 1}


def by_hand(cfg: Any, trajectories: list[Trajectory], policy: MlpPolicy) -> dict[str, Any]:
    """Advantages and returns of actions by a loop over the steps of each slot, before whitening."""
    algorithm = cfg.algorithm
    advantages, returns = {}, {}
    for t in trajectories:
        a = t.arrays
        places = [(i, c) for i in range(len(a["mask"])) for c in range(policy.chunk) if a["mask"][i, c]]
        after_advantage, after_value = 0.0, float(a["last_values"][0])
        for i, c in reversed(places):
            if a["terminated"][i, c]:
                after_advantage, after_value = 0.0, 0.0
            elif a["truncated"][i, c]:
                after_advantage, after_value = 0.0, float(a["final_values"][i, c])
            value = float(a["values"][i, c])
            delta = a["rewards"][i, c] + algorithm.gamma * after_value - value
            after_advantage = delta + algorithm.gamma * algorithm.lam * after_advantage
            advantages[t.id, i, c], returns[t.id, i, c] = after_advantage, after_advantage + value
            after_value = value
    return {"advantages": advantages, "returns": returns}


@pytest.mark.parametrize("chunk", [1, 3])
def test_gradient_of_ppo_against_the_formulas(chunk):
    cfg = config(ppo(**WHOLE, entropy_coef=0.1, value_clip=0.5, gamma=0.9, lam=0.8), chunk=chunk)
    policy = made(cfg)
    trajectories = rollout(policy, decisions=7)
    metrics, gradients, _, _ = trained(cfg, [trajectories])
    expected = by_hand(cfg, trajectories, policy)
    mean, std = np.mean(list(expected["advantages"].values())), np.std(list(expected["advantages"].values()))
    surrogate = value = entropy = torch.zeros(())
    clipped = kl = 0.0
    for t in trajectories:
        a = t.arrays
        found = policy.evaluate(policy.prepare({"state": a["obs/state"]}), torch.from_numpy(a["taken"]))
        for (name, i, c), advantage in expected["advantages"].items():
            if name != t.id:
                continue
            log_ratio = found["logprobs"][i, c].sum() - a["logprobs"][i, c].sum()
            ratio, whitened = log_ratio.exp(), (advantage - mean) / (std + 1e-8)
            surrogate = surrogate - torch.minimum(ratio * whitened, ratio.clamp(0.8, 1.2) * whitened)
            clipped += float(ratio.detach() > 1.2 if whitened > 0.0 else ratio.detach() < 0.8)
            kl += float((ratio - 1.0 - log_ratio).detach())
            old, target, v = a["values"][i, c], expected["returns"][t.id, i, c], found["values"][i, c]
            bounded = old + (v - old).clamp(-0.5, 0.5)
            value = value + 0.5 * torch.maximum((v - target) ** 2, (bounded - target) ** 2)
            entropy = entropy + found["entropy"][i, c].sum()
    count = len(expected["advantages"])
    loss = (surrogate + 0.5 * value - 0.1 * entropy) / count
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    torch.testing.assert_close(gradients[0], gradient, rtol=1e-9, atol=1e-12)
    (found,) = metrics
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert found["policy/loss"] == pytest.approx(float(surrogate.detach()) / count, rel=1e-9)
    assert found["critic/loss"] == pytest.approx(float(value.detach()) / count, rel=1e-9)
    assert found["policy/entropy"] == pytest.approx(float(entropy.detach()) / count, rel=1e-9)
    assert found["policy/clipped"] == pytest.approx(clipped / count)
    assert found["policy/approx_kl"] == pytest.approx(kl / count, rel=1e-9)
    returns = np.array(list(expected["returns"].values()))
    values = returns - np.array(list(expected["advantages"].values()))
    assert found["critic/return"] == pytest.approx(returns.mean(), rel=1e-9)
    assert found["critic/value"] == pytest.approx(values.mean(), rel=1e-9)
    assert found["critic/explained_variance"] == pytest.approx(1 - (returns - values).var() / returns.var(), rel=1e-9)
    assert found["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-9)
    episodes = [e for t in trajectories for e in t.info["episodes"]]
    assert {k: found[k] for k in summarise(episodes)} == pytest.approx(summarise(episodes))
    assert found["decisions"] == sum(t.arrays["mask"].any(1).sum() for t in trajectories)
    assert found["env_steps"] == count
    assert (found["optimizer_steps"], found["epochs"], found["nothing_to_train_on"]) == (1.0, 1.0, 0.0)


def test_a_chunk_of_one_is_an_action():
    """The level is how steps are counted: with one step per decision all levels but the token's say the same."""
    trajectories = rollout(made(config(ppo())))
    one, two = config(ppo()), config(ppo(reward_level="chunk", logprob_level="chunk"), value_level="chunk")
    a, b = (trained(cfg, [trajectories]) for cfg in (one, two))
    assert a[0] == b[0]
    for x, y in zip(a[1], b[1], strict=True):
        assert torch.equal(x, y)
    discrete = rollout(made(config(ppo()), DISCRETE))
    a, b = (trained(cfg, [discrete], spec=DISCRETE) for cfg in (one, config(ppo(logprob_level="token"))))
    assert a[0] == b[0]


def test_a_chunk_is_one_step_with_the_sum_of_its_rewards():
    cfg = config(ppo(**WHOLE, reward_level="chunk", logprob_level="chunk", whiten=False), chunk=3, value_level="chunk")
    policy = made(cfg)
    trajectories = rollout(policy)
    _, gradients, _, _ = trained(cfg, [trajectories])
    surrogate = value = torch.zeros(())
    count = 0
    for t in trajectories:
        a = t.arrays
        found = policy.evaluate(policy.prepare({"state": a["obs/state"]}), torch.from_numpy(a["taken"]))
        after_advantage, after_value = 0.0, float(a["last_values"][0])
        for i in reversed(range(len(a["mask"]))):
            if a["terminated"][i].any():
                after_advantage, after_value = 0.0, 0.0
            elif a["truncated"][i].any():
                after_advantage, after_value = 0.0, float(a["final_values"][i][a["truncated"][i]].item())
            old = float(a["values"][i, 0])
            after_advantage = a["rewards"][i].sum() + 0.99 * after_value - old + 0.99 * 0.95 * after_advantage
            after_value = old
            made_steps = torch.from_numpy(a["mask"][i])
            gap = found["logprobs"][i] - torch.from_numpy(a["logprobs"][i])
            ratio = gap[made_steps].sum().exp()
            surrogate = surrogate - torch.minimum(ratio * after_advantage, ratio.clamp(0.8, 1.2) * after_advantage)
            value = value + 0.5 * (found["values"][i, 0] - after_advantage - old) ** 2
            count += 1
    ((surrogate + 0.5 * value) / count).backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    torch.testing.assert_close(gradients[0], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", ["action", "chunk"])
def test_tokens_have_a_ratio_each_and_the_advantage_of_their_step(level):
    model = {"chunk": 3, "value_level": level}
    cfg = config(ppo(**WHOLE, logprob_level="token", reward_level=level, value_coef=0.0, whiten=False), **model)
    policy = made(cfg)
    trajectories = rollout(policy)
    _, gradients, _, _ = trained(cfg, [trajectories])
    coarse = config(ppo(**WHOLE, reward_level=level, value_coef=0.0, whiten=False), **model)
    _, summed, _, _ = trained(coarse, [trajectories])
    assert not torch.allclose(gradients[0], summed[0])
    # Where nothing has moved, a ratio's gradient is the log-prob's, and those of a step's tokens add up to the step's.
    for t in trajectories:
        found = policy.evaluate(policy.prepare({"state": t.arrays["obs/state"]}), torch.from_numpy(t.arrays["taken"]))
        t.arrays["logprobs"] = found["logprobs"].detach().numpy()
    (_, fine, _, _), (_, summed, _, _) = (trained(c, [trajectories]) for c in (cfg, coarse))
    torch.testing.assert_close(fine[0], summed[0] / policy.tokens, rtol=1e-9, atol=1e-12)


def test_minibatches_are_shuffled_over_all_ranks_by_seed_step_and_epoch():
    cfg = config(ppo(minibatch_size=20, epochs=2))
    policy = made(cfg)
    trainer = PlainTrainer(policy)
    update = load_update(cfg, trainer, policy, seed=3)
    trajectories = rollout(policy)
    total = sum(len(t.arrays["mask"]) for t in trajectories)
    update(trajectories, 0)
    seen = [batch["taken"].flatten().tolist() for batch in trainer.batches]
    assert [len(x) // 2 for x in seen] == [20, 20, 20] * 2
    everything = sorted(x for t in trajectories for x in t.arrays["taken"].flatten().tolist())
    for epoch in (seen[:3], seen[3:]):
        assert sorted(x for part in epoch for x in part) == everything
    assert seen[:3] != seen[3:]
    assert total == 60
    for seed, step, same in ((3, 0, True), (3, 1, False), (4, 0, False)):
        policy = made(cfg)
        other = PlainTrainer(policy)
        load_update(cfg, other, policy, seed=seed)(trajectories, step)
        assert ([b["taken"].flatten().tolist() for b in other.batches] == seen) is same


def test_episodes_of_any_length_weigh_the_same():
    """With one optimizer step, the gradient is that of the mean over episodes of their means."""
    algorithm = {"value_coef": 0.0, "whiten": False}
    cfg = config(ppo(**WHOLE, **algorithm, length_normalised=True))
    policy = made(cfg)
    trajectories = rollout(policy, slots=3)
    _, gradients, _, _ = trained(cfg, [trajectories])
    advantages = by_hand(cfg, trajectories, policy)["advantages"]
    parts: dict[Any, list[torch.Tensor]] = {}
    for t in trajectories:
        a = t.arrays
        found = policy.evaluate(policy.prepare({"state": a["obs/state"]}), torch.from_numpy(a["taken"]))
        episode = 0
        for i in range(len(a["mask"])):
            ratio = (found["logprobs"][i].sum() - a["logprobs"][i].sum()).exp()
            advantage = advantages[t.id, i, 0]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            parts.setdefault((t.id, episode), []).append(loss)
            episode += bool(a["terminated"][i, 0] or a["truncated"][i, 0])
    torch.stack([torch.stack(part).mean() for part in parts.values()]).mean().backward()
    gradient = torch.cat(
        [torch.zeros(p.numel()).double() if p.grad is None else p.grad.flatten() for p in policy.parameters()]
    )
    torch.testing.assert_close(gradients[0], gradient, rtol=1e-9, atol=1e-12)


def test_update_stops_where_the_policy_has_moved_too_far():
    steps = batches(config(ppo()), 1)
    metrics, gradients, _, _ = trained(config(ppo(target_kl=1e-6, epochs=3)), steps)
    assert metrics[0]["stopped_early"] == 1.0
    assert len(gradients) == 1 == metrics[0]["optimizer_steps"]  # behaviour differs before anything is learnt
    metrics, gradients, _, _ = trained(config(ppo(target_kl=1e6, epochs=3)), steps)
    assert metrics[0]["stopped_early"] == 0.0
    assert len(gradients) == 12


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """The state goes on over steps and episodes, against a loop over time."""
    cfg = config(ppo(scale_rewards=True, gamma=0.9, **WHOLE))
    plain = config(ppo(gamma=0.9, **WHOLE))
    steps = batches(cfg, 3)
    seen: list[float] = []
    running: dict[int, float] = {}
    for trajectories in steps:
        for t in trajectories:
            before = running.get(t.info["env"], 0.0)
            for i in range(len(t.arrays["mask"])):
                before = 0.9 * before + t.arrays["rewards"][i, 0]
                seen.append(before)
                if t.arrays["terminated"][i, 0] or t.arrays["truncated"][i, 0]:
                    before = 0.0
            running[t.info["env"]] = before
    metrics, gradients, _, state = trained(cfg, steps)
    assert metrics[-1]["reward/scale"] == pytest.approx(np.std(seen), rel=1e-9)
    assert state["advantages"]["running"] == pytest.approx({str(k): v for k, v in running.items()})
    scaled = copy.deepcopy(steps[:1])
    for t in scaled[0]:
        t.arrays["rewards"] /= metrics[0]["reward/scale"] + 1e-8
    _, expected, _, _ = trained(plain, scaled)
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-9, atol=1e-12)
