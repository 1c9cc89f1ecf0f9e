"""The test that plugins are put to finds each fault that is planted, and none where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simulators

from rlinf_core import registry
from rlinf_core.config.node import Config
from rlinf_core.errors import ConfigError
from rlinf_embodied.envs import EnvSpec, StepResult
from rlinf_embodied.envs.conformance import NotConforming, check_env
from rlinf_embodied.envs.conformance.__main__ import main

CFG = {"max_episode_steps": 6, "length": 9}


def make(kind: type[simulators.Toys], **cfg: Any) -> Callable[[Any, int], Any]:
    return lambda indices, seed: kind(Config({**CFG, **cfg}, "env"), indices, seed)


def test_a_good_one() -> None:
    report = check_env(make(simulators.Toys), render=True)
    assert set(report.values()) == {"ok"} and len(report) == 13
    assert set(check_env(make(simulators.Toys, discrete=True)).values()) == {"ok"}


def test_what_could_not_be_looked_at_is_said() -> None:
    assert check_env(make(simulators.Toys, max_episode_steps=500), limit=8)["time limit"].startswith("no episode ended")
    assert check_env(make(simulators.Toys, length=2))["time limit"].startswith("no episode reached the time limit")
    assert check_env(make(Blind))["render"] == "no picture: environment 1 cannot be shown: RuntimeError: dark"
    assert check_env(make(Constant))["seeds"].startswith("all episodes begin with the same")
    assert check_env(make(Blind), render=False)["render"] == "not looked at"


class Blind(simulators.Toys):
    def make(self, index: int) -> Any:
        env = super().make(index)

        def render() -> Any:
            raise RuntimeError("dark")

        env.render = render  # type: ignore[method-assign]
        return env


class Constant(simulators.Toys):
    def make(self, index: int) -> Any:
        env = super().make(index)
        begin = env.reset
        env.reset = lambda seed: begin(5)  # type: ignore[method-assign]
        return env


class NextStep(simulators.Toys):
    """Resets in the step after the end, as gymnasium's vectors do by default."""

    shown: Any = None

    def reset(self, envs: Any = None, *, seeds: Any = None) -> Any:
        self.shown = None
        return super().reset(envs, seeds=seeds)

    def step(self, actions: Any, active: Any = None) -> StepResult:
        result = super().step(actions, active)
        if result.final_obs is not None:
            for key, rows in result.final_obs.items():
                for place, i in enumerate(result.ended):
                    result.obs[key][i] = rows[place]
        self.shown = {key: value.copy() for key, value in result.obs.items()}
        return result

    def observe(self) -> Any:
        shown = self.shown or super().observe()
        return {key: value.copy() for key, value in shown.items()}


class NoFinal(simulators.Toys):
    def step(self, actions: Any, active: Any = None) -> StepResult:
        result = super().step(actions, active)
        result.final_obs = None
        return result


class FinalOfTheNext(simulators.Toys):
    def step(self, actions: Any, active: Any = None) -> StepResult:
        result = super().step(actions, active)
        if result.final_obs is not None:
            result.final_obs = self._observations(result.ended.tolist())
        return result


class NoLimit(simulators.Toys):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._limit = 10**9


class Dice(simulators.Toys):
    numbers = itertools.count()

    def step(self, actions: Any, active: Any = None) -> StepResult:
        result = super().step(actions, active)
        result.reward[active if active is not None else slice(None)] += next(self.numbers) % 7
        return result


class Position(simulators.Toys):
    """Seeds by position in the vector instead of by number in the run."""

    def _begin(self, i: int, seed: int | None) -> None:
        if seed is None:
            seed = self.episodes[i] * 100 + i
            self.episodes[i] += 1
        super()._begin(i, seed)


class Worn(simulators.Toys):
    """What was done before shows in later episodes."""

    def make(self, index: int) -> Any:
        env = super().make(index)
        begin, wear = env.reset, itertools.count()

        def reset(seed: int) -> Any:
            begin(seed)
            env.total = float(next(wear) if not hasattr(env, "fresh") else 0)
            return env.observe()

        env.reset = reset  # type: ignore[method-assign]
        return env


class ResetsAll(simulators.Toys):
    def reset(self, envs: Any = None, *, seeds: Any = None) -> Any:
        places = list(range(self.num_envs)) if envs is None else list(envs)
        for i in range(self.num_envs):
            if i not in places:
                self._begin(i, 99)
        return super().reset(envs, seeds=seeds)


class NeverIdle(simulators.Toys):
    def step(self, actions: Any, active: Any = None) -> StepResult:
        return super().step(np.nan_to_num(actions) if active is not None else actions)


class Lenient(simulators.Toys):
    def step(self, actions: Any, active: Any = None) -> StepResult:
        return super().step(np.nan_to_num(actions), active)


class Broadcasts(simulators.Toys):
    def step(self, actions: Any, active: Any = None) -> StepResult:
        return super().step(np.broadcast_to(actions, (self.num_envs, 2)) if np.ndim(actions) == 2 else actions, active)


class Unclipped(simulators.Toys):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._check._bounded = False


class Shares(simulators.Toys):
    def _present(self) -> Any:
        return {**self._arrays, **self._texts}


