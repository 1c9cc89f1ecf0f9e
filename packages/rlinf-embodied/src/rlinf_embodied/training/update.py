"""The update: what one training step does with the trajectories of all environments.

Shape legend: M decisions of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import RewardStatistics
from rlinf_core.types import StepInfo, Trainer, Trajectory
from rlinf_embodied.episodes import Episode, summarise
from rlinf_embodied.policies.base import Policy
from rlinf_embodied.training.advantages import Found, InGroups, OverTime
from rlinf_embodied.training.batch import Rollout, collect
from rlinf_embodied.training.losses import UpdateLoss
from rlinf_embodied.training.minibatches import Dealing
from rlinf_embodied.training.report import add_up, loss_metrics
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
        self.loss = UpdateLoss(algorithm, critic=self.critic)
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
        batch = Tensors(rollout, found, self.level, critic=self.critic)
        counts = torch.bincount(batch.slots, minlength=len(rollout.slots)).tolist()
        facts = {
            "counts": dict(zip(rollout.slots, counts, strict=True)),
            "steps": dict(zip(rollout.slots, batch.steps_of_slots(), strict=True)),
            "episodes": dict(zip(rollout.slots, [info.get("episodes", ()) for info in rollout.infos], strict=True)),
            "made": int(rollout.steps.sum()),
            "parts": batch.parts,
        }
        everyone = self.trainer.gather(facts)
        deal = Dealing(_together(everyone, "counts"), rollout.slots, self.size, self.seed, step)
        made = _together(everyone, "steps")
        steps = torch.cat([made[slot] for slot in sorted(made)]) if made else torch.zeros(0, dtype=torch.long)
        if self.by_episode:
            batch.weigh(steps, sum(part["parts"] for part in everyone), policy.tokens)
        metrics = self._moments(rollout, found) if self.critic else {}
        metrics |= found.metrics
        metrics |= self._epochs(batch, deal, steps)
        if policy_runs(policy):
            self._observe(rollout)
        episodes: list[Episode] = [e for slot, part in sorted(_together(everyone, "episodes").items()) for e in part]
        metrics |= summarise(episodes)
        done = float(sum(part["made"] for part in everyone))
        self.decisions += deal.total
        self.env_steps += int(done)
        metrics |= {"decisions": float(deal.total), "env_steps": done, "nothing_to_train_on": float(self.idle)}
        return metrics

    # -- optimizer steps --------------------------------------------------------------------------------------------

    def _epochs(self, batch: Tensors, deal: Dealing, steps: Tensor) -> dict[str, float]:
        """``steps`` [M] are the environment steps of each decision of all ranks."""
        trainer, policy = self.trainer, self.policy
        if not deal.total:
            self.idle += 1
            return {"optimizer_steps": 0.0}
        per_step = policy.tokens if self.level == "token" else 1
        per_chunk = policy.value_level == "chunk"
        limit = max(1, trainer.micro_batch_tokens // size_of(policy))
        self.loss.start()
        losses: dict[str, float] = {}
        norms, infos = 0.0, 0
        info: StepInfo | None = None
        stopped = False
        known: dict[str, float] = {}
        for epoch in range(self.epochs):
            for numbers, own in deal.epoch(epoch):
                made = int(steps[numbers].sum())
                units = len(numbers) if self.level == "chunk" else made * per_step
                share = units / (len(numbers) if per_chunk else made)
                parts = [batch.take(part, share) for part in own.split(limit)] if len(own) else []
                total, _, _ = trainer.accumulate(parts, self.loss)
                add_up(losses, {"loss": total, "units": units})
                info = trainer.step(float(units))
                norms, infos = norms + info.grad_norm, infos + 1
                if self.target_kl is not None:
                    now = trainer.reduce({name: self.loss.totals().get(name, 0.0) for name in ("approx_kl", "tokens")})
                    kl = (now["approx_kl"] - known.get("approx_kl", 0.0)) / max(
                        now["tokens"] - known.get("tokens", 0.0), 1.0
                    )
                    known = now
                    if kl > KL_SLACK * self.target_kl:
                        stopped = True
                        break
            if stopped:
                break
        assert info is not None
        sums = trainer.reduce({"loss": losses["loss"], **self.loss.totals()})
        metrics = {
            "loss": sums.pop("loss") / losses["units"],
            "grad_norm": norms / infos,
            "lr": info.lr,
            "optimizer_steps": float(infos),
            "epochs": infos / deal.parts,
        }
        if self.target_kl is not None:
            metrics["stopped_early"] = float(stopped)
        return metrics | loss_metrics(sums)

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


class PpoUpdate(Update):
    """PPO (arXiv 1707.06347): clipped ratios, advantages over time, a critic."""

    def __init__(self, trainer: Trainer, cfg: Any, policy: Policy, seed: int = 0) -> None:
        super().__init__(trainer, cfg, policy, seed, OverTime(cfg.algorithm))


class GrpoUpdate(Update):
    """GRPO (arXiv 2402.03300): advantages of whole episodes among those of one initial state, no critic."""

    def __init__(self, trainer: Trainer, cfg: Any, policy: Policy, seed: int = 0) -> None:
        super().__init__(trainer, cfg, policy, seed, InGroups(cfg.algorithm))


def load_update(cfg: Any, trainer: Trainer, policy: Policy, seed: int) -> Update:
    """The update that ``cfg.algorithm`` describes: with a critic or in groups."""
    kind = GrpoUpdate if "group_size" in cfg.algorithm else PpoUpdate
    return kind(trainer, cfg, policy, seed)


def size_of(policy: Policy) -> int:
    """What a decision counts against ``trainer.micro_batch_tokens``."""
    return int(getattr(policy, "tokens_per_decision", policy.chunk * policy.tokens))


def policy_runs(policy: Policy) -> bool:
    """Whether the policy has statistics that ``observe`` updates."""
    return bool(getattr(policy, "running", False))


def _together(everyone: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {slot: value for part in everyone for slot, value in part[name].items()}
