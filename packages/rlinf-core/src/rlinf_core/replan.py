"""Changing the plan between two steps of a run: portions and the order of turns, never where anything runs.

A scheduler's *replanner* is told what each step took and may answer with another plan. Only what can change in place is
taken over; other devices need a save, a relaunch and a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlinf_core.errors import PlanError, describe
from rlinf_core.graph import FlowGraph
from rlinf_core.placement import ClusterInfo
from rlinf_core.plan import FlatPlan, Plan, flatten

Answer = tuple[Mapping[str, Any], str] | str | None


class Replanner(Protocol):
    """What a scheduler plugin returns beside its plan."""

    def step(self, index: int, stages: Mapping[str, float], seconds: float) -> Answer:
        """Told after each step of the phase that was planned: seconds of own work by stage (slowest rank, all its
        tasks) and of the step. Returns a new plan as data with one sentence why, a sentence alone for the user, or
        nothing."""


class Replanning:
    """Asks the replanner at step boundaries and hands a plan that may be taken over to ``apply``."""

    def __init__(
        self,
        replanner: Replanner,
        phase: str,
        graph: FlowGraph,
        cluster: ClusterInfo,
        plan: Plan,
        flat: FlatPlan,
        apply: Callable[[Plan, FlatPlan], None],
        note: Callable[[str], None],
    ) -> None:
        self._replanner: Replanner | None = replanner
        self._phase = phase
        self._graph = graph
        self._cluster = cluster
        self._plan = plan
        self._flat = flat
        self._apply = apply
        self._note = note
        self.changes = 0

    def step_done(self, phase: str, index: int, stages: Mapping[str, float], seconds: float) -> bool:
        """Whether the plan was changed. A replanner that fails, or whose plan is none for this run, is not asked again:
        the run goes on as it was planned."""
        if phase != self._phase or self._replanner is None:
            return False
        try:
            return self._ask(self._replanner, index, stages, seconds)
        except (Exception, SystemExit) as error:  # of a plugin: no reason to lose a run
            self._replanner = None
            self._note(f"the plan stays as it is from here on: {describe(error)}")
            return False

    def _ask(self, replanner: Replanner, index: int, stages: Mapping[str, float], seconds: float) -> bool:
        answer = replanner.step(index, stages, seconds)
        if answer is None:
            return False
        if isinstance(answer, str):
            self._note(f"plan: {answer}")
            return False
        data, why = answer
        plan = Plan.from_dict(data, source=f"plan after step {index}")
        flat = flatten(plan, self._graph, self._cluster)
        self._check(flat, index)
        self.changes += 1
        self._plan, self._flat = plan, flat
        self._apply(plan, flat)
        self._note(f"plan changed after step {index}: {why}")
        return True

    def _check(self, flat: FlatPlan, index: int) -> None:
        for name, group in flat.groups.items():
            before = self._flat.groups[name]
            same = (group.processes, group.resident, group.together, group.slots)
            if same != (before.processes, before.resident, before.together, before.slots):
                raise PlanError(
                    f"plan after step {index}: {name!r} would be placed, kept or run otherwise than now; a running "
                    "plan changes only its portions and the order of turns: save, and start again with the new plan"
                )
