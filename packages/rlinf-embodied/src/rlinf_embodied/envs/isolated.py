"""A vector of environments in processes of its own: nothing that a simulator does can hang or kill the worker.

Shape legend: N environments, A the shape of one action.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core import errors
from rlinf_core.errors import ConfigError, PluginError, RLinfError
from rlinf_core.registry import Registry
from rlinf_embodied.envs.base import Box, EnvSpec, Observation, StepResult
from rlinf_embodied.envs.checks import ActionChecker, SimulatorError
from rlinf_embodied.envs.process import Lost, Process, gather
from rlinf_embodied.envs.vector import setting

log = logging.getLogger("rlinf.envs")

CLOSE_S = 5.0


class Part:
    """The environments at ``positions`` (a range of the vector's), with the process that has them."""

    def __init__(self, positions: range) -> None:
        self.positions = positions
        self.process: Process | None = None
        self.episodes: list[int] | None = None
        self.restarts = 0
        """Of simulators, by the plugin in the present process."""


class IsolatedEnvs:
    """N environments shared out over processes that step at the same time (``VectorEnv``).

    A process that raises, dies or does not answer in time is killed and started again; the episodes of its
    environments are dropped by name, and they go on with the next ones. After ``env.max_restarts`` that is an error.

    Config keys read here: ``name``, ``processes``, ``python``, ``step_timeout_s`` (also of a reset),
    ``start_timeout_s``, ``max_restarts``; the plugin in the process reads its own.
    """

    spec: EnvSpec

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        if not len(indices):
            raise ConfigError("a vector of environments has at least one")
        self.indices = tuple(int(index) for index in indices)
        self.seed = int(seed)
        self._python: str | None = setting(cfg, "python", None)
        self._step_s = float(setting(cfg, "step_timeout_s", 60.0))
        self._start_s = float(setting(cfg, "start_timeout_s", 300.0))
        self._max_restarts = int(setting(cfg, "max_restarts", 0))
        self._restarts = 0
        self._name = str(cfg["name"])
        self._entry = self._find_entry()
        data = cfg.to_dict() if hasattr(cfg, "to_dict") else dict(cfg)
        self._cfg = {**data, "isolate": False, "python": None, "processes": 1}
        n = len(self.indices)
        bounds = np.linspace(0, n, min(int(setting(cfg, "processes", 1)), n) + 1).round().astype(int).tolist()
        self._parts = [Part(range(a, b)) for a, b in pairwise(bounds)]
        self._begun = np.zeros(n, dtype=np.bool_)
        self._lost: dict[int, str] = {}
        """By position, why an episode was lost since the last step."""
        self._obs: Observation = {}
        try:
            self._start(self._parts)
        except BaseException:
            self.close()
            raise
        self._check = ActionChecker(self.spec.action, self.indices)
        for key, space in self.spec.observations.items():
            self._obs[key] = np.zeros((n, *space.shape), space.dtype) if isinstance(space, Box) else [""] * n

    # -- VectorEnv ---------------------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        return len(self.indices)

    @property
    def restarts(self) -> int:
        """How often a process or a simulator in one was started again."""
        return self._restarts + sum(part.restarts for part in self._parts)

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that live."""
        return [part.process.popen.pid for part in self._parts if part.process is not None]

    def reset(self, envs: Sequence[int] | None = None, *, seeds: Sequence[int] | None = None) -> Observation:
        positions = list(range(self.num_envs)) if envs is None else [int(i) for i in envs]
        if len(set(positions)) < len(positions) or not all(0 <= i < self.num_envs for i in positions):
            raise ConfigError(f"{positions} are not positions of {self.num_envs} environments, each once")
        if seeds is not None and len(seeds) != len(positions):
            raise ConfigError(f"{len(positions)} environments are to be reset, with {len(seeds)} seeds")
        chosen = dict(zip(positions, seeds or [None] * len(positions), strict=True))
        todo = [part for part in self._parts if any(i in chosen for i in part.positions)]
        while todo:
            asked = []
            for part in todo:
                mine = [i for i in part.positions if i in chosen]
                begins = [chosen[i] for i in mine]
                local = [i - part.positions.start for i in mine]
                asked.append(
                    (mine, ("reset", local, None if None in begins else [int(s) for s in begins if s is not None]))
                )
            failed = []
            for part, (mine, _), answer in zip(
                todo, asked, self._ask(todo, [c for _, c in asked], self._step_s), strict=True
            ):
                if isinstance(answer, Lost):
                    others = [i for i in part.positions if i not in chosen and self._begun[i]]
                    self._restart(part, answer, others)
                    failed.append(part)
                    continue
                self._take(answer, mine)
                for i in mine:
                    self._begun[i] = True
                    self._lost.pop(i, None)
            todo = failed
        return self._rows(positions)

    def step(self, actions: NDArray[Any], active: NDArray[np.bool_] | None = None) -> StepResult:
        n = self.num_envs
        actions = np.asarray(actions)
        self._check.shape(actions)
        running = np.ones(n, dtype=np.bool_) if active is None else np.array(active, dtype=np.bool_)
        reward = np.zeros(n)
        terminated, truncated, success = np.zeros((3, n), dtype=np.bool_)
        # An episode that was lost before this step is answered for now; the action was for it.
        dropped, self._lost = self._lost, {}
        running[list(dropped)] = False
        parts = [part for part in self._parts if running[part.positions.start : part.positions.stop].any()]
        commands = []
        for part in parts:
            rows = slice(part.positions.start, part.positions.stop)
            commands.append(("step", actions[rows], running[rows]))
        finals: list[Observation] = []
        ended: list[int] = []
        for part, answer in zip(parts, self._ask(parts, commands, self._step_s), strict=True):
            if isinstance(answer, Lost):
                lost = [i for i in part.positions if self._begun[i]]
                self._restart(part, answer, lost)
                dropped |= {i: self._lost.pop(i) for i in lost if i in self._lost}
                continue
            first, rows = part.positions.start, slice(part.positions.start, part.positions.stop)
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
            raise RLinfError(
                f"environment {self.indices[int(self._begun.argmin())]} has no episode yet: reset it first"
            )
        return self._rows(range(self.num_envs))

    def render(self, envs: Sequence[int]) -> list[NDArray[np.uint8]]:
        pictures: dict[int, NDArray[np.uint8]] = {}
        parts = [part for part in self._parts if any(i in part.positions for i in envs)]
        mine = [[int(i) for i in envs if i in part.positions] for part in parts]
        commands = [("render", [i - part.positions.start for i in m]) for part, m in zip(parts, mine, strict=True)]
        for part, places, answer in zip(parts, mine, self._ask(parts, commands, self._step_s), strict=True):
            if isinstance(answer, Lost):
                raise SimulatorError(f"environments {self._span(part)} could not be shown: {self._why(part, answer)}")
            pictures |= dict(zip(places, answer, strict=True))
        return [pictures[int(i)] for i in envs]

    def state(self) -> dict[str, Any]:
        answers = self._ask(self._parts, [("state",)] * len(self._parts), self._step_s)
        for part, answer in zip(self._parts, answers, strict=True):
            if isinstance(answer, Lost):
                raise SimulatorError(f"environments {self._span(part)} have no state: {self._why(part, answer)}")
        if all(isinstance(answer, dict) and "envs" in answer for answer in answers):
            return {"seed": self.seed, "envs": {k: v for answer in answers for k, v in answer["envs"].items()}}
        return {"seed": self.seed, "parts": [(self._indices(p), a) for p, a in zip(self._parts, answers, strict=True)]}

    def restore(self, state: Any) -> None:
        if "parts" in state:
            kept = dict(state["parts"])
            if missing := [self._span(part) for part in self._parts if self._indices(part) not in kept]:
                raise ConfigError(f"the state has no environments {missing[0]} together (env.processes was another)")
            states = [kept[self._indices(part)] for part in self._parts]
            longest = self.spec.max_episode_steps
        else:
            states = [state] * len(self._parts)
            longest = max((len(env["actions"]) for env in state["envs"].values()), default=0)
        size = max(len(part.positions) for part in self._parts)
        limit = self._start_s + self._step_s * (1 + longest * size)
        answers = self._ask(self._parts, [("restore", kept) for kept in states], limit)
        for part, answer in zip(self._parts, answers, strict=True):
            if isinstance(answer, Lost):
                raise SimulatorError(f"environments {self._span(part)} were not restored: {self._why(part, answer)}")
        begun = [None if "parts" in state else state["envs"][index]["seed"] for index in self.indices]
        self._begun[:] = True if "parts" in state else [seed is not None for seed in begun]
        self._lost = {}
        if self._begun.all():
            for part, answer in zip(
                self._parts, self._ask(self._parts, [("observe",)] * len(self._parts), self._step_s), strict=True
            ):
                if isinstance(answer, Lost):
                    raise SimulatorError(f"environments {self._span(part)} were lost: {self._why(part, answer)}")
                self._take(answer, part.positions)

    def close(self) -> None:
        for part in self._parts:
            if part.process is not None:
                part.process.end(CLOSE_S)
                part.process = None

    # -- within ------------------------------------------------------------------------------------------------------

    def _find_entry(self) -> tuple[str, ...] | None:
        """The plugin's entry point, for the process; with another interpreter that one may know one more."""
        try:
            entry = Registry("rlinf.envs").entry(self._name)
        except PluginError:
            if self._python is None:
                raise
            return None
        return (entry.group, entry.name, entry.value, entry.distribution, entry.version)

    def _indices(self, part: Part) -> tuple[int, ...]:
        return self.indices[part.positions.start : part.positions.stop]

    def _span(self, part: Part) -> str:
        numbers = self._indices(part)
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} ... {numbers[-1]}"

    def _start(self, parts: Sequence[Part]) -> None:
        """Start a process for each and wait until all have made their simulators."""
        for part in parts:
            start = {
                "entry": self._entry,
                "name": self._name,
                "cfg": self._cfg,
                "path": "env",
                "indices": list(self._indices(part)),
                "seed": self.seed,
                "episodes": part.episodes,
            }
            try:
                part.process = Process(start, self._python)
            except OSError as error:
                raise ConfigError(f"env.python: {self._python} cannot be run: {error}") from error
        answers = self._gather(parts, self._start_s, "env.start_timeout_s")
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Lost):
                raise SimulatorError(f"environments {self._span(part)} did not start: {self._why(part, answer)}")
            self.spec = answer

    def _ask(self, parts: Sequence[Part], commands: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        for part, command in zip(parts, commands, strict=True):
            if part.process is None:
                raise RLinfError("these environments are closed")
            part.process.ask(*command)
        return self._gather(parts, timeout_s, "env.step_timeout_s")

    def _gather(self, parts: Sequence[Part], timeout_s: float, key: str) -> list[Any]:
        """Results by part; a ``Lost`` for one whose process is to be started again. Raises what the user must know."""
        results = []
        processes = [part.process for part in parts if part.process is not None]
        for part, answer in zip(parts, gather(processes, timeout_s, key), strict=True):
            if isinstance(answer, Lost):
                results.append(answer)
                continue
            kind, result, episodes, restarts = answer
            if kind == "fault":
                name, text, traceback = result
                if name:
                    raise self._error(name, text)
                results.append(Lost(f"it raised {text}\n{traceback.rstrip()}"))
                continue
            part.restarts = restarts
            if len(episodes) == len(part.positions):
                part.episodes = episodes
            results.append(result)
        return results

    def _error(self, name: str, text: str) -> RLinfError:
        known: Callable[[str], RLinfError] | None = getattr(errors, name, None)
        if name == "SimulatorError" or known is None:
            known = SimulatorError
        where = f" (in env.python={self._python})" if self._python and issubclass(known, PluginError) else ""  # type: ignore[arg-type]
        return known(text + where)

    def _why(self, part: Part, lost: Lost) -> str:
        """The reason, with the last that the process wrote."""
        assert part.process is not None
        lines = part.process.last_lines()
        return str(lost) + (f"; the last that it wrote:\n{lines}" if lines else "")

    def _restart(self, part: Part, lost: Lost, positions: Sequence[int]) -> None:
        """Start the process of ``part`` again and begin the next episodes at ``positions``, whose present ones are
        noted as lost."""
        reason = f"environments {self._span(part)} failed: {self._why(part, lost)}"
        while True:
            if self.restarts >= self._max_restarts:
                times = (
                    f"were started again {self.restarts} times already"
                    if self._max_restarts
                    else "are not started again"
                )
                raise SimulatorError(f"{reason}\nsimulators {times} (env.max_restarts={self._max_restarts})")
            self._restarts += 1 + part.restarts
            part.restarts = 0
            log.warning("%s\nstarted again (%d of %d)", reason, self.restarts, self._max_restarts)
            assert part.process is not None
            part.process.kill()
            self._start([part])
            local = [i - part.positions.start for i in positions]
            if not local:
                return
            answer = self._ask([part], [("reset", local, None)], self._step_s)[0]
            if not isinstance(answer, Lost):
                break
            reason = f"environments {self._span(part)} failed: {self._why(part, answer)}"
        self._take(answer, positions)
        for i in positions:
            self._lost[i] = reason

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
