"""Metric loggers: plugins of ``rlinf.loggers``.

A logger is a class like ``Logger``; its distribution names it with an entry point and a run uses it when
``loggers`` in the configuration lists its name. An OSError that it raises stops the run with path and cause.

Beside what ``Logger`` asks for, a logger may have ``resumed(steps)``: called after the constructor when the run goes
on in the directory of an earlier process, after that many training steps. The composed configuration lies in
``config.yaml`` of the run directory from before the first ``log`` on (``read_config``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlinf_core.errors import RLinfError

PROJECT = "rlinf"
"""Where tracking services put a run unless their own variable (``WANDB_PROJECT``, ``MLFLOW_EXPERIMENT_NAME``) says."""


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


def axis(step: int, metrics: Mapping[str, float]) -> int:
    """Where on a chart's axis a step belongs: phases other than training (each a step 0 of its own) at the number of
    training steps done by then, which their metric ``train/steps`` tells."""
    return int(metrics.get("train/steps", step))


def run_name(run_dir: Path) -> str:
    """How a tracking service calls a run: the recipe's last word and the time, ``grpo_math/2026-01-31_12-00-00``."""
    return f"{run_dir.parent.name}/{run_dir.name}" if run_dir.parent.name else run_dir.name


def read_config(run_dir: Path) -> dict[str, Any]:
    """The run's composed configuration, flat under dotted keys; empty where the directory has none yet."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    import yaml

    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return dict(_flat(data, "")) if isinstance(data, dict) else {}


def _flat(data: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


__all__ = ["PROJECT", "Logger", "axis", "check_metrics", "read_config", "run_name"]
