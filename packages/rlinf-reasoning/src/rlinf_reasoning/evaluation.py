"""What an evaluation comes to: pass@k with confidence intervals, and where its answers are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = "evaluations"
"""Folder of a run directory with one file of answers for each evaluation."""
Z95 = 1.959964
"""Half-width of a 95 % interval of the normal distribution, in standard deviations."""


def answers_file(run_dir: Path, when: str) -> Path:
    """Where the answers of the evaluation ``when`` are."""
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in when).strip(".") or "evaluation"
    return run_dir / FOLDER / f"{name}.jsonl"


def pass_at(counts: Sequence[tuple[int, int]], k: int) -> list[float]:
    """Unbiased pass@k of each problem from (right answers, answers); problems with fewer than k answers are left out.

    Chen et al., arXiv 2107.03374, equation 1 (``rlinf_algos.pass_at_k``).
    """
    enough = [(right, total) for right, total in counts if total >= k]
    if k == 1:
        return [right / total for right, total in enough]
    if not enough:
        return []
    import torch

    from rlinf_algos import pass_at_k

    right, total = torch.tensor(enough).unbind(1)
    return [float(value) for value in pass_at_k(right, total, k)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of values in [0, 1] that stand for problems drawn independently; the interval has 95 %.

    Wilson's score interval (J. Am. Stat. Assoc. 22, 1927), which stays in [0, 1] and is right for 0 and 1, at the
    number of right-or-wrong problems that would give a mean as certain as the one of these values: n itself where all
    values are 0 or 1, more where they lie between. No values: NaN.
    """
    n = len(values)
    if not n:
        return math.nan, math.nan, math.nan
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values) / n
    full = mean * (1.0 - mean)
    effective = n * full / spread if spread > 1e-12 and full > 0.0 else n
    centre = (mean + Z95**2 / (2 * effective)) / (1 + Z95**2 / effective)
    half = Z95 / (1 + Z95**2 / effective) * math.sqrt(full / effective + Z95**2 / (4 * effective**2))
    return mean, max(0.0, centre - half), min(1.0, centre + half)


def estimates(counts: Sequence[tuple[int, int]], ks: Sequence[int]) -> dict[str, float]:
    """``accuracy`` (the share of right answers, problems counted alike) and each ``pass@k``, with ``/low`` and
    ``/high`` of its 95 % interval; names that have no problem to be estimated from are left out."""
    found = {}
    for name, k in (("accuracy", 1), *((f"pass@{k}", k) for k in ks)):
        values = pass_at(counts, k)
        if values:
            found[name], found[f"{name}/low"], found[f"{name}/high"] = interval(values)
    return found


def table(report: Mapping[str, float]) -> str:
    """The estimates of a report for people, one a line."""
    names = [name for name in report if name.startswith("pass@") and "/" not in name]
    lines = [
        f"{name:<9} {report[name]:6.1%}   95 % interval {report[f'{name}/low']:.1%} to {report[f'{name}/high']:.1%}"
        for name in sorted(names, key=lambda name: int(name.removeprefix("pass@")))
    ]
    lines.append(
        f"{report['problems']:g} problems, {report['answers']:g} answers, {report['response/length']:.1f} tokens on "
        f"average, {report['response/truncated']:.1%} cut by the limit"
    )
    for name, text in (
        ("prompt/dropped", "prompts dropped as too long"),
        ("prompt/truncated", "prompts cut"),
        ("reward/errors", "answers without a reward, counted as wrong"),
    ):
        if report.get(name):
            lines.append(f"{report[name]:g} {text}")
    return "\n".join(lines)
