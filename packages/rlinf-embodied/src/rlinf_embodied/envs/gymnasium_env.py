"""Environments that are registered with gymnasium, MuJoCo's and a user's own among them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, MissingExtraError, nearest
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec, Observation
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.envs.drawing import load_mujoco, mujoco_picture
from rlinf_embodied.envs.fleet import own_arguments, setting
from rlinf_embodied.envs.seeds import narrow
from rlinf_embodied.envs.vector import PerEnv

if TYPE_CHECKING:
    import gymnasium

REQUIRES = {"gymnasium": "gymnasium"}


class GymnasiumEnv(PerEnv):
    """N environments of one gymnasium id.

    Config keys: ``id``; ``module``, imported first (it registers an id of one's own); ``kwargs`` of
    ``gymnasium.make``; ``max_episode_steps`` (null: the id's own, which must then have one).

    Observations: a ``Box`` of uint8 with shape [H, W, 3] is ``image``; any other becomes ``state``, a float32 vector
    (flattened; one-hot for ``Discrete``). Those of a ``Dict`` keep their keys. Actions: ``Discrete`` and ``Box``. An
    episode is a success at the steps whose ``info`` says so under ``success`` or ``is_success``.

    Gymnasium's own wrappers for time limits, order and checks are left away: ``PerEnv`` does what they do.
    """

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        self._registered = find_spec(cfg["id"], setting(cfg, "module", None))
        self._kwargs = own_arguments(cfg)
        self._own_limit = setting(cfg, "max_episode_steps", None) or self._registered.max_episode_steps
        if self._own_limit is None:
            raise ConfigError(f"env.max_episode_steps: {cfg['id']} has no time limit of its own; give one in steps")
        self._convert: Callable[[Any], Observation] | None = None
        super().__init__(cfg, indices, seed)

    def make(self, index: int) -> GymnasiumSingle:
        env = make_bare(self._registered, self._kwargs)
        if self._convert is None:
            self._spaces, self._convert = observation_spaces(env.observation_space, self.cfg["id"])
            self._action, self._start = action_space(env.action_space, self.cfg["id"])
        return GymnasiumSingle(env, self._convert, self._start, self.cfg["id"])

    def describe(self, env: Any) -> EnvSpec:
        return EnvSpec(self._spaces, self._action, int(self._own_limit))


class GymnasiumSingle:
    """One gymnasium environment as ``PerEnv`` wants it."""

    def __init__(
        self, env: gymnasium.Env[Any, Any], convert: Callable[[Any], Observation], start: int, id: str
    ) -> None:
        self.env = env
        self.cut = False
        self._convert = convert
        self._start = start
        self._id = id

    def reset(self, seed: int) -> Observation:
        result = self.env.reset(seed=narrow(seed))
        if not isinstance(result, tuple) or len(result) != 2:  # an array of two numbers would unpack too
            raise ConfigError(f"env.id={self._id}: reset gives no pair (observation, info), as gymnasium wants it")
        return self._convert(result[0])

    def step(self, action: Any) -> tuple[Observation, float, bool, bool]:
        result = self.env.step(action + self._start if self._start else action)
        try:
            obs, reward, terminated, self.cut, info = result
        except ValueError as error:
            raise ConfigError(
                f"env.id={self._id}: step gives {len(result)} values, and gymnasium wants (observation, reward, "
                "terminated, truncated, info); those of before gymnasium 0.26 need a wrapper"
            ) from error
        success = bool(info and (info.get("success") or info.get("is_success")))
        return self._convert(obs), float(reward), terminated, success

    def render(self) -> NDArray[np.uint8]:
        if self.env.render_mode != "rgb_array":
            raise SimulatorError(f"env.id={self._id} cannot be shown: it has no render mode rgb_array")
        if hasattr(self.env.unwrapped, "mujoco_renderer"):
            return mujoco_picture(self.env.render)
        return np.asarray(self.env.render())

    def close(self) -> None:
        self.env.close()


def find_spec(id: str, module: str | None) -> Any:
    """Gymnasium's registration of ``id``; names the nearest when there is none."""
    import gymnasium

    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"env.module: {module!r} cannot be imported: {error}") from error
    try:
        return gymnasium.spec(id)
    except gymnasium.error.Error as error:
        known = list(gymnasium.registry)
        own = "" if module else "; env.module names a module that registers ids of your own"
        raise ConfigError(
            f"env.id: gymnasium has no environment {id!r}{nearest(id, known)} ({len(known)} are registered){own}"
        ) from error


def make_bare(registered: Any, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """``gymnasium.make`` without its wrappers for time limit, order and checks, with pictures where it has them."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    spec = copy.deepcopy(registered)
    spec.max_episode_steps = None
    spec.order_enforce = False
    spec.disable_env_checker = True
    if "mujoco" in str(spec.entry_point) and importlib.util.find_spec("mujoco") is not None:
        load_mujoco()
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    metadata = getattr(creator, "metadata", None) or {}
    options = dict(kwargs)
    if "rgb_array" in metadata.get("render_modes", ()):
        options.setdefault("render_mode", "rgb_array")
    try:
        return gymnasium.make(spec, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"env.id={spec.id}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"env.kwargs: {spec.id} does not take {kwargs}: {error}") from error


def action_space(space: Any, id: str) -> tuple[Box | Discrete, int]:
    """The kind of action, and what is added to a discrete one."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), int(space.start)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return Box(space.low.astype(np.float64), space.high.astype(np.float64), space.dtype.name), 0
    raise ConfigError(
        f"env.id={id}: actions are {space}; Discrete and Box (of floats) are known here, others need a wrapper"
    )


def observation_spaces(space: Any, id: str) -> tuple[dict[str, Box], Callable[[Any], Observation]]:
    """Spaces by key, and what turns gymnasium's observation into ours."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = {key: _one(part, f"{id}, observation {key!r}") for key, part in space.spaces.items()}
        boxes = {key: box for key, (_, box, _) in parts.items()}
        converters = {key: convert for key, (_, _, convert) in parts.items()}
        return boxes, lambda obs: {key: convert(obs[key]) for key, convert in converters.items()}
    key, box, convert = _one(space, id)
    if convert is _same:
        return {key: box}, lambda obs: {key: obs}
    return {key: box}, lambda obs: {key: convert(obs)}


def _same(value: Any) -> Any:
    return value


def _one(space: Any, where: str) -> tuple[str, Box, Callable[[Any], Any]]:
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8 and len(space.shape) == 3:
            if space.shape[2] != 3:
                raise ConfigError(f"env.id={where}: images are {list(space.shape)}, and [H, W, 3] is known here")
            return "image", Box(space.low.astype(np.float64), space.high.astype(np.float64), "uint8"), _same
        low, high = space.low.astype(np.float64).reshape(-1), space.high.astype(np.float64).reshape(-1)
        if len(space.shape) == 1 and space.dtype.kind == "f":
            return "state", Box(low, high), _same
        return "state", Box(low, high), lambda value: np.asarray(value, np.float32).reshape(-1)
    if not space.is_np_flattenable:
        raise ConfigError(f"env.id={where}: observations are {space}, which has no fixed size; it needs a wrapper")
    flat = spaces.flatten_space(space)
    box = Box(flat.low.astype(np.float64), flat.high.astype(np.float64))
    return "state", box, lambda value: spaces.flatten(space, value).astype(np.float32)
