"""The processes that share the environments of one vector: started, asked, killed and started again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlinf_core import errors
from rlinf_core.errors import ConfigError, PluginError, RLinfError
from rlinf_core.registry import Registry
from rlinf_embodied.envs.base import EnvSpec
from rlinf_embodied.envs.checks import SimulatorError
from rlinf_embodied.envs.fleet import setting
from rlinf_embodied.envs.process import Lost, Process, gather

log = logging.getLogger("rlinf.envs")

CLOSE_S = 5.0


class Part:
    """The environments at ``positions`` of the vector, the run's ``indices``, with the process that has them."""

    def __init__(self, positions: range, indices: tuple[int, ...]) -> None:
        self.positions, self.indices = positions, indices
        self.rows = slice(positions.start, positions.stop)
        self.process: Process | None = None
        self.episodes: list[int] | None = None
        self.restarts = 0
        """Of simulators, by the plugin in the present process."""

    def __str__(self) -> str:
        if len(self.indices) == 1:
            return f"environment {self.indices[0]}"
        return f"environments {self.indices[0]} ... {self.indices[-1]}"

    def why(self, lost: Lost) -> str:
        """The reason, with the last that the process wrote."""
        lines = "" if self.process is None else self.process.last_lines()
        return str(lost) + (f"; the last that it wrote:\n{lines}" if lines else "")


class Crew:
    """As many processes as ``cfg.processes`` says, each with a part of the environments ``indices``."""

    def __init__(self, cfg: Any, indices: tuple[int, ...], seed: int) -> None:
        self.seed = seed
        self._python: str | None = setting(cfg, "python", None)
        self.step_s = float(setting(cfg, "step_timeout_s", 60.0))
        self.start_s = float(setting(cfg, "start_timeout_s", 300.0))
        self._max_restarts = int(setting(cfg, "max_restarts", 0))
        self._restarts = 0
        self._name = str(cfg["name"])
        self._entry = self._find_entry()
        data = cfg.to_dict() if hasattr(cfg, "to_dict") else dict(cfg)
        self._cfg = {**data, "isolate": False, "python": None, "processes": 1}
        n = len(indices)
        bounds = np.linspace(0, n, min(int(setting(cfg, "processes", 1)), n) + 1).round().astype(int).tolist()
        self.parts = [Part(range(a, b), indices[a:b]) for a, b in pairwise(bounds)]
        try:
            self.spec = self._start(self.parts)
        except BaseException:
            self.close()
            raise

    @property
    def restarts(self) -> int:
        """How often a process, or a simulator in one, was started again."""
        return self._restarts + sum(part.restarts for part in self.parts)

    def ask(
        self, parts: Sequence[Part], commands: Sequence[tuple[Any, ...]], timeout_s: float | None = None
    ) -> list[Any]:
        """Give each part its command, then wait for all (``None``: ``env.step_timeout_s``).

        The results by part; a ``Lost`` for one whose process must be started again. Raises what the user must know.
        """
        for part, command in zip(parts, commands, strict=True):
            if part.process is None:
                raise RLinfError("these environments are closed")
            part.process.ask(*command)
        return self._gather(parts, self.step_s if timeout_s is None else timeout_s, "env.step_timeout_s")

    def must(
        self, parts: Sequence[Part], commands: Sequence[tuple[Any, ...]], what: str, limit: Any = None
    ) -> list[Any]:
        """As ``ask``, for what is not tried again: a part that is lost is an error."""
        answers = self.ask(parts, commands, limit)
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Lost):
                raise SimulatorError(f"{part} {what}: {part.why(answer)}")
        return answers

    def restart(self, part: Part, lost: Lost, positions: Sequence[int]) -> tuple[str, Any]:
        """Start the process of ``part`` again and begin the next episodes at ``positions``; why, and their
        observations (``None`` for no positions). Raises SimulatorError after ``env.max_restarts``."""
        reason = f"{part} failed: {part.why(lost)}"
        local = [i - part.positions.start for i in positions]
        while True:
            if self.restarts >= self._max_restarts:
                again = (
                    f"were started again {self.restarts} times already"
                    if self._max_restarts
                    else "are not started again"
                )
                raise SimulatorError(f"{reason}\nsimulators {again} (env.max_restarts={self._max_restarts})")
            self._restarts += 1 + part.restarts
            part.restarts = 0
            log.warning("%s\nstarted again (%d of %d)", reason, self.restarts, self._max_restarts)
            assert part.process is not None
            part.process.kill()
            self._start([part])
            if not local:
                return reason, None
            answer = self.ask([part], [("reset", local, None)])[0]
            if not isinstance(answer, Lost):
                return reason, answer
            reason = f"{part} failed: {part.why(answer)}"

    def close(self) -> None:
        """End the processes, which close their simulators first if they do so in time."""
        for part in self.parts:
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

    def _start(self, parts: Sequence[Part]) -> EnvSpec:
        """Start a process for each and wait until all have made their simulators."""
        for part in parts:
            start = {
                "entry": self._entry,
                "name": self._name,
                "cfg": self._cfg,
                "path": "env",
                "indices": list(part.indices),
                "seed": self.seed,
                "episodes": part.episodes,
            }
            try:
                part.process = Process(start, self._python)
            except OSError as error:
                raise ConfigError(f"env.python: {self._python} cannot be run: {error}") from error
        answers = self._gather(parts, self.start_s, "env.start_timeout_s")
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Lost):
                raise SimulatorError(f"{part} did not start: {part.why(answer)}")
        spec: EnvSpec = answers[0]
        return spec

    def _gather(self, parts: Sequence[Part], timeout_s: float, key: str) -> list[Any]:
        results: list[Any] = []
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
        """What a process raised on purpose, as its class here."""
        known = getattr(errors, name, SimulatorError)
        if not issubclass(known, RLinfError) or known in (errors.WorkerError,):
            known = SimulatorError
        elsewhere = f" (in env.python={self._python})" if self._python and issubclass(known, PluginError) else ""
        error: RLinfError = known(text + elsewhere)
        return error
