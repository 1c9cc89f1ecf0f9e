"""A sub-batch of environments in an evaluation: each takes the next episode when its own has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import RLinfError
from rlinf_embodied.data import Answered, Asked, Finished, Place, Slot
from rlinf_embodied.envs.base import VectorEnv
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.episodes import EpisodeTracker
from rlinf_embodied.workers.block import spread, take_rows


class Trial:
    """``begin`` with what waits, then ``advance`` with every answer until it returns ``None``.

    ``cfg`` is the node ``eval``: ``greedy``; the first ``videos`` episodes are filmed, pictures at most ``video_size``
    high and wide. Where environments cannot be shown ``warn`` is told why, once, and nothing is filmed.
    """

    def __init__(self, place: Place, env: VectorEnv, cfg: Any, warn: Callable[[str], None] = lambda text: None) -> None:
        self.place = place
        self._warn = warn
        self._shown = True
        self.env = env
        self.cfg = cfg
        self.tracker = EpisodeTracker(env.num_envs)
        self.slots: list[Slot | None] = [None] * env.num_envs
        self._decisions = np.zeros(env.num_envs, dtype=np.int64)
        self._frames: list[list[NDArray[np.uint8]]] = [[] for _ in range(env.num_envs)]
        self._finished: list[Finished] = []
        self._lost: list[tuple[Slot, str]] = []

    def begin(self, waiting: deque[Slot]) -> Asked | None:
        """The first question; ``None`` where nothing waits."""
        self.slots = [None] * self.env.num_envs
        self._finished, self._lost = [], []
        self._assign(range(self.env.num_envs), waiting)
        return self._ask()

    def advance(self, answer: Answered, waiting: deque[Slot]) -> Asked | None:
        """Do what was decided; environments whose episode has ended take the next one that waits."""
        if answer.actions is None:
            raise RLinfError(f"sub-batch {self.place} was given no actions")
        actions = spread(self.rows, self.env.num_envs, answer.actions)
        active = np.zeros(self.env.num_envs, dtype=np.bool_)
        active[self.rows] = True
        self._decisions[self.rows] += 1
        for c in range(actions.shape[1]):
            if not active.any():
                break
            self._film(np.flatnonzero(active))
            result = self.env.step(actions[:, c], None if active.all() else active)
            for row, why in result.dropped.items():
                if (slot := self.slots[row]) is None:
                    continue  # idle: it went with the process that it shares
                self._lost.append((slot, why))
                self.slots[row], active[row] = None, False
                self.tracker.reset([row])
            for episode in self.tracker.update(
                result.reward, result.terminated, result.truncated, result.success, active
            ):
                slot = self.slots[episode.env]
                assert slot is not None and slot.seed is not None
                frames = film(self._frames[episode.env], f"evaluation episode {slot.env}")
                self._finished.append(Finished(slot.id, replace(episode, env=slot.env), slot.seed, frames))
                self.slots[episode.env] = None
            active &= ~(result.terminated | result.truncated)
            self.obs = result.obs
        self._assign([row for row in self.rows if self.slots[row] is None], waiting)
        return self._ask()

    def finished(self) -> list[Finished]:
        """Episodes that have ended since this was asked last."""
        found, self._finished = self._finished, []
        return found

    def lost(self) -> list[tuple[Slot, str]]:
        """Episodes that a simulator's failure has cost since this was asked last, with the reason."""
        found, self._lost = self._lost, []
        return found

    def _assign(self, rows: Iterable[int], waiting: deque[Slot]) -> None:
        """Begin the next episodes that wait in the environments ``rows``."""
        begin: list[int] = []
        for row in rows:
            if waiting:
                self.slots[row] = waiting.popleft()
                begin.append(int(row))
        if begin:
            self.env.reset(begin, seeds=[slot.seed or 0 for row in begin if (slot := self.slots[row]) is not None])
            self.tracker.reset(begin)
            self._decisions[begin] = 0
            for row in begin:
                self._frames[row] = []
        self.fresh = begin

    def _ask(self) -> Asked | None:
        self.rows = np.array([row for row, slot in enumerate(self.slots) if slot is not None], dtype=np.int64)
        if not len(self.rows):
            return None
        obs = self.env.observe() if self.fresh else self.obs
        keys = np.zeros((len(self.rows), 3), dtype=np.int64)
        keys[:, 0] = self.cfg.seed
        keys[:, 1] = [slot.env for slot in self.slots if slot is not None]
        keys[:, 2] = self._decisions[self.rows]
        if len(self.rows) < self.env.num_envs:
            obs = take_rows(obs, self.rows)
        return Asked(self.place, obs, keys, greedy=self.cfg.greedy)

    def _film(self, rows: NDArray[np.int64]) -> None:
        filmed = [int(row) for row in rows if (slot := self.slots[row]) is not None and slot.env < self.cfg.videos]
        if not filmed or not self._shown:
            return
        try:
            pictures = self.env.render(filmed)
        except SimulatorError as error:  # what is learnt does not depend on it
            self._shown = False
            self._frames = [[] for _ in self._frames]
            self._warn(f"{error}; evaluations go on without videos (eval.videos=0 does not ask for any)")
            return
        for row, picture in zip(filmed, pictures, strict=True):
            self._frames[row].append(smaller(picture, self.cfg.video_size))


def film(frames: list[NDArray[np.uint8]], who: str) -> NDArray[np.uint8] | None:
    """The pictures of one episode as [T, H, W, 3]; ``None`` where none was made."""
    if sizes := sorted({frame.shape[:2] for frame in frames}):
        if len(sizes) > 1:
            raise SimulatorError(
                f"{who} cannot be filmed: its pictures are of several sizes, {list(sizes[0])} and {list(sizes[1])}"
            )
        return np.stack(frames)
    return None


def smaller(picture: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """A picture [H, W, 3] with neither side above ``size``: means over squares of pixels."""
    step = -(-max(picture.shape[:2]) // size)
    if step == 1:
        return picture
    height, width = (side // step * step for side in picture.shape[:2])
    blocks = picture[:height, :width].reshape(height // step, step, width // step, step, 3)
    return blocks.mean(axis=(1, 3)).round().astype(np.uint8)
