"""What episodes of a vectorised environment amount to: return, length, success once and at the end.

The meaning of autoreset is the one of ``rlinf_core.types.Env``: an episode that ends at step t is reset
within step t, so that step t's reward and success still belong to it and step t + 1 to the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlinf_core.errors import ConfigError

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode. ``ret`` is the undiscounted sum of rewards, ``length`` the number of steps.

    ``success_once``: at some step; ``success_at_end``: at the last one. ``truncated``: a time limit cut it,
    and it did not end by itself in the same step.
    """

    env: int
    ret: float
    length: int
    success_once: bool
    success_at_end: bool
    truncated: bool


class EpisodeTracker:
    """Adds up steps per environment and hands out episodes as they end (N environments)."""

    def __init__(self, num_envs: int) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs is at least 1, not {num_envs}")
        self.num_envs = num_envs
        self._ret = np.zeros(num_envs, dtype=np.float64)
        self._length = np.zeros(num_envs, dtype=np.int64)
        self._once = np.zeros(num_envs, dtype=bool)

    def update(
        self,
        reward: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike,
        success: ArrayLike | None = None,
        active: ArrayLike | None = None,
    ) -> list[Episode]:
        """Take one step of all environments; returns the episodes that ended in it, by environment.

        All arguments are [N]. ``success`` is that of this step (None: the environment reports none, False).
        ``active`` masks environments out whose step did nothing: one that resets on the *next* step ignores
        the action after an end, and that step belongs to no episode.
        """
        reward = self._column(reward, np.float64, "reward")
        ended = self._column(terminated, np.bool_, "terminated")
        cut = self._column(truncated, np.bool_, "truncated")
        nothing = np.zeros(self.num_envs, dtype=bool)
        succeeded = nothing if success is None else self._column(success, np.bool_, "success")
        counted = ~nothing if active is None else self._column(active, np.bool_, "active")

        self._ret += np.where(counted, reward, 0.0)
        self._length += counted
        self._once |= succeeded & counted
        done = (ended | cut) & counted
        episodes = [
            Episode(
                env=int(env),
                ret=float(self._ret[env]),
                length=int(self._length[env]),
                success_once=bool(self._once[env]),
                success_at_end=bool(succeeded[env]),
                truncated=bool(cut[env] and not ended[env]),
            )
            for env in np.flatnonzero(done)
        ]
        self._clear(done)
        return episodes

    def reset(self, envs: Iterable[int] | None = None) -> None:
        """Forget the unfinished episodes of ``envs`` (None: of all), as a reset from outside does."""
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[slice(None) if envs is None else list(envs)] = True
        self._clear(mask)

    def _clear(self, mask: NDArray[np.bool_]) -> None:
        self._ret[mask] = 0.0
        self._length[mask] = 0
        self._once[mask] = False

    def _column(self, values: ArrayLike, dtype: type[_T], name: str) -> NDArray[_T]:
        column = np.asarray(values, dtype=dtype)
        if column.shape != (self.num_envs,):
            raise ValueError(f"{name} has shape {column.shape}, and there are {self.num_envs} environments")
        return column


def summarise(episodes: Iterable[Episode]) -> dict[str, float]:
    """Means over episodes, each counted once, and their number.

    Keys: episodes, return, length, success_once, success_at_end, truncated. Without an episode only
    ``episodes`` (0) is there: a mean of nothing is not a number to log.
    """
    rows = list(episodes)
    if not rows:
        return {"episodes": 0.0}
    return {
        "episodes": float(len(rows)),
        "return": float(np.mean([row.ret for row in rows])),
        "length": float(np.mean([row.length for row in rows])),
        "success_once": float(np.mean([row.success_once for row in rows])),
        "success_at_end": float(np.mean([row.success_at_end for row in rows])),
        "truncated": float(np.mean([row.truncated for row in rows])),
    }
