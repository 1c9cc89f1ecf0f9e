"""Costs from a profile: a formula for each stage, with its error on points that were held out.

The formula is FormulaCost's, with coefficients that are not negative, fitted to relative errors of the mean over steps
(a step's time adds up, so means predict it and medians do not). Which of its terms are used is decided by
leave-one-out: few terms unless more of them predict the left-out points clearly better. What then remains at the
measured points is kept as a factor and interpolated between them, as far as it is more than the scatter of the samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_sched.calm import calm, lower_median
from rlinf_sched.costmodel import FormulaCost, Memory
from rlinf_sched.graph import SchedError, Stage
from rlinf_sched.profile import Profile, ProfileSample

Floats = NDArray[np.float64]
EXPONENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BENDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
STAIRS = (2, 4, 8, 16, 32, 64)
STEADY = 0.03
"""Scatter of the points up to which a staircase is looked for."""
_UNUSUAL = 4.0
"""Variance of a step's ranks, in terms of that of the calmer steps, above which the machine was busy."""
KNOTS = 16
"""Points of a release curve."""
_PER_TERM, _LEAST, _SCATTER = 0.15, 5e-4, 0.3
"""What a further parameter must gain: this part of the error, this much, and this part of the scatter of the points."""


@dataclass(frozen=True)
class _Row:
    """One measured point: ``replicas``, ``portion`` items of the step at once, ``share`` of them on one replica, mean
    ``seconds`` of a portion, and the relative standard error of that mean."""

    replicas: float
    portion: float
    share: float
    seconds: float
    error: float


def fit(
    profile: Profile, stages: dict[str, Stage], micro: dict[str, tuple[int, ...]] | None = None
) -> dict[str, FormulaCost]:
    """A cost for every stage. Raises SchedError naming a stage without samples. ``micro``: micro-batches by stage."""
    by_stage: defaultdict[str, list[ProfileSample]] = defaultdict(list)
    for sample in profile.samples:
        by_stage[sample.stage].append(sample)
    costs = {}
    for name, stage in stages.items():
        if not by_stage[name]:
            raise SchedError(f"the profile has no sample of stage {name!r}; profile again, or give its cost")
        costs[name] = fit_stage(by_stage[name], stage, (micro or {}).get(name, ()))
    return costs


def fit_stage(samples: Sequence[ProfileSample], stage: Stage, micro: tuple[int, ...] = ()) -> FormulaCost:
    """The cost of one stage. Raises SchedError when all its samples are empty of time."""
    if not any(sample.seconds > 0 for sample in samples):
        raise SchedError(f"the profile's samples of stage {stage.name!r} took no time at all; profile again")
    noise = _noise_together(samples) if stage.collective else _noise(samples)
    samples = calm(samples, stage, noise)
    rows = _rows(samples, stage, noise)
    least = _LEAST + _SCATTER * float(np.mean([row.error for row in rows]))
    best: tuple[float, float, dict[str, Any]] | None = None
    for shape, columns in _shapes(rows, max(micro, default=0), stage.collective):
        if len(rows) > 2 and len(columns) >= len(rows) and len(columns) > 1:
            continue
        matrix = np.column_stack(list(columns.values()))
        error = _held_out(matrix, rows)
        many = len(columns) + len(shape) + bool(shape.keys() & {"stair", "bend"})
        # Ranks that work alone seldom take longer for being many.
        many += len(columns.keys() & {"log", "linear", "serial", "power"}) * (not stage.collective)
        score = error * (1 + _PER_TERM * many) + least * many
        if best is None or score < best[0]:
            found = solve(matrix, np.array([row.seconds for row in rows]))
            best = score, error, shape | dict(zip(columns, (float(v) for v in found), strict=True))
    assert best is not None
    _, error, terms = best
    cost = FormulaCost(
        **terms,
        micro=micro,
        replica=stage.multiple,
        grain=0.0 if stage.ranks is not None and stage.device else _grain(stage),
        share=stage.collective,
        whole=float(samples[0].items),
        noise=noise * math.sqrt(1 / stage.per_item),
    )
    cost = _corrected(cost, rows, max(micro, default=0))
    load, each = _switches(samples, stage)
    curves = _curves(samples, stage)
    return replace(
        cost,
        memory=_memory(samples, stage),
        load=load / 2,
        offload=load / 2,
        reload_each=each,
        error=error,
        curve=tuple(np.mean([curve for _, curve in curves], axis=0).tolist()) if curves else (),
        curves=curves,
        measured=True,
    )


