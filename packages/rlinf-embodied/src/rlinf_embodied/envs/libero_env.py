"""LIBERO's manipulation tasks (Liu et al., arXiv 2306.03310). Importing this module does not load LIBERO.

What differs from our meaning, and is dealt with here: pictures come upside down; ``step`` gives four values, and its
third is success; there is no time limit; after ``reset`` an initial state has to be set, and setting one without
``reset`` keeps the controller's state of before; a simulation is built anew at each ``reset`` unless told otherwise,
and how far the gripper was driven outlives a reset that does not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, MissingExtraError, nearest
from rlinf_embodied.conf.libero import INSTALL, LIMITS, base_suite, find_python
from rlinf_embodied.envs.base import Box, EnvSpec, Observation, Text
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.envs.libero_rewards import Moment, load_reward
from rlinf_embodied.envs.vector import PerEnv

AGENT, WRIST = "agentview", "robot0_eye_in_hand"
STILL = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""No motion, open gripper."""
STATE_SIZE = 8


class LiberoEnv(PerEnv):
    """N environments of one LIBERO task.

    Config keys: see ``rlinf_embodied.conf.libero.Libero``. Observations: ``image`` and ``wrist_image`` (uint8
    [S, S, 3], upright), ``state`` (float32 [8]: position of the gripper in metres, its orientation as axis times
    angle, opening of its two fingers) and ``instruction``. Actions: seven numbers in [-1, 1], six of motion and the
    gripper (-1 open, 1 closed). An episode begins with the task's initial state number ``seed`` modulo how many there
    are.

    Pictures are those of the first of the 25 simulated instants of a step, as LIBERO itself has them.

    LIBERO does not go together with the other simulators: where it cannot be imported, the environments run in
    processes of LIBERO's own Python environment (``env.python``, or ``.venv-libero``).
    """

    def __new__(cls, cfg: Any, indices: Sequence[int], seed: int) -> Any:
        if find_spec("libero") is not None:
            return super().__new__(cls)
        python = find_python()
        if python is None:
            raise MissingExtraError(
                f"env.name=libero: LIBERO needs a Python environment of its own; {INSTALL} makes it, or name its "
                "interpreter with env.python"
            )
        from rlinf_embodied.envs.isolated import IsolatedEnvs

        settings = cfg.to_dict() if hasattr(cfg, "to_dict") else dict(cfg)
        return IsolatedEnvs({**settings, "python": str(python)}, indices, seed)

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        _quiet()
        self._task = find_task(str(cfg["suite"]), str(cfg["task"]))
        limit = cfg["max_episode_steps"] or LIMITS.get(base_suite(str(cfg["suite"])) or "")
        if limit is None:
            raise ConfigError(f"env.max_episode_steps: {cfg['suite']} has no usual time limit; give one in steps")
        self._steps = int(limit)
        super().__init__(cfg, indices, seed)

    def make(self, index: int) -> LiberoSingle:
        return LiberoSingle(self.cfg, self._task)

    def describe(self, env: Any) -> EnvSpec:
        side = int(self.cfg["image_size"])
        picture = Box(np.zeros((side, side, 3)), np.full((side, side, 3), 255.0), "uint8")
        state = Box(np.full(STATE_SIZE, -np.inf), np.full(STATE_SIZE, np.inf))
        wrist = {"wrist_image": picture} if self.cfg["wrist_image"] else {}
        return EnvSpec(
            {"image": picture, **wrist, "state": state, "instruction": Text()},
            Box(-np.ones(7), np.ones(7)),
            self._steps,
        )


class LiberoTask:
    """One task: its name, its instruction, the file that describes it, and its initial states [M, Q]."""

    def __init__(self, name: str, instruction: str, file: Path, states: NDArray[np.float64]) -> None:
        self.name, self.instruction, self.file, self.states = name, instruction, file, states


def find_task(suite: str, task: str) -> LiberoTask:
    """The task of LIBERO's ``suite`` with that number or name; names the nearest when there is none."""
    with redirect_stdout(StringIO()):  # the package prints how it orders tasks
        from libero.libero import benchmark, get_libero_path

        suites = benchmark.get_benchmark_dict()
        if suite.lower() not in suites:
            raise ConfigError(f"env.suite: LIBERO has no suite {suite!r}{nearest(suite, suites)}")
        tasks = suites[suite.lower()]()
    names = tasks.get_task_names()
    if task.isdecimal() and int(task) < len(names):
        number = int(task)
    elif task in names:
        number = names.index(task)
    else:
        raise ConfigError(
            f"env.task: {suite} has no task {task!r}{nearest(task, names)}; it has 0 ... {len(names) - 1}"
        )
    found = tasks.get_task(number)
    file = Path(get_libero_path("bddl_files")) / found.problem_folder / found.bddl_file
    try:
        states = np.asarray(tasks.get_task_init_states(number), dtype=np.float64)
    except FileNotFoundError as error:
        raise ConfigError(
            f"env.task: {suite} has no initial states for task {number} ({found.name}): {error}"
        ) from error
    if not file.is_file():
        raise ConfigError(f"env.task: {suite} has no description of task {number} ({found.name}): {file} is missing")
    return LiberoTask(found.name, found.language, file, states)


