"""The policy update: its gradient by hand, and that it depends neither on ranks nor on how batches are cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainer import Model, ReferenceTrainer, SmallTrainer, World, equal, over_ranks, recipe, samples

from rlinf_algos import preset
from rlinf_core.config import Config
from rlinf_core.errors import ConfigError, NonFiniteError
from rlinf_core.types import ParallelInfo, Sample, VocabShard
from rlinf_reasoning.batch import Row, TokenHead, collate
from rlinf_reasoning.conf import AsyncPpo, Dapo, Ppo
from rlinf_reasoning.losses import preset_of
from rlinf_reasoning.training import PolicyUpdate, Reference
from rlinf_reasoning.training import reference as reference_module
from rlinf_reasoning.training.minibatches import deal_groups


def update(cfg: Config, batch: list[Sample], **how: Any) -> tuple[SmallTrainer, dict[str, float]]:
    """One rank, the whole batch."""
    trainer = SmallTrainer(**how)
    return trainer, PolicyUpdate(trainer, cfg, seed=3)(batch)


def with_values(batch: list[Sample], value: float | None = None) -> list[Sample]:
    """The samples as a critic hands them on; values that differ, or all ``value``."""
    for n, sample in enumerate(batch):
        size = len(sample.response_ids)
        sample.info["values"] = [0.1 * ((n + k) % 5) if value is None else value for k in range(size)]
        sample.info["last_value"] = 0.25
    return batch


def by_hand(advantages: dict[str, list[float]], batch: list[Sample]) -> list[torch.Tensor]:
    """Gradient of the plain policy gradient, a mean over tokens, one sequence at a time."""
    model = Model()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample in batch:
        packed = collate([Row("x", sample.prompt_ids, sample.response_ids)])
        logprobs = TokenHead()(model(packed), packed, VocabShard())["logprobs"]
        total = total - (torch.tensor(advantages[sample.id], dtype=torch.float64) * logprobs).sum()
        tokens += len(sample.response_ids)
    (total / tokens).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


WAYS: dict[str, Any] = {
    "grpo": recipe(),
    "three minibatches": recipe(minibatches=3),
    "two epochs, recomputed, truncated": recipe(
        minibatches=2, epochs=2, old_logprobs="recompute", correction="tis", correction_cap=1.1
    ),
    "masked, entropy": recipe(
        minibatches=2, old_logprobs="recompute", correction="mask", correction_cap=1.2, entropy_coef=0.1
    ),
    "sequence means": recipe(aggregation="sequence_mean_of_token_means", minibatches=2),
    "constant": recipe(aggregation="constant", divisor=2.0, normalise_std=False),
    "gspo": recipe(loss="gspo", minibatches=2),
    "dapo with filter": recipe(Dapo, overlong_cache=1, overlong_filter=True, minibatches=2),
    "decoupled": recipe(AsyncPpo, minibatches=2),
    "ppo": recipe(Ppo, minibatches=2, lam=0.9, gamma=0.95, bootstrap_truncated=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_replicas_and_cuts_give_the_same_gradient(way: str) -> None:
    cfg = WAYS[way]

    def batch() -> list[Sample]:
        return with_values(samples(drift=0.2))

    one, expected = update(cfg, batch())
    assert len(one.steps) == min(cfg.algorithm.minibatches * cfg.algorithm.epochs, 6)
    assert any(bool(g.abs().max() > 1e-6) for g in one.gradients[-1])
    wide, metrics = update(cfg, batch(), tokens=10_000)
    assert equal(wide.gradients, one.gradients) and metrics == pytest.approx(expected, abs=1e-9)
    for together, parts in (
        (1, [batch()[::2], batch()[1::2]]),  # groups cut in two
        (1, [batch()[::-1], []]),  # a rank without any sample
        (2, [batch()[:5], batch()[5:9], batch()[9:], []]),  # replicas of two ranks
    ):
        for trainer, found in over_ranks(parts, lambda t, own: PolicyUpdate(t, cfg, seed=3)(own), together=together):
            assert found == pytest.approx(expected, abs=1e-9)
            assert equal(trainer.gradients, one.gradients)


@pytest.mark.parametrize("way", ["grpo", "constant"])
def test_portions_of_whole_groups_give_the_same_gradient(way: str) -> None:
    cfg = WAYS[way]
    one, expected = update(cfg, samples(drift=0.2))
    for size in (4, 8, 12):
        trainer, batch = SmallTrainer(), samples(drift=0.2)
        streamed = PolicyUpdate(trainer, cfg, seed=3)
        for start in range(0, len(batch), size):
            streamed.add(batch[start : start + size])
        assert streamed.finish() == pytest.approx(expected, abs=1e-9)
        assert equal(trainer.gradients, one.gradients)


def test_the_gradient_is_the_policy_gradient_of_the_advantages() -> None:
    batch = samples()
    trainer, _ = update(recipe(), batch)
    advantages = {s.id: [s.info["advantage"]] * len(s.response_ids) for s in batch}
    assert equal(trainer.gradients, [by_hand(advantages, batch)])


def test_dapo_without_filter_and_with_equal_clips_is_grpo_by_tokens() -> None:
    grpo, _ = update(recipe(minibatches=3), samples(drift=0.3))
    dapo, _ = update(recipe(Dapo, minibatches=3, clip_high=0.2), samples(drift=0.3))
    other, _ = update(recipe(Dapo, minibatches=3), samples(drift=0.3))
    assert equal(dapo.gradients, grpo.gradients)
    assert not equal(other.gradients, grpo.gradients)


def test_ppo_without_values_is_reinforce_with_reward_to_go() -> None:
    batch = with_values(samples(), value=0.0)
    trainer, _ = update(recipe(Ppo, lam=1.0, gamma=1.0, whiten=False), batch)
    reward_to_go = {s.id: [float(s.reward or 0.0)] * len(s.response_ids) for s in batch}
    assert equal(trainer.gradients, [by_hand(reward_to_go, batch)])


def test_gae_by_hand() -> None:
    """Two tokens, gamma 0.5, lambda 0.5: the last advantage r - V1, the first 0.5 V1 - V0 + 0.25 (r - V1)."""
    batch = [s for s in samples() if len(s.response_ids) == 2][:2]
    for sample, reward in zip(batch, (1.0, 0.0), strict=True):
        sample.reward, sample.info["values"] = reward, [0.25, 0.5]
    trainer, _ = update(recipe(Ppo, gamma=0.5, lam=0.5, whiten=False), batch)
    expected = {s.id: [0.25 - 0.25 + 0.25 * (r - 0.5), r - 0.5] for s, r in zip(batch, (1.0, 0.0), strict=True)}
    assert equal(trainer.gradients, [by_hand(expected, batch)])
    assert batch[0].info["advantage"] == pytest.approx((0.125 + 0.5) / 2)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_all_ranks() -> None:
    cfg = recipe(Ppo)
    batch = with_values(samples())
    trainer, _ = update(cfg, batch)
    plain: dict[str, list[float]] = {}
    for sample in batch:  # lambda = gamma = 1: what is left of the reward
        plain[sample.id] = [float(sample.reward or 0.0) - value for value in sample.info["values"]]
    flat = [v for values in plain.values() for v in values]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((v - mean) ** 2 for v in flat) / len(flat))
    white = {name: [(v - mean) / std for v in values] for name, values in plain.items()}
    assert equal(trainer.gradients, [by_hand(white, batch)], atol=1e-7)


def test_a_sample_without_values_is_named() -> None:
    with pytest.raises(Exception, match=r"sample train/0/p0/0 has 0 values for 1 response tokens: the critic's value"):
        update(recipe(Ppo), samples())


def test_the_overlong_penalty_counts_and_the_filter_leaves_out() -> None:
    """The limit is two tokens and the cache one: a response of two loses 1 of its reward."""
    penalised, metrics = update(recipe(Dapo, overlong_cache=1), samples())
    changed = samples()
    for sample in changed:
        sample.reward = float(sample.reward or 0.0) - (len(sample.response_ids) == 2)
    plain, _ = update(recipe(Dapo), changed)
    assert equal(penalised.gradients, plain.gradients)
    assert metrics["reward/overlong_penalty"] == pytest.approx(-0.5)
    assert metrics["reward/mean"] == pytest.approx(1 / 3), "the verifier's reward is reported as it is"

    filtered, metrics = update(recipe(Dapo, overlong_filter=True), samples())
    whole, _ = update(recipe(Dapo), [s for s in samples() if s.finish_reason == "stop"])
    assert equal(filtered.gradients, whole.gradients)
    assert metrics["response/filtered"] == pytest.approx(0.5)
    nothing, metrics = update(recipe(Dapo, overlong_filter=True), [s for s in samples() if s.finish_reason != "stop"])
    assert not nothing.steps and "loss" not in metrics and metrics["response/filtered"] == 1.0


def test_the_mismatch_of_trainer_and_engine_is_measured_before_the_update() -> None:
    batch = samples(drift=0.2)
    exact = samples()
    gaps = [abs(a - b) for s, e in zip(batch, exact, strict=True) for a, b in zip(s.logprobs, e.logprobs, strict=True)]
    for cfg in (recipe(), recipe(old_logprobs="recompute", minibatches=3, epochs=2)):
        _, metrics = update(cfg, samples(drift=0.2))
        assert metrics["policy/engine_gap"] == pytest.approx(sum(gaps) / len(gaps))
        assert metrics["policy/engine_gap_max"] == pytest.approx(max(gaps))
        assert 0.9 < metrics["policy/engine_ess"] < 1.0
        assert metrics["policy/engine_kl"] > 0.001
    _, metrics = update(recipe(), exact)
    assert metrics["policy/engine_gap_max"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["policy/engine_ess"] == pytest.approx(1.0)


def test_recomputed_log_probs_leave_the_engine_out_of_the_ratio() -> None:
    _, against_engine = update(recipe(), samples(drift=0.2))
    trainer, against_trainer = update(recipe(old_logprobs="recompute"), samples(drift=0.2))
    assert against_engine["policy/ratio"] != pytest.approx(1.0, abs=1e-3)
    assert against_trainer["policy/ratio"] == pytest.approx(1.0)
    assert trainer.forwards == 0, "with one optimizer step the old log-probs are the current ones"
    exact, _ = update(recipe(), samples())
    assert equal(trainer.gradients, exact.gradients)


def test_truncated_importance_sampling_by_hand() -> None:
    batch, cap = samples(drift=0.4), 1.1
    cfg = recipe(old_logprobs="recompute", correction="tis", correction_cap=cap)
    trainer, metrics = update(cfg, batch)
    exact = samples()
    weighted = {}
    for sample, one in zip(batch, exact, strict=True):
        weights = [min(math.exp(a - b), cap) for a, b in zip(one.logprobs, sample.logprobs, strict=True)]
        weighted[sample.id] = [sample.info["advantage"] * w for w in weights]
    assert equal(trainer.gradients, [by_hand(weighted, batch)])
    assert metrics["policy/correction_clipped"] > 0.0


def test_decoupled_ppo_weighs_stale_samples() -> None:
    batch = samples(drift=0.4)
    trainer, metrics = update(recipe(AsyncPpo, behaviour_cap=1.1), batch)
    weighted = {}
    for sample, one in zip(batch, samples(), strict=True):
        weights = [min(math.exp(a - b), 1.1) for a, b in zip(one.logprobs, sample.logprobs, strict=True)]
        weighted[sample.id] = [sample.info["advantage"] * w for w in weights]
    assert equal(trainer.gradients, [by_hand(weighted, batch)])
    assert metrics["policy/behaviour_capped"] > 0.0
    fresh, _ = update(recipe(AsyncPpo), samples())
    plain, _ = update(recipe(), samples())
    assert equal(fresh.gradients, plain.gradients), "with equal policies it is PPO"


def test_staleness_is_counted_in_versions() -> None:
    batch = samples()
    for sample in batch[:12]:
        sample.versions = [3] * len(sample.response_ids)
    for sample in batch[12:]:
        sample.versions = [5] * len(sample.response_ids)
    one, two = batch[::2], batch[1::2]

    def run(trainer: SmallTrainer, own: list[Sample]) -> dict[str, float]:
        found = PolicyUpdate(trainer, recipe())
        found.add(own)
        return found.finish(version=5)

    tokens = [v for s in batch for v in s.versions]
    for _, metrics in over_ranks([one, two], run):
        assert metrics["staleness/max"] == 2.0
        assert metrics["staleness/mean"] == pytest.approx(sum(5 - v for v in tokens) / len(tokens))


def test_the_entropy_bonus_raises_entropy() -> None:
    def entropy_after(coefficient: float) -> float:
        trainer, cfg = SmallTrainer(), recipe(entropy_coef=coefficient)
        made = PolicyUpdate(trainer, cfg)
        for _ in range(5):
            metrics = made(samples(reward=lambda g, i: float(i == 0)))
        return metrics["policy/entropy"]

    assert entropy_after(0.5) > entropy_after(0.0)


def test_epochs_go_over_the_batch_again_in_another_order() -> None:
    ids = [f"train/0/p{g}/{i}" for g in range(6) for i in range(4)]
    dealt = list(deal_groups(ids, 2, 3, seed=1))
    assert [epoch for epoch, _ in dealt] == [0, 0, 1, 1, 2, 2]
    everything = {f"train/0/p{g}" for g in range(6)}
    for epoch in range(3):
        first, second = (groups for e, groups in dealt if e == epoch)
        assert first | second == everything and not first & second
    assert dealt[0][1] == {"train/0/p0", "train/0/p1", "train/0/p2"}, "the first one in the order of the ids"
    assert len({frozenset(dealt[2 * e][1]) for e in range(3)}) > 1
    assert dealt == list(deal_groups(reversed(ids), 2, 3, seed=1))
    assert len(list(deal_groups(ids[:4], 4, 1, seed=1))) == 1, "fewer groups make fewer steps"


def test_a_warm_up_of_the_critic_leaves_the_policy() -> None:
    trainer = SmallTrainer()
    made = PolicyUpdate(trainer, recipe(Ppo))
    made.add(with_values(samples()), learn=False)
    metrics = made.finish()
    assert not trainer.steps and "loss" not in metrics and metrics["reward/mean"] == pytest.approx(1 / 3)


def test_metrics_say_what_happened() -> None:
    batch = samples()
    _, metrics = update(recipe(), batch)
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["samples"] == 24
    assert metrics["response/tokens"] == sum(len(s.response_ids) for s in batch)
    assert metrics["response/truncated"] == pytest.approx(0.5)
    assert metrics["policy/engine_kl"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["policy/ratio"] == pytest.approx(1.0)
    assert metrics["policy/clipped"] == 0.0
    assert metrics["groups/without_signal"] == 0.0
    assert metrics["grad_norm"] > 0.0


def test_equal_rewards_give_zero_gradient_and_are_counted() -> None:
    _, metrics = update(recipe(), samples(reward=lambda g, i: 1.0))
    assert metrics["groups/without_signal"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert metrics["loss"] == 0.0
    _, half = update(recipe(), samples(reward=lambda g, i: float(g > 2 and i == 0)))
    assert half["groups/without_signal"] == 0.5


def test_a_step_without_samples_does_nothing() -> None:
    trainer, metrics = update(recipe(minibatches=2), [])
    assert metrics["samples"] == 0.0
    assert not trainer.steps


def test_several_steps_raise_the_rewarded_responses() -> None:
    trainer, batch = SmallTrainer(), samples()
    good = [Row(s.id, s.prompt_ids, s.response_ids) for s in batch if s.reward]

    def mean() -> float:
        return float(trainer.forward([collate(good)])[0]["logprobs"].mean())

    before, made = mean(), PolicyUpdate(trainer, recipe(minibatches=2))
    for _ in range(5):
        made(batch)
    assert mean() > before


def test_not_finite_numbers_stop_the_update() -> None:
    trainer = SmallTrainer()
    torch.nn.init.constant_(trainer.model.out, math.nan)
    with pytest.raises(NonFiniteError):
        PolicyUpdate(trainer, recipe())(samples())


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = type("Registry", (), {"__init__": lambda self, group: None, "load": lambda self, name: ReferenceTrainer})
    monkeypatch.setattr(reference_module, "Registry", loaded)


def frozen(cfg: Config, trainer: SmallTrainer, tmp_path: Path) -> Reference:
    trainer.export(tmp_path / "reference")
    return Reference(cfg, tmp_path / "reference", ParallelInfo(), seed=0)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_to_the_frozen_reference_pulls_back(registry: None, tmp_path: Path, kind: str) -> None:
    cfg, batch, trainer = recipe(kl_coef=0.5, kl_kind=kind), samples(), SmallTrainer()
    made = PolicyUpdate(trainer, cfg, 0, frozen(cfg, trainer, tmp_path))
    assert made(batch)["policy/reference_kl"] == pytest.approx(0.0, abs=1e-12)
    free, _ = update(recipe(), batch)
    assert equal(trainer.gradients[:1], free.gradients[:1], atol=1e-9), "at the reference itself it has no gradient"
    assert made(batch)["policy/reference_kl"] > 0.0


def test_kl_in_the_reward_is_taken_off_it(registry: None, tmp_path: Path) -> None:
    """After one step policy and reference differ: the sum of k1 over a response comes off its reward."""
    cfg = recipe(kl_coef=0.5, kl_kind="k1", kl_in="reward")
    trainer = SmallTrainer()
    made = PolicyUpdate(trainer, cfg, 0, frozen(cfg, trainer, tmp_path))
    made(samples())
    current = SmallTrainer()
    current.model.load_state_dict(trainer.model.state_dict())
    batch = samples()
    for sample in batch:
        row = collate([Row(sample.id, sample.prompt_ids, sample.response_ids)])
        kl = current.forward([row])[0]["logprobs"] - SmallTrainer().forward([row])[0]["logprobs"]
        sample.reward = float(sample.reward or 0.0) - 0.5 * float(kl.sum())
    PolicyUpdate(current, recipe())(batch)
    made(samples())
    assert equal(trainer.gradients[1:], current.gradients, atol=1e-10)


def test_the_algorithm_node_is_the_paper_s_preset() -> None:
    dapo, paper = preset_of(recipe(Dapo).algorithm), preset("dapo")
    assert dapo.loss == paper.loss and dapo.advantage == paper.advantage
    assert {**dapo.loss_options} == {
        "aggregation": "token_mean",
        "divisor": None,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
    }
    assert preset_of(recipe(AsyncPpo).algorithm).loss == preset("async_ppo").loss
    ppo = preset_of(recipe(Ppo).algorithm)
    assert ppo.advantage_options == {k: v for k, v in preset("ppo_llm").advantage_options.items() if k != "whiten"}
    with pytest.raises(ConfigError, match=r"algorithm \(grpo\).*k must lie in"):
        preset_of(recipe(advantage="pass_at_k", advantage_options={"k": 0}).algorithm)
    passes = preset_of(recipe(advantage="pass_at_k", advantage_options={"k": 2}).algorithm)
    assert passes.advantage_options == {"k": 2}


def test_a_world_of_two_is_one_replica() -> None:
    world = World(2, together=2)
    found = over_ranks([samples()[:2], samples()[2:4]], lambda t, own: [s.id for s in t.share(own)], together=2)
    assert world.together == 2 and found[0][1] == found[1][1] == [s.id for s in samples()[:4]]
