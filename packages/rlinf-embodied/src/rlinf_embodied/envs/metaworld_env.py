"""MetaWorld: manipulation tasks of a Sawyer arm in MuJoCo (Yu et al., arXiv 1910.10897; version 3 of the tasks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, nearest
from rlinf_embodied.envs.base import Box, EnvSpec, Observation
from rlinf_embodied.envs.drawing import load_mujoco, mujoco_picture
from rlinf_embodied.envs.fleet import own_arguments, setting
from rlinf_embodied.envs.seeds import derive_seed, narrow
from rlinf_embodied.envs.vector import PerEnv

REQUIRES = {"metaworld": "metaworld"}

STATE = 39
"""Numbers of an observation: hand, gripper and objects now and one step before, and the goal."""


class MetaWorldEnv(PerEnv):
    """N environments of one MetaWorld task, the goal in the observation.

    Config keys: ``task`` (``reach-v3``); ``max_episode_steps`` (null: the simulator's 500); ``goals`` (0: where the
    goal and the objects are is drawn for each episode; n: one of n draws that are the same in every run, as MT1 has
    50); ``kwargs`` of the task's class (``camera_name``, ``width``, ``height``, ``reward_function_version``).

    Observation ``state`` float32 [39]. An episode never ends by itself; success is that of each step.

    ``reset(seed=…)`` of MetaWorld leaves its seed alone, so that goals of two runs differ: here the simulator is seeded
    before each episode.
    """

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        self._class = find_task(cfg["task"])
        self._goals = int(setting(cfg, "goals", 0))
        own = int(self._class.max_path_length)
        self._own_limit = int(setting(cfg, "max_episode_steps", None) or own)
        if self._own_limit > own:
            raise ConfigError(f"env.max_episode_steps={self._own_limit}: MetaWorld's episodes have at most {own} steps")
        self._kwargs = {"render_mode": "rgb_array", "camera_name": "corner2", "width": 256, "height": 256}
        self._kwargs |= own_arguments(cfg)
        super().__init__(cfg, indices, seed)

    def make(self, index: int) -> MetaWorldSingle:
        try:
            env = self._class(**self._kwargs)
        except TypeError as error:
            raise ConfigError(f"env.kwargs: {self.cfg['task']} does not take {self._kwargs}: {error}") from error
        return MetaWorldSingle(env, self._goals)

    def describe(self, env: Any) -> EnvSpec:
        space, action = env.env.sawyer_observation_space, env.env.action_space
        state = Box(space.low.astype(np.float64), space.high.astype(np.float64))
        return EnvSpec(
            {"state": state},
            Box(action.low.astype(np.float64), action.high.astype(np.float64)),
            self._own_limit,
        )


class MetaWorldSingle:
    """One MetaWorld task as ``PerEnv`` wants it."""

    def __init__(self, env: Any, goals: int) -> None:
        from gymnasium.envs.mujoco import MujocoEnv

        self.env = env
        self._goals = goals
        self._base_reset: Any = MujocoEnv.reset
        # What its own benchmarks set through a pickled task: the goal in the observation, where things are at a reset.
        env._partially_observable = False
        env.seeded_rand_vec = True
        env._set_task_called = True
        env.__dict__.pop("sawyer_observation_space", None)  # kept from when the goal was hidden

    def reset(self, seed: int) -> Observation:
        if self._goals:
            seed = derive_seed(0, "metaworld goal", seed % self._goals)
        env = self.env
        env.seed(narrow(seed))
        # As MetaWorld's own reset, which lays the scene out twice, in some tasks with traces of the first time in the
        # observation: both must be of the same draw, as they are with a task of its benchmarks.
        env.curr_path_length = 0
        env._freeze_rand_vec = False
        env.reset_model()
        env._freeze_rand_vec = True
        obs, _ = self._base_reset(env)
        env._prev_obs = obs[:18].copy()
        obs[18:36] = env._prev_obs
        return {"state": obs}

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool]:
        obs, reward, terminated, _, info = self.env.step(action)
        return {"state": obs}, float(reward), bool(terminated), bool(info["success"])

    def render(self) -> NDArray[np.uint8]:
        picture = mujoco_picture(self.env.render)
        # Several of MetaWorld's cameras hang head down: what is up in the picture points down in the world.
        camera = self.env.mujoco_renderer.camera_id
        if camera is not None and camera >= 0 and self.env.data.cam_xmat[camera].reshape(3, 3)[2, 1] < 0:
            picture = picture[::-1, ::-1]
        return np.ascontiguousarray(picture)

    def close(self) -> None:
        self.env.close()


def find_task(name: str) -> Any:
    """The class of a task; names the nearest when there is none."""
    load_mujoco()
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    if name not in ALL_V3_ENVIRONMENTS:
        raise ConfigError(
            f"env.task: MetaWorld has no task {name!r}{nearest(name, ALL_V3_ENVIRONMENTS)}; it has "
            f"{len(ALL_V3_ENVIRONMENTS)}: {', '.join(ALL_V3_ENVIRONMENTS)}"
        )
    return ALL_V3_ENVIRONMENTS[name]
