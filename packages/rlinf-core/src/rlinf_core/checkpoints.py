"""Checkpoints of a run: ``checkpoints/step-00000010/``, named only when whole, and which of them are kept.

A checkpoint holds what the workers saved (a folder per group, as the recipe says) and ``state.json``, what the driver
must know to go on: steps done, policy version, the metrics so far and how long the run's files were.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf_core.errors import ConfigError, nearest
from rlinf_core.rundir import RunDirectory, explain_save_error, guard, to_json

STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True)
class State:
    """What the driver goes on from.

    ``next_index``: by phase, the index of its next step. ``sizes``: bytes of the files that are appended to, as they
    were when the checkpoint was made. ``latest``: the last value of each metric. ``records``: see ``Flow.record``.
    """

    steps_done: int
    version: int = 0
    next_index: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    latest: Mapping[str, float] = field(default_factory=dict)
    records: Mapping[str, Any] = field(default_factory=dict)


def read_state(path: Path) -> State:
    """The state of a whole checkpoint; anything else is a ``ConfigError`` that says what is wrong with it."""
    try:
        data = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        why = f"has no {STATE}, so it is no checkpoint of a run, or only half of one"
        raise ConfigError(f"checkpoint {path}: {why if path.is_dir() else 'does not exist'}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {path}: {STATE} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ConfigError(f"checkpoint {path}: {STATE} is of another format than {FORMAT}; it was made by other code")
    try:
        return State(**data)
    except TypeError as error:
        raise ConfigError(f"checkpoint {path}: {STATE} lacks or has an entry too many: {error}") from error


class Checkpoints:
    """Makes and prunes the checkpoints of one run directory.

    The last ``keep_last`` are kept, and beside them the one with the largest value of the metric ``keep_best`` (the
    smallest with ``-`` before its name; the later of equal ones), to which the link ``checkpoints/best`` points.
    """

    def __init__(self, run: Path, *, keep_last: int = 1, keep_best: str = "") -> None:
        self.folder = run / "checkpoints"
        self.keep_last = keep_last
        self._metric = keep_best.removeprefix("-")
        self._sign = -1.0 if keep_best.startswith("-") else 1.0
        self._told = False

    def path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` steps lies once it is whole."""
        return self.folder / f"step-{step:08d}"

    def whole(self) -> list[tuple[int, Path]]:
        """(steps done, folder) of whole checkpoints, oldest first."""
        found = self.folder.glob("step-*") if self.folder.is_dir() else ()
        return sorted((int(p.name[5:]), p) for p in found if p.name[5:].isdigit() and (p / STATE).is_file())

    @contextmanager
    def saving(self, step: int, state: Callable[[], State]) -> Iterator[Path]:
        """A folder to save into; when the block ends well ``state()`` is written, the folder gets its name, and older
        checkpoints are pruned. A block that raises leaves no half-written checkpoint and removes none of the others.
        """
        final, aside = self.path(step), self.folder / f".step-{step:08d}.partial"
        with guard(aside):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        try:
            with guard(aside):
                yield aside
                self._write_state(aside, state())
                old = self.folder / f".step-{step:08d}.old"
                shutil.rmtree(old, ignore_errors=True)
                if final.exists():
                    os.replace(final, old)
                os.replace(aside, final)
                _sync_folder(self.folder)
                shutil.rmtree(old, ignore_errors=True)
        except BaseException as error:
            explained = explain_save_error(aside, error)
            shutil.rmtree(aside, ignore_errors=True)
            if explained is not None:
                raise explained from error
            raise
        with guard(self.folder, "prune"):
            self._prune()

    def restore(self) -> None:
        """Give a checkpoint its name back whose process ended while another of the same step took its place. Only for
        a run that no process drives."""
        for old in self.folder.glob(".step-*.old") if self.folder.is_dir() else ():
            final = self.folder / old.name.removeprefix(".").removesuffix(".old")
            if (old / STATE).is_file() and not final.exists():
                with guard(final):
                    os.replace(old, final)

    def drop_partial(self) -> None:
        """Remove what an earlier process was saving when it ended."""
        if self.folder.is_dir():
            for path in (*self.folder.glob(".step-*.partial"), *self.folder.glob(".step-*.old")):
                shutil.rmtree(path, ignore_errors=True)

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: the run goes on from ``step``."""
        with guard(self.folder, "prune"):
            for later, path in self.whole():
                if later > step:
                    shutil.rmtree(path)
            self._link_best(self.best())

    def best(self) -> Path | None:
        """The checkpoint with the best value of the metric; ``None`` where there is no metric or no value yet."""
        if not self._metric:
            return None
        scored = []
        for step, path in self.whole():
            value = read_state(path).latest.get(self._metric)
            if value is not None:
                scored.append((self._sign * value, step, path))
        return max(scored)[2] if scored else None

    def no_best(self, latest: Mapping[str, float]) -> str | None:
        """What to tell a user whose ``keep_best`` names a metric that has not been reported; ``None`` otherwise."""
        if not self._metric or self._metric in latest or self._told:
            return None
        self._told = True
        return (
            f"checkpoint.keep_best: no metric {self._metric!r} so far{nearest(self._metric, latest)}; only the last "
            f"{self.keep_last} are kept until there is one"
        )

    def _prune(self) -> None:
        best = self.best()
        for _, old in self.whole()[: -self.keep_last]:
            if old != best:
                shutil.rmtree(old)
        self._link_best(best)

    def _link_best(self, best: Path | None) -> None:
        link = self.folder / "best"
        if best is None:
            link.unlink(missing_ok=True)
            return
        aside = self.folder / ".best"
        aside.unlink(missing_ok=True)
        aside.symlink_to(best.name)
        os.replace(aside, link)

    def _write_state(self, folder: Path, state: State) -> None:
        data = {"format": FORMAT, **to_json(asdict(state))[0]}
        with open(folder / STATE, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(folder)


def sizes_of(directory: RunDirectory, names: tuple[str, ...]) -> dict[str, int]:
    """Bytes of the run's files that are appended to; 0 for one that is not there."""
    return {name: p.stat().st_size if (p := directory.path / name).is_file() else 0 for name in names}


def _sync_folder(folder: Path) -> None:
    """What was renamed is on the disk before anything older is removed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
