"""The update: what one training step does with the trajectories of all environments.

Shape legend: M decisions of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import RewardStatistics
from rlinf_core.errors import ConfigError
from rlinf_core.types import StepInfo, Trainer, Trajectory
from rlinf_embodied.episodes import Episode, summarise
from rlinf_embodied.policies.base import Policy
from rlinf_embodied.training.advantages import Found, InGroups, OverTime
from rlinf_embodied.training.batch import Rollout, collect
from rlinf_embodied.training.losses import UpdateLoss
from rlinf_embodied.training.minibatches import Dealing
from rlinf_embodied.training.report import loss_metrics
from rlinf_embodied.training.scaling import merged
from rlinf_embodied.training.tensors import Tensors

# How far above ``target_kl`` an update may go (as OpenAI's Spinning Up and Stable-Baselines3 have it).
KL_SLACK = 1.5


class Update:
    """One training step after the other. Call it with this rank's trajectories (none is fine) and the step's number.

    Reads ``cfg.algorithm``. The result does not depend on how slots are spread over ranks, nor on the size of
    micro-batches, up to the rounding of sums.
    """

    def __init__(self, trainer: Trainer, cfg: Any, policy: Policy, seed: int, advantages: OverTime | InGroups) -> None:
        algorithm = cfg.algorithm
        self.trainer = trainer
        self.policy = policy
        self.seed = seed
        self.advantages = advantages
        self.level: str = algorithm.logprob_level
        self.epochs: int = algorithm.epochs
        self.size: int = algorithm.minibatch_size
        self.target_kl: float | None = algorithm.target_kl
        self.by_episode: bool = algorithm.length_normalised
        self.critic = isinstance(advantages, OverTime)
        self.clip_values: bool = self.critic and algorithm.value_clip is not None
        self.loss = UpdateLoss(algorithm, critic=self.critic)
        self.limit = max(1, trainer.micro_batch_tokens // size_of(policy))
        """Decisions of one forward and backward, at most."""
        self.decisions = 0
        self.env_steps = 0
        self.idle = 0
        """Decisions and environment steps that were trained on so far, and steps without anything to train on."""

    def __call__(self, trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
        """Train on the trajectories of all ranks. Collective.

        Returns the metrics of the step, the same on every rank. A step with nothing to train on changes nothing but the
        running statistics, and is counted.

        Raises:
            NonFiniteError: a number of a trajectory, a loss or a gradient is NaN or infinite; names slots.
        """
        policy = self.policy
        mine = self.trainer.share(trajectories)
        rollout = collect(mine, policy, first_only=not self.critic)
        found = self.advantages(self.trainer, rollout)
        batch = Tensors(rollout, found, self.level, critic=self.critic, clip_values=self.clip_values)
        facts = {
            "decisions": batch.of_slots(),
            "episodes": {s: info.get("episodes", ()) for s, info in zip(rollout.slots, rollout.infos, strict=True)},
            "steps": int(rollout.steps.sum()),
            "parts": batch.parts,
        }
        everyone = self.trainer.gather(facts)
        decisions = _together(everyone, "decisions")
        counts = {slot: len(steps) for slot, steps in decisions.items()}
        deal = Dealing(counts, rollout.slots, self.size, self.seed, step)
        made = torch.cat([decisions[slot] for slot in sorted(decisions)]) if decisions else torch.zeros(0)
        if self.by_episode:
            batch.weigh(made, sum(part["parts"] for part in everyone), policy.tokens)
        metrics = self._moments(rollout, found) if self.critic else {}
        metrics |= found.metrics
        metrics |= self._epochs(batch, deal, made)
        if policy_runs(policy):
            self._observe(rollout)
        episodes: list[Episode] = [e for slot, part in sorted(_together(everyone, "episodes").items()) for e in part]
        metrics |= summarise(episodes)
        done = float(sum(part["steps"] for part in everyone))
        self.decisions += deal.total
        self.env_steps += int(done)
        metrics |= {"decisions": float(deal.total), "env_steps": done, "nothing_to_train_on": float(self.idle)}
        return metrics

    # -- optimizer steps --------------------------------------------------------------------------------------------

    def _epochs(self, batch: Tensors, deal: Dealing, made: Tensor) -> dict[str, float]:
        """``made`` [M] are the environment steps of each decision of all ranks."""
        trainer = self.trainer
        if not deal.total:
            self.idle += 1
            return {"optimizer_steps": 0.0}
        self.loss.start()
        done = Done()
        for epoch in range(self.epochs):
            everyone, own = deal.epoch(epoch)
            ordered, start = batch.ordered(torch.cat(own)), 0
            for numbers, mine in zip(everyone, own, strict=True):
                count, share = self._counts(len(numbers), int(made[numbers].sum()))
                stop = start + len(mine)
                parts = [ordered.take(i, min(i + self.limit, stop), share) for i in range(start, stop, self.limit)]
                start = stop
                loss, counted, _ = trainer.accumulate(parts, self.loss)
                done.add(loss, counted, count, trainer.step(count))
                if self._too_far(done):
                    break
            if done.stopped:
                break
        sums = trainer.reduce({"loss": done.loss, "counted": done.counted, **self.loss.totals()})
        if abs(sums.pop("counted") - done.count) > 0.5:
            raise ConfigError(
                "algorithm.loss: it counts otherwise than its options say (aggregation=token_mean counts what mask has "
                "true, others count decisions); losses of ranks and minibatches cannot be divided by that"
            )
        metrics = {
            "loss": sums.pop("loss") / done.count,
            "grad_norm": done.norm / done.steps,
            "lr": done.lr,
            "optimizer_steps": float(done.steps),
            "epochs": done.steps / deal.parts,
        }
        if self.target_kl is not None:
            metrics["stopped_early"] = float(done.stopped)
        return metrics | loss_metrics(sums)

    def _counts(self, decisions: int, steps: int) -> tuple[float, float]:
        """(what a minibatch of so many decisions and steps is divided by, that over the number of its values)."""
        by_rows = self.level == "chunk" or self.loss.by_rows
        count = decisions if by_rows else steps * (self.policy.tokens if self.level == "token" else 1)
        return float(count), count / (decisions if self.policy.value_level == "chunk" else steps)

    def _too_far(self, done: Done) -> bool:
        """Whether the last minibatch was so far from the old policy that the update is to stop. Collective."""
        if self.target_kl is None:
            return False
        found = self.loss.totals()
        now = self.trainer.reduce({name: found.get(name, 0.0) for name in ("approx_kl", "tokens")})
        kl, tokens = now["approx_kl"] - done.kl, now["tokens"] - done.tokens
        done.kl, done.tokens = now["approx_kl"], now["tokens"]
        done.stopped = kl > KL_SLACK * self.target_kl * max(tokens, 1.0)
        return done.stopped

    # -- what goes over all ranks -----------------------------------------------------------------------------------

    def _moments(self, rollout: Rollout, found: Found) -> dict[str, float]:
        """Returns and values before the update: means, and 1 - Var(R - V) / Var(R) (0 where returns do not differ)."""
        assert found.returns is not None and rollout.values is not None
        counted = rollout.of_decisions(rollout.steps)
        mask = counted if found.returns.shape[-1] == counted.shape[-1] else counted.any(-1, keepdim=True)
        returns, values = found.returns[mask], rollout.of_decisions(rollout.values)[mask]
        parts = [RewardStatistics().add(x) for x in (returns, values, returns - values)]
        total = [merged(column) for column in zip(*self.trainer.gather(parts), strict=True)]
        spread = total[0].std ** 2
        return {
            "critic/return": total[0].mean,
            "critic/value": total[1].mean,
            "critic/explained_variance": 1.0 - total[2].std ** 2 / spread if spread > 1e-12 else 0.0,
        }

    def _observe(self, rollout: Rollout) -> None:
        """Let the policy take this step's observations of all ranks into its running statistics."""
        counts = torch.bincount(rollout.slot_of(), minlength=len(rollout.slots)).tolist()
        split = {name: values.split(counts) for name, values in rollout.inputs.items()}
        mine = {slot: {n: parts[i] for n, parts in split.items()} for i, slot in enumerate(rollout.slots) if counts[i]}
        everyone = dict(sorted(item for part in self.trainer.gather(mine) for item in part.items()))
        if not everyone:
            return
        names = next(iter(everyone.values()))
        inputs = {name: torch.cat([part[name] for part in everyone.values()]) for name in names}
        self.trainer.update_buffers(lambda network: network.observe(inputs))  # type: ignore[operator]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What goes on after a checkpoint beside the trainer's state: plain numbers, the same on every rank."""
        totals = {"decisions": self.decisions, "env_steps": self.env_steps, "idle": self.idle}
        return {**totals, "advantages": self.advantages.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.decisions, self.env_steps, self.idle = (int(state[name]) for name in ("decisions", "env_steps", "idle"))
        self.advantages.restore(state["advantages"])


@dataclass
class Done:
    """What the optimizer steps of an update add up to. ``loss`` and ``counted`` are this rank's, ``count`` that of all
    ranks; ``kl`` and ``tokens`` the sums at the last look."""

    loss: float = 0.0
    counted: float = 0.0
    count: float = 0.0
    norm: float = 0.0
    lr: float = 0.0
    steps: int = 0
    kl: float = 0.0
    tokens: float = 0.0
    stopped: bool = False

    def add(self, loss: float, counted: float, count: float, info: StepInfo) -> None:
        self.loss, self.counted, self.count = self.loss + loss, self.counted + counted, self.count + count
        self.norm, self.lr, self.steps = self.norm + info.grad_norm, info.lr, self.steps + 1


class PpoUpdate(Update):
    """PPO (arXiv 1707.06347): clipped ratios, advantages over time, a critic."""

    def __init__(self, trainer: Trainer, cfg: Any, policy: Policy, seed: int = 0) -> None:
        super().__init__(trainer, cfg, policy, seed, OverTime(cfg.algorithm))


class GrpoUpdate(Update):
    """GRPO (arXiv 2402.03300): advantages of whole episodes among those of one initial state, no critic."""

    def __init__(self, trainer: Trainer, cfg: Any, policy: Policy, seed: int = 0) -> None:
        super().__init__(trainer, cfg, policy, seed, InGroups(cfg.algorithm))


def load_update(cfg: Any, trainer: Trainer, policy: Policy, seed: int) -> Update:
    """The update that ``cfg.algorithm`` describes: with a critic or in groups.

    Raises:
        ConfigError: an option is unknown, or the policy's values are not those of what has a reward.
    """
    if "group_size" in cfg.algorithm:
        return GrpoUpdate(trainer, cfg, policy, seed)
    if policy.value_level != cfg.algorithm.reward_level:
        raise ConfigError(
            f"algorithm.reward_level: {cfg.algorithm.reward_level}, but the policy {cfg.model.name} has values of "
            f"level {policy.value_level}; the two must be equal"
        )
    return PpoUpdate(trainer, cfg, policy, seed)


def size_of(policy: Policy) -> int:
    """What a decision counts against ``trainer.micro_batch_tokens``."""
    return int(getattr(policy, "tokens_per_decision", policy.chunk * policy.tokens))


def policy_runs(policy: Policy) -> bool:
    """Whether the policy has statistics that ``observe`` updates."""
    return bool(getattr(policy, "running", False))


def _together(everyone: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {slot: value for part in everyone for slot, value in part[name].items()}
