"""The update, the warm start and their independence of ranks, with a small trainer of the test's own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_core.config import Config
from rlinf_core.errors import NonFiniteError
from rlinf_core.types import ParallelInfo, Prompt, Sample, StepInfo
from rlinf_reasoning import training
from rlinf_reasoning.batch import TokenForward
from rlinf_reasoning.training import GrpoUpdate, WarmStart, advantages_of

VOCABULARY = 14


class Tokenizer:
    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + "0123456789+=".index(c) for c in text]


class Model(torch.nn.Module):
    """Sees the last four tokens; enough to learn a few answers by heart."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(4, VOCABULARY, 32, generator=generator, dtype=torch.float64) * 0.3)
        self.out = torch.nn.Parameter(torch.randn(32, VOCABULARY, generator=generator, dtype=torch.float64) * 0.1)

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, logits_to_keep: int) -> Any:
        hidden = self.embed[0][input_ids]
        for back in (1, 2, 3):
            shifted = torch.nn.functional.pad(input_ids, (back, 0))[:, : input_ids.shape[1]]
            hidden = hidden + self.embed[back][shifted]
        logits = torch.tanh(hidden) @ self.out
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


class World:
    """Sums over ranks that are threads of the test."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class SmallTrainer:
    """The trainer protocol with SGD on ``Model``."""

    def __init__(self, world: World | None = None, rank: int = 0) -> None:
        self.tokenizer = Tokenizer()
        self.model = Model()
        self.forward = TokenForward()
        self.world = world or World(1)
        self.rank = rank
        self.steps: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []
        self.restart_optimizer(Config({"lr": 0.01}))

    def restart_optimizer(self, cfg: Any) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)

    def logprobs(self, batch: Any) -> Any:
        with torch.no_grad():
            return self.forward(self.model, batch)

    def accumulate(self, batch: Any, loss_fn: Callable[..., Any]) -> tuple[float, float, dict[str, float]]:
        loss, count, metrics = loss_fn(self.forward(self.model, batch), batch)
        if not math.isfinite(float(loss.detach())):
            raise NonFiniteError("loss")
        loss.backward()
        return float(loss.detach()), count, metrics

    def step(self, count: float) -> StepInfo:
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        parts = self.world.gather(self.rank, own)
        summed = [sum(part[i] for part in parts) / count for i in range(len(own))]
        for parameter, gradient in zip(self.model.parameters(), summed, strict=True):
            parameter.grad = gradient.clone()
        self.gradients.append(summed)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append(count)
        return StepInfo(grad_norm=float(sum((g**2).sum() for g in summed)) ** 0.5, lr=0.1)

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for part in self.world.gather(self.rank, dict(values)):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total


def recipe(**algorithm: Any) -> Config:
    settings = {
        "group_size": 4,
        "normalise_std": True,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "kl_kind": "k3",
        "minibatches": 1,
    }
    return Config(
        {
            "algorithm": {**settings, **algorithm},
            "trainer": {"name": "small", "micro_batch_tokens": 40, "lr": 0.05},
            "model": {"path": None},
            "sampling": {"temperature": 1.0},
            "warm_start": {
                "held_out": 4,
                "max_steps": 300,
                "batch_size": 8,
                "target_accuracy": 0.9,
                "check_every": 5,
                "lr": 0.05,
                "lr_warmup_steps": 0,
            },
        }
    )


def samples(groups: int = 6, size: int = 4, reward: Callable[[int, int], float] | None = None) -> list[Sample]:
    trainer = SmallTrainer()
    found = []
    for g in range(groups):
        for i in range(size):
            prompt, response = [2 + g, 12, 3, 13], [2 + (g * 3 + i) % 10, 1][: 1 + (g + i) % 2]
            row = training.Row("x", prompt, response)
            batch = training.collate([row], 0)
            logprobs = training.per_row(trainer.logprobs(batch)["logprobs"], batch["mask"])[0]
            found.append(
                Sample(
                    id=f"train/0/p{g}/{i}",
                    group=f"train/0/p{g}",
                    index=i,
                    group_size=size,
                    prompt_text="",
                    prompt_ids=prompt,
                    response_ids=response,
                    response_text="",
                    logprobs=logprobs,
                    versions=[0] * len(response),
                    finish_reason="stop" if response[-1] == 1 else "length",
                    reward=float((g + i) % 3 == 0) if reward is None else reward(g, i),
                )
            )
    return found


def split_over_ranks(cfg: Config, parts: list[list[Sample]]) -> list[tuple[SmallTrainer, dict[str, float]]]:
    world = World(len(parts))
    found: dict[int, tuple[SmallTrainer, dict[str, float]]] = {}

    def run(rank: int) -> None:
        trainer = SmallTrainer(world, rank)
        metrics = GrpoUpdate(trainer, cfg)(parts[rank])  # type: ignore[arg-type]
        found[rank] = (trainer, metrics)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(len(parts))]


def test_advantages_are_by_group_id() -> None:
    rewards = {"p0/0": 1.0, "p1/0": 5.0, "p0/1": 0.0, "p1/1": 5.0}
    found = advantages_of(rewards, normalise_std=False)
    assert found == {"p0/0": 0.5, "p0/1": -0.5, "p1/0": 0.0, "p1/1": 0.0}
    assert advantages_of({}, normalise_std=True) == {}


@pytest.mark.parametrize("minibatches", [1, 3])
def test_one_rank_or_several_any_split_the_same_update(minibatches: int) -> None:
    cfg, batch = recipe(minibatches=minibatches), samples()
    ((one, expected),) = split_over_ranks(cfg, [batch])
    assert len(one.steps) == minibatches
    splits = ([batch[::2], batch[1::2]], [batch[:5], batch[5:]], [batch[::-1], []])
    for parts in splits:  # groups cut in two, and a rank without any sample
        for trainer, metrics in split_over_ranks(cfg, [list(p) for p in parts]):
            assert metrics == pytest.approx(expected, abs=1e-9)
            for mine, reference in zip(trainer.gradients, one.gradients, strict=True):
                assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(mine, reference, strict=True))


def test_micro_batch_size_does_not_change_the_gradient() -> None:
    batch = samples()
    ((small, _),) = split_over_ranks(recipe(), [batch])
    cfg = Config({**recipe().to_dict(), "trainer": {"name": "small", "micro_batch_tokens": 10_000, "lr": 0.05}})
    ((large, _),) = split_over_ranks(cfg, [batch])
    for a, b in zip(small.gradients[0], large.gradients[0], strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_the_gradient_is_the_policy_gradient_of_the_advantages() -> None:
    batch = samples()
    trainer = SmallTrainer()
    GrpoUpdate(trainer, recipe())(batch)  # type: ignore[arg-type]
    model = Model()
    total, tokens = torch.zeros(()), 0
    for sample in batch:
        part = training.collate([training.Row("x", sample.prompt_ids, sample.response_ids)], 0)
        total = total - sample.info["advantage"] * TokenForward()(model, part)["logprobs"].sum()
        tokens += len(sample.response_ids)
    (total / tokens).backward()
    for parameter, found in zip(model.parameters(), trainer.gradients[0], strict=True):
        assert torch.allclose(parameter.grad, found, atol=1e-12)


def test_metrics_say_what_happened() -> None:
    batch = samples()
    metrics = GrpoUpdate(SmallTrainer(), recipe())(batch)  # type: ignore[arg-type]
    rewards = [s.reward for s in batch]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))  # type: ignore[arg-type]
    assert metrics["samples"] == 24
    assert metrics["response/tokens"] == sum(len(s.response_ids) for s in batch)
    assert metrics["response/truncated"] == pytest.approx(sum(s.finish_reason == "length" for s in batch) / 24)
    assert metrics["policy/engine_kl"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["policy/ratio"] == pytest.approx(1.0)
    assert metrics["policy/clipped"] == 0.0
    assert metrics["groups/without_signal"] == 0.0
    assert metrics["grad_norm"] > 0.0


def test_equal_rewards_give_zero_gradient_and_are_counted() -> None:
    trainer = SmallTrainer()
    metrics = GrpoUpdate(trainer, recipe())(samples(reward=lambda g, i: 1.0))  # type: ignore[arg-type]
    assert metrics["groups/without_signal"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert metrics["loss"] == 0.0
    half = GrpoUpdate(SmallTrainer(), recipe())(samples(reward=lambda g, i: float(g > 2 and i == 0)))  # type: ignore[arg-type]
    assert half["groups/without_signal"] == 0.5


def test_a_step_without_samples_does_nothing() -> None:
    trainer = SmallTrainer()
    metrics = GrpoUpdate(trainer, recipe())([])  # type: ignore[arg-type]
    assert metrics["samples"] == 0.0
    assert not trainer.steps


def test_several_steps_raise_the_rewarded_responses() -> None:
    trainer, cfg = SmallTrainer(), recipe(minibatches=2)
    update = GrpoUpdate(trainer, cfg)  # type: ignore[arg-type]
    batch = samples()
    before = _mean_logprob(trainer, batch)
    for _ in range(5):
        update(batch)
    assert _mean_logprob(trainer, batch) > before


def _mean_logprob(trainer: SmallTrainer, batch: list[Sample]) -> float:
    good = [training.Row(s.id, s.prompt_ids, s.response_ids) for s in batch if s.reward]
    return float(trainer.logprobs(training.collate(good, 0))["logprobs"].mean())


def test_not_finite_numbers_stop_the_update() -> None:
    trainer = SmallTrainer()
    torch.nn.init.constant_(trainer.model.out, math.nan)
    with pytest.raises(NonFiniteError):
        GrpoUpdate(trainer, recipe())(samples())  # type: ignore[arg-type]


def sums(count: int = 60) -> list[Prompt]:
    pairs = [(a, b) for a in range(10) for b in range(10) if a + b < 10][:count]
    return [Prompt(f"warm/p{i}", f"{a}+{b}=", str(a + b)) for i, (a, b) in enumerate(pairs)]


def test_warm_start_stops_at_its_target() -> None:
    trainer, told = SmallTrainer(), []
    cfg = recipe()
    problems = [*sums()[:8], *sums()]  # what is measured is also learnt here: the small model only learns by heart
    metrics = WarmStart(trainer, cfg, ParallelInfo(), seed=0)(problems, told.append)
    assert 0.9 <= metrics["warm_start/accuracy"] <= 1.0
    assert 0 < metrics["warm_start/steps"] < 300
    assert metrics["warm_start/steps"] % 5 == 0
    assert told and "held-out accuracy" in told[-1]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05  # a fresh optimizer for what follows
    assert not trainer.optimizer.state


def test_warm_start_with_two_ranks_is_the_same() -> None:
    cfg = Config({**recipe().to_dict(), "warm_start": {**recipe().warm_start.to_dict(), "max_steps": 7}})

    def run(ranks: int) -> list[torch.Tensor]:
        world = World(ranks)
        trainers = [SmallTrainer(world, rank) for rank in range(ranks)]
        threads = [
            threading.Thread(target=WarmStart(t, cfg, ParallelInfo(rank=r, world_size=ranks), seed=3), args=(sums(),))
            for r, t in enumerate(trainers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [g for trainer in trainers[:1] for step in trainer.gradients for g in step]

    one, two = run(1), run(2)
    assert len(one) == len(two) == 14
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(one, two, strict=True))


class ReferenceTrainer(SmallTrainer):
    """A backend as ``Reference`` loads it: made from its config, set up from an exported directory."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.moves: list[str] = []

    def setup(self, model: Any, forward: Any, parallel: ParallelInfo, *, seed: int) -> None:
        assert parallel.world_size == 1
        self.model.load_state_dict(torch.load(Path(model.path) / "weights.pt"))
        self.forward = forward

    def onload(self) -> None:
        self.moves.append("on")

    def offload(self) -> None:
        self.moves.append("off")


class Exporting(SmallTrainer):
    def export(self, path: Path) -> None:
        path.mkdir()
        torch.save(self.model.state_dict(), path / "weights.pt")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = type("Registry", (), {"__init__": lambda self, group: None, "load": lambda self, name: ReferenceTrainer})
    monkeypatch.setattr(training, "Registry", loaded)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_to_the_frozen_reference_pulls_back(registry: None, tmp_path: Path, kind: str) -> None:
    cfg, batch = recipe(kl_coef=0.5, kl_kind=kind), samples()
    trainer = Exporting()
    reference = training.Reference(trainer, cfg, tmp_path / "reference", ParallelInfo(), seed=0)  # type: ignore[arg-type]
    update = GrpoUpdate(trainer, cfg, reference)  # type: ignore[arg-type]
    first = update(batch)
    assert first["policy/reference_kl"] == pytest.approx(0.0, abs=1e-12)
    free = SmallTrainer()
    GrpoUpdate(free, recipe())(batch)  # type: ignore[arg-type]
    # at the reference itself the KL has no gradient
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(trainer.gradients[0], free.gradients[0], strict=True))
    second = update(batch)
    assert second["policy/reference_kl"] > 0.0
