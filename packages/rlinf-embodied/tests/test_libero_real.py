"""LIBERO itself, in its own Python environment, with real rendering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from rlinf_core.config.node import Config
from rlinf_core.errors import ConfigError
from rlinf_embodied.conf.libero import Libero, find_python
from rlinf_embodied.envs import load_env

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("libero") is None and find_python() is None, reason="there is no .venv-libero (tools/install --env)"
    ),
]
ACTIONS = np.random.default_rng(0).uniform(-1.0, 1.0, (4, 1, 7))


def libero(**changes: Any) -> Any:
    settings = asdict(Libero(**{"reward": "distance", "image_size": 64, **changes}))
    return load_env(Config(settings, "env"), [0], 3)


def episode(envs: Any, seed: int) -> list[dict[str, Any]]:
    """What is seen of an episode with the same actions."""
    seen = [envs.reset(seeds=[seed])]
    for action in ACTIONS:
        result = envs.step(action)
        seen.append({**result.obs, "reward": result.reward})
    return seen


def assert_equal(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    for one, other in zip(first, second, strict=True):
        assert set(one) == set(other)
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])


@pytest.fixture(scope="module")
def envs() -> Iterator[Any]:
    made = libero()
    yield made
    made.close()


def test_soft_resets_are_exact(envs: Any) -> None:
    """An episode of a kept simulation is bit-equal, pictures too, after others and to one of a new simulation."""
    first = episode(envs, 1)
    other = episode(envs, 2)
    assert any((a["state"] != b["state"]).any() for a, b in zip(first, other, strict=True))
    assert_equal(first, episode(envs, 51))  # 50 initial states
    hard = libero(hard_reset=True)
    try:
        assert_equal(first, episode(hard, 1))
    finally:
        hard.close()


def test_pictures_are_upright_and_the_task_is_told(envs: Any) -> None:
    obs = envs.reset(seeds=[0])
    assert obs["instruction"] == ["pick up the black bowl between the plate and the ramekin and place it on the plate"]
    assert obs["image"].shape == obs["wrist_image"].shape == (1, 64, 64, 3)
    warm = obs["image"][0, :, :, 0].astype(float) - obs["image"][0, :, :, 2]
    assert warm[-8:].mean() > warm[:8].mean() + 10.0  # the table's wood is below, the grey wall above
    assert envs.spec.max_episode_steps == 220


@pytest.mark.long
def test_reflections_can_be_left_away(envs: Any) -> None:
    whole = envs.reset(seeds=[0])
    plain_envs = libero(reflections=False)
    try:
        plain = plain_envs.reset(seeds=[0])
    finally:
        plain_envs.close()
    np.testing.assert_array_equal(whole["state"], plain["state"])
    apart = np.abs(whole["image"].astype(int) - plain["image"])
    assert 0 < apart.mean() < 5.0


def test_the_distance_reward_tells_episodes_apart(envs: Any) -> None:
    totals = []
    for direction in (-1.0, 1.0):
        envs.reset(seeds=[0])
        down = np.array([[0.0, 0.0, direction, 0.0, 0.0, 0.0, -1.0]])
        totals.append(sum(float(envs.step(down).reward[0]) for _ in range(5)))
    assert totals[0] > 0.005  # the bowl is below the gripper
    assert totals[1] < -0.005


def test_a_task_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ConfigError, match="env.suite: LIBERO has no suite 'libero_goal_swop'.*did you mean 'libero_goal_swap'"
    ):
        libero(suite="libero_goal_swop")
