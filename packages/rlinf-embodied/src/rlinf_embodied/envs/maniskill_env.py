"""ManiSkill: manipulation tasks in SAPIEN (Tao et al., arXiv 2410.00425), with states as observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, nearest
from rlinf_embodied.envs import maniskill_without_vulkan
from rlinf_embodied.envs.base import Box, EnvSpec, Observation
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.envs.fleet import own_arguments, setting
from rlinf_embodied.envs.seeds import narrow
from rlinf_embodied.envs.vector import PerEnv

REQUIRES = {"mani_skill": "maniskill", "sapien": "maniskill"}


class ManiSkillCpu(PerEnv):
    """N environments of one ManiSkill task, each simulated by itself on the CPU.

    Config keys: ``task`` (``PushCube-v1``), ``control_mode``, ``reward_mode``, ``max_episode_steps`` (null: the task's
    own), ``kwargs`` of the task's class.

    Observation ``state``, float32. Success is ManiSkill's, which also ends the episode. Pictures need a Vulkan device.
    """

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        self._task = find_task(cfg["task"])
        self._can_draw = maniskill_without_vulkan.has_vulkan()
        self._limit_of_task = time_limit(cfg, self._task)
        super().__init__(cfg, indices, seed)

    def make(self, index: int) -> ManiSkillSingle:
        drawing = {"render_mode": "rgb_array"} if self._can_draw else {"render_backend": "none"}
        return ManiSkillSingle(
            make_task(self.cfg, self._task, {"num_envs": 1, "sim_backend": "physx_cpu", **drawing}), self._can_draw
        )

    def describe(self, env: Any) -> EnvSpec:
        return spec_of(env.env, self._limit_of_task)


class ManiSkillSingle:
    """One ManiSkill environment as ``PerEnv`` wants it: without the leading dimension and the tensors."""

    def __init__(self, env: Any, can_draw: bool) -> None:
        self.env = env
        self._can_draw = can_draw

    def reset(self, seed: int) -> Observation:
        obs, _ = self.env.reset(seed=narrow(seed))
        return {"state": obs[0].numpy().copy()}

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool]:
        obs, reward, terminated, _, info = self.env.step(action)
        success = bool(info["success"]) if "success" in info else False
        return {"state": obs[0].numpy()}, float(reward), bool(terminated), success

    def render(self) -> NDArray[np.uint8]:
        if not self._can_draw:
            raise SimulatorError(
                "ManiSkill draws with Vulkan, and SAPIEN finds no Vulkan device here (it takes a driver and libvulkan1)"
            )
        return np.asarray(self.env.render()[0].cpu().numpy(), dtype=np.uint8)

    def close(self) -> None:
        self.env.close()


def find_task(name: str) -> Any:
    """ManiSkill's registration of a task; names the nearest when there is none, and assets that are missing."""
    maniskill_without_vulkan.apply()
    import mani_skill.envs  # noqa: F401 - registers the tasks
    from mani_skill.utils import assets
    from mani_skill.utils.registration import REGISTERED_ENVS

    if name not in REGISTERED_ENVS:
        raise ConfigError(
            f"env.task: ManiSkill has no task {name!r}{nearest(name, REGISTERED_ENVS)}; it has {len(REGISTERED_ENVS)}, "
            "such as PushCube-v1, PickCube-v1, PullCube-v1, StackCube-v1"
        )
    task = REGISTERED_ENVS[name]
    wanted: list[str] = []
    for asset in task.asset_download_ids or []:
        group = asset in assets.DATA_GROUPS
        wanted += assets.expand_data_group_into_individual_data_source_ids(asset) if group else [asset]
    # ManiSkill itself would ask a question on the terminal, and end the process.
    if missing := [asset for asset in wanted if not assets.is_data_source_downloaded(asset)]:
        raise ConfigError(
            f"env.task: {name} needs {len(missing)} sets of assets that are not there ({', '.join(missing[:3])}); get "
            f"them with: python -m mani_skill.utils.download_asset {name}"
        )
    return task


def time_limit(cfg: Any, task: Any) -> int:
    limit = setting(cfg, "max_episode_steps", None) or task.max_episode_steps
    if limit is None:
        raise ConfigError(f"env.max_episode_steps: {task.uid} has no time limit of its own; give one in steps")
    return int(limit)


def make_task(cfg: Any, task: Any, options: dict[str, Any]) -> Any:
    """The bare environment of a task, without ManiSkill's wrappers."""
    given = own_arguments(cfg)
    if given.setdefault("obs_mode", "state") != "state":
        raise ConfigError(f"env.kwargs.obs_mode: observations are states here (state), not {given['obs_mode']}")
    for key in ("control_mode", "reward_mode"):
        if (value := setting(cfg, key, None)) is not None:
            given.setdefault(key, value)
    modes = {"control_mode": "_supported_control_modes", "reward_mode": "SUPPORTED_REWARD_MODES"}
    try:
        return task.make(**given, **options)
    except (KeyError, AssertionError, NotImplementedError) as error:
        wrong = next((key for key in modes if key in given and str(given[key]) in str(error)), None)
        if wrong is None:
            raise
        raise ConfigError(f"env.{wrong}={given[wrong]}: {task.uid} does not have it: {error}") from error
    except TypeError as error:
        raise ConfigError(f"env.kwargs: {task.uid} does not take {given}: {error}") from error


def spec_of(env: Any, limit: int) -> EnvSpec:
    space, action = env.single_observation_space, env.single_action_space
    return EnvSpec(
        {"state": Box(space.low.astype(np.float64), space.high.astype(np.float64))},
        Box(action.low.astype(np.float64), action.high.astype(np.float64)),
        limit,
    )


def make_envs(cfg: Any, indices: Sequence[int], seed: int) -> PerEnv:
    """The plugin: each environment by itself on the CPU, or all at once on a GPU, as ``cfg.device`` says."""
    device = setting(cfg, "device", "auto")
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            from rlinf_embodied.envs.maniskill_batch import ManiSkillBatch

            return ManiSkillBatch(cfg, indices, seed)
        if device == "cuda":
            raise ConfigError("env.device=cuda: torch finds no GPU here; env.device=cpu simulates on the CPU")
    return ManiSkillCpu(cfg, indices, seed)
