"""Environments in processes of their own: the same numbers, and whatever a simulator does stays there."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_core import registry
from rlinf_core.config.node import Config
from rlinf_core.errors import ConfigError, MissingExtraError, NonFiniteError, PluginError, RLinfError
from rlinf_embodied.envs import SimulatorError, load_env
from rlinf_embodied.envs.conformance import check_env
from rlinf_embodied.envs.isolated import IsolatedEnvs
from rlinf_embodied.envs.wire import dumps, length_of

ENTRIES = (
    registry.Entry("rlinf.envs", "toys", "simulators:Toys", "toys"),
    registry.Entry("rlinf.envs", "vector", "simulators:RaisingVector", "toys"),
    registry.Entry("rlinf.envs", "absent", "simulators:Absent", "toys"),
    registry.Entry("rlinf.envs", "unmet", "unmet_simulator:Env", "toys"),
)
LIMITS = {"isolate": True, "step_timeout_s": 30.0, "start_timeout_s": 60.0, "max_restarts": 2}


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed_entries", lambda: ENTRIES)


@pytest.fixture
def make() -> Any:
    made: list[Any] = []

    def load(indices: Any = (0, 1, 2, 3), **cfg: Any) -> Any:
        made.append(load_env(Config({"name": "toys", **LIMITS, **cfg}, "env"), indices, 0))
        return made[-1]

    yield load
    for env in made:
        env.close()


def push(env: Any, gain: float = 0.5, **options: Any) -> Any:
    return env.step(np.full((env.num_envs, 2), gain, dtype=np.float32), **options)


def gone(pid: int, deadline_s: float = 30.0) -> bool:
    """Whether the process ends within the time."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_numbers_as_in_this_process(make: Any, processes: int) -> None:
    apart, here = make(processes=processes, length=4), make(isolate=False, length=4)
    assert isinstance(apart, IsolatedEnvs) and not isinstance(here, IsolatedEnvs)
    assert len(apart.pids) == processes and apart.spec.observations["state"].shape == (3,)
    assert np.array_equal(apart.reset()["state"], here.reset()["state"])
    rng = np.random.default_rng(0)
    for _ in range(12):
        actions, active = rng.uniform(-1, 1, (4, 2)), rng.random(4) < 0.7
        a, b = apart.step(actions, active), here.step(actions, active)
        assert np.array_equal(a.obs["state"], b.obs["state"]) and a.obs["instruction"] == b.obs["instruction"]
        for name in ("reward", "terminated", "truncated", "success", "ended"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert (a.final_obs is None) == (b.final_obs is None)
        if a.final_obs is not None:
            assert np.array_equal(a.final_obs["state"], b.final_obs["state"])
            assert a.final_obs["instruction"] == b.final_obs["instruction"]
    assert np.array_equal(apart.reset([3, 1], seeds=[5, 6])["state"], here.reset([3, 1], seeds=[5, 6])["state"])
    assert [p.shape for p in apart.render([2, 0])] == [(8, 8, 3)] * 2


def test_a_state_goes_from_one_split_to_another(make: Any) -> None:
    two, one, here = make(processes=2), make(processes=1), make(isolate=False)
    two.reset()
    for _ in range(3):
        push(two)
    kept = two.state()
    expected = [push(two, 0.7).obs["state"] for _ in range(12)]
    for env in (one, here, two):
        env.restore(kept)
        assert np.array_equal(env.observe()["state"][:, 1:], [[3.0, 1.5]] * 4)
        assert all(np.array_equal(push(env, 0.7).obs["state"], want) for want in expected)


def test_a_process_that_is_killed(make: Any) -> None:
    env, here = make(processes=2), make(isolate=False)
    env.reset()
    here.reset()
    push(env)
    old = env.pids
    os.kill(old[0], signal.SIGKILL)
    result = push(env, active=np.array([False, True, True, True]))
    assert set(result.dropped) == {0, 1}  # that of the idle one is lost as well
    assert all("was killed by SIGKILL" in reason for reason in result.dropped.values())
    assert result.reward.tolist() == [0.0, 0.0, 0.5, 0.5] and not result.terminated.any() and not len(result.ended)
    # The next ones of their own episodes, not the first ones again.
    assert np.array_equal(result.obs["state"][:2], here.reset([0, 1])["state"])
    assert result.obs["state"][2:, 1].tolist() == [2.0, 2.0]
    assert env.restarts == 1 and env.pids[0] != old[0] and env.pids[1] == old[1]
    assert push(env).obs["state"][:, 1].tolist() == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang", r"did not answer within 1 s \(env.step_timeout_s\) and was killed; the last.*\nabout to hang"),
        ("exit", r"exited with code 7; the last that it wrote:\nbye"),
        ("sysexit", "exited with code 3"),
        ("kill", "was killed by SIGKILL"),
    ],
)
def test_a_simulator_that_takes_its_process_along(make: Any, tmp_path: Path, fault: str, reason: str) -> None:
    env = make(fault=fault, at=2, once=str(tmp_path / "once"), processes=2, step_timeout_s=1.0)
    env.reset()
    assert not push(env).dropped
    old = env.pids
    result = push(env)
    assert set(result.dropped) == {0, 1}
    assert re.search(reason, result.dropped[0], re.DOTALL), result.dropped[0]
    assert result.obs["state"][:, 1].tolist() == [0.0, 0.0, 2.0, 2.0]
    assert gone(old[0]) and not gone(old[1], 0.0)
    assert not push(env).dropped


