"""Changing a running plan when its stages take longer, or less long, than the plan was made for.

Placements stay. What may change between two steps is how much stages take at once, and which of independent stages has
the devices first. Pure: told what each step took, answers with a plan, a sentence, or nothing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlinf_sched.costmodel import Cost
from rlinf_sched.explain import rescaled
from rlinf_sched.export import to_plan
from rlinf_sched.graph import SchedError
from rlinf_sched.moves import difference, key_of, neighbours
from rlinf_sched.planner import Candidate, Plan, plan
from rlinf_sched.predict import predict
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import Run

_SCREEN = 2
"""Draws over which plans are compared before the best of them is predicted in full."""
_FOLLOWED = 16
"""Ranks of a stage that are followed one by one meanwhile."""
_SHOWN = 0.10
"""A stage that is off by less is not named as a reason."""


class Replanner:
    """``found``: what was planned; ``chosen``: the candidate that runs. ``window``: steps that are looked at together;
    ``threshold``: relative difference of step seconds that all of them must have; ``gain``: predicted improvement that
    a change must bring; ``cooldown``: steps after a change or a fruitless search in which nothing is done (None:
    as many as the window)."""

    def __init__(
        self,
        found: Plan,
        chosen: Candidate | None = None,
        *,
        window: int = 3,
        threshold: float = 0.15,
        gain: float = 0.05,
        cooldown: int | None = None,
    ) -> None:
        self._problem = found.original
        self._data = to_plan(found, chosen or found.best)
        self._window, self._threshold, self._gain = window, threshold, gain
        self._cooldown = window if cooldown is None else cooldown
        self._seen: deque[tuple[dict[str, float], float]] = deque(maxlen=window)
        self._rest = 1  # the first step compiles and allocates
        self._told = False
        self._factor: dict[str, float] = {}
        """By stage: how many times as long as planned at first."""
        self._tried: dict[str, tuple[dict[str, float], float]] = {}
        """Plans that were in force: the factors and the seconds of a step when they were left."""
        self._run = predict(self._problem, self._data)
        self._expected = self._run.seconds

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that is in force."""
        return copy.deepcopy(self._data)

    def step(self, index: int, stages: Mapping[str, float], seconds: float) -> tuple[dict[str, Any], str] | str | None:
        """Told after each step: seconds of each stage's own work and of the step. Returns a new plan and why, a
        sentence when only other devices would help (once), or None. What is not finite is left out."""
        if not np.isfinite(seconds) or seconds <= 0 or not all(np.isfinite(v) for v in stages.values()):
            return None
        if self._rest:
            self._rest -= 1
            return None
        self._seen.append((dict(stages), seconds))
        if len(self._seen) < self._window or not self._left():
            return None
        return self._replan()

    def _left(self) -> bool:
        """Whether every step of the window is out of the band, on the same side."""
        off = [seconds / self._expected - 1 for _, seconds in self._seen]
        return min(off) > self._threshold or max(off) < -self._threshold

    def _replan(self) -> tuple[dict[str, Any], str] | str | None:
        measured = float(np.median([seconds for _, seconds in self._seen]))
        factors = self._factors()
        problem = self._rescaled(factors, measured)
        self._factor = {n: f * self._factor.get(n, 1.0) for n, f in factors.items()} | {
            n: f for n, f in self._factor.items() if n not in factors
        }
        now = predict(problem, self._data)
        changed = self._better(problem)
        run = now if changed is None else predict(problem, changed)
        best = run.seconds
        self._problem = problem
        self._seen.clear()
        self._rest = self._cooldown
        if changed is None or best > now.seconds * (1 - self._gain):
            self._run, self._expected = now, measured  # what it takes now is what is expected from now on
            return self._elsewhere(problem, now.seconds)
        self._tried[key_of(self._data)] = dict(self._factor), measured
        why = f"{self._reason(factors)}: {difference(self._data, changed)}; step {now.seconds:.3g} s -> {best:.3g} s"
        changed["predicted"] = {"step": round(best, 6)} | {name: round(v, 6) for name, v in run.busy.items()}
        self._data, self._run = changed, run
        self._expected = best * measured / now.seconds
        return copy.deepcopy(changed), why

    def _better(self, problem: Problem) -> dict[str, Any] | None:
        """The plan in reach with the least predicted time; None: the present one."""
        best = predict(problem, self._data, seeds=_SCREEN, alone=_FOLLOWED).seconds
        found = None
        seen = {key_of(self._data)}
        for data in neighbours(problem, self._data):
            if (key := key_of(data)) in seen:
                continue
            seen.add(key)
            seconds = max(predict(problem, data, seeds=_SCREEN, alone=_FOLLOWED).seconds, self._known(key))
            if seconds < best * (1 - 1e-6):
                best, found = seconds, data
        return found

    def _known(self, key: str) -> float:
        """What a plan took when it was in force, if the stages take now what they took then; else 0."""
        then, seconds = self._tried.get(key, ({}, 0.0))
        names = {**then, **self._factor}
        same = all(abs(self._factor.get(n, 1.0) / then.get(n, 1.0) - 1) < self._threshold for n in names)
        return seconds if same else 0.0

    def _factors(self) -> dict[str, float]:
        """Measured over predicted seconds by stage (1 where nothing was measured)."""
        found: dict[str, float] = {}
        for name in self._problem.graph.stages:
            mine = [stages[name] for stages, _ in self._seen if stages.get(name, 0.0) > 0]
            expected = busy_of(self._run, name, self._problem)
            if mine and expected > 0:
                found[name] = float(np.median(mine)) / expected
        return found

    def _rescaled(self, factors: Mapping[str, float], measured: float) -> Problem:
        costs: dict[str, Cost] = {
            name: rescaled(cost, factors.get(name, 1.0)) for name, cost in self._problem.costs.items()
        }
        problem = replace(self._problem, costs=costs)
        rest = measured - predict(problem, self._data).seconds
        # Slower than all stages explain: it is the step's own.
        return replace(problem, overhead=max(0.0, problem.overhead + rest))

    def _reason(self, factors: Mapping[str, float]) -> str:
        name = max(factors, key=lambda n: max(factors[n], 1 / factors[n]), default="")
        if not name or abs(factors[name] - 1) < _SHOWN:
            return "steps take longer than all stages together explain"
        return f"{name} takes {factors[name]:.2f} times as long as planned"

    def _elsewhere(self, problem: Problem, now: float) -> str | None:
        """Said once: what another placement would bring."""
        if self._told:
            return None
        try:
            other = plan(problem)
        except SchedError:
            return None
        if other.best.rescored > now * (1 - self._gain):
            return None
        self._told = True
        return (
            f"other devices would bring {now:.3g} s a step down to {other.best.rescored:.3g} s "
            f"({other.best.family}): save, `rlinf profile` again and start with plan=auto"
        )


def busy_of(run: Run, name: str, problem: Problem) -> float:
    """Predicted seconds of a stage's own work; of a cycle's member its part of the cycle."""
    if name in run.busy:
        return run.busy[name]
    for cycle in problem.graph.cycles:
        if name in cycle.members:
            alone = {
                n: float(problem.costs[n].seconds(np.array([problem.devices]), problem.items, 0)[0])
                for n in cycle.members
            }
            return run.busy.get(cycle.name, 0.0) * alone[name] / max(sum(alone.values()), 1e-12)
    return 0.0
