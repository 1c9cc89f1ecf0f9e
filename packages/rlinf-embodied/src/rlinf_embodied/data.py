"""What moves on the channels between simulator, policy and trainer.

Shape legend: n environments of one block, T decisions of a segment, C steps per decision, D log-probs per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.envs.base import Observation
from rlinf_embodied.episodes import Episode

Place = tuple[int, int]
"""Who sends a block: (simulator rank, sub-batch). The key of both channels of the cycle."""


@dataclass(slots=True)
class Slot:
    """One environment's part in a step: what is counted in the step's account.

    ``id`` is unique in its step; ``env`` the environment's number in the run. ``group`` and ``group_size``: slots with
    the same initial state, for advantages relative to each other (GRPO); else the slot itself and 1. ``seed``: the
    initial state to begin with; ``None``: go on where the last step ended.
    """

    id: str
    env: int
    group: str = ""
    group_size: int = 1
    seed: int | None = None

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


@dataclass(slots=True)
class Asked:
    """Observations of a block, for the policy. ``keys`` [n, 3] (step, environment, decision) key the random numbers.

    ``final``: observations whose value alone is wanted (where a time limit cut an episode), ``None`` for none.
    ``act`` false: only values are wanted, of ``obs`` too (the end of a segment).
    """

    place: Place
    obs: Observation
    keys: NDArray[np.int64]
    final: Observation | None = None
    act: bool = True
    greedy: bool = False


@dataclass(slots=True)
class Answered:
    """The policy's answer to an ``Asked``: fields as ``policies.base.Decision``; ``final_values`` of its ``final``,
    [m, C] or [m, 1]. ``version``: of the weights that decided."""

    place: Place
    actions: NDArray[Any] | None
    taken: NDArray[Any] | None
    logprobs: NDArray[Any] | None
    values: NDArray[Any] | None
    final_values: NDArray[Any] | None = None
    version: int = 0


@dataclass(slots=True)
class Finished:
    """An episode that ended, for the one who counts: of which slot or evaluation episode, what it amounted to, and the
    pictures of it, where they were wanted ([frames, H, W, 3] uint8)."""

    id: str
    episode: Episode
    seed: int = 0
    frames: NDArray[np.uint8] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


ARRAYS = {
    "taken": "[T, C, D] what was decided, as the policy's evaluate wants it",
    "logprobs": "[T, C, D] of it when it was decided",
    "values": "[T, C] or [T, 1] of the observation; absent without a value head",
    "rewards": "[T, C]",
    "mask": "[T, C] bool, steps that were made (false after an episode's end in a chunk, or in an idle environment)",
    "terminated": "[T, C] bool",
    "truncated": "[T, C] bool",
    "final_values": "[T, C] value of the observation before the reset where truncated, else 0",
    "last_values": "[1] value after the last decision of a segment cut while its episode goes on, else 0",
    "success": "[T, C] bool, success of the step",
}
"""Arrays of a ``rlinf_core.types.Trajectory`` of this package, one environment each, beside ``obs/KEY`` [T, ...] (or a
list of strings). ``info``: ``env``, ``group``, ``group_size``, ``version``, ``episodes`` (list of ``Episode``)."""