def test_a_simulator_that_raises_is_made_again_where_it_is(make: Any, tmp_path: Path) -> None:
    env = make(fault="raise", at=2, once=str(tmp_path / "once"))
    env.reset()
    push(env)
    old = env.pids
    assert push(env).dropped == {1: "environment 1 failed in step 2: ValueError: the arm came off"}
    assert env.pids == old and env.restarts == 1


def test_a_vector_that_raises_is_started_again(make: Any, tmp_path: Path) -> None:
    env = make(name="vector", once=str(tmp_path / "once"))
    env.reset()
    old = env.pids
    result = push(env)
    assert set(result.dropped) == {0, 1, 2, 3}
    assert "it raised KeyError: 'everything came off'" in result.dropped[0]
    assert "simulators.py" in result.dropped[0]  # the traceback
    assert gone(old[0]) and not push(env).dropped


def test_restarts_are_bounded(make: Any) -> None:
    env = make(fault="exit", at=1, max_restarts=2)
    env.reset()
    assert len(push(env).dropped) == 4 and len(push(env).dropped) == 4
    with pytest.raises(SimulatorError, match=r"exited with code 7[\s\S]*again 2 times already \(env.max_restarts=2\)"):
        push(env)
    never = make(fault="exit", at=1, max_restarts=0)
    never.reset()
    with pytest.raises(SimulatorError, match=r"environments 0 \.\.\. 3 failed[\s\S]*are not started again"):
        push(never)


def test_a_simulator_and_its_process_share_the_bound(make: Any, tmp_path: Path) -> None:
    env = make(fault="raise", at=1, max_restarts=2)
    env.reset()
    push(env)
    push(env)
    assert env.restarts == 2
    os.kill(env.pids[0], signal.SIGKILL)
    with pytest.raises(SimulatorError, match="again 2 times already"):
        push(env)


def test_lost_in_a_reset(make: Any) -> None:
    env, here = make(), make(isolate=False)
    env.reset()
    here.reset()
    push(env)
    os.kill(env.pids[0], signal.SIGKILL)
    assert np.array_equal(env.reset([2])["state"], here.reset([2])["state"])  # the same episode, in a new process
    result = push(env)
    assert set(result.dropped) == {0, 1, 3}  # the others' episodes went with the process
    assert result.obs["state"][:, 1].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert not push(env).dropped


@pytest.mark.parametrize("fault", ["exit", "hang"])
def test_lost_while_it_is_drawn(make: Any, tmp_path: Path, fault: str) -> None:
    once = str(tmp_path / "once")
    env = make(fault=fault, when="render", at=1, once=once, processes=2, step_timeout_s=1.0)
    env.reset()
    push(env)
    assert [p.shape for p in env.render([1, 2])] == [(1, 1, 3), (8, 8, 3)]
    assert env.restarts == 1
    result = push(env)
    assert set(result.dropped) == {0, 1} and result.obs["state"][:, 1].tolist() == [0.0, 0.0, 2.0, 2.0]
    assert not push(env).dropped and [p.shape for p in env.render([1])] == [(8, 8, 3)]


def test_chatter_does_not_hold_it_up(make: Any) -> None:
    env = make(fault="chatter", at=1)
    env.reset()
    for _ in range(3):
        assert not push(env).dropped


