"""Rewards of LIBERO episodes beside its own, which is 1 at success and nothing before.

A reward is a function of two moments: before a step and after it. ``env.reward=module:function`` names a user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError
from rlinf_embodied.conf.libero import check_reward


@dataclass(frozen=True)
class Moment:
    """What a reward may look at: positions [3] in metres, in the simulator's world.

    ``objects``: of everything that can be named, by name. ``of_interest``: names of what the task is about, what is to
    be moved first. ``success``: whether the task is done.
    """

    gripper: NDArray[np.float64]
    objects: Mapping[str, NDArray[np.float64]]
    of_interest: tuple[str, ...]
    success: bool

    @property
    def distance(self) -> float:
        """From the gripper to the first object of interest."""
        return float(np.linalg.norm(self.gripper - self.objects[self.of_interest[0]]))


Reward = Callable[[Moment, Moment], float]


def sparse(before: Moment, after: Moment) -> float:
    """1 at success."""
    return float(after.success)


def distance(before: Moment, after: Moment) -> float:
    """1 at success, and by how many metres the gripper came nearer to the object.

    Shaping with the potential -distance and no discount (Ng, Harada and Russell 1999, theorem 1): over an episode it
    adds up to the distance gained, so that it changes no comparison between policies that end equally near.
    """
    return float(after.success) + before.distance - after.distance


BUILT_IN: dict[str, Reward] = {"sparse": sparse, "distance": distance}


def load_reward(name: str) -> Reward:
    """The reward called ``name``: a built-in one, or ``module:function``. Raises ConfigError when it cannot be had."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if problems := check_reward(name):
        raise ConfigError(problems[0])
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"env.reward: {name!r} cannot be imported where LIBERO runs: {error}") from error
    if not callable(found):
        raise ConfigError(f"env.reward: {name!r} is a {type(found).__name__}, not a function of two moments")
    reward: Reward = found
    return reward
