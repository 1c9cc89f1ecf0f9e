"""ManiSkill: real steps of real tasks, with and without a Vulkan device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from rlinf_core.config.node import Config
from rlinf_core.errors import ConfigError
from rlinf_embodied.envs import Box, PerEnv, SimulatorError, maniskill_without_vulkan
from rlinf_embodied.envs.conformance import check_env
from rlinf_embodied.envs.maniskill_env import find_task, make_envs

pytestmark = [
    pytest.mark.slow,
    # Not importorskip: it takes ten seconds to import, also for those who leave the slow tests out.
    pytest.mark.skipif(find_spec("mani_skill") is None, reason="the extra maniskill is not installed"),
    # SAPIEN says so when it brings its own; and what it imports is older than Python's own deprecations.
    pytest.mark.filterwarnings("ignore:Failed to find system libvulkan:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def made(indices: Any = (0, 1), seed: int = 0, task: str = "PushCube-v1", **cfg: Any) -> PerEnv:
    keys = {"control_mode": "pd_ee_delta_pos", "device": "cpu", **cfg}
    return make_envs(Config({"task": task, **keys}, "env"), indices, seed)


@pytest.mark.parametrize("task", ["PushCube-v1", "PickCube-v1", "PullCube-v1", "StackCube-v1"])
def test_steps(task: str) -> None:
    env = made(task=task)
    assert env.spec.max_episode_steps == 50  # the task's own
    assert isinstance(env.spec.action, Box) and env.spec.action.dtype == "float32"
    first = env.reset()["state"]
    assert first.dtype == np.float32 and first.shape == (2, *env.spec.observations["state"].shape)
    result = env.step(np.ones((2, *env.spec.action.shape)))
    assert (result.obs["state"] != first).any(axis=1).all() and result.reward.dtype == np.float64
    assert np.array_equal(env.reset([1, 0], seeds=[3, 3])["state"][0], env.observe()["state"][0])


def test_a_success_ends_the_episode() -> None:
    """Push the cube as the reward wants it: behind it, then forward."""
    env = made((0,), seed=0)
    state = env.reset(seeds=[4])["state"][0]
    for t in range(50):
        hand, cube = state[18:21], state[28:31]
        behind = cube + np.array([-0.08, 0.0, 0.0])
        aim = behind if t < 14 else cube + np.array([0.3, 0.0, 0.0])
        move = np.clip((aim - hand) * 12.0, -1.0, 1.0)
        result = env.step(np.append(move, -1.0)[None])
        state = result.obs["state"][0]
        if result.success[0]:
            break
    assert result.success[0] and result.terminated[0] and not result.truncated[0]
    assert result.ended.tolist() == [0] and result.final_obs is not None
    assert not np.array_equal(result.final_obs["state"], result.obs["state"])


def test_keeps_to_the_interface() -> None:
    report = check_env(lambda indices, seed: made(indices, seed, max_episode_steps=8), render=False, steps=9)
    assert {rule: seen for rule, seen in report.items() if seen != "ok"} == {"render": "not looked at"}


def test_the_batch_keeps_to_the_interface_with_one() -> None:
    """What runs on a GPU, with the one environment that a CPU simulates."""
    from rlinf_embodied.envs.maniskill_batch import ManiSkillBatch

    cfg = Config({"task": "PushCube-v1", "control_mode": "pd_ee_delta_pos", "max_episode_steps": 5}, "env")
    batch, single = ManiSkillBatch(cfg, (3,), 0, backend="physx_cpu"), made((3,), max_episode_steps=5)
    assert np.array_equal(batch.reset()["state"], single.reset()["state"])
    rng = np.random.default_rng(0)
    for t in range(12):
        actions = rng.uniform(-1, 1, (1, 4))
        active = np.array([t % 4 != 2])
        a, b = batch.step(actions, active), single.step(actions, active)
        assert np.allclose(a.obs["state"], b.obs["state"], atol=1e-5)
        assert np.allclose(a.reward, b.reward, atol=1e-5) and np.array_equal(a.truncated, b.truncated)
        assert (a.final_obs is None) == (b.final_obs is None)
    kept = batch.state()
    there = batch.observe()["state"]
    batch.step(rng.uniform(-1, 1, (1, 4)))
    batch.restore(kept)
    assert np.allclose(batch.observe()["state"], there, atol=1e-5)


def test_names_modes_and_devices() -> None:
    with pytest.raises(ConfigError, match=r"ManiSkill has no task 'PushCub-v1' \(did you mean 'PushCube-v1'\?\)"):
        made(task="PushCub-v1")
    with pytest.raises(
        ConfigError, match="env.control_mode=teleport: PushCube-v1 does not have it.*pd_joint_delta_pos"
    ):
        made(control_mode="teleport")
    with pytest.raises(ConfigError, match="env.reward_mode=praise: PushCube-v1 does not have it"):
        made(reward_mode="praise")
    with pytest.raises(ConfigError, match="env.kwargs: PushCube-v1 does not take .*'colour'"):
        made(kwargs={"colour": 1})
    with pytest.raises(ConfigError, match="env.kwargs.obs_mode: observations are states here"):
        made(kwargs={"obs_mode": "rgb"})
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="env.device=cuda: torch finds no GPU here"):
            made(device="cuda")


def test_missing_assets_are_named_instead_of_asked_for() -> None:
    """ManiSkill would ask on the terminal whether to download them, and end the process."""
    from mani_skill.utils import assets
    from mani_skill.utils.registration import REGISTERED_ENVS

    lacking = [
        name
        for name, task in REGISTERED_ENVS.items()
        if any(
            asset in assets.DATA_SOURCES and not assets.is_data_source_downloaded(asset)
            for asset in task.asset_download_ids
        )
    ]
    assert lacking
    with pytest.raises(ConfigError, match=rf"{lacking[0]} needs \d+ sets of assets.*download_asset {lacking[0]}"):
        find_task(lacking[0])


def test_without_vulkan_states_only() -> None:
    if not maniskill_without_vulkan.apply():
        pytest.skip("there is a Vulkan device")
    import sapien

    assert sapien.render.RenderMaterial is maniskill_without_vulkan.NoMaterial
    assert not maniskill_without_vulkan.has_vulkan()
    env = made((0,))
    env.reset()
    with pytest.raises(SimulatorError, match="SAPIEN finds no Vulkan device here"):
        env.render([0])


def test_the_stand_in_takes_everything() -> None:
    material = maniskill_without_vulkan.NoMaterial(base_color=[1, 2, 3, 4])
    material.roughness = 0.5
    assert material.set_base_color([0, 0, 0, 1]) is None
    with pytest.raises(AttributeError):
        material.__array__  # noqa: B018
