"""The LIBERO plugin on a stand-in for LIBERO, and its configuration. ``test_libero_real.py`` runs the real one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_core.errors import ConfigError, MissingExtraError
from rlinf_embodied.conf import libero as conf
from rlinf_embodied.conf.libero import Libero, base_suite
from rlinf_embodied.envs import libero_env
from rlinf_embodied.envs.base import Box, Text
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.envs.conformance import check_env
from rlinf_embodied.envs.libero_env import LiberoEnv
from rlinf_embodied.envs.libero_rewards import Moment, distance, load_reward, sparse

FAKE = Path(__file__).parent / "toys" / "fake_libero"
RIGHT = np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])


@pytest.fixture
def simulators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """The stand-ins that are made."""
    (tmp_path / "suite").mkdir()
    for name in ("push_the_plate", "open_the_drawer", "without_states"):
        (tmp_path / "suite" / f"{name}.bddl").write_text("")
    monkeypatch.setenv("FAKE_LIBERO", str(tmp_path))
    monkeypatch.syspath_prepend(str(FAKE))
    for name in [name for name in sys.modules if name.split(".")[0] == "libero"]:
        monkeypatch.delitem(sys.modules, name)
    from libero.libero.envs import MADE

    yield MADE
    for name in [name for name in sys.modules if name.split(".")[0] == "libero"]:
        del sys.modules[name]


def config(**changes: Any) -> dict[str, Any]:
    return asdict(Libero(**{"image_size": 8, "max_episode_steps": 12, "max_restarts": 0, **changes}))


def test_it_keeps_to_the_interface(simulators: list[Any]) -> None:
    report = check_env(lambda indices, seed: LiberoEnv(config(), indices, seed), steps=12)
    assert set(report.values()) == {"ok"}, report
    assert all(one.closed for one in simulators)


def test_observations_are_named_and_upright(simulators: list[Any]) -> None:
    envs = LiberoEnv(config(settle_steps=0), [0], 0)
    assert list(envs.spec.observations) == ["image", "wrist_image", "state", "instruction"]
    assert isinstance(envs.spec.observations["instruction"], Text)
    assert isinstance(envs.spec.action, Box)
    assert envs.spec.action.shape == (7,)
    obs = envs.reset(seeds=[2])
    assert obs["instruction"] == ["push the plate"]
    for name in ("image", "wrist_image"):
        assert (obs[name][0, :4] == 200).all()
        assert (obs[name][0, 4:] == 50).all()
    np.testing.assert_array_equal(envs.render([0])[0], obs["image"][0])
    # Position, axis times angle of half a radian about z (the quaternion came with the other sign), fingers.
    np.testing.assert_allclose(obs["state"][0, :6], [0.08, 0.09, 0.10, 0.0, 0.0, 0.5], atol=1e-6)
    only = LiberoEnv(config(wrist_image=False), [0], 0)
    assert list(only.spec.observations) == ["image", "state", "instruction"]
    assert simulators[-1].cameras == ["agentview"]


def test_initial_states_are_a_function_of_the_seed(simulators: list[Any]) -> None:
    envs = LiberoEnv(config(task="1", settle_steps=3), [0, 1], 0)
    first = envs.reset(seeds=[3, 8])["state"]
    np.testing.assert_array_equal(first[0], first[1])  # five initial states
    for _ in range(4):
        envs.step(np.repeat(RIGHT, 2, axis=0) * 0.5)
    again = envs.reset(seeds=[3, 4])["state"]
    np.testing.assert_array_equal(again[0], first[0])
    assert (again[1] != first[0]).any()
    assert simulators[0].where[1] - 1.0 == pytest.approx(0.13, abs=1e-3)


@pytest.mark.parametrize("hard", [False, True])
def test_a_soft_reset_forgets_what_a_hard_one_does(simulators: list[Any], hard: bool) -> None:
    envs = LiberoEnv(config(hard_reset=hard, settle_steps=0), [0], 0)
    fresh = envs.reset(seeds=[1])["state"]
    for _ in range(3):
        envs.step(RIGHT * 0.1)
    assert envs.observe()["state"][0, 6] != fresh[0, 6]
    np.testing.assert_array_equal(envs.reset(seeds=[1])["state"], fresh)
    assert simulators[0].hard_reset == hard


def test_pictures_that_nobody_sees_are_not_drawn(simulators: list[Any]) -> None:
    envs = LiberoEnv(config(settle_steps=10), [0], 0)
    envs.reset()
    assert simulators[0].drawn == 2
    assert simulators[0].time == 10
    envs.step(RIGHT * 0.0)
    assert simulators[0].drawn == 4


def test_done_means_success_and_the_limit_cuts(simulators: list[Any]) -> None:
    envs = LiberoEnv(config(settle_steps=0), [0], 0)
    envs.reset(seeds=[0])
    for _ in range(4):
        assert not envs.step(RIGHT).terminated.any()
    done = envs.step(RIGHT)
    assert done.terminated.all()
    assert done.success.all()
    assert done.reward == [1.0]
    for step in range(12):
        result = envs.step(RIGHT * 0.0)
        assert not result.terminated.any()
        assert result.truncated.all() == (step == 11)
    assert simulators[0].ignore_done
    assert LiberoEnv(config(max_episode_steps=None), [0], 0).spec.max_episode_steps == 220
    assert LiberoEnv(config(suite="libero_goal", max_episode_steps=None), [0], 0).spec.max_episode_steps == 300


def test_the_distance_reward_adds_up_to_what_was_gained(simulators: list[Any]) -> None:
    envs = LiberoEnv(config(reward="distance", settle_steps=0), [0], 0)
    start = envs.reset(seeds=[0])["state"][0, :3]
    rewards = [envs.step(RIGHT * 0.4).reward[0] for _ in range(5)]
    end = envs.observe()["state"][0, :3]
    plate = np.array([1.0, 0.0, 0.0])
    gained = np.linalg.norm(start - plate) - np.linalg.norm(end - plate)
    assert sum(rewards) == pytest.approx(gained, abs=1e-6)
    assert min(rewards) > 0.03


def test_rewards() -> None:
    def moment(x: float, success: bool = False) -> Moment:
        return Moment(np.array([x, 0.0, 0.0]), {"bowl": np.zeros(3)}, ("bowl",), success)

    assert sparse(moment(1.0), moment(0.2)) == 0.0
    assert sparse(moment(1.0), moment(0.2, True)) == 1.0
    assert distance(moment(1.0), moment(0.25)) == pytest.approx(0.75)
    assert distance(moment(0.25), moment(1.0, True)) == pytest.approx(0.25)
    assert load_reward("distance") is distance
    assert load_reward("rlinf_embodied.envs.libero_rewards:distance") is distance
    for name, words in (
        ("distanc", "did you mean 'distance'"),
        ("nowhere:reward", "No module named 'nowhere'"),
        ("math:nothing", "no attribute 'nothing'"),
        ("math:pi", "is a float, not a function"),
    ):
        with pytest.raises(ConfigError, match=f"env.reward: .*{words}"):
            load_reward(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"suite": "libero_spatail"}, r"env.suite: .*did you mean 'libero_spatial'"),
        ({"task": "4"}, r"env.task: .*it has 0 \.\.\. 3"),
        ({"task": "push_the_plates"}, r"env.task: .*did you mean 'push_the_plate'"),
        ({"task": "2"}, r"env.task: .*no initial states for task 2 \(without_states\)"),
        ({"task": "3"}, r"env.task: .*without_a_file.bddl is missing"),
        ({"kwargs": {"colour": 1}}, r"env.kwargs: LIBERO does not take"),
    ],
)
def test_what_libero_does_not_have_is_named(simulators: list[Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LiberoEnv(config(**changes), [0], 0)


@pytest.mark.parametrize("names", ["", "GPU-8932f937-d72c,GPU-2", "0,1", None])
def test_names_of_devices_that_robosuite_cannot_read_are_kept_from_it(
    simulators: list[Any], monkeypatch: pytest.MonkeyPatch, names: str | None
) -> None:
    """A worker of a CPU stage has an empty list, one with GPUs their unique names."""
    if names is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    LiberoEnv(config(), [0], 0).reset()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == names


def test_tasks_by_name(simulators: list[Any]) -> None:
    assert LiberoEnv(config(task="open_the_drawer"), [0], 0).reset()["instruction"] == ["open the drawer"]


def test_a_machine_that_cannot_draw_is_told_how(simulators: list[Any]) -> None:
    with pytest.raises(SimulatorError, match="LIBERO cannot draw with MUJOCO_GL=.*libegl1"):
        LiberoEnv(config(kwargs={"broken": "Cannot initialize a EGL device display"}), [0], 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        LiberoEnv(config(kwargs={"broken": "out of memory"}), [0], 0)


def test_without_libero_it_runs_in_libero_s_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(libero_env, "find_spec", lambda name: None)
    monkeypatch.setattr(libero_env, "find_python", lambda: None)
    with pytest.raises(MissingExtraError, match=r"tools/install 'rlinf-embodied\[libero\]' --env libero"):
        LiberoEnv(config(), [0], 0)
    asked: list[Any] = []
    monkeypatch.setattr(libero_env, "find_python", lambda: tmp_path / "python")
    monkeypatch.setattr("rlinf_embodied.envs.isolated.IsolatedEnvs", lambda *arguments: asked.append(arguments))
    LiberoEnv(config(), [3], 7)
    ((cfg, indices, seed),) = asked
    assert cfg["python"] == str(tmp_path / "python")
    assert cfg["task"] == "0"
    assert (indices, seed) == ([3], 7)


def test_faults_of_the_configuration_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conf, "find_spec", lambda name: None)
    monkeypatch.setattr(conf, "find_python", lambda: tmp_path)
    assert Libero().validate(None) == []
    assert Libero(suite="libero_90", task="89").validate(None) == []
    assert Libero(suite="libero_goal_swap", reward="my.module:mine").validate(None) == []
    for changes, words in (
        ({"suite": "libero_spatail"}, "env.suite: 'libero_spatail' is unknown (did you mean 'libero_spatial'?)"),
        ({"task": "10"}, "env.task: libero_spatial has the tasks 0 ... 9, not 10"),
        ({"reward": "distanc"}, "env.reward: 'distanc' is unknown (did you mean 'distance'?)"),
        ({"reward": ":f"}, "env.reward: ':f' is unknown"),
        ({"python": str(tmp_path)}, "env.python: "),
    ):
        problems = Libero(**changes).validate(None)
        assert len(problems) == 1, problems
        assert problems[0].startswith(words)
    monkeypatch.setattr(conf, "find_python", lambda: None)
    assert "--env libero makes it" in Libero().validate(None)[0]


def test_the_environment_of_the_checkout_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / ".venv-libero" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    monkeypatch.chdir(tmp_path)
    assert conf.find_python() == python
    assert base_suite("libero_10_swap") == "libero_10"
    assert base_suite("libero_100") is None