class WrongType(simulators.Toys):
    def observe(self) -> Any:
        return {**super().observe(), "state": super().observe()["state"].astype(np.float64)}


class WrongRows(simulators.Toys):
    def reset(self, envs: Any = None, *, seeds: Any = None) -> Any:
        super().reset(envs, seeds=seeds)
        return self._observations(range(self.num_envs))


class Forgets(simulators.Toys):
    def restore(self, state: Any) -> None:
        for kept in state["envs"].values():
            kept["actions"] = kept["actions"][:2]
            kept["floats"] = {}
        super().restore(state)


class ForgetsNumbers(simulators.Toys):
    def restore(self, state: Any) -> None:
        numbers = list(self.episodes)
        super().restore(state)
        self.episodes[:] = [number + 3 for number in numbers]


class HeadlessPicture(simulators.Toys):
    def render(self, envs: Any) -> Any:
        return [np.zeros((8, 8, 3), np.uint8) for _ in envs]


class FloatPicture(simulators.Toys):
    def render(self, envs: Any) -> Any:
        return [np.random.default_rng(0).random((8, 8, 3)) for _ in envs]


class ClosesOnce(simulators.Toys):
    def close(self) -> None:
        if not self._envs:
            raise ValueError("closed already")
        super().close()


class NoEnd(simulators.Toys):
    """Says ``done`` when it is a success, and has no time limit, as LIBERO."""

    def describe(self, env: Any) -> EnvSpec:
        spec = super().describe(env)
        return EnvSpec(spec.observations, spec.action, 0)


class WrongIndices(simulators.Toys):
    def __init__(self, cfg: Any, indices: Any, seed: int) -> None:
        super().__init__(cfg, range(len(indices)), seed)


class UnlistedEnd(simulators.Toys):
    def step(self, actions: Any, active: Any = None) -> StepResult:
        result = super().step(actions, active)
        result.truncated[:] = False
        return result


class IntegerRewards(simulators.Toys):
    def step(self, actions: Any, active: Any = None) -> Any:
        result = super().step(actions, active)
        result.reward = result.reward.astype(int)
        return result


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NextStep, "time limit: after its end environment 0 does not have the first observation of its next"),
        (NoFinal, "there is no final_obs"),
        (FinalOfTheNext, "final_obs is the observation after the reset"),
        (NoLimit, "time limit: an episode .* 7 steps, and the limit is 6|goes on after 6 steps"),
        (Dice, "seeds: the same environments with the same seed and actions differ, in step"),
        (Position, "split: environment 1 is another one when it is not beside all others"),
        (Worn, "two environments reset with the same seed differ|history: an episode begins otherwise"),
        (ResetsAll, r"partial reset: reset\(\[0\]\) changes the observation of environment 1"),
        (NeverIdle, "active: an environment that is not active moves"),
        (Lenient, "actions: an action that is nan: is not refused"),
        (Broadcasts, "actions: actions for one environment of two: is not refused"),
        (Unclipped, "actions: an action beyond the bounds is not the one at the bound"),
        (Shares, "step: the observations of a step share memory"),
        (WrongType, r"reset: observe\(\): 'state' is of float64, not float32"),
        (WrongRows, r"reset: reset\(\[2, 0\]\): 'state' has shape \[3, 3\], not \[2, 3\]"),
        (Forgets, "state: restore does not bring the same environments back"),
        (ForgetsNumbers, "state: after restore .* go on otherwise"),
        (HeadlessPicture, "render: a picture is of one colour"),
        (FloatPicture, r"render: a picture is \[8, 8, 3\] of float64"),
        (ClosesOnce, "close: raised ValueError: closed already"),
        (NoEnd, "spec: max_episode_steps is 0; every environment has a time limit"),
        (WrongIndices, r"spec: indices are \(0, 1\) for environments 3 and 5"),
        (UnlistedEnd, r"ended is \[0, 1\], and the episodes of \[\] terminated"),
        (IntegerRewards, "reward is of type int64"),
    ],
)
def test_planted_faults(kind: type[simulators.Toys], message: str) -> None:
    with pytest.raises(NotConforming, match=message):
        check_env(make(kind))


def test_no_picture_where_there_must_be_one() -> None:
    with pytest.raises(NotConforming, match="render: there is no picture: environment 1 cannot be shown"):
        check_env(make(Blind), render=True)


def test_one_that_cannot_be_made_is_not_called_nonconforming() -> None:
    with pytest.raises(ConfigError, match="no such task"):
        check_env(make(simulators.Toys, refuse="no such task"))


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Entry("rlinf.envs", "toys", "simulators:Toys", "toys")
    monkeypatch.setattr(registry, "installed_entries", lambda: (entry,))
    assert main(["toys", "max_episode_steps=6"]) == 0
    assert "time limit     ok" in capsys.readouterr().out
    assert main(["toys", "fault=raise", "at=1", "bad=0"]) == 1
    assert "toys does not conform: step: raised SimulatorError: environment 0" in capsys.readouterr().err
    assert main(["toyz"]) == 1
    assert "did you mean 'toys'" in capsys.readouterr().err
    assert main([]) == 2 and main(["toys", "x"]) == 2
