"""Environments that are registered with gymnasium, and a user's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from rlinf_core.config.node import Config
from rlinf_core.errors import ConfigError
from rlinf_embodied.envs import Box, Discrete, SimulatorError
from rlinf_embodied.envs.conformance import check_env

pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")

from rlinf_embodied.envs.gymnasium_env import GymnasiumEnv


def made(id: str, indices: Any = (0, 1), seed: int = 0, **cfg: Any) -> GymnasiumEnv:
    if id.startswith("Own/"):
        cfg.setdefault("module", "own_gymnasium")
    return GymnasiumEnv(Config({"id": id, **cfg}, "env"), indices, seed)


def test_cartpole() -> None:
    env = made("CartPole-v1")
    assert env.spec.action == Discrete(2) and env.spec.max_episode_steps == 500
    assert env.spec.observations["state"].shape == (4,) and env.reset()["state"].dtype == np.float32
    report = check_env(lambda indices, seed: made("CartPole-v1", indices, seed, max_episode_steps=8))
    assert {rule: seen for rule, seen in report.items() if seen != "ok" and rule != "render"} == {}


def test_the_time_limit_is_the_ids_or_the_users() -> None:
    assert made("CartPole-v1", max_episode_steps=7).spec.max_episode_steps == 7
    assert made("Own/Limitless-v0", max_episode_steps=7).spec.max_episode_steps == 7
    with pytest.raises(ConfigError, match="env.max_episode_steps: Own/Limitless-v0 has no time limit of its own"):
        made("Own/Limitless-v0")


def test_reacher_in_mujoco() -> None:
    pytest.importorskip("mujoco")
    env = made("Reacher-v5")
    assert isinstance(env.spec.action, Box) and env.spec.action.shape == (2,)
    assert env.spec.observations["state"].dtype == "float32"  # MuJoCo's are float64
    report = check_env(lambda indices, seed: made("Reacher-v5", indices, seed), render=False, steps=12)
    assert {rule: seen for rule, seen in report.items() if seen != "ok"} == {"render": "not looked at"}


def test_a_picture_of_mujoco_is_upright() -> None:
    pytest.importorskip("mujoco")
    env = made("Hopper-v5", (0,))
    env.reset()
    try:
        picture = env.render([0])[0].astype(int)
    except SimulatorError as error:
        pytest.skip(f"nothing to draw with: {error}")
    assert picture.shape[2] == 3
    red = picture[:, :, 0] - picture[:, :, 2]  # the hopper is orange, the sky bluish, the floor a grey check
    rows = np.flatnonzero((red > 60).any(axis=1))
    sky = picture[: len(picture) // 8].reshape(-1, 3).std(axis=0).max()
    floor = picture[-len(picture) // 8 :].reshape(-1, 3).std(axis=0).max()
    assert rows.size and floor > 2 * sky, (floor, sky)


def test_a_step_of_ones_own() -> None:
    env = made("Own/Vector-v0")
    first = env.reset()
    assert env.spec.observations["state"] is not None and first["state"].dtype == np.float32
    assert first["state"][0, 0] != first["state"][1, 0]
    results = [env.step(np.array([0, 2])) for _ in range(4)]
    assert results[0].reward.tolist() == [-1.0, 1.0]  # this Discrete starts at -1
    assert [r.success.tolist() for r in results] == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert results[3].truncated.all() and not results[3].terminated.any()  # by itself, long before the limit
    assert results[3].final_obs is not None and results[3].final_obs["state"][:, 1].tolist() == [4.0, 4.0]
    assert results[3].obs["state"][:, 1].tolist() == [0.0, 0.0]


def test_answers_of_before_gymnasium_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="env.id=Own/Old-v0: reset gives no pair"):
        made("Own/Old-v0").reset()
    env = made("Own/Old-v0", kwargs={"pair": True})
    env.reset()
    with pytest.raises(ConfigError, match="env.id=Own/Old-v0: step gives 4 values"):
        env.step(np.array([0, 0]))


def test_success_by_its_other_name_and_none() -> None:
    for id, expected in (("Own/IsSuccess-v0", [False, True]), ("Own/Silent-v0", [False, False])):
        env = made(id, (0,))
        env.reset()
        assert [bool(env.step(np.array([0])).success[0]) for _ in range(2)] == expected


def test_an_end_is_no_cut() -> None:
    env = made("Own/Ends-v0", (0,))
    env.reset()
    result = [env.step(np.array([0])) for _ in range(4)][-1]
    assert result.terminated.all() and not result.truncated.any()


@pytest.mark.parametrize(
    ("id", "keys"),
    [
        ("Image", {"image": ((4, 5, 3), "uint8", 1)}),
        ("Dict", {"state": ((2,), "float32", None), "image": ((4, 5, 3), "uint8", 1), "goal": ((3,), "float32", None)}),
        ("Matrix", {"state": ((4,), "float32", 1)}),
        ("Tiles", {"state": ((5,), "float32", None)}),
    ],
)
def test_observations_by_kind(id: str, keys: dict[str, Any]) -> None:
    env = made(f"Own/{id}-v0", (0,))
    env.reset()
    result = env.step(np.array([1]))
    assert set(result.obs) == set(keys) == set(env.spec.observations)
    for key, (shape, dtype, value) in keys.items():
        space = env.spec.observations[key]
        assert isinstance(space, Box) and space.shape == shape and space.dtype == dtype
        assert result.obs[key].shape == (1, *shape) and result.obs[key].dtype == dtype
        assert value is None or (result.obs[key] == value).all()
    if id == "Tiles":
        assert result.obs["state"].tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]


def test_ones_own_keep_to_the_interface() -> None:
    for id in ("Dict", "Push", "Ends"):
        report = check_env(lambda indices, seed, id=id: made(f"Own/{id}-v0", indices, seed), steps=8)
        left = {rule: seen for rule, seen in report.items() if seen != "ok"}
        assert left.pop("render") == f"no picture: env.id=Own/{id}-v0 cannot be shown: it has no render mode rgb_array"
        assert set(left) <= {"time limit"}


@pytest.mark.parametrize(
    ("library", "message"),
    [("foo", "MuJoCo does not load with MUJOCO_GL=foo: RuntimeError: invalid value.*; egl needs a driver"),
     ("disable", "MuJoCo cannot draw with MUJOCO_GL=disable: .*; egl needs a driver .*, osmesa the library")],
)  # fmt: skip
def test_without_a_way_to_draw(library: str, message: str) -> None:
    pytest.importorskip("mujoco")
    code = """
        from rlinf_core.config.node import Config
        from rlinf_embodied.envs.gymnasium_env import GymnasiumEnv
        try:
            env = GymnasiumEnv(Config({"id": "Reacher-v5"}, "env"), (0,), 0)
            env.reset()
            env.render([0])
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "MUJOCO_GL": library}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert re.match(f"SimulatorError {message}", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("CartPoll-v1", r"no environment 'CartPoll-v1' \(did you mean 'CartPole-v1'\?\).*env.module"),
        ("CartPole-v9", "no environment 'CartPole-v9'.*did you mean 'CartPole-v"),
        ("Own/Vectr-v0", r"no environment 'Own/Vectr-v0' \(did you mean 'Own/Vector-v0'\?\)"),
        ("Own/Grey-v0", r"Own/Grey-v0: images are \[4, 5, 1\], and \[H, W, 3\] is known here"),
        ("Own/Endless-v0", "Own/Endless-v0: observations are Sequence.*needs a wrapper"),
        ("Own/Many-v0", "Own/Many-v0: actions are MultiDiscrete.*others need a wrapper"),
    ],
)
def test_refused_by_name(id: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(id)


def test_arguments_of_the_constructor() -> None:
    env = made("Own/Vector-v0", (0,), kwargs={"key": "is_success"})
    env.reset()
    assert not env.step(np.array([0])).success[0] and env.step(np.array([0])).success[0]
    nested = made("Own/Vector-v0", (0,), kwargs={"options": {"a": {"b": [1]}}})
    assert type(nested._envs[0].env.unwrapped.options["a"]) is dict  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"env.kwargs: Own/Vector-v0 does not take \{'colour': 1\}"):
        made("Own/Vector-v0", kwargs={"colour": 1})
    with pytest.raises(ConfigError, match="env.module: 'no_such_module' cannot be imported"):
        made("CartPole-v1", module="no_such_module")
