"""From the rewards of samples to advantages: over-long shaping, groups over all ranks, GAE with a critic's values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_algos import AdvantageInputs, Preset, overlong_penalty, terminal_reward
from rlinf_core.errors import RLinfError
from rlinf_core.types import Sample, Trainer
from rlinf_reasoning.training.minibatches import group_of

Lists = dict[str, list[float]]


def gather(trainer: Trainer, values: Mapping[str, float]) -> dict[str, float]:
    """The numbers of all replicas by sample id, in the order of the ids. Collective."""
    return dict(sorted(trainer.reduce(values).items()))


@dataclass(frozen=True)
class Shaping:
    """What the length of a response does to its reward (DAPO, arXiv 2503.14476, section 3.4).

    ``cache`` tokens before ``limit`` a penalty begins that reaches ``penalty`` at the limit (0: none); with
    ``filtered``, a response that the limit cut is no peer in its group and is not trained on.
    """

    limit: int
    cache: int = 0
    penalty: float = 1.0
    filtered: bool = False

    @classmethod
    def of(cls, cfg: Any) -> Shaping:
        """As ``cfg.algorithm`` and ``cfg.sampling.max_new_tokens`` say."""
        algorithm = cfg.algorithm
        return cls(
            cfg.sampling.max_new_tokens,
            algorithm.overlong_cache,
            algorithm.overlong_penalty,
            algorithm.overlong_filter,
        )

    def penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """What is added to each reward, at most 0, by sample id."""
        if not self.cache or not samples:
            return dict.fromkeys((s.id for s in samples), 0.0)
        lengths = torch.tensor([len(s.response_ids) for s in samples])
        found = overlong_penalty(lengths, max_length=self.limit, cache=self.cache).tolist()
        return {s.id: self.penalty * value for s, value in zip(samples, found, strict=True)}

    def kept(self, sample: Sample) -> bool:
        """Whether the sample is trained on and a peer in its group."""
        return sample.reward is not None and not (self.filtered and sample.finish_reason == "length")


def group_advantages(
    trainer: Trainer, preset: Preset, rewards: Mapping[str, float], kl: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Advantages of whole responses by sample id, over all replicas. Collective.

    Args:
        rewards: of this replica's samples; NaN for one that is no peer (its advantage is 0).
        kl: sum of the KL estimate over the response, by sample id; for a KL in the reward.
    """
    everyone = gather(trainer, rewards)
    summed = None if kl is None else gather(trainer, kl)
    if not everyone:
        return {}
    values = torch.tensor(list(everyone.values()), dtype=torch.float64)
    penalty = None if summed is None else torch.tensor([[summed[name]] for name in everyone], dtype=torch.float64)
    found = preset.compute_advantages(
        AdvantageInputs(
            rewards=values,
            groups=[group_of(name) for name in everyone],
            valid=~values.isnan(),
            kl=penalty,
            mask=torch.ones(len(values), 1, dtype=torch.bool),
        )
    )
    return dict(zip(everyone, found.advantages.tolist(), strict=True))


def token_advantages(
    preset: Preset, samples: Sequence[Sample], rewards: Mapping[str, float], *, bootstrap: bool = False
) -> tuple[Lists, Lists]:
    """(advantages, returns) per response token by sample id: GAE over the tokens of each response by itself.

    Reads ``info["values"]`` (R; of the state before each token), ``info["kl"]`` (R) for a KL in the reward, and with
    ``bootstrap`` ``info["last_value"]`` of responses that the limit cut: what follows their last token. After one that
    has ended the value is 0.

    Raises:
        RLinfError: a sample has no values (or KL): the flow lacks the critic's ``value`` (the actor's ``reference``).
    """
    if not samples:
        return {}, {}
    longest = max(len(s.response_ids) for s in samples)
    shape = (len(samples), longest)
    mask, values = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    last = torch.zeros(len(samples), dtype=torch.float64)
    kl = torch.zeros(shape, dtype=torch.float64) if preset.kl_coefficient and preset.kl_in == "reward" else None
    for i, sample in enumerate(samples):
        size = len(sample.response_ids)
        mask[i, :size] = True
        values[i, :size] = torch.tensor(_info(sample, "values", size), dtype=torch.float64)
        if kl is not None:
            kl[i, :size] = torch.tensor(_info(sample, "kl", size), dtype=torch.float64)
        if bootstrap and sample.finish_reason == "length":
            last[i] = sample.info["last_value"]
    terminal = torch.tensor([rewards[s.id] for s in samples], dtype=torch.float64)
    found = preset.compute_advantages(
        AdvantageInputs(rewards=terminal_reward(terminal, mask), values=values, mask=mask, kl=kl, last_values=last)
    )
    assert found.returns is not None  # GAE has returns
    return _lists(samples, found.advantages), _lists(samples, found.returns)


def _info(sample: Sample, name: str, size: int) -> list[float]:
    values = sample.info.get(name)
    if values is None or len(values) != size:
        task = "critic's value" if name == "values" else "actor's reference"
        raise RLinfError(
            f"sample {sample.id} has {0 if values is None else len(values)} {name} for {size} response tokens: the "
            f"{task} task must come before training"
        )
    return list(values)


def _lists(samples: Sequence[Sample], values: torch.Tensor) -> Lists:
    return {s.id: row[: len(s.response_ids)].tolist() for s, row in zip(samples, values, strict=True)}


def whitened(trainer: Trainer, advantages: Lists) -> Lists:
    """(A - mean) / (std + 1e-8) over the tokens of all replicas, as ``rlinf_algos.masking.whiten``; 0 where they do not
    differ by more than rounding. Collective."""
    flat = [v for name in sorted(advantages) for v in advantages[name]]
    sums = trainer.reduce({"count": float(len(flat)), "total": math.fsum(flat)})
    count = sums["count"]
    mean = sums["total"] / max(count, 1.0)
    square = trainer.reduce({"square": math.fsum((v - mean) ** 2 for v in flat)})["square"]
    std = math.sqrt(square / max(count, 1.0))
    if count < 2 or std <= 4 * torch.finfo(torch.float64).eps * abs(mean):
        return {name: [0.0] * len(values) for name, values in advantages.items()}
    return {name: [(v - mean) / (std + 1e-8) for v in values] for name, values in advantages.items()}
