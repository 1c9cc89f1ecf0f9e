"""Costs from a profile: a formula for each stage, with its error on points that were held out.

The formula is FormulaCost's, with coefficients that are not negative, fitted to relative errors. Which of its terms
are used is decided by leave-one-out: the subset with the least error on the points left out, the smaller one on a tie.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import numpy as np

from rlinf_sched.costmodel import FormulaCost, Memory
from rlinf_sched.graph import SchedError, Stage
from rlinf_sched.profile import Profile, Summary

TERMS = ("fixed", "serial", "spread", "step", "log")


def fit(
    profile: Profile, stages: dict[str, Stage], micro: dict[str, tuple[int, ...]] | None = None
) -> dict[str, FormulaCost]:
    """A cost for every stage. Raises SchedError naming a stage without samples. ``micro``: micro-batches by stage."""
    by_stage: defaultdict[str, list[Summary]] = defaultdict(list)
    for line in profile.summaries():
        by_stage[line.stage].append(line)
    costs = {}
    for name, stage in stages.items():
        if not by_stage[name]:
            raise SchedError(f"the profile has no sample of stage {name!r}; profile again, or give its cost")
        costs[name] = fit_stage(by_stage[name], stage, (micro or {}).get(name, ()))
    return costs


def fit_stage(lines: list[Summary], stage: Stage, micro: tuple[int, ...] = ()) -> FormulaCost:
    """The cost of one stage from its summaries (seconds of one portion at each devices and portion)."""
    replica = stage.multiple
    count = np.array([max(line.devices if stage.device else stage.ranks or 1, 1) // replica for line in lines])
    count = np.maximum(count, 1)
    portion = np.array([line.portion for line in lines], dtype=float)
    seconds = np.maximum(np.array([line.seconds_per_item for line in lines]) * portion, 1e-12)
    size = max(micro, default=0)
    steps = np.ceil(portion / (count * size)) if size else np.zeros(len(lines))
    columns = {
        "fixed": np.ones(len(lines)),
        "serial": portion,
        "spread": steps * size if size else portion / count,
        "step": steps,
        "log": np.log2(count),
    }
    names = [name for name in TERMS if (name != "step" or size) and (name != "log" or count.max() > 1)]
    best: tuple[float, int, tuple[str, ...]] | None = None
    for many in range(1, min(len(names), max(1, len(lines) - 1)) + 1):
        for chosen in combinations(names, many):
            matrix = np.column_stack([columns[name] for name in chosen])
            error = _held_out(matrix, seconds)
            if best is None or error < best[0] * (1 - 1e-3) - 1e-9:
                best = error, many, chosen
    assert best is not None
    matrix = np.column_stack([columns[name] for name in best[2]])
    found = dict(zip(best[2], _solve(matrix, seconds), strict=True))
    switch = float(np.median([line.switch_seconds for line in lines]))
    return FormulaCost(
        **{name: float(value) for name, value in found.items()},
        micro=micro,
        replica=replica,
        memory=_memory(lines, count),
        load=switch / 2,
        offload=switch / 2,
        error=best[0],
    )


def _solve(matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares of the relative error with coefficients that are not negative, by active sets."""
    scaled = matrix / seconds[:, None]
    result = np.zeros(matrix.shape[1])
    active = list(range(matrix.shape[1]))
    while active:
        found = np.linalg.lstsq(scaled[:, active], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            result[active] = found
            break
        active.pop(int(np.argmin(found)))
    return result


def _held_out(matrix: np.ndarray, seconds: np.ndarray) -> float:
    """Mean relative error on points left out one by one; with fewer than three points, of the fit itself."""
    if len(seconds) < 3:
        return float(np.mean(np.abs(matrix @ _solve(matrix, seconds) / seconds - 1)))
    errors = []
    for k in range(len(seconds)):
        rest = np.arange(len(seconds)) != k
        errors.append(abs(float(matrix[k] @ _solve(matrix[rest], seconds[rest])) / seconds[k] - 1))
    return float(np.mean(errors))


def _memory(lines: list[Summary], count: np.ndarray) -> Memory:
    """A line through the peaks over the items that each replica had at once, at or above every one of them."""
    peak = np.array([line.peak_bytes for line in lines], dtype=float)
    each = np.ceil(np.array([line.portion for line in lines]) / count)
    if not peak.any():
        return Memory()
    slope = 0.0
    if len(set(each.tolist())) > 1:
        slope = max(0.0, float(np.polyfit(each, peak, 1)[0]))
    return Memory(resident=max(0.0, float((peak - slope * each).max())), item=slope)
