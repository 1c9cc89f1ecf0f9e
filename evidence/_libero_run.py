"""Runs in LIBERO's own Python environment: prints what one simulation costs, or how far resets are apart, as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_embodied.conf.libero import SUITES
from rlinf_embodied.envs import libero_env
from rlinf_embodied.envs.libero_env import LiberoSingle, LiberoTask

STEPS = 10


class Clock:
    """Seconds of processor and wall of calls, the median of several."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    def __call__(self, name: str, run: Callable[[], Any], times: int = 1) -> Any:
        cpu, wall = [], []
        for _ in range(times):
            began = time.process_time(), time.perf_counter()
            result = run()
            cpu.append(time.process_time() - began[0])
            wall.append(time.perf_counter() - began[1])
        self.cpu[name], self.wall[name] = float(np.median(cpu)), float(np.median(wall))
        return result


def settings(**changes: Any) -> dict[str, Any]:
    base = {"settle_steps": 10, "reward": "distance", "image_size": 128, "wrist_image": True, "hard_reset": False}
    return {**base, "reflections": True, "kwargs": {}, **changes}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def cost(suite: str, number: str) -> dict[str, Any]:
    clock = Clock()
    task: LiberoTask = clock("import", lambda: libero_env.find_task(suite, number))
    env = clock("build", lambda: LiberoSingle(settings(), task))
    inner = env._env
    env.reset(0)  # what is compiled or loaded once
    env.step(libero_env.STILL)

    def plain() -> None:
        inner.reset()
        inner.set_init_state(task.states[0])

    clock("plain soft reset", plain, 5)
    clock("soft reset", lambda: env.reset(0), 5)
    memory = {"one simulation": peak()}
    rng = np.random.default_rng(0)
    clock("step, two cameras", lambda: env.step(rng.uniform(-1.0, 1.0, 7)), STEPS)
    inner.env._observables["robot0_eye_in_hand_image"].set_enabled(False)
    clock("step, one camera", lambda: inner.step(rng.uniform(-1.0, 1.0, 7)), STEPS)
    env._reflections = False
    env.reset(0)
    inner.env._observables["robot0_eye_in_hand_image"].set_enabled(False)
    clock("step, one camera, no reflections", lambda: inner.step(rng.uniform(-1.0, 1.0, 7)), STEPS)
    inner.env._observables["agentview_image"].set_enabled(False)
    clock("step, no picture", lambda: inner.step(rng.uniform(-1.0, 1.0, 7)), STEPS)
    env._reflections = True  # a hard reset draws them again
    for observable in inner.env._observables.values():
        observable.set_enabled(True)
    second = LiberoSingle(settings(), task)
    second.reset(0)
    memory["two"] = peak()
    inner.env.hard_reset = True
    clock("hard reset", lambda: env.reset(0), 3)
    return {"cpu": clock.cpu, "wall": clock.wall, "memory": memory}


def difference(suite: str, number: str) -> dict[str, Any]:
    task = libero_env.find_task(suite, number)
    env = LiberoSingle(settings(), task)
    inner = env._env
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (STEPS, 7))

    def state() -> Any:
        return np.array(inner.sim.get_state().flatten())[1:]  # the first number is the time

    def episode(begin: Callable[[], Any]) -> tuple[Any, Any, Any]:
        begin()
        first = state()
        for action in actions:
            raw = inner.step(action)[0]
        return first, state(), raw["agentview_image"]

    def other() -> None:
        """Another episode before."""
        rng = np.random.default_rng(1)
        env.reset(1)
        for _ in range(40):
            with env._no_pictures():
                inner.step(np.append(rng.uniform(-1.0, 1.0, 6), 1.0))

    def soft(keep: bool) -> None:
        with env._no_pictures():
            inner.seed(0)
            inner.reset()
            if not keep:
                for robot in inner.robots:
                    robot.gripper.current_action = np.zeros(robot.gripper.dof)
            inner.set_init_state(task.states[0])

    def alone() -> None:
        inner.set_init_state(task.states[0])

    found = {}
    for way, begin in (("soft", lambda: soft(False)), ("gripper kept", lambda: soft(True)), ("no reset", alone)):
        other()
        found[way] = episode(begin)
    inner.env.hard_reset = True
    fresh = episode(lambda: soft(True))
    return {
        way: {
            "begin": float(np.abs(first - fresh[0]).max()),
            "end": float(np.abs(last - fresh[1]).max()),
            "pixels": float((picture != fresh[2]).any(axis=-1).mean()),
        }
        for way, (first, last, picture) in found.items()
    }


def main() -> None:
    what, task = sys.argv[1:]
    suite, number = task.split(":")
    assert suite in SUITES
    libero_env._quiet()
    print(json.dumps({"cost": cost, "difference": difference}[what](suite, number)))


if __name__ == "__main__":
    main()
