"""What an evaluation comes to: means over episodes with confidence intervals, and where its episodes are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlinf_embodied.episodes import Episode

FOLDER = "evaluations"
"""Folder of a run directory with the episodes, and the video, of each evaluation."""
Z95 = 1.959964
"""Half-width of a 95 % interval of the normal distribution, in standard deviations."""
SHARES = ("success_once", "success_at_end")
NUMBERS = ("return", "length")


def file_of(run_dir: Path, when: str, suffix: str) -> Path:
    """Where the evaluation ``when`` keeps its episodes (``.jsonl``) or its video (``.mp4``)."""
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in when).strip(".") or "evaluation"
    return run_dir / FOLDER / f"{name}{suffix}"


def wilson(successes: int, n: int) -> tuple[float, float, float]:
    """(share, low, high): Wilson's score interval of 95 % (J. Am. Stat. Assoc. 22, 1927), which stays in [0, 1] and is
    right for 0 and 1. NaN without a trial."""
    if not n:
        return math.nan, math.nan, math.nan
    share = successes / n
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    return share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's t interval of 95 % for the mean of independent values. One value alone tells nothing
    of the spread: its interval is infinite. NaN without a value."""
    n = len(values)
    if not n:
        return math.nan, math.nan, math.nan
    mean = math.fsum(values) / n
    if n == 1:
        return mean, -math.inf, math.inf
    half = t_quantile(n - 1) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, to three digits.

    Abramowitz and Stegun, 26.7.5 (an expansion in 1 / degrees), exact values for one and two degrees of freedom.
    """
    if degrees <= 2:
        return (12.7062, 4.30265)[degrees - 1]
    z, n = Z95, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))


def estimates(episodes: Iterable[Episode]) -> dict[str, float]:
    """``success_once``, ``success_at_end`` (Wilson), ``return`` and ``length`` (Student), each with ``/low`` and
    ``/high`` of its 95 % interval, and ``episodes``, their number. Without an episode only ``episodes`` (0); without a
    second one no interval of a mean: an infinite number is not one to log."""
    rows = list(episodes)
    found = {"episodes": float(len(rows))}
    if not rows:
        return found
    for name in SHARES:
        values = wilson(sum(bool(getattr(row, name)) for row in rows), len(rows))
        found[name], found[f"{name}/low"], found[f"{name}/high"] = values
    for name, numbers in (("return", [row.ret for row in rows]), ("length", [float(row.length) for row in rows])):
        mean, low, high = student(numbers)
        found[name] = mean
        if math.isfinite(low):
            found[f"{name}/low"], found[f"{name}/high"] = low, high
    return found


def line(report: dict[str, float]) -> str:
    """An evaluation in one line for people."""
    if not report.get("episodes"):
        return "no episode ended"
    parts = [f"{report['episodes']:g} episodes"]
    for name in SHARES:
        parts.append(f"{name} {report[name]:.1%} ({report[f'{name}/low']:.1%} to {report[f'{name}/high']:.1%})")
    for name in NUMBERS:
        ends = f" ({report[f'{name}/low']:.4g} to {report[f'{name}/high']:.4g})" if f"{name}/low" in report else ""
        parts.append(f"{name} {report[name]:.4g}{ends}")
    return ", ".join(parts)
