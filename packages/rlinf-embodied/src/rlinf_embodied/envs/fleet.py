"""The simulators of a vector of environments: made, made again after a failure, closed."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from rlinf_core.errors import ConfigError, describe
from rlinf_embodied.envs.base import EnvSpec, SingleEnv
from rlinf_embodied.envs.checks import SimulatorError

log = logging.getLogger("rlinf.envs")


def setting(cfg: Any, key: str, default: Any) -> Any:
    """The value of a key that a plugin of someone else's need not have in its schema."""
    return cfg[key] if key in cfg else default  # noqa: SIM401 - a Config has no get


def own_arguments(cfg: Any) -> dict[str, Any]:
    """``cfg.kwargs`` as plain data, for the simulator's own constructor."""
    given = setting(cfg, "kwargs", {})
    return dict(given.to_dict() if hasattr(given, "to_dict") else given)


class Fleet:
    """One ``SingleEnv`` for each of ``indices``. A plugin says how with ``make`` and ``describe``."""

    spec: EnvSpec
    indices: Sequence[int]

    def __init__(self, cfg: Any, indices: Sequence[int]) -> None:
        if not len(indices):
            raise ConfigError("a vector of environments has at least one")
        self.cfg = cfg
        self.indices = tuple(int(index) for index in indices)
        self.restarts = 0
        self._max_restarts = int(setting(cfg, "max_restarts", 0))
        self._envs: list[SingleEnv] = []
        weakref.finalize(self, _close, self._envs).atexit = False
        self._has_drawn = False
        try:
            for index in self.indices:
                self._envs.append(self.make(index))
            self.spec = self.describe(self._envs[0])
        except BaseException:
            self.close()
            raise

    # -- what a plugin says ------------------------------------------------------------------------------------------

    def make(self, index: int) -> SingleEnv:
        """A new simulator for the run's environment ``index``."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to make an environment")

    def describe(self, env: SingleEnv) -> EnvSpec:
        """Spaces and time limit, from the first simulator."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its environments look like")

    def close(self) -> None:
        """Free the simulators; may be called twice."""
        _close(self._envs)

    def _drew(self) -> None:
        """A first picture was made: close before MuJoCo ends its EGL at exit, which it arranges when it draws first.
        Simulators that are closed later print tracebacks."""
        if not self._has_drawn:
            self._has_drawn = True
            atexit.register(_close, self._envs)

    def _remake(self, i: int, error: Exception, when: str) -> None:
        if self.restarts >= self._max_restarts:
            raise SimulatorError(
                f"environment {self.indices[i]} failed {when}: {describe(error)}; "
                + (
                    f"simulators were started again {self.restarts} times already (env.max_restarts)"
                    if self._max_restarts
                    else "it is not started again (env.max_restarts=0)"
                )
            ) from error
        self.restarts += 1
        _close([self._envs[i]])
        try:
            self._envs[i] = self.make(self.indices[i])
        except Exception as again:
            raise SimulatorError(
                f"environment {self.indices[i]} failed {when} ({describe(error, 500)}) and cannot be made again: "
                f"{describe(again)}"
            ) from again


def _close(envs: list[SingleEnv]) -> None:
    while envs:
        try:
            envs.pop().close()
        except Exception as error:
            log.warning("a simulator could not be closed: %s", describe(error, 300))
