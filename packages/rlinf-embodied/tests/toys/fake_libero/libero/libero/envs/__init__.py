"""One environment with LIBERO's habits: pictures upside down, four values, what a soft reset forgets."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np

MADE: list[OffScreenRenderEnv] = []
TOP, BOTTOM = 200, 50


class Observable:
    def __init__(self) -> None:
        self.enabled = True

    def set_enabled(self, enabled: bool) -> None:
        self.enabled = enabled

    def reset(self) -> None:
        pass


class OffScreenRenderEnv:
    """Its state is [x, y, z, fixture]; an action moves the first three. Success: x > 0.5."""

    def __init__(
        self,
        bddl_file_name: str,
        camera_names: list[str],
        camera_heights: int,
        camera_widths: int,
        ignore_done: bool,
        hard_reset: bool,
        broken: str = "",
    ) -> None:
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(","):
            int(name)
        if broken:
            raise RuntimeError(broken)
        self.file, self.cameras, self.size = bddl_file_name, camera_names, (camera_heights, camera_widths)
        self.ignore_done, self.hard_reset = ignore_done, hard_reset
        self.where, self.fixture, self.time = np.zeros(4), 0.0, 0
        self.drawn, self.resets, self.closed = 0, 0, False
        gripper = SimpleNamespace(dof=2, current_action=np.zeros(2))
        self.robots = [SimpleNamespace(gripper=gripper, eef_site_id=0)]
        self._observables = {f"{camera}_image": Observable() for camera in camera_names}
        self.obj_body_id = {"plate_1": 1}
        self.object_sites_dict = {"drawer_region": None}
        self.obj_of_interest = ["nothing", "plate_1"]
        MADE.append(self)

    @property
    def env(self) -> Any:
        return self

    @property
    def sim(self) -> Any:
        data = SimpleNamespace(
            body_xpos=np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
            site_xpos=self.where[None, :3],
            get_site_xpos=lambda name: np.array([0.0, 1.0, 0.0]),
        )
        return SimpleNamespace(data=data)

    def seed(self, seed: int) -> None:
        np.random.seed(seed)

    def reset(self) -> Any:
        self.resets += 1
        self.time = 0
        self.fixture = np.random.random()
        if self.hard_reset:
            self.robots[0].gripper.current_action = np.zeros(2)
        return self._get_observations()

    def set_init_state(self, state: Any) -> Any:
        assert self.time == 0, "set_init_state without reset keeps the controller's state"
        self.where = np.array(state)
        return self._get_observations()

    def step(self, action: Any) -> Any:
        assert len(action) == 7
        self.time += 1
        gripper = self.robots[0].gripper
        gripper.current_action = np.clip(gripper.current_action + 0.01 * np.sign(action[6]), -1.0, 1.0)
        self.where[:3] += 0.1 * np.asarray(action[:3]) + 0.001 * gripper.current_action[0]
        success = bool(self.where[0] > 0.5)
        return self._get_observations(), float(success), success, {}

    def _update_observables(self, force: bool) -> None:
        assert force

    def _get_observations(self) -> dict[str, Any]:
        seen: dict[str, Any] = {
            "robot0_eef_pos": self.where[:3].copy(),
            "robot0_eef_quat": np.array([0.0, 0.0, -np.sin(0.25), -np.cos(0.25)]),
            "robot0_gripper_qpos": np.array([self.robots[0].gripper.current_action[0], self.fixture]),
        }
        for name, observable in self._observables.items():
            if observable.enabled:
                self.drawn += 1
                picture = np.full((*self.size, 3), BOTTOM, dtype=np.uint8)
                picture[self.size[0] // 2 :] = TOP  # the last rows are the upper ones
                seen[name] = picture
        return seen

    def close(self) -> None:
        self.closed = True
