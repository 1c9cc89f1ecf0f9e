"""ManiSkill's simulation of many environments at once, on a GPU.

Not run on a GPU yet (docs/untested-on-gpu.md); the tests run it with one environment on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.envs import maniskill_without_vulkan
from rlinf_embodied.envs.base import EnvSpec, Observation
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.envs.maniskill_env import find_task, make_task, spec_of, time_limit
from rlinf_embodied.envs.seeds import narrow
from rlinf_embodied.envs.vector import PerEnv


class ManiSkillBatch(PerEnv):
    """N environments of one ManiSkill task in one simulation; config keys as ``ManiSkillCpu``.

    Episodes begin one environment at a time (``options["env_idx"]``), because ManiSkill draws the initial states of all
    that are reset together from one seed. An environment that is not active is put back to where it was after the step.
    ``restore`` plays the actions of each environment again by itself, which is slow, and on a GPU exact to rounding.
    """

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int, backend: str = "physx_cuda") -> None:
        task = find_task(cfg["task"])
        self._can_draw = maniskill_without_vulkan.has_vulkan()
        self._limit_of_task = time_limit(cfg, task)
        drawing = {"render_mode": "rgb_array"} if self._can_draw else {"render_backend": "none"}
        self.batch = make_task(cfg, task, {"num_envs": len(indices), "sim_backend": backend, **drawing})
        super().__init__(cfg, indices, seed)

    def make(self, index: int) -> Row:
        return Row(self, self.indices.index(index))

    def describe(self, env: Any) -> EnvSpec:
        return spec_of(self.batch, self._limit_of_task)

    def close(self) -> None:
        if self._envs:
            self.batch.close()
        super().close()

    def _simulate(
        self, running: Sequence[int], actions: Any, into: tuple[NDArray[Any], ...], dropped: dict[int, str]
    ) -> list[int]:
        results = self.advance(running, actions)
        places = list(running)
        self._arrays["state"][places] = results[0][places]
        for mine, theirs in zip((into[0], into[1], into[3]), results[1:], strict=True):
            mine[places] = theirs[places]
        ended = []
        for i in places:
            self._past[i].append(actions[i])
            into[2][i] = len(self._past[i]) >= self._limit and not into[1][i]
            if into[1][i] or into[2][i]:
                ended.append(i)
        return ended

    def advance(self, running: Sequence[int], actions: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """One step of those ``running``: states [N, …], rewards, terminations and successes [N]."""
        import torch

        env, n = self.batch, len(self.indices)
        idle = sorted(set(range(n)) - set(running))
        where = torch.tensor(idle, device=env.device)
        before = env.get_state().clone() if idle else None
        obs, reward, terminated, _, info = env.step(torch.as_tensor(actions, device=env.device))
        success = info.get("success", torch.zeros(n, dtype=torch.bool))
        results = tuple(value.cpu().numpy().copy() for value in (obs, reward, terminated, success))
        if before is not None:
            env.set_state(before[where], where)
        return results

    def begin(self, position: int, seed: int) -> NDArray[Any]:
        """A new episode at one position; its state."""
        import torch

        n = len(self.indices)
        where = torch.tensor([position], device=self.batch.device)
        obs, _ = self.batch.reset(seed=[narrow(seed)] * n, options={"env_idx": where})
        row: NDArray[Any] = obs[position].cpu().numpy().copy()
        return row

    def picture(self, position: int) -> NDArray[np.uint8]:
        if not self._can_draw:
            raise SimulatorError("ManiSkill draws with Vulkan, and SAPIEN finds no Vulkan device here")
        return np.asarray(self.batch.render()[position].cpu().numpy(), dtype=np.uint8)


class Row:
    """One environment of the batch, for what is done one at a time."""

    def __init__(self, batch: ManiSkillBatch, position: int) -> None:
        self._batch, self._position = batch, position

    def reset(self, seed: int) -> Observation:
        return {"state": self._batch.begin(self._position, seed)}

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool]:
        actions = np.zeros((self._batch.num_envs, *action.shape), action.dtype)
        actions[self._position] = action
        row = [values[self._position] for values in self._batch.advance([self._position], actions)]
        return {"state": row[0]}, float(row[1]), bool(row[2]), bool(row[3])

    def render(self) -> NDArray[np.uint8]:
        return self._batch.picture(self._position)

    def close(self) -> None:
        """The batch is closed as a whole."""
