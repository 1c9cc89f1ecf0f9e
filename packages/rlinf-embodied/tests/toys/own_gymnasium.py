"""A user's own gymnasium environments, registered when this module is imported."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

CUT_AT = 4


class Own(gymnasium.Env[Any, Any]):
    """Observes what ``observation`` makes of the step's number; cuts itself at step 4; a success at step 2."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        space: Any,
        observe: Any,
        action: Any = None,
        key: str = "success",
        ends: bool = False,
        options: Any = None,
    ) -> None:
        self.observation_space = space
        self.action_space = spaces.Discrete(3, start=-1) if action is None else action
        self._observe, self._key, self._ends = observe, key, ends
        self.options = options

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.offset = float(self.np_random.random())
        self.steps = 0
        return self._observe(self), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        over = self.steps == CUT_AT
        return self._observe(self), float(np.sum(action)), over and self._ends, over and not self._ends, self.info()

    def info(self) -> dict[str, Any]:
        return {self._key: self.steps == 2} if self._key else {}


def _vector(env: Own) -> Any:
    return np.array([env.offset, env.steps])


def _image(env: Own) -> Any:
    return np.full((4, 5, 3), env.steps, dtype=np.uint8)


class Old(Own):
    """Answers as environments did before gymnasium: no pair from a reset, four values from a step."""

    def __init__(self, pair: bool = False) -> None:
        super().__init__(NUMBERS, _vector)
        self.pair = pair

    def reset(self, **keys: Any) -> Any:
        pair = super().reset(**keys)
        return pair if self.pair else pair[0]

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


PIXELS = spaces.Box(0, 255, (4, 5, 3), np.uint8)
NUMBERS = spaces.Box(-9.0, 9.0, (2,), np.float64)
MAKERS: dict[str, Any] = {
    "Vector": lambda **kw: Own(NUMBERS, _vector, **kw),
    "IsSuccess": lambda **kw: Own(NUMBERS, _vector, key="is_success", **kw),
    "Silent": lambda **kw: Own(NUMBERS, _vector, key="", **kw),
    "Ends": lambda **kw: Own(NUMBERS, _vector, ends=True, **kw),
    "Image": lambda **kw: Own(PIXELS, _image, **kw),
    "Dict": lambda **kw: Own(
        spaces.Dict({"state": NUMBERS, "image": PIXELS, "goal": spaces.Discrete(3)}),
        lambda env: {"state": _vector(env), "image": _image(env), "goal": env.steps % 3},
        **kw,
    ),
    "Matrix": lambda **kw: Own(spaces.Box(0, 9, (2, 2)), lambda env: np.full((2, 2), env.steps, np.float32), **kw),
    "Tiles": lambda **kw: Own(spaces.Discrete(5), lambda env: env.steps, **kw),
    "Grey": lambda **kw: Own(spaces.Box(0, 255, (4, 5, 1), np.uint8), lambda env: np.zeros((4, 5, 1), np.uint8), **kw),
    "Endless": lambda **kw: Own(spaces.Sequence(NUMBERS), lambda env: (), **kw),
    "Push": lambda **kw: Own(NUMBERS, _vector, action=spaces.Box(-0.5, 0.5, (2,)), **kw),
    "Many": lambda **kw: Own(NUMBERS, _vector, action=spaces.MultiDiscrete([2, 2]), **kw),
}
for _name, _maker in MAKERS.items():
    gymnasium.register(f"Own/{_name}-v0", entry_point=_maker, max_episode_steps=20)
gymnasium.register("Own/Old-v0", entry_point=lambda **kw: Old(**kw), max_episode_steps=20)
gymnasium.register("Own/Limitless-v0", entry_point=MAKERS["Vector"])
