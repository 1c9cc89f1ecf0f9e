"""A vector of environments in processes of its own: nothing that a simulator does can hang or kill the worker.

Shape legend: N environments, A the shape of one action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_embodied.envs.base import Box, EnvSpec, Observation, StepResult
from rlinf_embodied.envs.checks import ActionChecker
from rlinf_embodied.envs.crew import Crew, Part
from rlinf_embodied.envs.process import Lost


class IsolatedEnvs:
    """N environments shared out over processes that step at the same time (``VectorEnv``).

    A process that raises, dies or does not answer in time is killed and started again; the episodes of its
    environments are dropped by name, and they go on with the next ones. Where that happens while one is drawn, its
    picture is a black one, and the next step drops them. After ``env.max_restarts`` that is an error.

    Config keys read here: ``name``, ``processes``, ``python``, ``step_timeout_s`` (also of a reset),
    ``start_timeout_s``, ``max_restarts``; the plugin in the process reads its own.
    """

    spec: EnvSpec
    indices: Sequence[int]

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        if not len(indices):
            raise ConfigError("a vector of environments has at least one")
        self.indices = tuple(int(index) for index in indices)
        self.seed = int(seed)
        n = len(self.indices)
        self._begun = np.zeros(n, dtype=np.bool_)
        self._lost: dict[int, str] = {}
        """By position, why an episode was lost since the last step."""
        self._crew = Crew(cfg, self.indices, self.seed)
        self._parts = self._crew.parts
        self.spec = self._crew.spec
        self._check = ActionChecker(self.spec.action, self.indices)
        self._obs: Observation = {
            key: np.zeros((n, *space.shape), space.dtype) if isinstance(space, Box) else [""] * n
            for key, space in self.spec.observations.items()
        }

    # -- VectorEnv ---------------------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        return len(self.indices)

    @property
    def restarts(self) -> int:
        """How often a process, or a simulator in one, was started again."""
        return self._crew.restarts

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that live."""
        return [part.process.popen.pid for part in self._parts if part.process is not None]

    def reset(self, envs: Sequence[int] | None = None, *, seeds: Sequence[int] | None = None) -> Observation:
        n = self.num_envs
        positions = list(range(n)) if envs is None else [int(i) for i in envs]
        if len(set(positions)) < len(positions) or not all(0 <= i < n for i in positions):
            raise ConfigError(f"{positions} are not positions of {n} environments, each once (0 ... {n - 1})")
        if seeds is not None and len(seeds) != len(positions):
            raise ConfigError(f"{len(positions)} environments are to be reset, with {len(seeds)} seeds")
        begins = {} if seeds is None else {i: int(seed) for i, seed in zip(positions, seeds, strict=True)}
        todo = [part for part in self._parts if any(i in part.positions for i in positions)]
        while todo:
            mine = [[i for i in positions if i in part.positions] for part in todo]
            commands = [
                ("reset", [i - part.positions.start for i in m], [begins[i] for i in m] if begins else None)
                for part, m in zip(todo, mine, strict=True)
            ]
            failed = []
            for part, m, answer in zip(todo, mine, self._crew.ask(todo, commands), strict=True):
                if isinstance(answer, Lost):  # the others' episodes went along
                    self._restart(part, answer, [i for i in part.positions if i not in m and self._begun[i]])
                    failed.append(part)
                    continue
                self._take(answer, m)
                for i in m:
                    self._begun[i] = True
                    self._lost.pop(i, None)
            todo = failed
        return self._rows(positions)

    def step(self, actions: NDArray[Any], active: NDArray[np.bool_] | None = None) -> StepResult:
        n = self.num_envs
        actions = np.asarray(actions)
        self._check.shape(actions)
        running = self._check.running(active)
        reward = np.zeros(n)
        terminated, truncated, success = np.zeros((3, n), dtype=np.bool_)
        # The action was for an episode that was lost since: it is answered for now.
        dropped, self._lost = self._lost, {}
        running[list(dropped)] = False
        parts = [part for part in self._parts if running[part.rows].any()]
        commands = [("step", actions[part.rows], running[part.rows]) for part in parts]
        finals: list[Observation] = []
        ended: list[int] = []
        for part, answer in zip(parts, self._crew.ask(parts, commands), strict=True):
            if isinstance(answer, Lost):
                lost = [i for i in part.positions if self._begun[i]]
                self._restart(part, answer, lost)
                dropped |= {i: self._lost.pop(i) for i in lost}
                continue
            first, rows = part.positions.start, part.rows
            self._take(answer.obs, part.positions)
            reward[rows], success[rows] = answer.reward, answer.success
            terminated[rows], truncated[rows] = answer.terminated, answer.truncated
            if answer.final_obs is not None:
                finals.append(answer.final_obs)
                ended += [first + int(i) for i in answer.ended]
            dropped |= {first + i: reason for i, reason in answer.dropped.items()}
        final = _joined(finals) if finals else None
        return StepResult(
            self._rows(range(n)), reward, terminated, truncated, success, final, np.array(ended, np.int64), dropped
        )

    def observe(self) -> Observation:
        if not self._begun.all():
            first = self.indices[int(self._begun.argmin())]
            raise RLinfError(f"environment {first} has no episode yet: reset it first")
        return self._rows(range(self.num_envs))

    def render(self, envs: Sequence[int]) -> list[NDArray[np.uint8]]:
        parts = [part for part in self._parts if any(i in part.positions for i in envs)]
        mine = [[int(i) for i in envs if i in part.positions] for part in parts]
        commands = [("render", [i - part.positions.start for i in m]) for part, m in zip(parts, mine, strict=True)]
        pictures: dict[int, NDArray[np.uint8]] = {}
        for part, places, answer in zip(parts, mine, self._crew.ask(parts, commands), strict=True):
            if isinstance(answer, Lost):  # drawing may crash too: the next step says which episodes that has cost
                self._restart(part, answer, [i for i in part.positions if self._begun[i]])
                answer = [np.zeros((1, 1, 3), np.uint8) for _ in places]
            pictures |= dict(zip(places, answer, strict=True))
        return [pictures[int(i)] for i in envs]

    def state(self) -> dict[str, Any]:
        states = self._crew.must(self._parts, [("state",)] * len(self._parts), "gave no state")
        if all(isinstance(state, dict) and "envs" in state for state in states):
            return {"seed": self.seed, "envs": {k: v for state in states for k, v in state["envs"].items()}}
        return {"seed": self.seed, "parts": [(p.indices, s) for p, s in zip(self._parts, states, strict=True)]}

    def restore(self, state: Any) -> None:
        whole = "envs" in state  # those of single environments can be dealt anew, those of parts cannot
        kept = {} if whole else dict(state["parts"])
        if missing := [part for part in self._parts if not whole and part.indices not in kept]:
            raise ConfigError(f"the state does not have {missing[0]} together (env.processes was another)")
        longest = max((len(e["actions"]) for e in state["envs"].values()), default=0) if whole else 0
        size = max(len(part.positions) for part in self._parts)
        limit = self._crew.start_s + self._crew.step_s * (1 + (longest or self.spec.max_episode_steps) * size)
        commands = [("restore", state if whole else kept[part.indices]) for part in self._parts]
        self._crew.must(self._parts, commands, "could not be restored", limit)
        begun = [not whole or state["envs"][index]["seed"] is not None for index in self.indices]
        self._begun[:] = begun
        self._lost = {}
        if self._begun.all():
            found = self._crew.must(self._parts, [("observe",)] * len(self._parts), "could not be looked at")
            for part, obs in zip(self._parts, found, strict=True):
                self._take(obs, part.positions)

    def close(self) -> None:
        self._crew.close()

    # -- within ------------------------------------------------------------------------------------------------------

    def _restart(self, part: Part, lost: Lost, positions: Sequence[int]) -> None:
        """Start ``part`` again; the episodes at ``positions`` are noted as lost, and the next ones begun."""
        reason, obs = self._crew.restart(part, lost, positions)
        if positions:
            self._take(obs, positions)
        self._lost |= dict.fromkeys(positions, reason)

    def _take(self, obs: Observation, positions: Sequence[int]) -> None:
        for key, values in self._obs.items():
            if isinstance(values, list):
                for i, text in zip(positions, obs[key], strict=True):
                    values[i] = text
            else:
                values[list(positions)] = obs[key]

    def _rows(self, positions: Sequence[int]) -> Observation:
        places = list(positions)
        return {
            key: [values[i] for i in places] if isinstance(values, list) else values[places]
            for key, values in self._obs.items()
        }


def _joined(parts: Sequence[Observation]) -> Observation:
    first = parts[0]
    return {
        key: [text for part in parts for text in part[key]]
        if isinstance(first[key], list)
        else np.concatenate([part[key] for part in parts])
        for key in first
    }