class LiberoSingle:
    """One simulation, kept for all its episodes. ``reset`` sets it back without building it anew (``env.hard_reset``
    false): states are those of a new one, in a tenth of the time (docs/evidence/libero)."""

    def __init__(self, cfg: Any, task: LiberoTask) -> None:
        self._task = task
        self._settle = int(cfg["settle_steps"])
        self._reward = load_reward(str(cfg["reward"]))
        self._reflections = bool(cfg["reflections"])
        self._side = int(cfg["image_size"])
        self._cameras = {"image": AGENT, **({"wrist_image": WRIST} if cfg["wrist_image"] else {})}
        options = {"hard_reset": bool(cfg["hard_reset"]), **dict(cfg["kwargs"].items())}
        os.environ.setdefault("MUJOCO_GL", "egl")  # robosuite draws off screen alone here
        try:
            with _visible_devices_by_number():
                from libero.libero.envs import OffScreenRenderEnv

                self._env = OffScreenRenderEnv(
                    bddl_file_name=str(task.file),
                    camera_names=list(self._cameras.values()),
                    camera_heights=self._side,
                    camera_widths=self._side,
                    ignore_done=True,  # it would refuse steps after 1,000
                    **options,
                )
        except TypeError as error:
            raise ConfigError(f"env.kwargs: LIBERO does not take {options}: {error}") from error
        except Exception as error:
            if not _is_about_drawing(error):
                raise
            raise SimulatorError(
                f"LIBERO cannot draw with MUJOCO_GL={os.environ['MUJOCO_GL']} ({error}); egl needs a driver (on "
                "Debian: libegl1 and libgl1-mesa-dri), osmesa the library libosmesa6"
            ) from error
        self._moment: Moment | None = None
        self._picture = np.zeros((self._side, self._side, 3), dtype=np.uint8)

    def reset(self, seed: int) -> Observation:
        with _visible_devices_by_number():
            return self._reset(seed)

    def _reset(self, seed: int) -> Observation:
        number = seed % len(self._task.states)
        env = self._env
        with self._no_pictures():
            env.seed(number)  # the places of fixtures, which no initial state has, are drawn at every reset
            env.reset()
            for robot in env.robots:  # a soft reset forgets how far the gripper was driven
                robot.gripper.current_action = np.zeros(robot.gripper.dof)
            env.set_init_state(self._task.states[number])
            for _ in range(self._settle):
                env.step(STILL)
        if not self._reflections:
            import mujoco

            flags = env.sim._render_context_offscreen.scn.flags
            flags[int(mujoco.mjtRndFlag.mjRND_REFLECTION)] = False
        for observable in self._observables():
            observable.reset()  # when the next sample is due
        env.env._update_observables(force=True)
        self._moment = self._look()
        return self._observation(env.env._get_observations())

    def step(self, action: Any) -> tuple[Observation, float, bool, bool]:
        assert self._moment is not None, "PerEnv resets first"
        raw, _, success, _ = self._env.step(action)
        before, self._moment = self._moment, self._look(bool(success))
        reward = float(self._reward(before, self._moment))
        return self._observation(raw), reward, bool(success), bool(success)

    def render(self) -> NDArray[np.uint8]:
        return self._picture

    def close(self) -> None:
        self._env.close()

    def _observation(self, raw: Any) -> Observation:
        pictures = {name: np.ascontiguousarray(raw[f"{camera}_image"][::-1]) for name, camera in self._cameras.items()}
        self._picture = pictures["image"]
        turned = _axis_angle(raw["robot0_eef_quat"])
        state = np.concatenate([raw["robot0_eef_pos"], turned, raw["robot0_gripper_qpos"]]).astype(np.float32)
        return {**pictures, "state": state, "instruction": self._task.instruction}

    def _look(self, success: bool = False) -> Moment:
        """Where things are now."""
        inner = self._env.env
        data = inner.sim.data
        objects = {name: np.array(data.body_xpos[body]) for name, body in inner.obj_body_id.items()}
        for site in inner.object_sites_dict:
            objects.setdefault(site, np.array(data.get_site_xpos(site)))
        gripper = np.array(data.site_xpos[inner.robots[0].eef_site_id])
        named = tuple(name for name in inner.obj_of_interest if name in objects)
        return Moment(gripper, objects, named, success)

    def _observables(self) -> list[Any]:
        return list(self._env.env._observables.values())

    @contextmanager
    def _no_pictures(self) -> Iterator[None]:
        """Steps and resets whose pictures nobody sees do not draw them, which is nine tenths of their time."""
        names = [f"{camera}_image" for camera in self._cameras.values()]
        table = self._env.env._observables
        for name in names:
            table[name].set_enabled(False)
        try:
            yield
        finally:
            for name in names:
                table[name].set_enabled(True)


@contextmanager
def _visible_devices_by_number() -> Iterator[None]:
    """robosuite takes ``CUDA_VISIBLE_DEVICES`` for numbers of what can draw. Where it is none (empty: no GPU, or unique
    names), the first device draws, or ``MUJOCO_EGL_DEVICE_ID``."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None or all(name.strip().isdigit() for name in names.split(",")):
        yield
        return
    del os.environ["CUDA_VISIBLE_DEVICES"]
    try:
        yield
    finally:
        os.environ["CUDA_VISIBLE_DEVICES"] = names


def _axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Axis times angle [3] of a rotation (x, y, z, w), the angle in [0, pi]: equal rotations give equal numbers."""
    x, w = np.asarray(quaternion[:3], dtype=np.float64), float(quaternion[3])
    if w < 0.0:
        x, w = -x, -w
    length = float(np.linalg.norm(x))
    return x * (2.0 * np.arctan2(length, w) / length) if length > 1e-12 else np.zeros(3)


def _is_about_drawing(error: Exception) -> bool:
    text = f"{type(error).__module__} {type(error).__name__} {error}".lower()
    return any(word in text for word in ("egl", "osmesa", "opengl", "gl context", "display"))


def _quiet() -> None:
    """No hints of robosuite's about a file of private settings."""
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
