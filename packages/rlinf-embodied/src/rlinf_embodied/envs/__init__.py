"""Environments by name (entry-point group ``rlinf.envs``), behind one vectorised interface (``envs.base``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_core.errors import ConfigError, RLinfError, describe
from rlinf_core.registry import Registry
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec, Observation, SingleEnv, StepResult, Text, VectorEnv
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.envs.fleet import setting
from rlinf_embodied.envs.seeds import derive_seed, episode_seed
from rlinf_embodied.envs.vector import PerEnv

__all__ = [
    "Box",
    "Discrete",
    "EnvSpec",
    "Observation",
    "PerEnv",
    "SimulatorError",
    "SingleEnv",
    "StepResult",
    "Text",
    "VectorEnv",
    "derive_seed",
    "episode_seed",
    "load_env",
]


def load_env(cfg: Any, indices: Sequence[int], seed: int, *, what: str = "") -> VectorEnv:
    """The environments ``indices`` of a run, made by the plugin ``cfg.name``.

    Args:
        cfg: config node ``env``. With ``isolate`` or ``python`` they run in processes of their own, which are killed
            and started again when they fail (``envs.isolated``).
        indices: numbers of the environments in the run.
        seed: root seed of their episodes.
        what: what they are for, to begin messages with (``"evaluation"``).

    Raises:
        PluginError: there is no such plugin (or it is claimed twice).
        MissingExtraError: what the plugin needs is not installed; says how to install it.
        ConfigError: the plugin refuses its configuration.
        SimulatorError: the simulators cannot be made.
    """
    try:
        if setting(cfg, "isolate", False) or setting(cfg, "python", None):
            from rlinf_embodied.envs.isolated import IsolatedEnvs

            return IsolatedEnvs(cfg, indices, seed)
        plugin = Registry("rlinf.envs").load(cfg["name"])
        made: VectorEnv = plugin(cfg, indices, seed)
        return made
    except RLinfError as error:
        if what and not isinstance(error, ConfigError):
            error.add_note(f"(environments {_span(indices)}: {what})")
        raise
    except Exception as error:
        raise SimulatorError(
            f"environments {_span(indices)}{f' ({what})' if what else ''} of env.name={cfg['name']} cannot be made: "
            f"{describe(error)}"
        ) from error


def _span(indices: Sequence[int]) -> str:
    numbers = [int(i) for i in indices]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
