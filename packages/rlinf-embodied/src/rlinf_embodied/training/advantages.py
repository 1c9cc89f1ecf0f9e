"""From rewards to advantages, over all ranks.

Shape legend: S slots of this rank, T decisions, C steps per decision, V values per decision (C or 1), N decisions in
which something was done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import AdvantageInputs, RewardStatistics, advantage, chunk_rewards, normalise_rewards
from rlinf_algos.errors import AlgorithmError
from rlinf_core.errors import ConfigError
from rlinf_core.types import Trainer
from rlinf_embodied.training.batch import Rollout
from rlinf_embodied.training.scaling import RewardScale, merged

SCORES = ("return", "success_once", "success_at_end")


@dataclass(slots=True)
class Found:
    """``advantages`` [N, V], ``returns`` [N, V] where there is a critic, ``kept`` [N] bool (None: all), and metrics,
    the same on every rank."""

    advantages: Tensor
    returns: Tensor | None = None
    kept: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class OverTime:
    """Advantages and returns of the steps (or chunks) of each slot: GAE, or another that works over time."""

    def __init__(self, algorithm: Any) -> None:
        self.level: str = algorithm.reward_level
        self.whiten: bool = algorithm.whiten
        self.compute, self.options = _chosen(algorithm, {"gamma": algorithm.gamma, "lam": algorithm.lam})
        self.scale = RewardScale(algorithm.gamma) if algorithm.scale_rewards else None

    def __call__(self, trainer: Trainer, rollout: Rollout) -> Found:
        """Collective."""
        metrics = {}
        rewards = rollout.rewards
        if self.scale is not None:
            rewards = self.scale(trainer, rollout)
            metrics["reward/scale"] = self.scale.statistics.std
        found, returns = self._compute(rollout, rewards)
        if self.whiten:
            counted = found[rollout.steps.flatten(1)] if self.level == "action" else found[rollout.steps.any(-1)]
            statistics = merged(trainer.gather(RewardStatistics().add(counted)))
            found = normalise_rewards(found.flatten(), statistics).view_as(found)
        shape = (*rollout.steps.shape[:2], rollout.chunk if self.level == "action" else 1)
        advantages, returns = (rollout.of_decisions(x.reshape(shape)) for x in (found, returns))
        return Found(advantages, returns, metrics=metrics)

    def _compute(self, rollout: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """(advantages, returns), [S, T C] of steps or [S, T] of chunks."""
        assert rollout.values is not None
        values, mask = rollout.values.flatten(1), rollout.steps.flatten(1)
        flags = {name: getattr(rollout, name).flatten(1) for name in ("terminated", "truncated", "final_values")}
        rewards_2d = rewards.flatten(1)
        if self.level == "chunk":
            rewards_2d, mask = chunk_rewards(rewards, rollout.steps)
            cut = rollout.truncated & ~rollout.terminated
            flags = {
                "terminated": rollout.terminated.any(-1),
                "truncated": rollout.truncated.any(-1),
                # An episode ends once in a chunk: what follows is not made.
                "final_values": torch.where(cut, rollout.final_values, 0.0).sum(-1),
            }
        if not mask.any():
            empty = torch.zeros_like(values)
            return empty, empty
        inputs = AdvantageInputs(rewards=rewards_2d, values=values, mask=mask, last_values=rollout.last_values, **flags)
        result = self.compute(inputs, self.options)
        if result.returns is None:
            raise ConfigError("algorithm.advantage: it gives no returns, and the critic learns from them; use gae")
        return result.advantages, result.returns

    def state(self) -> dict[str, Any]:
        return {} if self.scale is None else self.scale.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.scale is not None and state:
            self.scale.restore(state)


class InGroups:
    """One advantage for a whole episode, by comparing it with others from the same initial state (GRPO).

    The score is the episode's return or success. With ``success_filter``, groups in which every episode failed, or
    every one succeeded, are left out; they are counted in any case.
    """

    def __init__(self, algorithm: Any) -> None:
        self.score: str = algorithm.score
        self.filter: bool = algorithm.success_filter
        own = {"normalise_std": algorithm.normalise_std, "group_size": algorithm.group_size}
        self.compute, self.options = _chosen(algorithm, own)

    def __call__(self, trainer: Trainer, rollout: Rollout) -> Found:
        """Collective."""
        mine = {
            slot: (str(info.get("group") or slot), self._score(rollout, i), bool(rollout.success[i].any()))
            for i, (slot, info) in enumerate(zip(rollout.slots, rollout.infos, strict=True))
            if rollout.steps[i].any()
        }
        everyone = dict(sorted((slot, found) for part in trainer.gather(mine) for slot, found in part.items()))
        groups = [group for group, _, _ in everyone.values()]
        succeeded: dict[str, list[bool]] = {}
        for group, _, success in everyone.values():
            succeeded.setdefault(group, []).append(success)
        failed = {group for group, found in succeeded.items() if not any(found)}
        solved = {group for group, found in succeeded.items() if all(found)}
        advantages: dict[str, float] = {}
        if everyone:
            scores = torch.tensor([score for _, score, _ in everyone.values()], dtype=torch.float64)
            result = self.compute(AdvantageInputs(rewards=scores, groups=groups), self.options).advantages
            advantages = dict(zip(everyone, result.tolist(), strict=True))
        signal = {group for slot, group in zip(everyone, groups, strict=True) if advantages[slot] != 0.0}
        out = (failed | solved) if self.filter else set()
        count = float(len(succeeded))
        metrics = {
            "groups": count,
            "groups/all_failed": float(len(failed)),
            "groups/all_succeeded": float(len(solved)),
            "groups/without_signal": count - len(signal),
            "groups/trained": float(len(signal - out)),
        }
        kept = torch.tensor(
            [
                slot in everyone and everyone[slot][0] in signal and everyone[slot][0] not in out
                for slot in rollout.slots
            ],
            dtype=torch.bool,
        )
        values = torch.tensor([advantages.get(slot, 0.0) for slot in rollout.slots], dtype=torch.float64)
        slots = rollout.slot_of()
        return Found(values[slots][:, None], kept=kept[slots], metrics=metrics)

    def _score(self, rollout: Rollout, slot: int) -> float:
        if self.score == "return":
            return float(rollout.rewards[slot].sum())
        made = rollout.success[slot].flatten()[rollout.steps[slot].flatten()]
        return float(made.any()) if self.score == "success_once" else float(made[-1])

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing goes on."""


def _chosen(algorithm: Any, own: Mapping[str, Any]) -> tuple[Any, Any]:
    """The advantage by name, and its options: those of ``own`` that it has, and ``advantage_options``."""
    try:
        found = advantage(algorithm.advantage)
        known = getattr(found.options, "__dataclass_fields__", {})
        given = {name: value for name, value in own.items() if name in known}
        return found, found.make_options({**given, **algorithm.advantage_options.to_dict()})
    except AlgorithmError as error:
        raise ConfigError(f"algorithm.advantage ({algorithm.advantage}): {error}") from error