class Test_what_the_user_must_know_is_raised:
    def test_faults_of_the_policy(self, make: Any) -> None:
        env = make(processes=2)
        env.reset()
        with pytest.raises(ConfigError, match=r"actions have shape \[4, 3\].*take \[4, 2\]"):
            env.step(np.zeros((4, 3)))
        with pytest.raises(ConfigError, match=r"active is \[4\] of bool, not \[3\]"):
            push(env, active=np.ones(3, dtype=bool))
        bad = np.zeros((4, 2))
        bad[3, 0] = np.nan
        with pytest.raises(NonFiniteError, match="action of environment 3 is not finite"):
            env.step(bad)

    def test_faults_of_the_observation(self, make: Any) -> None:
        env = make(fault="nan", at=1)
        env.reset()
        with pytest.raises(NonFiniteError, match="environment 1: observation 'state' is not finite"):
            push(env)

    def test_faults_of_the_configuration(self, make: Any) -> None:
        with pytest.raises(ConfigError, match=r"env.task: there is no task 'wash'"):
            make(refuse="env.task: there is no task 'wash'")

    def test_a_start_that_fails(self, make: Any) -> None:
        with pytest.raises(
            SimulatorError, match=r"environments 0 \.\.\. 3 did not start: it raised OSError: no such arm"
        ):
            make(fault="start")

    def test_a_start_that_hangs(self, make: Any) -> None:
        with pytest.raises(SimulatorError, match=r"within 3 s \(env.start_timeout_s\)[\s\S]*\nstarting"):
            make(fault="start hang", start_timeout_s=3.0)

    def test_a_plugin_that_is_not_there(self, make: Any) -> None:
        with pytest.raises(PluginError, match="no env 'toyz' is installed.*did you mean 'toys'"):
            make(name="toyz")
        with pytest.raises(PluginError, match="simulators:Absent.*cannot be imported"):
            make(name="absent")

    def test_what_the_plugin_needs(self, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "unmet_simulator.py").write_text("import a_simulator_that_nobody_has\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(MissingExtraError, match="needs a_simulator_that_nobody_has.*install it with"):
            make(name="unmet")

    def test_positions_seeds_and_no_reset(self, make: Any) -> None:
        env = make()
        with pytest.raises(RLinfError, match="environment 0 has no episode yet"):
            push(env)
        with pytest.raises(RLinfError, match="environment 0 has no episode yet"):
            env.observe()
        with pytest.raises(ConfigError, match="are not positions of 4 environments"):
            env.reset([4])
        with pytest.raises(ConfigError, match="4 environments are to be reset, with 1 seeds"):
            env.reset(seeds=[1])
        env.close()
        env.close()
        with pytest.raises(RLinfError, match="closed"):
            env.reset()


@pytest.mark.slow
def test_keeps_to_the_interface() -> None:
    def make(indices: Any, seed: int) -> Any:
        cfg = {"name": "toys", **LIMITS, "processes": 2, "max_episode_steps": 6, "length": 9}
        return load_env(Config(cfg, "env"), indices, seed)

    assert set(check_env(make, steps=8, render=True).values()) == {"ok"}


def test_close_leaves_no_process(make: Any) -> None:
    env = make(processes=2)
    pids = env.pids
    env.close()
    assert env.pids == [] and all(gone(pid, 0.0) for pid in pids)


PARENT = """
    import sys
    sys.path[:] = {path!r}
    from rlinf_core import registry
    registry.installed_entries = lambda: (registry.Entry("rlinf.envs", "toys", "simulators:Toys", "toys"),)
    from rlinf_core.config.node import Config
    from rlinf_embodied.envs import load_env
    import numpy as np
    env = load_env(Config({cfg!r}, "env"), (0, 1), 0)
    env.reset()
    print(*env.pids, flush=True)
    if {hang}:
        env.step(np.zeros((2, 2)))
    sys.stdin.read()
"""


@pytest.mark.parametrize("hang", [False, True])
def test_killing_the_parent_leaves_no_process(hang: bool) -> None:
    cfg = {"name": "toys", **LIMITS, "processes": 2, "step_timeout_s": 600.0}
    cfg |= {"fault": "hang", "at": 1, "bad": 0} if hang else {}
    code = textwrap.dedent(PARENT).format(path=sys.path, cfg=cfg, hang=hang)
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        parent.kill()
        parent.communicate(timeout=30)
    assert all(gone(pid) for pid in pids)


class Test_another_interpreter:
    def test_runs_the_same_plugin(self, make: Any, tmp_path: Path) -> None:
        """Its own site-packages are this environment's; what lies outside of any comes along from here."""
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\necho ran > {tmp_path}/ran\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        env = make(isolate=False, python=str(python))
        env.reset()
        assert push(env).obs["state"][:, 1].tolist() == [1.0] * 4
        assert (tmp_path / "ran").exists()

    def test_that_is_none(self, make: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="env.python: /nowhere/python cannot be run"):
            make(python="/nowhere/python")

    def test_that_lacks_the_packages(self, make: Any, tmp_path: Path) -> None:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" -I -S "$@"\n')
        python.chmod(0o755)
        with pytest.raises(SimulatorError, match=r"did not start[\s\S]*No module named 'numpy'"):
            make(python=str(python))

    def test_knows_plugins_that_this_one_does_not(self, make: Any, tmp_path: Path) -> None:
        with pytest.raises(PluginError, match=rf"no env 'other' is installed[\s\S]*in env.python={sys.executable}"):
            make(name="other", python=sys.executable)


def test_a_process_loads_neither_ray_nor_torch() -> None:
    code = """
        import sys
        import rlinf_embodied.envs.child, rlinf_embodied.envs.wire, rlinf_embodied.envs
        from rlinf_core.config.node import Config
        from rlinf_core.registry import Registry
        heavy = [name for name in ("ray", "torch", "hydra", "omegaconf", "gymnasium") if name in sys.modules]
        print(heavy)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_arrays_come_as_they_went() -> None:
    for value in (
        np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::2],
        np.zeros((0, 3)),
        np.float64(2.5),
        np.array(True),
    ):
        data = dumps({"x": value})
        assert length_of(data[:8]) == len(data) - 8
        back = pickle.loads(data[8:])["x"]
        assert np.array_equal(back, value)
        if isinstance(value, np.ndarray):
            assert back.dtype == value.dtype and back.shape == value.shape
            if back.size:
                back[...] = 1  # it can be written to
    assert b"numpy._core" not in dumps(np.zeros(3)) and b"numpy.core" not in dumps(np.zeros(3))
