"""Metric loggers: plugins of ``rlinf.loggers``.

A logger is a class like ``Logger``; its distribution names it with an entry point and a run uses it when
``loggers`` in the configuration lists its name. An OSError that it raises stops the run with path and cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rlinf_core.errors import RLinfError


class Logger(Protocol):
    """Writes metrics into (or for) one run directory, which exists."""

    def __init__(self, run_dir: Path) -> None: ...

    def log(self, step: int, phase: str, metrics: dict[str, float]) -> None:
        """Write one step's metrics of a phase (``train``, ``evaluate``, …). Values may be NaN or infinite."""

    def close(self) -> None: ...


def check_metrics(step: int, phase: str, metrics: Mapping[str, object]) -> dict[str, float]:
    """Metrics as plain floats. Raises RLinfError naming the metric that is not a real number."""
    values = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            values[str(name)] = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise RLinfError(
                f"metric {name!r} of {phase} step {step} is not a number: {value!r} ({type(value).__name__})"
            ) from error
    return values


__all__ = ["Logger", "check_metrics"]
