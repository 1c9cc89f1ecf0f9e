"""An environment's ``EnvSpec`` as a file of the run directory: the simulators write it, policy and trainer read it.

So the environment is made where it is stepped alone, and simulators need not be installed where the policy is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import RLinfError
from rlinf_core.rundir import guard
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec, Text

FILE = "environment.json"


def write_spec(run_dir: Path, spec: EnvSpec) -> None:
    """Write ``environment.json``, whole or not at all."""
    path = run_dir / FILE
    aside = run_dir / f".{FILE}.{os.getpid()}"
    with guard(path):
        aside.write_text(json.dumps(to_data(spec), indent=1) + "\n", encoding="utf-8")
        os.replace(aside, path)


def read_spec(run_dir: Path) -> EnvSpec:
    """What ``write_spec`` wrote. Raises RLinfError when no simulator has written it yet."""
    path = run_dir / FILE
    if not path.is_file():
        raise RLinfError(f"{path} is not there: call the simulator's describe() and join that step first")
    return from_data(json.loads(path.read_text(encoding="utf-8")))


def to_data(spec: EnvSpec) -> dict[str, Any]:
    """As numbers, texts, lists and mappings."""
    return {
        "observations": {key: _space(space) for key, space in spec.observations.items()},
        "action": _space(spec.action),
        "max_episode_steps": spec.max_episode_steps,
    }


def from_data(data: dict[str, Any]) -> EnvSpec:
    """The inverse of ``to_data``."""
    observations: dict[str, Box | Text] = {}
    for key, value in data["observations"].items():
        space = _from_space(value)
        assert not isinstance(space, Discrete)
        observations[key] = space
    action = _from_space(data["action"])
    assert not isinstance(action, Text)
    return EnvSpec(observations, action, int(data["max_episode_steps"]))


def _space(space: Box | Discrete | Text) -> dict[str, Any]:
    if isinstance(space, Discrete):
        return {"kind": "discrete", "n": space.n}
    if isinstance(space, Text):
        return {"kind": "text"}
    bounds = {"low": _bound(space.low), "high": _bound(space.high)}
    return {"kind": "box", "shape": list(space.shape), "dtype": space.dtype, **bounds}


def _bound(values: NDArray[np.float64]) -> Any:
    """One number where all are equal: a picture has many."""
    flat = np.asarray(values, dtype=np.float64)
    return float(flat.flat[0]) if flat.size and (flat == flat.flat[0]).all() else flat.tolist()


def _from_space(data: dict[str, Any]) -> Box | Discrete | Text:
    if data["kind"] == "discrete":
        return Discrete(int(data["n"]))
    if data["kind"] == "text":
        return Text()
    shape = tuple(data["shape"])
    low, high = (np.array(np.broadcast_to(np.asarray(data[end], np.float64), shape)) for end in ("low", "high"))
    return Box(low, high, data["dtype"])
