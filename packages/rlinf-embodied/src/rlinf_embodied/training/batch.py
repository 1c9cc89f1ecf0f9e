"""The trajectories of a step as tensors.

Shape legend: S slots of this rank, T decisions of the longest one, N decisions of this rank in which something was
done, C steps per decision, D log-probs per step, V values per decision (C or 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_core.types import Trajectory
from rlinf_embodied.episodes import Episode
from rlinf_embodied.policies.base import Policy

OBS = "obs/"


@dataclass(slots=True)
class Rollout:
    """This rank's part of a step, slots in the order of their ids.

    Over time, padded where a slot is shorter: ``steps`` [S, T, C] bool (made and counted), ``rewards``, ``terminated``,
    ``truncated``, ``success``, ``final_values`` [S, T, C], ``values`` [S, T, V] or None, ``last_values`` [S]. Numbers
    are float64. By decision, in the order of slots and time: ``inputs`` and ``taken`` as ``Policy.evaluate`` reads
    them, ``logprobs`` [N, C, D]; ``place`` [N] is where a decision is among the S T. ``part`` [S, T] numbers the
    episodes of a slot from 0.
    """

    slots: list[str]
    infos: list[dict[str, Any]]
    chunk: int
    tokens: int
    steps: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor
    final_values: Tensor
    last_values: Tensor
    values: Tensor | None
    part: Tensor
    inputs: dict[str, Tensor]
    taken: Tensor
    logprobs: Tensor
    place: Tensor

    @property
    def episodes(self) -> list[Episode]:
        return [episode for info in self.infos for episode in info.get("episodes", ())]

    def of_decisions(self, values: Tensor) -> Tensor:
        """What is [S, T, ...] as [N, ...]."""
        return values.flatten(0, 1)[self.place]

    def slot_of(self) -> Tensor:
        """The number of the slot of each decision [N]."""
        return self.place // max(self.steps.shape[1], 1)


def collect(trajectories: Sequence[Trajectory], policy: Policy, *, first_only: bool = False) -> Rollout:
    """Put trajectories together. ``first_only`` counts the first episode of each slot alone.

    Raises:
        NonFiniteError: a reward, observation, value or log-prob is NaN or infinite; names slots.
        RLinfError: an array is absent or of another size than the policy says.
    """
    rows = sorted(trajectories, key=lambda t: t.id)
    chunk, tokens, level = policy.chunk, policy.tokens, policy.value_level
    longest = max((len(t.arrays["mask"]) for t in rows), default=0)

    def over_time(name: str, dtype: torch.dtype, width: int = chunk) -> Tensor:
        padded = torch.zeros(len(rows), longest, width, dtype=dtype)
        for i, row in enumerate(rows):
            value = _array(row, name, width)
            padded[i, : len(value)] = torch.from_numpy(value)
        return padded

    f64, flag = torch.float64, torch.bool
    made = over_time("mask", flag)
    ended = (over_time("terminated", flag) | over_time("truncated", flag)) & made
    done = ended.any(-1).long()
    part = done.cumsum(1) - done
    steps = made & (part == 0)[..., None] if first_only else made
    counted = steps.any(-1)
    place = counted.flatten().nonzero().squeeze(1)
    width = chunk if level == "action" else 1
    chosen = [counted[i, : len(row.arrays["mask"])].numpy() for i, row in enumerate(rows)]
    inputs, taken, logprobs = _decided(rows, chosen, policy)
    rollout = Rollout(
        slots=[row.id for row in rows],
        infos=[row.info for row in rows],
        chunk=chunk,
        tokens=tokens,
        steps=steps,
        rewards=over_time("rewards", f64).masked_fill_(~steps, 0.0),
        terminated=over_time("terminated", flag) & steps,
        truncated=over_time("truncated", flag) & steps,
        success=over_time("success", flag) & steps,
        final_values=over_time("final_values", f64),
        last_values=torch.tensor([float(np.asarray(r.arrays["last_values"]).reshape(-1)[0]) for r in rows], dtype=f64),
        values=None if level == "none" else over_time("values", f64, width),
        part=part,
        inputs=inputs,
        taken=taken,
        logprobs=logprobs,
        place=place,
    )
    _check_finite(rollout)
    return rollout


def _array(row: Trajectory, name: str, width: int) -> NDArray[Any]:
    value = row.arrays.get(name)
    if value is None:
        raise RLinfError(f"slot {row.id}: its trajectory has no array {name!r}; it has {', '.join(row.arrays)}")
    found = np.asarray(value)
    if found.ndim != 2 or found.shape[1] != width:
        raise RLinfError(f"slot {row.id}: array {name!r} has shape {found.shape}, the policy makes it [T, {width}]")
    return found


def _decided(
    rows: Sequence[Trajectory], chosen: Sequence[NDArray[np.bool_]], policy: Policy
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(inputs of the policy, taken, log-probs) of the chosen decisions of each slot."""
    if not any(part.any() for part in chosen):
        empty = torch.zeros(0, policy.chunk, policy.tokens)
        return {}, empty, empty
    keep = np.concatenate(chosen)
    whole = bool(keep.all())

    def together(name: str) -> Any:
        found = [row.arrays[name] for row in rows]
        if isinstance(found[0], list):
            return [
                text
                for texts, part in zip(found, chosen, strict=True)
                for text, c in zip(texts, part, strict=True)
                if c
            ]
        values = np.concatenate([np.asarray(value) for value in found])
        return values if whole else values[keep]

    observations = {name[len(OBS) :]: together(name) for name in rows[0].arrays if name.startswith(OBS)}
    inputs = policy.prepare(observations)
    return inputs, torch.from_numpy(together("taken")), torch.from_numpy(together("logprobs"))


def _check_finite(rollout: Rollout) -> None:
    steps, tokens = rollout.steps, rollout.logprobs
    _finite(rollout, "reward", rollout.rewards)
    _finite(rollout, "value before a reset", rollout.final_values.masked_fill(~rollout.truncated, 0.0))
    _finite(rollout, "value after the last decision", rollout.last_values)
    if rollout.values is not None:
        _finite(
            rollout,
            "value",
            rollout.values.masked_fill(~(steps if rollout.values.shape[-1] > 1 else steps.any(-1, True)), 0.0),
        )
    where = rollout.slot_of()
    inputs: Mapping[str, Tensor] = {
        f"observation {name!r}": x for name, x in rollout.inputs.items() if x.is_floating_point()
    }
    done = tokens.masked_fill(~rollout.of_decisions(steps)[..., None], 0.0) if len(tokens) else tokens
    for name, values in {**inputs, "log-prob": done}.items():
        _finite(rollout, name, values, where)


def _finite(rollout: Rollout, name: str, values: Tensor, slots: Tensor | None = None) -> None:
    """Refuse NaN and infinities in ``values``, whose first dimension is slots (or decisions of ``slots``)."""
    if not values.numel() or bool(values.sum().isfinite()):
        return
    bad = ~values.isfinite().flatten(1).all(1) if values.dim() > 1 else ~values.isfinite()
    if not bool(bad.any()):  # the sum alone is too large
        return
    found = bad.nonzero().squeeze(1)
    numbers = sorted(set((found if slots is None else slots[found]).tolist()))
    names = ", ".join(f"{rollout.slots[i]} (environment {rollout.infos[i].get('env', '?')})" for i in numbers[:8])
    raise NonFiniteError(f"{name} is NaN or infinite in {len(numbers)} slots: {names}")
