"""What environments and policies hand to each other is looked at here: shapes, kinds, NaN. Faults are named.

Shape legend: N environments, A the shape of one action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec, Observation, Text


class SimulatorError(RLinfError):
    """A simulator failed more often than it may be started again, or cannot do what it is asked for."""


class ActionChecker:
    """Turns a policy's actions [N, *A] into what the simulators take, or says what is wrong with them."""

    def __init__(self, space: Box | Discrete, indices: Sequence[int]) -> None:
        self._space = space
        self._indices = indices
        self._shape = (len(indices), *space.shape)
        if isinstance(space, Box):
            self._dtype = np.dtype(space.dtype)
            self._low, self._high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
            self._bounded = bool(np.isfinite(self._low).any() or np.isfinite(self._high).any())

    def __call__(self, actions: NDArray[Any], active: NDArray[np.bool_] | None) -> Any:
        """Actions by environment: rows of an array (``Box``, within its bounds), or a list of integers (``Discrete``).

        Rows that are not ``active`` are not looked at.
        """
        actions = np.asarray(actions)
        self.shape(actions)
        return self._box(actions, active) if isinstance(self._space, Box) else self._discrete(actions, active)

    def shape(self, actions: NDArray[Any]) -> None:
        """That there is one action for each environment, of the right shape."""
        if actions.shape != self._shape:
            raise ConfigError(
                f"actions have shape {list(actions.shape)}; {self._shape[0]} environments with actions of shape "
                f"{list(self._shape[1:])} take {list(self._shape)}"
            )

    def running(self, active: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Which environments are stepped [N]: all of them when ``active`` is ``None``."""
        n = self._shape[0]
        if active is None:
            return np.ones(n, dtype=np.bool_)
        active = np.array(active)
        if active.shape != (n,) or active.dtype != np.bool_:
            raise ConfigError(f"active is [{n}] of bool, not {list(active.shape)} of {active.dtype}")
        return active

    def _box(self, actions: NDArray[Any], active: NDArray[np.bool_] | None) -> NDArray[Any]:
        if actions.dtype.kind not in "fiu":
            raise ConfigError(f"actions are of type {actions.dtype}, and the environment takes numbers ({self._dtype})")
        finite = np.isfinite(actions)
        if not finite.all():
            self._refuse_unfinite(actions, finite, active)
            actions = np.where(finite, actions, 0.0)
        if self._bounded:
            actions = np.minimum(np.maximum(actions, self._low), self._high)
        elif actions.dtype == self._dtype:
            return actions.copy()  # the simulators may keep theirs, and the caller may write into his
        return actions.astype(self._dtype)

    def _refuse_unfinite(
        self, actions: NDArray[Any], finite: NDArray[np.bool_], active: NDArray[np.bool_] | None
    ) -> None:
        bad: NDArray[np.bool_] = np.logical_not(finite.reshape(len(finite), -1).all(axis=1))
        if active is not None:
            bad &= active
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise NonFiniteError(
                f"the action of environment {self._indices[i]} is not finite: {_short(actions[i])}"
                f"{_others(bad)}; the policy gave it"
            )

    def _discrete(self, actions: NDArray[Any], active: NDArray[np.bool_] | None) -> list[np.int64]:
        assert isinstance(self._space, Discrete)
        if actions.dtype.kind not in "iu":
            raise ConfigError(
                f"actions are of type {actions.dtype}, and the environment takes integers 0 ... {self._space.n - 1}"
            )
        low, high = 0, self._space.n
        numbers = actions.tolist()
        if min(numbers) < low or max(numbers) >= high:
            bad: NDArray[np.bool_] = np.logical_or(actions < low, actions >= high)
            if active is not None:
                np.logical_and(bad, active, out=bad)
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                raise ConfigError(
                    f"the action of environment {self._indices[i]} is {numbers[i]}, and there are {low} ... "
                    f"{high - 1}{_others(bad)}"
                )
        return list(actions.astype(np.int64))


def check_picture(picture: NDArray[Any], who: str) -> None:
    """That it is [H, W, 3] of uint8, and not empty."""
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8 or not picture.size:
        raise SimulatorError(
            f"{who} is shown as {list(picture.shape)} of {picture.dtype}; a picture is [H, W, 3] of uint8"
        )


def check_observation(spec: EnvSpec, obs: Observation, who: str) -> None:
    """That one environment's observation (no leading dimension) is what ``spec`` promises: keys, shapes, kinds, no NaN.

    Raises ConfigError or NonFiniteError that begins with ``who``.
    """
    if not isinstance(obs, Mapping):
        raise ConfigError(f"{who}: the observation is of type {type(obs).__name__}, not a dict by key")
    if set(obs) != set(spec.observations):
        missing = sorted(set(spec.observations) - set(obs))
        extra = sorted(set(obs) - set(spec.observations))
        text = "; ".join(
            f"{word} {', '.join(map(repr, names))}" for word, names in (("without", missing), ("with", extra)) if names
        )
        raise ConfigError(f"{who}: the observation comes {text}; keys are {', '.join(spec.observations)}")
    for key, space in spec.observations.items():
        value = obs[key]
        if isinstance(space, Text):
            if not isinstance(value, str):
                raise ConfigError(f"{who}: observation {key!r} is a {type(value).__name__}, not a text")
            continue
        if not isinstance(value, np.ndarray | np.generic):
            raise ConfigError(f"{who}: observation {key!r} is a {type(value).__name__}, not an array")
        array = np.asarray(value)
        if array.shape != space.shape:
            raise ConfigError(
                f"{who}: observation {key!r} has shape {list(array.shape)}, and {list(space.shape)} was promised"
            )
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise ConfigError(f"{who}: observation {key!r} is of type {array.dtype}, and {space.dtype} was promised")
        if array.dtype.kind == "f":
            # In the promised type: what is finite in float64 may not be in float32.
            with np.errstate(over="ignore"):
                finite = np.isfinite(array.astype(space.dtype))
            if not finite.all():
                raise NonFiniteError(f"{who}: observation {key!r} is not finite: {_at(array, finite)}")


class FiniteRows:
    """Looks for NaN and infinities in an array [N, ...] that is written over and over."""

    def __init__(self, rows: NDArray[Any], name: str, indices: Sequence[int]) -> None:
        self._rows, self._name, self._indices = rows, name, indices
        self._flat = rows.reshape(-1)
        self._finite = np.ones(self._flat.shape, dtype=np.bool_)

    def check(self) -> None:
        """Raises NonFiniteError that names the first environment with such a number."""
        np.isfinite(self._flat, out=self._finite)
        if np.count_nonzero(self._finite) == self._finite.size:  # a fraction of what all() takes
            return
        finite = self._finite.reshape(len(self._rows), -1)
        i = int(np.flatnonzero(~finite.all(axis=1))[0])
        row = self._rows[i]
        raise NonFiniteError(
            f"environment {self._indices[i]}: {self._name} is not finite: {_at(row, finite[i].reshape(row.shape))}"
        )


def _at(array: NDArray[Any], finite: NDArray[np.bool_]) -> str:
    if array.ndim == 0:
        return str(array)
    place = tuple(int(k) for k in np.argwhere(~finite)[0])
    return f"{array[place]} at {list(place)} ({int((~finite).sum())} of {array.size} numbers)"


def _short(value: Any) -> str:
    text = np.array2string(np.asarray(value), precision=4, threshold=8)
    return text if len(text) <= 120 else f"{text[:120]}…"


def _others(bad: NDArray[np.bool_]) -> str:
    count = int(bad.sum())
    return "" if count == 1 else f" (and those of {count - 1} more)"
