"""Vectors of single environments: episodes, seeds, time limit, autoreset, checks, failures, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simulators

from rlinf_core.config.node import Config
from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_embodied.envs import SimulatorError, derive_seed, episode_seed
from rlinf_embodied.envs.seeds import narrow


def made(indices: Any = (0, 1), seed: int = 0, **cfg: Any) -> simulators.Toys:
    return simulators.Toys(Config(cfg, "env"), indices, seed)


def push(env: Any, gain: float = 0.5, **options: Any) -> Any:
    return env.step(np.full((env.num_envs, 2), gain, dtype=np.float32), **options)


class Test_episodes:
    def test_begin_as_a_function_of_seed_environment_and_number(self) -> None:
        env = made((4, 9), seed=3, length=2)
        assert env.reset()["state"][:, 0].tolist() == [episode_seed(3, i, 0) % 1000 for i in (4, 9)]
        push(env)
        assert push(env).obs["state"][:, 0].tolist() == [episode_seed(3, i, 1) % 1000 for i in (4, 9)]
        assert env.reset([1])["state"][:, 0].tolist() == [episode_seed(3, 9, 2) % 1000]
        assert env.reset([1, 0], seeds=[12, 34])["state"][:, 0].tolist() == [12, 34]
        # A seed from outside is not one of the environment's own episodes.
        assert env.reset()["state"][:, 0].tolist() == [episode_seed(3, 4, 2) % 1000, episode_seed(3, 9, 3) % 1000]

    def test_seeds_are_pinned_and_differ(self) -> None:
        assert episode_seed(0, 0, 0) == 7885960348925819626
        assert len({episode_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}) == 125
        assert derive_seed(1, "a", "bc") != derive_seed(1, "ab", "c")
        assert derive_seed(1, 1) != derive_seed(1, "1")
        assert narrow(5) == 5 and 0 <= narrow(episode_seed(0, 0, 0)) < 2**31

    def test_numbers_can_be_set(self) -> None:
        env = made((0, 1))
        env.episodes[:] = [5, 0]
        assert env.reset()["state"][:, 0].tolist() == [episode_seed(0, 0, 5) % 1000, episode_seed(0, 1, 0) % 1000]

    def test_the_limit_cuts_where_the_simulator_has_none(self) -> None:
        env = made(max_episode_steps=3)
        env.reset()
        results = [push(env) for _ in range(7)]
        assert [r.truncated.all() for r in results] == [False, False, True, False, False, True, False]
        assert not any(r.terminated.any() for r in results)

    def test_an_end_at_the_limit_is_an_end(self) -> None:
        env = made(max_episode_steps=3, length=3)
        env.reset()
        result = [push(env) for _ in range(3)][-1]
        assert result.terminated.all() and not result.truncated.any()

    def test_the_simulator_itself_may_cut(self) -> None:
        env = made()
        env.reset()
        env._envs[1].cut = True  # type: ignore[attr-defined]
        result = push(env)
        assert result.truncated.tolist() == [False, True] and not result.terminated.any()

    def test_reset_within_the_step_and_final_obs(self) -> None:
        env = made((0, 1, 2), length=2)
        env.reset()
        push(env, active=np.array([True, False, True]))
        result = push(env, 0.25)
        assert result.ended.tolist() == [0, 2] and result.ended.dtype == np.int64
        assert result.terminated.tolist() == [True, False, True]
        assert result.final_obs is not None
        assert result.final_obs["state"][:, 1:].tolist() == [[2.0, 0.75], [2.0, 0.75]]
        assert result.final_obs["instruction"] == [f"go to {episode_seed(0, i, 0) % 7}" for i in (0, 2)]
        assert result.obs["state"][:, 1:].tolist() == [[0.0, 0.0], [1.0, 0.25], [0.0, 0.0]]
        assert result.obs["instruction"][0] == f"go to {episode_seed(0, 0, 1) % 7}"
        assert result.reward.tolist() == [0.25] * 3
        assert push(env).final_obs["state"].shape == (1, 3)

    def test_success_is_of_the_step(self) -> None:
        env = made()
        env.reset()
        assert [bool(push(env).success[0]) for _ in range(6)] == [False, False, True, False, False, True]

    def test_idle_ones_stay(self) -> None:
        env = made()
        env.reset()
        first = push(env)
        result = env.step(np.array([[np.nan, np.nan], [1.0, 1.0]]), np.array([False, True]))
        assert result.obs["state"][0].tolist() == first.obs["state"][0].tolist()
        assert result.reward.tolist() == [0.0, 1.0] and not result.success.any()

    def test_one_that_never_began_may_be_idle_but_not_stepped(self) -> None:
        env = made()
        env.reset([1])
        push(env, active=np.array([False, True]))
        with pytest.raises(RLinfError, match="environment 0 has no episode yet"):
            push(env)
        with pytest.raises(RLinfError, match="environment 0 has no episode yet"):
            env.observe()

    def test_results_are_the_callers(self) -> None:
        env = made()
        first = env.reset()
        result = push(env)
        before = result.obs["state"].copy()
        result.obs["state"][:] = 7
        result.obs["instruction"][0] = "nothing"
        first["state"][:] = 7
        assert np.array_equal(env.observe()["state"], before)
        assert env.observe()["instruction"][0] != "nothing"
        second = push(env)
        assert result.reward is not second.reward and np.array_equal(result.obs["state"], np.full((2, 3), 7.0))


class Test_actions:
    def test_clipped_to_the_box(self) -> None:
        env = made()
        env.reset()
        assert env.step(np.array([[3.0, 0.0], [-np.float64(1e300), 0.0]])).reward.tolist() == [1.0, -1.0]

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_that_are_not_finite(self, bad: float) -> None:
        env = made((3, 8))
        env.reset()
        with pytest.raises(NonFiniteError, match=r"action of environment 8 is not finite: \[.*; the policy"):
            env.step(np.array([[0.0, 0.0], [0.0, bad]]))

    def test_of_another_shape(self) -> None:
        env = made()
        env.reset()
        with pytest.raises(ConfigError, match=r"actions have shape \[2, 3\].* take \[2, 2\]"):
            env.step(np.zeros((2, 3)))
        with pytest.raises(ConfigError, match=r"actions have shape \[2\]"):
            env.step(np.zeros(2))

    def test_of_another_kind(self) -> None:
        env = made()
        env.reset()
        with pytest.raises(ConfigError, match="takes numbers"):
            env.step(np.zeros((2, 2), dtype=bool))

    def test_discrete_ones(self) -> None:
        env = made(discrete=True)
        env.reset()
        assert env.step(np.array([0, 4], dtype=np.int32)).reward.tolist() == [0.0, 4.0]
        for wrong, message in (
            (np.array([0, 5]), "action of environment 1 is 5, and there are 0 ... 4"),
            (np.array([-1, -2]), r"environment 0 is -1.*\(and those of 1 more\)"),
            (np.array([0.0, 1.0]), "takes integers"),
        ):
            with pytest.raises(ConfigError, match=message):
                env.step(wrong)
        env.step(np.array([0, 9]), np.array([True, False]))

    def test_a_wrong_mask(self) -> None:
        env = made()
        env.reset()
        for mask in (np.array([True]), np.array([1, 0])):
            with pytest.raises(ConfigError, match=r"active is \[2\] of bool"):
                push(env, active=mask)


class Strange(simulators.Counter):
    """Gives what ``cfg.gives`` says at ``cfg.at`` (0: in reset)."""

    def observe(self) -> dict[str, Any]:
        obs = super().observe()
        if self.steps == self.cfg["at"] and self.index == 1:
            obs.update(self.cfg["gives"])
        return obs


class Strangers(simulators.Toys):
    def make(self, index: int) -> Strange:
        return Strange(self.plain, index)


class Test_observations:
    @pytest.mark.parametrize(
        ("gives", "kind", "message"),
        [
            (
                {"state": np.array([0.0, np.nan, 1.0])},
                NonFiniteError,
                r"1: observation 'state' is not finite: nan at \[1\]",
            ),
            ({"state": np.array([0.0, 1e300, 1.0])}, NonFiniteError, "1: observation 'state' is not finite"),
            ({"state": np.zeros(1, np.float32)}, ConfigError, r"1: observation 'state' has shape \[1\], and \[3\]"),
            ({"other": 1}, ConfigError, "1: the observation comes with 'other'"),
            ({"state": [1.0, 2.0, 3.0]}, ConfigError, "1: observation 'state' is a list, not an array"),
            ({"instruction": 5}, ConfigError, "1: observation 'instruction' is a int, not a text"),
            ({"state": np.zeros(3, complex)}, ConfigError, "1: observation 'state' is of type complex128"),
        ],
    )
    def test_that_are_not_as_promised(self, gives: dict[str, Any], kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            Strangers(_plain(gives=gives, at=0), (0, 1), 0).reset()

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_not_finite_in_a_step(self, value: float) -> None:
        env = Strangers(_plain(gives={"state": np.array([0.0, 0.0, value])}, at=2), (0, 1), 0)
        env.reset()
        push(env)
        with pytest.raises(
            NonFiniteError, match=rf"environment 1: observation 'state' is not finite: {value} at \[2\]"
        ):
            push(env)

    def test_another_shape_in_a_step_is_not_spread_over_the_row(self) -> None:
        env = Strangers(_plain(gives={"state": np.zeros(1, np.float32)}, at=1), (0, 1), 0)
        env.reset()
        with pytest.raises(ConfigError, match=r"environment 1: observation 'state' has shape \[1\]"):
            push(env)

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ([1.0, 2.0, 3.0], "1: observation 'state' is a list, not an array"),
            (None, "1: observation 'state' is a NoneType, not an array"),
            (np.array(["a", "b", "c"]), "1: observation 'state' is of type <U1"),
        ],
    )
    def test_another_kind_in_a_later_reset(self, state: Any, message: str) -> None:
        env = Strangers(_plain(gives={}, at=0), (0, 1), 0)
        env.reset()
        env.cfg["gives"]["state"] = state
        with pytest.raises(ConfigError, match=message):
            env.reset()

    def test_another_kind_in_a_step(self) -> None:
        env = Strangers(_plain(gives={"state": [1.0, 2.0, 3.0]}, at=1), (0, 1), 0)
        env.reset()
        with pytest.raises(ConfigError, match="1: observation 'state' is a list, not an array"):
            push(env)

    def test_an_observation_that_is_no_dict(self) -> None:
        env = made()
        env._envs[1].reset = lambda seed: np.zeros(3)  # type: ignore[method-assign, attr-defined]
        with pytest.raises(ConfigError, match="environment 1: the observation is of type ndarray, not a dict by key"):
            env.reset()

    def test_rewards_that_are_not_finite(self) -> None:
        env = made(fault="nan", at=2)
        env.reset()
        push(env)
        env._envs[1].step = lambda action: (env._envs[1].observe(), float("nan"), False, False)  # type: ignore[method-assign, attr-defined]
        with pytest.raises(NonFiniteError, match="environment 1: the reward is not finite"):
            push(env)


def _plain(**cfg: Any) -> Any:
    """A configuration with values that no file could have (arrays)."""
    return cfg


class Test_failures:
    def test_made_again_and_the_episode_dropped(self) -> None:
        env = made(fault="raise", at=3, max_restarts=2)
        env.reset()
        push(env)
        push(env)
        broken = env._envs[1]
        result = push(env)
        assert result.dropped == {1: "environment 1 failed in step 3: ValueError: the arm came off"}
        assert result.reward.tolist() == [0.5, 0.0] and not result.terminated.any() and not len(result.ended)
        assert result.obs["state"][1].tolist() == [episode_seed(0, 1, 1) % 1000, 0, 0]
        assert broken.closed and env._envs[1] is not broken  # type: ignore[attr-defined]
        assert result.obs["state"][0, 1] == 3  # the other one went on
        assert push(env).obs["state"][1, 1] == 1

    def test_at_most_so_often(self) -> None:
        env = made(fault="raise", at=1, max_restarts=2)
        env.reset()
        assert 1 in push(env).dropped and 1 in push(env).dropped
        with pytest.raises(SimulatorError, match=r"environment 1 failed in step 1.*the arm came off.*again 2 times"):
            push(env)

    def test_never_by_default(self) -> None:
        env = made(fault="raise", at=1)
        env.reset()
        with pytest.raises(SimulatorError, match=r"not started again \(env.max_restarts=0\)"):
            push(env)

    def test_one_that_cannot_be_made_again(self) -> None:
        env = made(fault="raise", at=1, max_restarts=2)
        env.reset()

        def make(index: int) -> Any:
            raise OSError("no memory")

        env.make = make  # type: ignore[method-assign]
        with pytest.raises(
            SimulatorError, match=r"environment 1 failed in step 1 \(.*came off\) and cannot be made again"
        ):
            push(env)

    def test_in_a_reset_the_same_episode_is_tried_again(self) -> None:
        env = made(max_restarts=1)

        def broken(seed: int) -> Any:
            raise RuntimeError("stuck")

        env._envs[0].reset = broken  # type: ignore[method-assign]
        assert env.reset()["state"][0, 0] == episode_seed(0, 0, 0) % 1000
        env._envs[0].reset = broken  # type: ignore[method-assign]
        with pytest.raises(SimulatorError, match="environment 0 failed while it was reset: RuntimeError: stuck"):
            env.reset()

    def test_one_that_cannot_be_closed_is_left(self, caplog: pytest.LogCaptureFixture) -> None:
        env = made()

        def broken() -> None:
            raise RuntimeError("stuck")

        env._envs[0].close = broken  # type: ignore[method-assign]
        last = env._envs[1]
        env.close()
        env.close()
        assert last.closed and "could not be closed: RuntimeError: stuck" in caplog.text  # type: ignore[attr-defined]
        with pytest.raises(RLinfError, match="closed"):
            push(env)
        with pytest.raises(RLinfError, match="closed"):
            env.reset()

    def test_those_made_before_one_that_cannot_be_made_are_closed(self) -> None:
        made_ones: list[simulators.Counter] = []

        class Half(simulators.Toys):
            def make(self, index: int) -> simulators.Counter:
                if index == 1:
                    raise OSError("no memory")
                made_ones.append(super().make(index))
                return made_ones[-1]

        with pytest.raises(OSError, match="no memory"):
            Half(Config({}, "env"), (0, 1), 0)
        assert made_ones[0].closed


class Test_state:
    def test_brings_back(self) -> None:
        env = made((0, 1, 2), length=4)
        env.reset([0, 1])
        mask = np.array([True, True, False])
        for gain in (0.1, 0.2, 0.3, 0.4, 0.5):
            push(env, gain, active=mask)
        kept = env.state()
        there = [push(env, 0.7, active=mask) for _ in range(6)]
        for again in (env, made((0, 1, 2), length=4)):
            again.restore(kept)
            for expected in there:
                result = push(again, 0.7, active=mask)
                assert np.array_equal(result.obs["state"], expected.obs["state"])
                assert result.obs["instruction"] == expected.obs["instruction"]
                assert np.array_equal(result.terminated, expected.terminated)

    def test_of_a_part(self) -> None:
        env = made((0, 1, 2))
        env.reset()
        push(env)
        part = made((2,))
        part.restore(env.state())
        assert np.array_equal(part.observe()["state"], env.observe()["state"][2:])

    def test_of_others_is_refused(self) -> None:
        env = made((0, 1))
        env.reset()
        with pytest.raises(ConfigError, match=r"no environment 7; it has \[0, 1\]"):
            made((7,)).restore(env.state())
        with pytest.raises(ConfigError, match="seed 0 does not fit those of 5"):
            made((0, 1), seed=5).restore(env.state())

    def test_of_a_simulator_that_rolls_dice_is_refused(self) -> None:
        class Dice(simulators.Counter):
            def step(self, action: Any) -> Any:
                self.total += float(np.random.default_rng().normal())
                return super().step(action)

        class Casino(simulators.Toys):
            def make(self, index: int) -> Dice:
                return Dice(self.plain, index)

        env = Casino(Config({}, "env"), (0,), 0)
        env.reset()
        push(env)
        with pytest.raises(SimulatorError, match="environment 0 cannot be brought back.*not deterministic"):
            env.restore(env.state())

    def test_a_simulator_that_fails_meanwhile(self, tmp_path: Any) -> None:
        env = made(fault="raise", at=2, once=str(tmp_path / "once"))
        (tmp_path / "once").write_text("")
        env.reset()
        push(env)
        push(env)
        kept = env.state()
        (tmp_path / "once").unlink()
        with pytest.raises(SimulatorError, match="environment 1 failed while its episode was played again: ValueError"):
            env.restore(kept)


class Test_arguments:
    def test_positions_and_seeds(self) -> None:
        env = made()
        for envs in ([2], [-1], [0, 0]):
            with pytest.raises(ConfigError, match="are not positions of 2 environments"):
                env.reset(envs)
        with pytest.raises(ConfigError, match="2 environments are to be reset, with 1 seeds"):
            env.reset(seeds=[1])
        with pytest.raises(ConfigError, match="at least one"):
            made(())

    def test_pictures(self) -> None:
        env = made()
        env.reset()
        assert [p.shape for p in env.render([1])] == [(8, 8, 3)]
        env._envs[0].render = lambda: np.zeros((8, 8), np.uint8)  # type: ignore[method-assign]
        with pytest.raises(SimulatorError, match=r"environment 0 is shown as \[8, 8\] of uint8"):
            env.render([0])
        env._envs[0].render = lambda: np.zeros((0, 8, 3), np.uint8)  # type: ignore[method-assign]
        with pytest.raises(SimulatorError, match=r"environment 0 is shown as \[0, 8, 3\]"):
            env.render([0])

        def dark() -> Any:
            raise RuntimeError("no display")

        env._envs[0].render = dark  # type: ignore[method-assign]
        with pytest.raises(SimulatorError, match="environment 0 cannot be shown: RuntimeError: no display"):
            env.render([0])
