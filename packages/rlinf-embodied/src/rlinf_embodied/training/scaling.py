"""Rewards in units of the standard deviation of discounted returns, and merging statistics of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import RewardStatistics, discounted_scan, normalise_rewards
from rlinf_core.types import Trainer
from rlinf_embodied.training.batch import Rollout


def merged(parts: Iterable[RewardStatistics]) -> RewardStatistics:
    """The statistics of all parts together."""
    total = RewardStatistics()
    for part in parts:
        total = total.merge(part)
    return total


class RewardScale:
    """Divides rewards by the running standard deviation of the discounted return so far.

    For each environment R_t = r_t + gamma R_{t-1} goes on over steps and begins anew with an episode; its variance over
    all that was seen, this step's included, scales this step's rewards (Engstrom et al., arXiv 2005.12729, section 3).
    What is known is the same on every rank and does not depend on which rank had which slot: slots are merged in the
    order of their ids.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self.statistics = RewardStatistics()
        self.running: dict[str, float] = {}
        """R of each environment after its last step, by its number (as text, so that JSON keeps it)."""

    def __call__(self, trainer: Trainer, rollout: Rollout) -> Tensor:
        """The scaled rewards [S, T, C]. Collective."""
        mine = {}
        for i, slot in enumerate(rollout.slots):
            env = str(rollout.infos[i].get("env", slot))
            statistics, after = self._follow(rollout, i, self.running.get(env, 0.0))
            mine[slot] = (env, statistics, after)
        everyone = dict(sorted((slot, found) for part in trainer.gather(mine) for slot, found in part.items()))
        for env, statistics, after in everyone.values():
            self.statistics = self.statistics.merge(statistics)
            self.running[env] = after
        flat = normalise_rewards(rollout.rewards.flatten(), self.statistics, shift_mean=False)
        return flat.view_as(rollout.rewards)

    def _follow(self, rollout: Rollout, slot: int, before: float) -> tuple[RewardStatistics, float]:
        """Statistics of R over the steps of a slot, and R after them (0 where an episode has just ended)."""
        steps = rollout.steps[slot].flatten()
        rewards = rollout.rewards[slot].flatten()[steps]
        if not len(rewards):
            return RewardStatistics(), before
        ends = (rollout.terminated[slot] | rollout.truncated[slot]).flatten()[steps]
        keep = torch.full_like(rewards, self.gamma)
        keep[1:].masked_fill_(ends[:-1], 0.0)
        rewards = rewards.clone()
        rewards[0] += self.gamma * before
        # The scan runs backwards in time; here it must run forwards.
        returns = discounted_scan(rewards.flip(0)[None], keep.flip(0)[None])[0].flip(0)
        return RewardStatistics().add(returns), 0.0 if bool(ends[-1]) else float(returns[-1])

    def state(self) -> dict[str, Any]:
        """What goes on after a checkpoint, as plain numbers."""
        s = self.statistics
        return {"count": s.count, "mean": s.mean, "square": s.square, "running": dict(self.running)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.statistics = RewardStatistics(float(state["count"]), float(state["mean"]), float(state["square"]))
        self.running = {str(env): float(value) for env, value in state["running"].items()}
