"""A sub-batch of a simulator rank: environments that are stepped together, and what a step sees of them.

Shape legend: n environments of the block, r of them that the policy is asked about, T decisions, C steps per decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import RLinfError
from rlinf_core.types import Trajectory
from rlinf_embodied.data import Answered, Asked, Place, Slot
from rlinf_embodied.envs.base import Observation, StepResult, VectorEnv
from rlinf_embodied.episodes import Episode, EpisodeTracker
from rlinf_embodied.workers.segment import Segment


def take_rows(obs: Observation, rows: NDArray[np.int64]) -> Observation:
    """The observations of some environments alone."""
    return {k: [v[i] for i in rows] if isinstance(v, list) else v[rows] for k, v in obs.items()}


def joined(parts: Sequence[Observation]) -> Observation:
    """Several observations as one, in order."""
    if len(parts) == 1:
        return parts[0]
    return {
        key: [text for part in parts for text in part[key]]
        if isinstance(value, list)
        else np.concatenate([part[key] for part in parts])
        for key, value in parts[0].items()
    }


def spread(rows: NDArray[np.int64], n: int, actions: NDArray[Any]) -> NDArray[Any]:
    """Actions [r, C, *A] of the environments ``rows`` as those of all n; the others', which nothing reads, are 0."""
    if len(rows) == n:
        return actions
    full = np.zeros((n, *actions.shape[1:]), dtype=actions.dtype)
    full[rows] = actions
    return full


class Block:
    """One sub-batch in training. ``begin`` a step, then ``advance`` with every answer, at last ``finish``.

    An environment whose slot has a seed begins a new episode and is idle once that has ended; the others go on from
    step to step. One whose simulator failed loses what it did in this step (``lost``: reason by position).
    """

    def __init__(self, place: Place, env: VectorEnv) -> None:
        self.place = place
        self.env = env
        self.tracker = EpisodeTracker(env.num_envs)
        self.begun = np.zeros(env.num_envs, dtype=np.bool_)
        self.lost: dict[int, str] = {}

    def begin(self, slots: Sequence[Slot], step: int, steps: int) -> Asked:
        """The first question of a step: ``steps`` steps are to be made in the environments of ``slots``."""
        n = self.env.num_envs
        seeds = {row: slot.seed for row, slot in enumerate(slots) if slot.seed is not None}
        if seeds:
            self.env.reset(list(seeds), seeds=list(seeds.values()))
            self.tracker.reset(seeds)
            self.begun[list(seeds)] = True
        if not self.begun.all():
            self.env.reset([int(i) for i in np.flatnonzero(~self.begun)])
            self.begun[:] = True
        self.slots, self.step, self.steps = list(slots), step, steps
        self.once = np.array([slot.seed is not None for slot in slots], dtype=np.bool_)
        self.running = np.ones(n, dtype=np.bool_)
        self.lost = {}
        self.episodes: list[list[Episode]] = [[] for _ in range(n)]
        self.segment: Segment | None = None
        self.obs = self.env.observe()
        self.decision = 0
        self.rows = np.arange(n)
        return self._ask()

    def advance(self, answer: Answered) -> Asked | None:
        """Do what was decided. The next question (the step's last one is for values alone, ``act`` is false), or
        ``None`` where nothing more is to be asked."""
        if answer.actions is None or answer.taken is None or answer.logprobs is None:
            raise RLinfError(f"sub-batch {self.place} was given no actions")
        chunk = answer.actions.shape[1]
        if self.segment is None:
            self.segment = Segment(self.env.num_envs, self.steps // chunk, answer)
        else:
            self.segment.final_values(answer)
        self.segment.decided(self.rows, self._seen(), answer)
        final: list[Observation] = []
        going = self._steps(spread(self.rows, self.env.num_envs, answer.actions), final)
        self.running &= going | ~self.once
        self.decision += 1
        values = answer.values is not None
        if self.decision == self.segment.decisions or not self.running.any():
            self.goes_on = going
            return self._ask(act=False, final=final) if values and (final or going.any()) else None
        self.rows = np.flatnonzero(self.running)
        return self._ask(final=final if values else [])

    def finish(self, answer: Answered | None) -> list[Trajectory]:
        """The trajectories of the step, one for each slot that was not lost."""
        assert self.segment is not None
        if answer is not None:
            self.segment.final_values(answer)
        for row in np.flatnonzero(self.running & self.once):
            self.episodes[row].append(self.segment.unfinished(row, self.slots[row].env))
            self.tracker.reset([int(row)])
        values = np.zeros(self.env.num_envs)
        if answer is not None and answer.values is not None:
            values[self.rows] = np.where(self.goes_on[self.rows], answer.values[:, 0], 0.0)
        return [
            self.segment.trajectory(row, slot, self.episodes[row], values[row])
            for row, slot in enumerate(self.slots)
            if row not in self.lost
        ]

    @property
    def made(self) -> int:
        """Steps that the environments of this block have made in the step."""
        return 0 if self.segment is None else int(self.segment.mask.sum())

    def state(self) -> dict[str, Any]:
        """What brings the block back to where it is."""
        env = self.env.state() if self.begun.any() else None
        return {"env": env, "begun": self.begun.copy(), "tracker": deepcopy(self.tracker)}

    def restore(self, state: dict[str, Any]) -> None:
        if state["env"] is not None:
            self.env.restore(state["env"])
        self.begun, self.tracker = state["begun"], state["tracker"]

    def _steps(self, actions: NDArray[Any], final: list[Observation]) -> NDArray[np.bool_]:
        """One chunk in the environments that were asked about. Returns those whose episode goes on after it."""
        assert self.segment is not None
        active = np.zeros(self.env.num_envs, dtype=np.bool_)
        active[self.rows] = True
        for c in range(actions.shape[1]):
            if not active.any():
                break
            result = self.env.step(actions[:, c], None if active.all() else active)
            if result.dropped:
                self._drop(result, active)
            over = result.terminated | result.truncated
            self.segment.stepped(self.decision, c, result, active)
            for episode in self.tracker.update(
                result.reward, result.terminated, result.truncated, result.success, active
            ):
                row = episode.env
                self.episodes[row].append(replace(episode, env=self.slots[row].env))
            if result.final_obs is not None:
                cut = np.flatnonzero((result.truncated & ~result.terminated)[result.ended])
                if len(cut):
                    final.append(take_rows(result.final_obs, cut))
                    self.segment.wants_value(self.decision, c, result.ended[cut])
            active &= ~over
            self.obs = result.obs
        return active

    def _drop(self, result: StepResult, active: NDArray[np.bool_]) -> None:
        """Simulators failed: their episodes count nowhere, and in this step nothing more is done in them if they were
        to make one episode. Nothing is lost of environments that are idle, but share the process of one that failed."""
        for row, reason in result.dropped.items():
            if not active[row]:
                continue
            self.lost[row] = reason
            self.tracker.reset([row])
            active[row] = False

    def _ask(self, *, act: bool = True, final: Sequence[Observation] = ()) -> Asked:
        rows = self.rows
        keys = np.zeros((len(rows), 3), dtype=np.int64)
        keys[:, 0], keys[:, 2] = self.step, self.decision
        keys[:, 1] = [self.slots[row].env for row in rows]
        return Asked(self.place, self._seen(), keys, joined(final) if final else None, act)

    def _seen(self) -> Observation:
        """The observations that are asked about."""
        return self.obs if len(self.rows) == len(self.slots) else take_rows(self.obs, self.rows)
