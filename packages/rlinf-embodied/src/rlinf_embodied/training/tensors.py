"""What is trained on, by decision.

Shape legend: N decisions of this rank, M of all ranks, C steps per decision, D log-probs per step, U units per decision
(``levels``), V values per decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_embodied.training import levels
from rlinf_embodied.training.advantages import Found
from rlinf_embodied.training.batch import Rollout
from rlinf_embodied.training.network import INPUT

# An epoch is put into its order at once up to so many bytes; what is larger is read minibatch by minibatch.
_AT_ONCE = 1 << 26


class Tensors:
    """What the loss reads of each decision that is trained on, and the policy's inputs."""

    def __init__(self, rollout: Rollout, found: Found, level: str, *, critic: bool, clip_values: bool = False) -> None:
        chunk, tokens = rollout.chunk, rollout.tokens
        steps, logprobs = rollout.of_decisions(rollout.steps), rollout.logprobs
        part = rollout.part.flatten()[rollout.place]
        held = {
            "mask": levels.mask_of(steps, tokens, level),
            "old_logprobs": levels.join(logprobs, steps, level),
            "advantages": levels.spread(found.advantages, chunk, tokens, level),
        }
        if level == "chunk" and chunk > 1:
            held["steps"] = steps
        if critic:
            assert found.returns is not None and rollout.values is not None
            held["returns"] = found.returns
            if clip_values:
                held["old_values"] = rollout.of_decisions(rollout.values)
            value_mask = steps.any(-1, keepdim=True) if found.returns.shape[-1] == 1 else steps
            if value_mask.shape != held["mask"].shape:  # of one shape they are equal
                held["value_mask"] = value_mask
        held = {name: x.to(logprobs.dtype) if x.is_floating_point() else x for name, x in held.items()}
        held |= {"taken": rollout.taken, **{INPUT + name: x for name, x in rollout.inputs.items()}}
        slots, made = rollout.slot_of(), steps.sum(-1)
        if found.kept is not None and not bool(found.kept.all()):
            held = {name: x[found.kept] for name, x in held.items()}
            slots, made, part = slots[found.kept], made[found.kept], part[found.kept]
        self.held = held
        self.names = rollout.slots
        self.slots = slots
        self.made = made
        """The slot of each decision, and its environment steps [N]."""
        self.level = level
        width = int(part.max()) + 1 if len(part) else 1
        parts, self.episode = torch.unique(slots * width + part, return_inverse=True)
        self.parts = len(parts)
        """Episodes (or parts of them) that are trained on."""

    def of_slots(self) -> dict[str, Tensor]:
        """The environment steps of each decision, by slot."""
        counts = torch.bincount(self.slots, minlength=len(self.names)).tolist()
        return dict(zip(self.names, self.made.split(counts), strict=True))

    def weigh(self, made: Tensor, episodes: int, tokens: int) -> None:
        """Give each episode the same weight: the mean over its units counts as much, however many they are. The
        weights of all ranks have the mean 1. ``made`` [M] are the environment steps of the decisions of all ranks."""
        total = len(made) if self.level == "chunk" else int(made.sum()) * (tokens if self.level == "token" else 1)
        mask = self.held["mask"]
        units = torch.zeros(self.parts, dtype=torch.float64).index_add_(0, self.episode, mask.sum(-1).double())
        weight = total / (max(episodes, 1) * units[self.episode])
        self.held["weights"] = weight[:, None].expand(mask.shape).to(self.held["advantages"].dtype)

    def ordered(self, order: Tensor) -> Ordered:
        """The decisions in the order of an epoch."""
        return Ordered(self, order)


class Ordered:
    """The decisions of an epoch in the order in which they are taken."""

    def __init__(self, source: Tensors, order: Tensor) -> None:
        self.source = source
        self.order = order
        size = sum(x.numel() * x.element_size() for x in source.held.values())
        self.held = {name: x[order] for name, x in source.held.items()} if size <= _AT_ONCE else None

    def take(self, start: int, stop: int, value_share: float) -> dict[str, Any]:
        """The micro-batch of the decisions from ``start`` to ``stop``."""
        found: dict[str, Any]
        if self.held is not None:
            found = {name: x[start:stop] for name, x in self.held.items()}
        else:
            places = self.order[start:stop]
            found = {name: x[places] for name, x in self.source.held.items()}
        found["value_share"] = value_share
        found["ids"] = Names(self, start, stop)
        return found


class Names(Sequence[str]):
    """The slots of a micro-batch, looked up when a message wants them."""

    def __init__(self, ordered: Ordered, start: int, stop: int) -> None:
        self._of = (ordered, start, stop)

    def _list(self) -> list[str]:
        ordered, start, stop = self._of
        source = ordered.source
        return [source.names[i] for i in sorted(set(source.slots[ordered.order[start:stop]].tolist()))]

    def __len__(self) -> int:
        return len(self._list())

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._list())
