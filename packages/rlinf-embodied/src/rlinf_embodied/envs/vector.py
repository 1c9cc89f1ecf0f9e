"""A vector of environments made of single ones: episodes, time limit, autoreset, checks, failures, state.

Shape legend: N environments, A the shape of one action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, RLinfError, describe
from rlinf_embodied.envs.base import Box, Observation, StepResult, Text
from rlinf_embodied.envs.checks import ActionChecker, FiniteRows, SimulatorError, check_observation, check_picture
from rlinf_embodied.envs.fleet import Fleet, log
from rlinf_embodied.envs.seeds import episode_seed


class PerEnv(Fleet):
    """N environments of one task, each a ``SingleEnv``. A plugin subclasses it with ``make`` and ``describe``.

    The k-th episode of environment i begins with ``episode_seed(seed, i, k)``. An episode is cut at
    ``spec.max_episode_steps``, whether the simulator has a limit or not. A simulator that raises is closed and made
    again, at most ``max_restarts`` times in all; its episode is dropped by name. Where one is in the middle of an
    episode is given by the episode's seed and the actions so far, which ``restore`` plays again: that is exact for
    simulators that are deterministic, and it is checked.

    Args:
        cfg: config node ``env``. Read here: ``max_restarts`` (0 where there is none).
        indices: the environments' numbers in the run.
        seed: root seed.
    """

    episodes: list[int]
    """By environment, the number of its next episode that is not begun with a seed from outside. May be set."""

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        super().__init__(cfg, indices)
        self.seed = int(seed)
        n = len(self.indices)
        self.episodes = [0] * n
        self._check = ActionChecker(self.spec.action, self.indices)
        self._limit = self.spec.max_episode_steps
        # The present episode of each: its seed (None: not begun) and what was done in it.
        self._seeds: list[int | None] = [None] * n
        self._past: list[list[Any]] = [[] for _ in range(n)]
        spaces = self.spec.observations.items()
        self._texts: dict[str, list[str]] = {key: [""] * n for key, space in spaces if isinstance(space, Text)}
        self._arrays = {key: np.zeros((n, *s.shape), s.dtype) for key, s in spaces if isinstance(s, Box)}
        self._rows = [(key, rows, rows.shape[1:]) for key, rows in self._arrays.items()]
        floats = {key: rows for key, rows in self._arrays.items() if rows.dtype.kind == "f"}
        self._floats = list(floats.items())
        self._reward = np.zeros(n)
        self._finite = [FiniteRows(self._reward, "the reward", self.indices)]
        self._finite += [FiniteRows(rows, f"observation {key!r}", self.indices) for key, rows in self._floats]

    # -- VectorEnv ---------------------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        return len(self.indices)

    def reset(self, envs: Sequence[int] | None = None, *, seeds: Sequence[int] | None = None) -> Observation:
        positions = self._positions(envs)
        if seeds is not None and len(seeds) != len(positions):
            raise ConfigError(f"{len(positions)} environments are to be reset, with {len(seeds)} seeds")
        for place, i in enumerate(positions):
            self._begin(i, None if seeds is None else int(seeds[place]))
        return self._observations(positions)

    def step(self, actions: NDArray[Any], active: NDArray[np.bool_] | None = None) -> StepResult:
        n = len(self.indices)
        if not self._envs:
            raise RLinfError("these environments are closed")
        if active is None:
            running: Sequence[int] = range(n)
        else:
            active = self._check.running(active)
            running = np.flatnonzero(active).tolist()
        checked = self._check(actions, active)
        if None in self._seeds:
            for i in running:
                self._must_have_begun(i)
        reward = self._reward
        reward[:] = 0.0
        terminated, truncated, success = np.zeros((3, n), dtype=np.bool_)
        dropped: dict[int, str] = {}
        ended = self._simulate(running, checked, (reward, terminated, truncated, success), dropped)
        for finite in self._finite:
            finite.check()
        final = self._observations(ended) if ended else None
        for i in ended:
            self._begin(i, None)
        return StepResult(
            self._present(),
            reward.copy(),
            terminated,
            truncated,
            success,
            final,
            np.array(ended, dtype=np.int64),
            dropped,
        )

    def observe(self) -> Observation:
        for i in range(len(self.indices)) if None in self._seeds else ():
            self._must_have_begun(i)
        return self._present()

    def render(self, envs: Sequence[int]) -> list[NDArray[np.uint8]]:
        pictures = []
        for i in self._positions(envs):
            try:
                picture = np.asarray(self._envs[i].render())
            except RLinfError:
                raise
            except Exception as error:
                raise SimulatorError(f"environment {self.indices[i]} cannot be shown: {describe(error)}") from error
            self._drew()
            check_picture(picture, f"environment {self.indices[i]}")
            pictures.append(picture)
        return pictures

    def state(self) -> dict[str, Any]:
        """``envs``: by the environments' numbers, so that a part of them can go on from it too."""
        envs = {
            index: {
                "next": self.episodes[i],
                "seed": self._seeds[i],
                "actions": np.array(self._past[i]),
                "floats": {key: rows[i].copy() for key, rows in self._floats},
            }
            for i, index in enumerate(self.indices)
        }
        return {"seed": self.seed, "envs": envs}

    def restore(self, state: Any) -> None:
        if state["seed"] != self.seed:
            raise ConfigError(f"a state of environments with seed {state['seed']} does not fit those of {self.seed}")
        if missing := [index for index in self.indices if index not in state["envs"]]:
            raise ConfigError(f"the state has no environment {missing[0]}; it has {sorted(state['envs'])}")
        for i, index in enumerate(self.indices):
            kept = state["envs"][index]
            self._seeds[i] = None
            if kept["seed"] is not None:
                self._begin(i, kept["seed"])
                self._replay(i, kept["actions"], kept["floats"])
            self.episodes[i] = kept["next"]

    def _simulate(
        self, running: Sequence[int], actions: Any, into: tuple[NDArray[Any], ...], dropped: dict[int, str]
    ) -> list[int]:
        """One step of the simulators at the positions ``running``; those whose episode ended, in order. Writes the
        observations, ``into`` (reward, terminated, truncated, success) and what was lost."""
        reward, terminated, truncated, success = into
        envs, past, limit, rows, texts = self._envs, self._past, self._limit, self._rows, self._texts
        ended: list[int] = []
        for i in running:
            env, action = envs[i], actions[i]
            try:
                obs, reward[i], over, success[i] = env.step(action)
                for key, buffer, shape in rows:
                    value = obs[key]
                    # An assignment would spread a smaller array over the row.
                    if getattr(value, "shape", None) != shape:
                        check_observation(self.spec, obs, f"environment {self.indices[i]}")
                    buffer[i] = value
                if texts:
                    for key in texts:
                        texts[key][i] = obs[key]
            except RLinfError:
                raise
            except Exception as error:
                dropped[i] = self._lost(i, error)
                reward[i], success[i] = 0.0, False
                continue
            past[i].append(action)
            if over:
                terminated[i] = True
                ended.append(i)
            elif len(past[i]) >= limit or getattr(env, "cut", False):
                truncated[i] = True
                ended.append(i)
        return ended

    # -- within ------------------------------------------------------------------------------------------------------

    def _must_have_begun(self, i: int) -> None:
        if self._seeds[i] is None:
            raise RLinfError(f"environment {self.indices[i]} has no episode yet: reset it first")

    def _positions(self, envs: Sequence[int] | None) -> Sequence[int]:
        n = len(self.indices)
        if not self._envs:
            raise RLinfError("these environments are closed")
        if envs is None:
            return range(n)
        positions = [int(i) for i in envs]
        if len(set(positions)) < len(positions) or not all(0 <= i < n for i in positions):
            raise ConfigError(f"{positions} are not positions of {n} environments, each once (0 ... {n - 1})")
        return positions

    def _present(self) -> Observation:
        obs: Observation = {key: rows.copy() for key, rows in self._arrays.items()}
        for key, texts in self._texts.items():
            obs[key] = list(texts)
        return obs

    def _observations(self, positions: Sequence[int]) -> Observation:
        places = list(positions)
        obs: Observation = {key: rows[places] for key, rows in self._arrays.items()}
        for key, texts in self._texts.items():
            obs[key] = [texts[i] for i in places]
        return obs

    def _begin(self, i: int, seed: int | None) -> None:
        """Begin an episode of the environment at position i: that of ``seed``, or its next one."""
        if seed is None:
            seed = episode_seed(self.seed, self.indices[i], self.episodes[i])
            self.episodes[i] += 1
        while True:
            try:
                obs = self._envs[i].reset(seed)
                break
            except RLinfError:
                raise
            except Exception as error:
                self._remake(i, error, "while it was reset")
        if self._seeds[i] is None:
            check_observation(self.spec, obs, f"environment {self.indices[i]}")
        try:
            self._write(i, obs)
        except (AttributeError, KeyError, TypeError, ValueError):  # of another kind than was promised: say which
            check_observation(self.spec, obs, f"environment {self.indices[i]}")
            raise
        for finite in self._finite[1:]:
            finite.check()
        self._seeds[i] = seed
        self._past[i] = []

    def _write(self, i: int, obs: Observation) -> None:
        for key, rows, shape in self._rows:
            value = obs[key]
            if value.shape != shape:  # an assignment would spread a smaller array over the row
                check_observation(self.spec, obs, f"environment {self.indices[i]}")
            rows[i] = value
        for key, texts in self._texts.items():
            texts[i] = obs[key]

    def _replay(self, i: int, actions: NDArray[Any], floats: Mapping[str, NDArray[Any]]) -> None:
        """Do ``actions`` again, from the beginning of an episode; the observation must then be ``floats``."""
        for action in actions:
            try:
                self._write(i, self._envs[i].step(action)[0])
            except Exception as error:
                raise SimulatorError(
                    f"environment {self.indices[i]} failed while its episode was played again: {describe(error)}"
                ) from error
            self._past[i].append(action)
        for key, row in floats.items():
            if not np.allclose(self._arrays[key][i], row, rtol=1e-4, atol=1e-4):
                raise SimulatorError(
                    f"environment {self.indices[i]} cannot be brought back to where it was: observation {key!r} is "
                    "another one after the same actions from the same seed (it is not deterministic)"
                )

    def _lost(self, i: int, error: Exception) -> str:
        """The simulator at position i raised in a step: make it again and begin the next episode."""
        reason = f"environment {self.indices[i]} failed in step {len(self._past[i]) + 1}: {describe(error, 500)}"
        self._remake(i, error, f"in step {len(self._past[i]) + 1}")
        self._begin(i, None)
        log.warning("%s; started again (%d of %d)", reason, self.restarts, self._max_restarts)
        return reason