def _grain(stage: Stage) -> float:
    """The smallest part of the step's items that one replica can be given."""
    return float(stage.group) if stage.collective and stage.barrier == "group" else 1 / stage.per_item


# ------------------------------------------------------------------ the measured points


def _replicas(sample: ProfileSample, stage: Stage) -> int:
    return max((sample.devices if stage.device else stage.ranks or 1) // stage.multiple, 1)


def _rows(samples: Sequence[ProfileSample], stage: Stage, noise: float) -> list[_Row]:
    groups: defaultdict[tuple[int, int], list[ProfileSample]] = defaultdict(list)
    for sample in samples:
        groups[_replicas(sample, stage), sample.portion].append(sample)
    return [_row(n, groups[n, c], stage, noise) for n, c in sorted(groups)]


def _row(n: int, samples: list[ProfileSample], stage: Stage, noise: float) -> _Row:
    one = samples[0]
    if not all(s.taken and sum(s.taken) for s in samples):
        rounds = math.ceil(one.items / one.portion)
        seconds = float(np.mean([s.seconds for s in samples])) / rounds
        share, portion = one.portion / n, float(one.portion)
    elif stage.collective or len(one.ranks) == 1:
        own = sum(sum(s.taken) for s in samples)
        takes = sum(math.ceil(sum(s.taken) / s.each) if s.each else 1 for s in samples)
        # Ranks that do not wait for each other differ; ranks that do have the same seconds.
        seconds = sum(float(np.mean(s.ranks)) if noise else s.seconds for s in samples) / takes
        portion = own / takes / stage.per_item
        whole = one.each / stage.per_item if one.each and takes > len(samples) else portion
        share = math.ceil(whole / n / _grain(stage) - 1e-9) * _grain(stage) * portion / whole
    else:
        pairs = [(t, k, s.each) for s in samples for t, k in zip(s.ranks, s.taken, strict=True) if k]
        takes = sum(math.ceil(k / each) if each else 1 for _, k, each in pairs)
        seconds = sum(t for t, _, _ in pairs) / takes
        share = sum(k for _, k, _ in pairs) / takes / stage.per_item
        portion = share * n
    items = sum(sum(s.taken) for s in samples)
    scatter = np.array([s.seconds for s in samples])
    error = noise / math.sqrt(items) if noise and items else 0.0
    if not noise and len(scatter) > 1:
        error = float(scatter.std(ddof=1)) / max(float(scatter.mean()), 1e-12) / math.sqrt(len(scatter))
    return _Row(float(n), portion, share, max(seconds, 1e-12), error)


def _noise(samples: Sequence[ProfileSample]) -> float:
    """Relative deviation of one item's seconds, from how the ranks of one step differ (of single ranks: the steps)."""
    least = min((sample.each for sample in samples), default=0)  # smaller portions even the ranks out
    whole = [sample for sample in samples if sample.each == least]
    pairs = [[(t, k) for t, k in zip(s.ranks, s.taken, strict=True) if k and t > 0] for s in whole]
    rows = [row for row in pairs if len(row) > 1] or [[pair for row in pairs for pair in row]]
    found = []
    for row in rows:
        if len(row) > 1:
            rate = sum(t for t, _ in row) / sum(k for _, k in row)
            found.append((sum((t / k / rate - 1) ** 2 * k for t, k in row), len(row) - 1))
    return _deviation(found)


def _noise_together(samples: Sequence[ProfileSample]) -> float:
    """The same of ranks that are dealt their portions: they are dealt as much work each, if not as many items."""
    found = []
    for sample in samples:
        seconds = np.array(sample.ranks)
        if len(seconds) > 1 and seconds.min() > 0:
            squares = float(((seconds / seconds.mean() - 1) ** 2).sum()) * sum(sample.taken) / len(seconds)
            found.append((squares, len(seconds) - 1))
    return _deviation(found)


def _deviation(steps: Sequence[tuple[float, int]]) -> float:
    """From (sum of squares, degrees of freedom) of each step. A step in which ranks differ far more than in the calmer
    half of the steps was disturbed: it counts for no more than those allow."""
    if not steps:
        return 0.0
    # The median of a chi-squared variable over its degrees of freedom (Wilson and Hilferty, 1931).
    usual = lower_median([squares / freedom / (1 - 2 / (9 * freedom)) ** 3 for squares, freedom in steps])
    total = sum(min(squares, _UNUSUAL * usual * freedom) for squares, freedom in steps)
    return math.sqrt(total / sum(freedom for _, freedom in steps))


# ------------------------------------------------------------------ terms


def _shapes(rows: list[_Row], micro: int, together: bool) -> Iterator[tuple[dict[str, float], dict[str, Floats]]]:
    """Sets of terms, the simple ones first: fixed values of the formula, and columns by coefficient."""
    n = np.array([row.replicas for row in rows])
    share = np.array([row.share for row in rows])
    whole = np.array([row.portion for row in rows]) if together else share * n
    steps = np.ceil(share / micro - 1e-9) if micro else np.zeros(len(rows))
    base = {"spread": steps * micro if micro else share, "fixed": np.ones(len(rows))}
    if len(rows) <= 2:
        yield {}, dict(list(base.items())[: len(rows)])
        return
    base["serial"] = whole
    if micro:
        base["step"] = steps
    if n.max() > 1:
        base["log"] = np.log2(n)
        base["linear"] = n - 1
    for many in range(1, min(len(base), 3) + 1):
        for chosen in combinations(base, many):
            if not {"log", "linear"} <= set(chosen):
                yield {}, {name: base[name] for name in chosen}
    if len(set(n)) > 1:
        for exponent in EXPONENTS:
            for more in ((), ("fixed",), ("log",), ("fixed", "log")):
                yield {"exponent": exponent}, {"power": share * n / n**exponent} | {k: base[k] for k in more}
    for bend in BENDS if len(set(share)) > 2 and not micro else ():
        for more in ((), ("fixed",), ("log",), ("fixed", "log")):
            if all(k in base for k in more):
                yield {"bend": bend}, {"spread": share**bend} | {k: base[k] for k in more}
    steady = float(np.mean([row.error for row in rows])) < STEADY  # else a staircase is seen in mere scatter
    for stair in STAIRS if steady and not micro else ():
        if stair < share.max() * 2:
            for more in ((), ("fixed",), ("spread",), ("log",), ("fixed", "spread"), ("fixed", "log")):
                column = {"step": np.ceil(share / stair - 1e-9)}
                if all(k in base for k in more):
                    yield {"stair": float(stair)}, column | {k: base[k] for k in more}


def solve(matrix: Floats, seconds: Floats) -> Floats:
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


def _held_out(matrix: Floats, rows: list[_Row]) -> float:
    """Mean relative error on points left out one by one; with fewer than three points, of the fit itself."""
    seconds = np.array([row.seconds for row in rows])
    if len(seconds) < 3:
        return float(np.mean(np.abs(matrix @ solve(matrix, seconds) / seconds - 1)))
    errors = []
    for k in range(len(seconds)):
        rest = np.arange(len(seconds)) != k
        errors.append(abs(float(matrix[k] @ solve(matrix[rest], seconds[rest])) / seconds[k] - 1))
    return float(np.mean(errors))


def _corrected(cost: FormulaCost, rows: list[_Row], micro: int) -> FormulaCost:
    """The formula with what remains at the measured points, as far as it is more than their scatter."""
    points = []
    for row in rows:
        here = np.array([int(row.replicas) * cost.replica])
        trend = float(replace(cost, points=(), noise=0.0).seconds(here, row.portion, micro)[0])
        rest = math.log(row.seconds / max(trend, 1e-12))
        certain = rest**2 / (rest**2 + row.error**2) if rest else 1.0
        points.append((row.replicas, row.portion, certain * rest))
    return replace(cost, points=tuple(points))


# ------------------------------------------------------------------ release, switches, memory


def _curves(samples: Sequence[ProfileSample], stage: Stage) -> tuple[tuple[float, tuple[float, ...]], ...]:
    """Mean release by items of a replica, of those that took everything at once; empty when nothing was put."""
    least = min((sample.each for sample in samples if sample.released), default=0)
    by_share: defaultdict[float, list[Floats]] = defaultdict(list)
    for sample in samples:
        if sample.released and sample.each == least:
            by_share[sample.portion / _replicas(sample, stage)].append(resampled(sample.released))
    found = []
    for share in sorted(by_share):
        mean = np.maximum.accumulate(np.mean(by_share[share], axis=0))
        found.append((share, tuple(round(float(v), 6) for v in mean)))
    return tuple(found)


def resampled(curve: Sequence[float]) -> Floats:
    """A release curve at ``KNOTS`` points: each is the first known time at which that much had left."""
    own = (np.arange(len(curve)) + 1) / len(curve)
    index = np.searchsorted(own, (np.arange(KNOTS) + 1) / KNOTS - 1e-9)
    found: Floats = np.minimum(np.array(curve, dtype=float)[np.minimum(index, len(own) - 1)], 1.0)
    return found


def _switches(samples: Sequence[ProfileSample], stage: Stage) -> tuple[float, float]:
    """Seconds of a load and an offload: what is fixed, and what is divided by the replicas."""
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        groups[_replicas(sample, stage)].append(sample.switch_seconds)
    n = np.array(sorted(groups), dtype=float)
    seconds = np.array([float(np.mean(groups[int(k)])) for k in n])
    if len(n) < 2 or not (seconds > 0).all():
        return float(np.mean(seconds)), 0.0
    fixed, each = solve(np.column_stack([np.ones(len(n)), 1 / n]), seconds)
    return float(fixed), float(each)


def _memory(samples: Sequence[ProfileSample], stage: Stage) -> Memory:
    """A line through the peaks over the items that each replica had at once, at or above every one of them; resident
    bytes as measured, divided by the replicas when they fall with them."""
    seen = [sample for sample in samples if sample.peak_bytes > 0]
    if not seen:
        return Memory()
    n = np.array([_replicas(sample, stage) for sample in seen])
    peak = np.array([sample.peak_bytes for sample in seen], dtype=float)
    each = np.ceil(np.array([sample.portion for sample in seen]) / n)
    resident: dict[str, Any] = {}
    loaded = {int(k): float(s.resident_bytes) for s, k in zip(seen, n, strict=True) if s.resident_bytes > 0}
    if loaded:
        least, most = min(loaded), max(loaded)
        sharded = most > least and loaded[most] * most < (loaded[least] * least) * math.sqrt(most / least)
        whole = max(size * (k if sharded else 1) for k, size in loaded.items())
        resident = {"resident": whole, "sharded": sharded}
        held = whole / n if sharded else np.full(len(n), whole)
        peak = np.maximum(peak - held, 0.0)
    slope = max(0.0, float(np.polyfit(each, peak, 1)[0])) if len(set(each.tolist())) > 1 else 0.0
    rest = max(0.0, float((peak - slope * each).max()))
    return Memory(**resident, item=slope, work=rest) if resident else Memory(resident=rest, item=slope)
