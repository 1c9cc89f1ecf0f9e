"""The directory of one run: ``runs/<recipe>/<time>/``.

::

    config.yaml     the composed configuration        plan.yaml       the plan that ran
    metrics.jsonl   one line per step and phase       samples.jsonl   prompts, responses, rewards
    events.out.*    TensorBoard (by a logger)         trace.json      spans, for ui.perfetto.dev
    checkpoints/    step-00000010, …                  summary.json    what the run came to
    logs/           output of every worker            .driver.lock    held while the run goes on

JSON has no NaN or infinity: such values are written as ``null`` and counted (``non_finite`` in the summary).
Every write that fails raises RunDirectoryError with the path and the cause (no space, no permission).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import IO, Any

from rlinf_core.errors import RLinfError, RunDirectoryError
from rlinf_core.loggers import Logger, check_metrics
from rlinf_core.perfetto import Trace
from rlinf_core.registry import Registry

PROBE_BYTES = 64 * 1024
"""Written and removed again when a run directory is made, so that a full disk is found before anything starts."""


FULL_BYTES = 1 << 20
"""A disk with less room than this counts as full when a save fails without saying why."""


@contextmanager
def guard(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn the OSError of an access into a RunDirectoryError that names path and cause."""
    try:
        yield
    except (RLinfError, ConnectionError, TimeoutError):  # OSErrors too, but not about files
        raise
    except OSError as error:
        place = error.filename or path
        raise RunDirectoryError(f"cannot {doing} {place}: {error.strerror or error}") from error


def explain_save_error(path: Path, error: BaseException) -> RunDirectoryError | None:
    """The RunDirectoryError behind a failed save below ``path``, if it was the disk.

    Libraries that write in native code (torch, safetensors) report a full disk as an error of their own.
    """
    if isinstance(error, RLinfError):
        return None
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    full = "No space left" in str(error) or "os error 28" in str(error)
    if full or shutil.disk_usage(place).free < FULL_BYTES:
        return RunDirectoryError(f"cannot write {path}: No space left on device")
    return None


