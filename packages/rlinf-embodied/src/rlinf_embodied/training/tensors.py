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


class Tensors:
    """What the loss reads of each decision that is trained on, and the policy's inputs."""

    def __init__(self, rollout: Rollout, found: Found, level: str, *, critic: bool) -> None:
        chunk, tokens = rollout.chunk, rollout.tokens
        steps, logprobs = rollout.of_decisions(rollout.steps), rollout.logprobs
        chosen = {"slots": rollout.slot_of(), "part": rollout.part.flatten()[rollout.place]}
        fields = {
            "steps": steps,
            "mask": levels.mask_of(steps, tokens, level),
            "old_logprobs": levels.join(logprobs, steps, level),
            "advantages": levels.spread(found.advantages, chunk, tokens, level),
        }
        if critic:
            assert found.returns is not None and rollout.values is not None
            one = found.returns.shape[-1] == 1
            fields |= {
                "returns": found.returns,
                "old_values": rollout.of_decisions(rollout.values),
                "value_mask": steps.any(-1, keepdim=True) if one else steps,
            }
        fields = {name: x.to(logprobs.dtype) if x.is_floating_point() else x for name, x in fields.items()}
        fields |= {"taken": rollout.taken, **{INPUT + name: x for name, x in rollout.inputs.items()}}
        if found.kept is not None and not bool(found.kept.all()):
            fields, chosen = ({n: x[found.kept] for n, x in held.items()} for held in (fields, chosen))
        self.fields = fields
        self.names = rollout.slots
        self.slots = chosen["slots"]
        self.level = level
        width = int(chosen["part"].max()) + 1 if len(self.slots) else 1
        self.episode, parts = torch.unique(self.slots * width + chosen["part"], return_inverse=True)[::-1]
        self.parts = len(parts)
        """Episodes (or parts of them) that are trained on."""

    def steps_of_slots(self) -> list[Tensor]:
        """The environment steps of each decision, by slot."""
        counts = torch.bincount(self.slots, minlength=len(self.names)).tolist()
        return list(self.fields["steps"].sum(-1).split(counts))

    def weigh(self, steps: Tensor, episodes: int, tokens: int) -> None:
        """Give each episode the same weight: the mean over its units counts as much, however many they are. The
        weights of all ranks have the mean 1. ``steps`` [M] of the decisions of all ranks."""
        total = len(steps) if self.level == "chunk" else int(steps.sum()) * (tokens if self.level == "token" else 1)
        mask = self.fields["mask"]
        units = torch.zeros(self.parts, dtype=torch.float64).index_add_(0, self.episode, mask.sum(-1).double())
        weight = total / (episodes * units[self.episode]) if episodes else units
        self.fields["weights"] = weight[:, None].expand(mask.shape).to(self.fields["advantages"].dtype)

    def take(self, places: Tensor, value_share: float) -> dict[str, Any]:
        """The micro-batch of the decisions at ``places``."""
        found: dict[str, Any] = {name: x[places] for name, x in self.fields.items()}
        found["value_share"] = value_share
        found["ids"] = Names(self.names, self.slots, places)
        return found


class Names(Sequence[str]):
    """The slots of a micro-batch, looked up when a message wants them."""

    def __init__(self, names: Sequence[str], slots: Tensor, places: Tensor) -> None:
        self._of = (names, slots, places)

    def _list(self) -> list[str]:
        names, slots, places = self._of
        return [names[i] for i in sorted(set(slots[places].tolist()))]

    def __len__(self) -> int:
        return len(self._list())

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._list())
