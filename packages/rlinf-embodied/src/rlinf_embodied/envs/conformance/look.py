"""How the conformance test looks at environments: what it compares, and what it says when that is not as it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import RLinfError, describe
from rlinf_embodied.envs.base import Discrete, EnvSpec, Observation, StepResult, Text, VectorEnv

Make = Callable[[Sequence[int], int], VectorEnv]
"""(numbers of the environments in the run, root seed) -> the environments."""


class NotConforming(RLinfError, AssertionError):
    """An environment does not keep to the interface; says which rule, and what was seen instead."""


class Look:
    """Makes environments, drives them with random actions, and compares what comes back."""

    def __init__(self, make: Make, steps: int, tolerance: float) -> None:
        self.make, self.steps, self.tolerance = make, steps, tolerance
        with self.made((0,)) as env:
            self.spec: EnvSpec = env.spec

    @contextmanager
    def made(self, indices: Sequence[int], seed: int = 7) -> Iterator[VectorEnv]:
        env = self.make(indices, seed)
        try:
            yield env
        finally:
            env.close()

    def actions(self, steps: int, count: int, seed: int = 0) -> NDArray[Any]:
        """Random actions [steps, count, *A], the same for equal arguments."""
        rng = np.random.default_rng(seed)
        space = self.spec.action
        if isinstance(space, Discrete):
            return rng.integers(0, space.n, (steps, count))
        low, high = np.maximum(space.low, -2.0), np.minimum(space.high, 2.0)
        return rng.uniform(low, high, (steps, count, *space.shape)).astype(space.dtype)

    def run(self, indices: Sequence[int], actions: NDArray[Any]) -> list[StepResult]:
        with self.made(indices) as env:
            env.reset()
            return [env.step(step) for step in actions]

    def refuses(self, env: VectorEnv, actions: NDArray[Any], kind: type[Exception], what: str) -> None:
        try:
            env.step(actions)
        except kind:
            return
        except Exception as error:
            raise NotConforming(f"{what}: raises {describe(error)}, not a {kind.__name__}") from error
        raise NotConforming(f"{what}: is not refused")

    def observation(self, obs: Observation, count: int, what: str) -> None:
        promised = self.spec.observations
        want(set(obs) == set(promised), f"{what} has keys {sorted(obs)}, and {sorted(promised)} were promised")
        for key, space in promised.items():
            value = obs[key]
            if isinstance(space, Text):
                fits = isinstance(value, list) and len(value) == count and all(isinstance(v, str) for v in value)
                want(fits, f"{what}: {key!r} is not a list of {count} texts")
                continue
            wanted = (count, *space.shape)
            want(isinstance(value, np.ndarray), f"{what}: {key!r} is a {type(value).__name__}, not an array")
            want(value.shape == wanted, f"{what}: {key!r} has shape {list(value.shape)}, not {list(wanted)}")
            want(value.dtype == np.dtype(space.dtype), f"{what}: {key!r} is of {value.dtype}, not {space.dtype}")
            want(bool(np.isfinite(value).all()), f"{what}: {key!r} is not finite")

    def result(self, result: StepResult, count: int) -> None:
        want(isinstance(result, StepResult), f"step gives a {type(result).__name__}, not a StepResult")
        self.observation(result.obs, count, "step")
        kinds = {"reward": "f", "terminated": "b", "truncated": "b", "success": "b"}
        for item in fields(result):
            if item.name in kinds:
                value = getattr(result, item.name)
                fits = isinstance(value, np.ndarray) and value.shape == (count,)
                want(fits, f"{item.name} is not an array [{count}]")
                want(value.dtype.kind == kinds[item.name], f"{item.name} is of type {value.dtype}")
        want(bool(np.isfinite(result.reward).all()), "a reward is not finite")
        over = np.flatnonzero(result.terminated | result.truncated)
        want(
            list(result.ended) == list(over),
            f"ended is {result.ended.tolist()}, and the episodes of {over.tolist()} terminated or were truncated",
        )
        if len(over):
            want(result.final_obs is not None, "an episode ended, and there is no final_obs")
            assert result.final_obs is not None
            self.observation(result.final_obs, len(over), "final_obs")
        else:
            want(result.final_obs is None, "no episode ended, and final_obs is not None")
        want(not result.dropped, f"an episode was lost: {next(iter(result.dropped.values()), '')}")

    def equal(self, a: Observation, b: Observation) -> bool:
        return not self._difference(a, b)

    def _difference(self, a: Observation, b: Observation) -> str:
        for key, value in a.items():
            if not isinstance(value, np.ndarray):
                if value != b[key]:
                    return f"{key!r}: {value!r} and {b[key]!r}"
                continue
            apart = np.abs(value.astype(np.float64) - b[key].astype(np.float64))
            if apart.size and apart.max() > self.tolerance:
                return f"{key!r} by {apart.max():.3g}"
        return ""

    def same(self, a: Observation, b: Observation, what: str) -> None:
        difference = self._difference(a, b)
        want(not difference, f"{what} ({difference})")

    def same_results(self, a: Sequence[StepResult], b: Sequence[StepResult], what: str) -> None:
        for t, (x, y) in enumerate(zip(a, b, strict=True)):
            self.same(x.obs, y.obs, f"{what}, in step {t + 1}")
            for name in ("reward", "terminated", "truncated", "success"):
                mine, theirs = (np.asarray(getattr(r, name), dtype=np.float64) for r in (x, y))
                want(np.allclose(mine, theirs, rtol=0, atol=self.tolerance), f"{what}, in step {t + 1} ({name})")


def want(condition: bool, message: str) -> None:
    if not condition:
        raise NotConforming(message)


def row(obs: Observation, place: int) -> Observation:
    """One environment's observation out of several."""
    return {key: value[place] if isinstance(value, list) else np.array(value[place]) for key, value in obs.items()}


def copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.copy()