def to_json(value: Any) -> tuple[Any, int]:
    """(``value`` as JSON can hold it, number of NaN and infinities that became null)."""
    if value is None or isinstance(value, bool | int | str):
        return value, 0
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Mapping):
        pairs = {str(key): to_json(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(count for _, count in pairs.values())
    if isinstance(value, list | tuple | set | frozenset):
        items = [to_json(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    if isinstance(value, Enum):
        return value.name, 0
    if isinstance(value, os.PathLike):
        return os.fspath(value), 0
    for method in ("item", "tolist"):  # numbers and arrays of numpy and torch
        if callable(convert := getattr(value, method, None)) and (method == "tolist" or getattr(value, "ndim", 0) == 0):
            return to_json(convert())
    return str(value), 0


class RunDirectory:
    """Creates and writes one run's directory. Not thread-safe; one process (the driver) owns it."""

    def __init__(
        self, path: Path, *, loggers: Iterable[str] = ("jsonl", "tensorboard"), resumed_steps: int | None = None
    ) -> None:
        """``path`` must exist (see ``create``). Loggers are plugins of ``rlinf.loggers``, opened here.

        ``resumed_steps``: the run goes on after that many steps; loggers that have a method ``resumed`` are told.
        """
        self.path = path
        self.non_finite = 0
        self.trace = Trace()
        self.lock: int | None = None
        """A descriptor that holds the directory for this process (``resume.lock_run``); closed with it."""
        self._samples: IO[str] | None = None
        self._loggers: list[Logger] = []
        registry = Registry("rlinf.loggers")
        classes = [registry.load(name) for name in loggers]
        with guard(path):
            for logger_class in classes:
                logger = logger_class(path)
                self._loggers.append(logger)
                if resumed_steps is not None and callable(resumed := getattr(logger, "resumed", None)):
                    resumed(resumed_steps)

    @classmethod
    def create(
        cls,
        root: str | Path,
        recipe: str,
        *,
        loggers: Iterable[str] = ("jsonl", "tensorboard"),
        now: datetime | None = None,
    ) -> RunDirectory:
        """Make ``root/recipe/<time>/``; runs that start in the same second get different names.

        Raises RunDirectoryError at once when the place is unwritable, below a regular file, or full.
        """
        parent = Path(root).expanduser().resolve() / recipe
        stamp = (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")
        with guard(parent, "create the run directory below"):
            parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(10_000):
            path = parent / (stamp if attempt == 0 else f"{stamp}-{attempt + 1}")
            try:
                with guard(path, "create the run directory"):
                    path.mkdir()
            except RunDirectoryError as error:
                if isinstance(error.__cause__, FileExistsError):
                    continue
                raise
            break
        else:
            raise RunDirectoryError(f"cannot find a free name for a run directory in {parent}")
        try:
            _probe(path)
            return cls(path, loggers=loggers)
        except RLinfError:
            shutil.rmtree(path, ignore_errors=True)  # nothing of value is in it yet
            raise

    # -- files -------------------------------------------------------------------------------------------------------

    def write_text(self, name: str, text: str) -> Path:
        """Write a file whole: aside first, then renamed, so that a reader never sees half of it."""
        path = self.path / name
        with guard(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(aside, 0o644)  # mkstemp makes files that only the owner can read
                os.replace(aside, path)
            except OSError:
                Path(aside).unlink(missing_ok=True)
                raise
        return path

    def write_config(self, config: Mapping[str, Any]) -> Path:
        """``config.yaml``: the composed configuration (``cfg.to_dict()``)."""
        import yaml

        return self.write_text("config.yaml", yaml.safe_dump(to_json(config)[0], sort_keys=False, allow_unicode=True))

    def write_plan(self, text: str, name: str = "plan.yaml") -> Path:
        """``plan.yaml``: the plan as its own ``to_yaml`` wrote it; ``plan-1.yaml``, …: what took its place later."""
        return self.write_text(name, text)

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """``summary.json``; ``non_finite`` counts the NaN and infinities that metrics and samples had."""
        data, count = to_json(summary)
        self.non_finite += count
        return self.write_text("summary.json", json.dumps({**data, "non_finite": self.non_finite}, indent=2) + "\n")

    def write_trace(self, name: str = "trace.json") -> Path:
        """``trace.json`` from the spans in ``self.trace``."""
        return self.write_text(name, self.trace.to_json())

    # -- metrics and samples -----------------------------------------------------------------------------------------

    def log(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Give one step's metrics to every logger. Values must be real numbers; NaN and infinity are counted."""
        values = check_metrics(step, phase, metrics)
        self.non_finite += sum(not math.isfinite(value) for value in values.values())
        with guard(self.path):
            for logger in self._loggers:
                logger.log(step, phase, values)

    def write_samples(self, samples: Iterable[Any]) -> int:
        """Append samples (dataclasses or mappings), one line each, and flush; returns how many."""
        path = self.path / "samples.jsonl"
        lines = []
        for sample in samples:
            data, count = to_json(sample)
            self.non_finite += count
            lines.append(json.dumps(data, ensure_ascii=False) + "\n")
        with guard(path):
            if self._samples is None:
                self._samples = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
            self._samples.write("".join(lines))
            self._samples.flush()
        return len(lines)

    # -- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close loggers and files. Safe to call twice; every logger is closed even when one fails."""
        first: BaseException | None = None
        closing: list[Any] = [*self._loggers, *([self._samples] if self._samples else [])]
        self._loggers, self._samples = [], None
        for item in closing:
            try:
                with guard(self.path):
                    item.close()
            except RLinfError as error:
                first = first or error
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        if first is not None:
            raise first

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except RLinfError:
            if kind is None:  # otherwise what ended the block is the first cause, and closing only repeats it
                raise


def _probe(path: Path) -> None:
    probe = path / ".probe"
    try:
        with guard(path, "write in"), open(probe, "wb") as file:
            file.write(b"\0" * PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
