"""Config schema of ``env/libero``, and where LIBERO's own Python environment is. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlinf_core.errors import nearest
from rlinf_embodied.conf.envs import Env, check_env, key

SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
"""LIBERO's task suites and how many tasks they have (arXiv 2306.03310). The package has perturbed ones beside."""
LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Usual time limits, in steps (those of OpenVLA's evaluation); LIBERO has none. Variants have those of theirs."""
REWARDS = ("sparse", "distance")
INSTALL = "tools/install 'rlinf-embodied[libero]' --env libero"


@dataclass
class Libero(Env):
    """A manipulation task of LIBERO, from its own initial states, with pictures and an instruction."""

    name: str = key("libero", "environment plugin")
    suite: str = key("libero_spatial", "task suite")
    task: str = key("0", "task of the suite: its number, or its name")
    max_episode_steps: int | None = key(None, "time limit in steps; null: the usual one of the suite", min=1)
    image_size: int = key(128, "side of the pictures in pixels", min=8)
    wrist_image: bool = key(True, "the wrist camera's picture too, which takes as long as the other one")
    reflections: bool = key(
        True, "draw what the table reflects, as LIBERO does; without it pictures take half the time and differ a little"
    )
    settle_steps: int = key(10, "steps without motion before an episode, in which objects come to rest", min=0)
    hard_reset: bool = key(False, "build the simulation anew for each episode, which takes ten times as long")
    reward: str = key(
        "sparse",
        "sparse: 1 at success; distance: also how much nearer the gripper came to the object; or module:function",
    )
    python: str | None = key(
        None, "Python interpreter with LIBERO; null: this one if it has it, else .venv-libero of the checkout"
    )
    step_timeout_s: float = key(120.0, "longest time for a step or a reset of a process of its own", min=0.01)

    def validate(self, root: Any) -> list[str]:
        return check_libero(self)


def find_python() -> Path | None:
    """The interpreter of ``.venv-libero``, in the working directory or in the checkout that this file is of."""
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        python = folder / ".venv-libero" / "bin" / "python"
        if python.is_file():
            return python
    return None


def base_suite(suite: str) -> str | None:
    """The suite itself, or the one that it is a variant of (``libero_goal_swap`` of ``libero_goal``), if any."""
    return next((name for name in SUITES if suite == name or suite.startswith(f"{name}_")), None)


def check_libero(env: Any) -> list[str]:
    """What is wrong with the config of a LIBERO environment, as far as it can be seen without LIBERO."""
    problems = []
    here = find_spec("libero") is not None
    if env.python is not None or here:
        problems += check_env(env)
    elif find_python() is None:
        problems.append(f"env.name=libero: LIBERO needs a Python environment of its own; {INSTALL} makes it")
    if base_suite(env.suite) is None:
        problems.append(f"env.suite: {env.suite!r} is unknown{nearest(env.suite, SUITES)}; suites: {', '.join(SUITES)}")
    count = SUITES.get(env.suite)
    if count is not None and env.task.isdecimal() and int(env.task) >= count:
        problems.append(f"env.task: {env.suite} has the tasks 0 ... {count - 1}, not {env.task}")
    return problems + check_reward(env.reward)


def check_reward(name: str) -> list[str]:
    """That the reward is a built-in one or looks like ``module:function``."""
    module, _, function = name.partition(":")
    if name in REWARDS or (module and function.isidentifier()):
        return []
    return [
        f"env.reward: {name!r} is unknown{nearest(name, REWARDS)}; choose from {', '.join(REWARDS)}, or name a "
        "function of your own as module:function"
    ]


SCHEMAS: dict[str, type] = {"env/libero": Libero}
