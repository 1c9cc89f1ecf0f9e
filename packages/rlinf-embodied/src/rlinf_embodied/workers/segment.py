"""What one step sees of a block's environments, as arrays that are cut into trajectories at its end.

Shape legend: n environments, r of them that a decision was made for, T decisions, C steps per decision, D log-probs per
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.types import Trajectory
from rlinf_embodied.data import Answered, Slot
from rlinf_embodied.envs.base import Observation, StepResult
from rlinf_embodied.episodes import Episode


class Segment:
    """Arrays [T, n, ...] of ``decisions`` decisions; ``answer``, the first one, says of what kind they are."""

    def __init__(self, n: int, decisions: int, answer: Answered) -> None:
        assert answer.taken is not None and answer.logprobs is not None
        shape = (decisions, n, answer.taken.shape[1])
        self.decisions = decisions
        self.taken = np.zeros((decisions, n, *answer.taken.shape[1:]), dtype=answer.taken.dtype)
        self.logprobs = np.zeros((decisions, n, *answer.logprobs.shape[1:]), dtype=answer.logprobs.dtype)
        self.values: NDArray[Any] | None = None
        if answer.values is not None:
            self.values = np.zeros((decisions, n, *answer.values.shape[1:]), dtype=answer.values.dtype)
        self.rewards = np.zeros(shape, dtype=np.float64)
        self.finals = np.zeros(shape, dtype=np.float32 if self.values is None else self.values.dtype)
        self.mask, self.terminated, self.truncated, self.success = np.zeros((4, *shape), dtype=np.bool_)
        self.obs: dict[str, Any] = {}
        self.texts: dict[str, list[list[str]]] = {}
        self.asked = np.zeros((decisions, n), dtype=np.bool_)
        self.version = answer.version
        self._wanted: list[tuple[int, int, NDArray[np.int64]]] = []
        self._decided = 0

    def decided(self, rows: NDArray[np.int64], obs: Observation, answer: Answered) -> None:
        """The next decision: observations and answer of the environments ``rows`` [r]."""
        t, n = self._decided, self.mask.shape[1]
        at: Any = t if len(rows) == n else (t, rows)
        self.taken[at], self.logprobs[at], self.asked[at] = answer.taken, answer.logprobs, True
        if self.values is not None:
            self.values[at] = answer.values
        for key, value in obs.items():
            if isinstance(value, list):
                texts = self.texts.setdefault(key, [[""] * n for _ in range(self.decisions)])
                for row, text in zip(rows, value, strict=True):
                    texts[t][row] = text
                continue
            if key not in self.obs:
                self.obs[key] = np.zeros((self.decisions, n, *value.shape[1:]), dtype=value.dtype)
            self.obs[key][at] = value
        self._decided += 1

    def stepped(self, t: int, c: int, result: StepResult, active: NDArray[np.bool_]) -> None:
        """Step c of decision t was made in the ``active`` environments."""
        self.mask[t, :, c] = active
        self.rewards[t, :, c] = np.where(active, result.reward, 0.0)
        self.terminated[t, :, c] = result.terminated & active
        self.truncated[t, :, c] = result.truncated & active
        self.success[t, :, c] = result.success & active

    def wants_value(self, t: int, c: int, rows: NDArray[np.int64]) -> None:
        """The next answer's ``final_values`` begin, or go on, with those of ``rows`` after step c of decision t."""
        self._wanted.append((t, c, rows))

    def final_values(self, answer: Answered) -> None:
        """Put the values of observations that a time limit cut off where they belong."""
        wanted, self._wanted = self._wanted, []
        if answer.final_values is None:
            return
        first = 0
        for t, c, rows in wanted:
            self.finals[t, rows, c] = answer.final_values[first : first + len(rows), 0]
            first += len(rows)

    def unfinished(self, row: int, env: int) -> Episode:
        """What the steps of this segment amount to in an environment whose only episode the segment's end cuts off."""
        mask, success = self.mask[:, row].ravel(), self.success[:, row].ravel()
        made = np.flatnonzero(mask)
        at_end = bool(len(made) and success[made[-1]])
        return Episode(env, float(self.rewards[:, row].sum()), len(made), bool(success.any()), at_end, True)

    def trajectory(self, row: int, slot: Slot, episodes: Sequence[Episode], last_value: float) -> Trajectory:
        """What belongs to one environment, without the decisions that were not made for it."""
        made = int(self.asked[:, row].sum())
        arrays: dict[str, Any] = {f"obs/{key}": value[:made, row] for key, value in self.obs.items()}
        arrays.update({f"obs/{key}": [line[row] for line in texts[:made]] for key, texts in self.texts.items()})
        named = {
            "taken": self.taken,
            "logprobs": self.logprobs,
            "rewards": self.rewards,
            "mask": self.mask,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "success": self.success,
            "final_values": self.finals,
        }
        if self.values is not None:
            named["values"] = self.values
        arrays["last_values"] = np.array([last_value], dtype=self.finals.dtype)
        arrays.update({name: value[:made, row] for name, value in named.items()})
        info = {
            "env": slot.env,
            "group": slot.group,
            "group_size": slot.group_size,
            "version": self.version,
            "episodes": list(episodes),
        }
        return Trajectory(slot.id, arrays, info)
