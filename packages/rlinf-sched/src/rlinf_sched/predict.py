"""What a plan of the runtime will take: any plan file, on the devices that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlinf_sched.planread import read_plan
from rlinf_sched.problem import Problem
from rlinf_sched.runtime import ALONE, run_plan, scatters
from rlinf_sched.simulator import Run

SEEDS = 8
"""Draws over which a prediction is the mean where times scatter."""
FEW_RANKS = 16
"""On more devices than these the ranks of a stage are taken for one: by chance alone they differ."""


def followed(devices: int) -> int:
    """Ranks of a stage up to which each is followed by itself, on so many devices."""
    return FEW_RANKS if devices > FEW_RANKS else ALONE


def predict(
    problem: Problem, data: Mapping[str, Any], *, seeds: int = SEEDS, alone: int | None = None, source: str = "plan"
) -> Run:
    """Run a plan (plain data, as in its YAML) as the runtime would.

    ``problem``: the whole one, cycles as two stages. ``seconds`` and ``busy`` are means over ``seeds`` draws where
    times scatter (0: expected values only); the bars are those of a draw near the mean. ``alone``: ranks of a stage up
    to which each is followed by itself (None: as the devices suggest). Raises SchedError for a plan that is none for
    this problem.
    """
    flat = read_plan(data, problem, source=source)
    alone = followed(flat.devices) if alone is None else alone
    if not seeds or not scatters(problem):
        return run_plan(flat, problem, alone=alone)
    runs = [run_plan(flat, problem, seed=seed, alone=alone) for seed in range(seeds)]
    busy = {name: float(np.mean([run.busy[name] for run in runs])) for name in runs[0].busy}
    mean = float(np.mean([run.seconds for run in runs]))
    return replace(
        min(runs, key=lambda run: abs(run.seconds - mean)),
        seconds=mean,
        busy=busy,
        switching=float(np.mean([run.switching for run in runs])),
    )
