"""Config schemas of the group ``env``: which simulator, which task of it, and how it runs. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class Env:
    """What every environment has."""

    name: str = key("gymnasium", "environment plugin")
    max_episode_steps: int | None = key(
        None, "time limit in steps; null: the task's own, where the simulator has one", min=1
    )
    kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "arguments for the simulator's own constructor", "entry": "KEY"}
    )
    isolate: bool = key(
        False, "run in processes of their own, which are killed and started again when they raise, hang or die"
    )
    processes: int = key(1, "processes that share the environments of one worker (with isolate or python)", min=1)
    python: str | None = key(None, "another Python interpreter for those processes, for simulators that conflict")
    step_timeout_s: float = key(60.0, "longest time for a step or a reset of a process of its own", min=0.01)
    start_timeout_s: float = key(300.0, "longest time for such a process to be ready", min=0.1)
    max_restarts: int = key(3, "how often simulators that failed are started again, in all, per worker", min=0)

    def validate(self, root: Any) -> list[str]:
        return check_env(self)


@dataclass
class Gymnasium(Env):
    """An environment that is registered with gymnasium."""

    id: str = key("CartPole-v1", "id that gymnasium knows")
    module: str | None = key(None, "module to import first, which registers an id of your own")


@dataclass
class MetaWorld(Env):
    """A manipulation task of MetaWorld, with one goal per episode."""

    name: str = key("metaworld", "environment plugin")
    task: str = key("reach-v3", "MetaWorld task")
    goals: int = key(0, "how many places of goal and objects there are; 0: new ones in each episode", min=0)
    max_episode_steps: int | None = key(150, "time limit in steps; null: the simulator's 500", min=1, max=500)


@dataclass
class ManiSkill(Env):
    """A manipulation task of ManiSkill."""

    name: str = key("maniskill", "environment plugin")
    task: str = key("PushCube-v1", "ManiSkill task")
    control_mode: str | None = key("pd_ee_delta_pos", "ManiSkill's controller, which decides the action; null: its own")
    reward_mode: str = key("normalized_dense", "reward", choices=("sparse", "dense", "normalized_dense", "none"))
    device: str = key(
        "auto",
        "where it is simulated: cpu, one at a time; cuda, all at once; auto: cuda where there is one",
        choices=("auto", "cpu", "cuda"),
    )


def check_env(env: Any) -> list[str]:
    """What is wrong with the keys that all environments have."""
    from rlinf_core.registry import check_name

    problems = []
    if env.python is None:
        problems += check_name("rlinf.envs", env.name, "env.name")  # another interpreter may have what this one lacks
        if env.processes > 1 and not env.isolate:
            problems.append(
                f"env.processes={env.processes}: without env.isolate=true environments run in the worker's own process"
            )
    else:
        path = Path(env.python).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            problems.append(
                f"env.python: {env.python} is not an interpreter that can be run; tools/install PACKAGE --env NAME "
                "makes .venv-NAME/bin/python"
            )
    return problems


SCHEMAS: dict[str, type] = {
    "env/gymnasium": Gymnasium,
    "env/metaworld": MetaWorld,
    "env/maniskill": ManiSkill,
}
