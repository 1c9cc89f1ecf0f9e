"""MetaWorld: real steps of a real task."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from rlinf_core.config.node import Config
from rlinf_core.errors import ConfigError
from rlinf_embodied.envs import Box, SimulatorError
from rlinf_embodied.envs.conformance import check_env
from rlinf_embodied.envs.metaworld_env import STATE, MetaWorldEnv, find_task

pytestmark = pytest.mark.skipif(find_spec("metaworld") is None, reason="the extra metaworld is not installed")


def made(indices: Any = (0, 1), seed: int = 0, task: str = "reach-v3", **cfg: Any) -> MetaWorldEnv:
    return MetaWorldEnv(Config({"task": task, **cfg}, "env"), indices, seed)


def test_reach() -> None:
    env = made(max_episode_steps=3)
    assert env.spec.observations["state"].shape == (STATE,) and env.spec.max_episode_steps == 3
    assert isinstance(env.spec.action, Box) and env.spec.action.shape == (4,)
    env.reset()
    results = [env.step(np.zeros((2, 4))) for _ in range(4)]
    assert [bool(r.truncated.all()) for r in results] == [False, False, True, False]
    assert not any(r.terminated.any() for r in results) and (results[0].reward > 0).all()
    assert results[2].final_obs is not None
    goals = [obs["state"][:, -3:] for obs in (results[2].final_obs, results[2].obs)]
    assert (goals[0] != goals[1]).any(axis=1).all()  # each episode has a goal of its own


def test_goals_are_a_function_of_the_episodes_seed() -> None:
    """``reset(seed=…)`` of MetaWorld itself takes no notice of the seed."""
    env = made((0,))
    goals = [tuple(env.reset([0], seeds=[seed])["state"][0, -3:]) for seed in (1, 2, 3, 1, 2, 3)]
    assert len(set(goals)) == 3 and goals[:3] == goals[3:]
    few = made((0,), goals=2)
    assert len({tuple(few.reset([0], seeds=[seed])["state"][0, -3:]) for seed in range(12)}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reach-v3", "drawer-open-v3", "window-close-v3", "peg-unplug-side-v3"])
def test_an_episode_is_one_of_metaworlds_own(task: str) -> None:
    """With the goal and objects where a task of its benchmarks has them, all that follows is the same."""
    from metaworld.types import Task

    env = made((0,), task=task)
    first = env.reset(seeds=[3])["state"][0]
    kind = find_task(task)
    data = {"rand_vec": env._envs[0].env._last_rand_vec, "env_cls": kind, "partially_observable": False}  # type: ignore[attr-defined]
    own = kind()
    own.set_task(Task(task, pickle.dumps(data)))
    for _ in range(2):  # whatever was before
        state, _ = own.reset()
        own.step(np.ones(4, dtype=np.float32))
    state, _ = own.reset()
    assert np.array_equal(first, state.astype(np.float32))
    for action in np.random.default_rng(0).uniform(-1, 1, (10, 4)).astype(np.float32):
        result = env.step(action[None])
        state, reward, _, _, info = own.step(action)
        assert np.array_equal(result.obs["state"][0], state.astype(np.float32))
        assert result.reward[0] == reward and result.success[0] == bool(info["success"])


def test_success_is_that_of_the_step() -> None:
    """Go to the goal and away again."""
    env = made((0,))
    state = env.reset(seeds=[1])["state"][0]
    seen = []
    for t in range(70):
        aim = state[-3:] if t < 50 else np.array([0.0, 0.5, 0.3])
        move = np.clip((aim - state[:3]) * 20.0, -1.0, 1.0)
        result = env.step(np.append(move, 0.0)[None])
        state = result.obs["state"][0]
        seen.append(bool(result.success[0]))
        assert not result.terminated[0]
    assert any(seen) and seen[49] and not seen[0] and not seen[-1]


@pytest.mark.slow
def test_keeps_to_the_interface() -> None:
    report = check_env(lambda indices, seed: made(indices, seed, max_episode_steps=12), render=False, steps=14)
    assert {rule: seen for rule, seen in report.items() if seen != "ok"} == {"render": "not looked at"}


@pytest.mark.slow
@pytest.mark.long
def test_another_task_keeps_to_the_interface() -> None:
    """One whose reset looks at where the last episode left its parts."""
    report = check_env(
        lambda indices, seed: made(indices, seed, task="drawer-open-v3", max_episode_steps=8), render=False, steps=9
    )
    assert {rule: seen for rule, seen in report.items() if seen != "ok"} == {"render": "not looked at"}


@pytest.mark.slow
@pytest.mark.parametrize("camera", ["corner", "corner2"])
def test_pictures_are_upright(camera: str) -> None:
    """The camera ``corner2`` hangs head down in the model."""
    env = made((0,), kwargs={"camera_name": camera})
    env.reset()
    try:
        picture = env.render([0])[0].astype(int)
    except SimulatorError as error:
        pytest.skip(f"nothing to draw with: {error}")
    assert picture.shape == (256, 256, 3)
    red = picture[:, :, 0] - picture[:, :, 1:].max(axis=2) > 40  # the arm
    wood = (picture[:, :, 0] - picture[:, :, 2] > 20) & ~red  # the table
    assert np.argwhere(red)[:, 0].mean() < np.argwhere(wood)[:, 0].mean()


def test_wrong_names_and_limits() -> None:
    with pytest.raises(ConfigError, match=r"env.task: MetaWorld has no task 'reach' \(did you mean 'reach-v3'\?\)"):
        made(task="reach")
    with pytest.raises(ConfigError, match="env.max_episode_steps=501: MetaWorld's episodes have at most 500 steps"):
        made(max_episode_steps=501)
    with pytest.raises(ConfigError, match=r"env.kwargs: reach-v3 does not take .*'colour'"):
        made(kwargs={"colour": 1})
    assert find_task("push-v3").max_path_length == 500
