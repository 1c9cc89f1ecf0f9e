"""What an environment is here: one vectorised interface with one meaning of autoreset.

Shape legend: N environments, A the shape of one action.

A plugin (entry-point group ``rlinf.envs``) is a class that is called as ``Plugin(cfg, indices, seed)`` and gives a
``VectorEnv``. Most simulators step one environment at a time: their plugin subclasses ``rlinf_embodied.envs.vector.
PerEnv`` and says how to make a ``SingleEnv``; episodes, seeds, time limits, autoreset and checks are then done for it.
A simulator that steps many at once on an accelerator implements ``VectorEnv`` itself.
``rlinf_embodied.envs.conformance.check_env`` is the test that every plugin must pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Observation = dict[str, Any]
"""By key, of N environments: an array [N, ...], or for text (``instruction``) a list of N strings. Keys that several
plugins have: ``state`` (float32 vector), ``image`` and ``wrist_image`` (uint8, [N, H, W, 3], upright),
``instruction``."""


@dataclass(frozen=True, slots=True)
class Box:
    """Numbers within bounds. ``low`` and ``high`` have the shape; infinite where there is no bound."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.low.shape)


@dataclass(frozen=True, slots=True)
class Discrete:
    """One of the numbers 0 ... n-1, as int64."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What a policy must know of an environment before one is stepped.

    ``observations``: the space of one environment's observation by key. ``action``: of one action. Actions outside a
    ``Box`` are clipped to it by the environment, NaN is an error. ``max_episode_steps``: the time limit in steps; every
    plugin has one.
    """

    observations: Mapping[str, Box | Text]
    action: Box | Discrete
    max_episode_steps: int


@dataclass(slots=True)
class StepResult:
    """What one step of N environments gave.

    ``obs`` is what the next action answers: for an environment whose episode ended in this step it is the first of its
    next episode. ``final_obs`` are the observations before the reset, of the environments ``ended`` alone (rows in that
    order); ``None`` when no episode ended. ``terminated``: the episode ended by itself; ``truncated``: a time limit cut
    it (where both are true it ended by itself). ``success`` is that of this step. ``dropped``: environments whose
    episode was lost because the simulator failed and was started again, with the reason; their row is the first of a
    new episode and what came before belongs to no episode.
    """

    obs: Observation
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    final_obs: Observation | None = None
    ended: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    dropped: dict[int, str] = field(default_factory=dict)


@runtime_checkable
class VectorEnv(Protocol):
    """N environments of one task. ``indices`` are their numbers in the whole run.

    The k-th episode of environment i begins as a function of (seed, i, k) alone, so that nothing depends on how
    environments are shared out over processes.
    """

    spec: EnvSpec
    indices: Sequence[int]

    @property
    def num_envs(self) -> int: ...

    def reset(self, envs: Sequence[int] | None = None, *, seeds: Sequence[int] | None = None) -> Observation:
        """Begin a new episode in the environments ``envs`` (positions 0 ... N-1; ``None``: all) and return the
        observations of *those*. ``seeds`` (one for each) says which episode, instead of the next one of (seed, i, k):
        equal seeds give equal initial states."""

    def step(self, actions: NDArray[Any], active: NDArray[np.bool_] | None = None) -> StepResult:
        """Step the environments [N]; actions [N, *A]. Those that are not ``active`` are left as they are (their rows of
        the result repeat the last observation, with reward 0 and no end). An episode that ends is reset at once."""

    def observe(self) -> Observation:
        """The present observations, as the last ``reset`` or ``step`` gave them."""

    def render(self, envs: Sequence[int]) -> list[NDArray[np.uint8]]:
        """One upright picture [H, W, 3] of each."""

    def state(self) -> Any:
        """What brings the environments back to where they are (picklable); see ``restore``."""

    def restore(self, state: Any) -> None:
        """Go on from ``state``: same observations, and the same to come for the same actions."""

    def close(self) -> None:
        """Free the simulators; may be called twice."""


class SingleEnv(Protocol):
    """One environment, as ``PerEnv`` wants it. No autoreset, no time limit, no checks: ``PerEnv`` does those.

    One that has a true ``cut`` (bool) after a step was cut by the simulator itself in it, whatever the time limit.
    """

    def reset(self, seed: int) -> Observation:
        """A new episode whose initial state is a function of ``seed``; observation without a leading dimension."""

    def step(self, action: Any) -> tuple[Observation, float, bool, bool]:
        """(observation, reward, terminated, success of this step)."""

    def render(self) -> NDArray[np.uint8]:
        """An upright picture [H, W, 3]."""

    def close(self) -> None: ...
