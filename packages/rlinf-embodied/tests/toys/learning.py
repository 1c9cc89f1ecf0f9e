"""Trajectories made by hand, and the smallest trainer: a torch loop whose ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from rlinf_core.config import Config
from rlinf_core.types import StepInfo, Trajectory
from rlinf_embodied.conf.algorithms import Grpo, Ppo
from rlinf_embodied.conf.models import Mlp
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec
from rlinf_embodied.episodes import EpisodeTracker
from rlinf_embodied.noise import uniforms
from rlinf_embodied.policies.mlp import MlpPolicy
from rlinf_embodied.training import load_update
from rlinf_embodied.training.network import run

DEADLINE = 60.0


def box(size: int, bound: float = np.inf) -> Box:
    return Box(np.full(size, -bound), np.full(size, bound))


CONTINUOUS = EnvSpec({"state": box(3)}, box(2, 2.0), 20)
DISCRETE = EnvSpec({"state": box(3)}, Discrete(4), 20)


def config(algorithm: Any, **model: Any) -> Config:
    """``model`` beside an algorithm's schema; float64, small layers."""
    chosen = Mlp(**{"dtype": "float64", "hidden": [8, 6], **model})
    return Config({"model": asdict(chosen), "algorithm": asdict(algorithm)})


def ppo(**keys: Any) -> Ppo:
    return Ppo(**{"minibatch_size": 16, "epochs": 2, **keys})


def grpo(**keys: Any) -> Grpo:
    return Grpo(**{"minibatch_size": 16, "epochs": 2, **keys})


class PlainTrainer:
    """Adam over a policy; gradients are added over the ranks of ``ranks``."""

    def __init__(self, policy: Any, ranks: Ranks | None = None, rank: int = 0, limit: int = 10_000) -> None:
        self.model = policy
        self.ranks, self.rank = ranks or Ranks(1), rank
        self.micro_batch_tokens = limit
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
        self.batches: list[Mapping[str, Any]] = []
        self.gradients: list[torch.Tensor] = []
        self.refuse: Callable[[Mapping[str, Any]], None] = lambda batch: None

    def share(self, items: Sequence[Any]) -> list[Any]:
        return list(items)

    def gather(self, value: Any) -> list[Any]:
        return self.ranks.gather(self.rank, value)

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for theirs in self.gather(dict(values)):
            for name, value in theirs.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def accumulate(self, batches: Sequence[Any], loss_fn: Any) -> tuple[float, float, dict[str, float]]:
        total = count = 0.0
        for batch in batches:
            self.batches.append(batch)
            loss, counted, _ = loss_fn(run(self.model, batch), batch)
            self.refuse(batch)
            loss.backward()
            total, count = total + float(loss.detach()), count + counted
        return total, count, {}

    def step(self, count: float) -> StepInfo:
        flat = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        everyone = self.gather(flat)
        for parameter, *grads in zip(self.model.parameters(), *everyone, strict=True):
            parameter.grad = sum(grads) / count
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepInfo(float(self.gradients[-1].norm()), 0.01)

    def update_buffers(self, change: Callable[[Any], None]) -> None:
        change(self.model)


class Ranks:
    """Threads that meet to exchange values."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count)
        self.values: list[Any] = [None] * count

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(DEADLINE)
        found = list(self.values)
        self.barrier.wait(DEADLINE)
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The results of ``work(rank)`` of all ranks, each in a thread; the first error of one is raised."""

        def guarded(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            jobs = [pool.submit(guarded, rank) for rank in range(self.count)]
            errors = [e for job in jobs if (e := job.exception(DEADLINE)) is not None]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                raise error
            return [job.result() for job in jobs]


def rollout(
    policy: MlpPolicy,
    *,
    slots: int = 6,
    decisions: int = 10,
    seed: int = 0,
    ends: float = 0.15,
    group: int = 1,
    once: bool = False,
) -> list[Trajectory]:
    """Random observations, rewards and ends; what was decided is the policy's. ``once``: idle after the first end."""
    random = np.random.default_rng(seed)
    found = []
    for slot in range(slots):
        obs = random.standard_normal((decisions, 3)).astype(np.float32)
        keys = np.array([[seed, slot, t] for t in range(decisions)])
        decided = policy.act({"state": obs}, uniforms(seed, keys, policy.chunk, policy.tokens))
        shape = (decisions, policy.chunk)
        mask, terminated, truncated = np.ones(shape, bool), np.zeros(shape, bool), np.zeros(shape, bool)
        over, tracker, episodes = False, EpisodeTracker(1), []
        rewards, success = random.standard_normal(shape), random.random(shape) < 0.1
        for t in range(decisions):
            mask[t] = not (over and once)
            for c in range(policy.chunk):
                if mask[t, c] and random.random() < ends:
                    (truncated if random.random() < 0.4 else terminated)[t, c] = over = True
                    mask[t, c + 1 :] = False
                if mask[t, c]:
                    step = [[x[t, c]] for x in (rewards, terminated, truncated, success)]
                    episodes += tracker.update(*step)
        cut = bool(mask[-1].any()) and not (terminated[-1] | truncated[-1]).any()
        arrays = {
            "obs/state": obs,
            "taken": decided.taken,
            "logprobs": decided.logprobs + 0.05 * random.standard_normal(decided.logprobs.shape),
            "rewards": rewards * mask,
            "mask": mask,
            "terminated": terminated,
            "truncated": truncated,
            "final_values": random.standard_normal(shape) * truncated,
            "last_values": random.standard_normal(1) * cut,
            "success": success & mask,
        }
        if decided.values is not None:
            arrays["values"] = decided.values + random.standard_normal(decided.values.shape)
        name = f"000000/{slot // group:05d}" if group > 1 else f"000000/{slot:05d}"
        info = {"env": slot, "group": name, "group_size": group, "version": 0, "episodes": episodes}
        found.append(Trajectory(f"{name}/{slot % group:03d}" if group > 1 else name, arrays, info))
    return found


def made(cfg: Any, spec: Any = CONTINUOUS, seed: int = 0) -> MlpPolicy:
    return MlpPolicy(cfg.model, spec, seed)


def trained(
    cfg: Any,
    steps: list[list[Trajectory]],
    *,
    ranks: int = 1,
    spec: Any = CONTINUOUS,
    limit: int = 10_000,
    deal: Any = lambda i, ranks: i % ranks,
) -> tuple[list[dict[str, float]], list[torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """(metrics of each step, gradients of each optimizer step, weights, state) after training on ``steps``."""
    group = Ranks(ranks)

    def work(rank: int) -> Any:
        policy = made(cfg, spec)
        trainer = PlainTrainer(policy, group, rank, limit)
        update = load_update(cfg, trainer, policy, seed=3)
        found = []
        for number, trajectories in enumerate(steps):
            mine = [t for i, t in enumerate(trajectories) if deal(i, ranks) == rank]
            found.append(update(mine[::-1], number))
        return found, trainer.gradients, policy.state_dict(), update.state()

    results = group.run(work)
    for other in results[1:]:
        assert other[0] == results[0][0]
        assert other[3] == results[0][3]
        for a, b in zip(results[0][2].values(), other[2].values(), strict=True):
            assert torch.equal(a, b)
    return results[0]


def batches(cfg: Any, count: int = 3) -> list[list[Trajectory]]:
    in_groups = "group_size" in cfg.algorithm
    more: dict[str, Any] = {"group": 3, "once": True} if in_groups else {}
    return [rollout(made(cfg), seed=10 + number, **more) for number in range(count)]
