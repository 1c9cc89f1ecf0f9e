"""Profiles: measured time and memory of stages, as data.

A profile is a list of samples (what one stage did in one step) and of whole steps' seconds, stamped with the
fingerprints of the flow and of the hardware it was taken on: times of another flow or machine are no evidence.
Files are JSON, written aside and renamed when whole.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

FORMAT = 1


class ProfileError(ValueError):
    """A profile or a sample of one is not what it must be; names the field, and the file if there is one."""


@dataclass(frozen=True, slots=True)
class ProfileSample:
    """What one stage did in one step.

    ``devices`` it ran on (0: a CPU stage), ``portion`` items of the step that the whole stage took at once, ``items``
    in all, ``seconds`` of its slowest rank, ``peak_bytes`` on one device, ``switch_seconds`` of loading and offloading
    around it (``seconds`` leaves them out).

    Optional: ``ranks``: seconds of each rank; ``taken``: items of its own input that each rank took; ``each``: how many
    of them at once (0: all); ``puts``: items that one rank put; ``released``: at which fractions of a rank's seconds
    1/k, 2/k, … k/k of its complete groups had left; ``resident_bytes``: loaded and idle, on one device; ``waits``:
    seconds that a rank fed from outside waited, which is what its gets and puts cost.
    """

    stage: str
    devices: int
    portion: int
    items: int
    seconds: float
    peak_bytes: int = 0
    switch_seconds: float = 0.0
    ranks: tuple[float, ...] = ()
    taken: tuple[int, ...] = ()
    each: int = 0
    puts: int = 0
    released: tuple[float, ...] = ()
    resident_bytes: int = 0
    waits: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.stage, str) or not self.stage:
            raise ProfileError(f"stage is the name of a stage, not {self.stage!r}")
        for name, least in _INTEGERS:
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ProfileError(f"{name} of stage {self.stage!r} is an integer of at least {least}, not {value!r}")
        for name in ("seconds", "switch_seconds", "waits"):
            self._seconds(name, getattr(self, name))
        for name in ("ranks", "released"):
            for value in getattr(self, name):
                self._seconds(name, value)
        if len(self.ranks) != len(self.taken) or any(type(n) is not int or n < 0 for n in self.taken):
            raise ProfileError(f"taken of stage {self.stage!r} are items, one number for each of ranks")
        if any(b < a for a, b in pairwise(self.released)):
            raise ProfileError(f"released of stage {self.stage!r} never falls, not {list(self.released)!r}")

    def _seconds(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ProfileError(f"{name} of stage {self.stage!r} is finite and not negative, not {value!r}")


_INTEGERS = (
    ("devices", 0),
    ("portion", 1),
    ("items", 1),
    ("peak_bytes", 0),
    ("each", 0),
    ("puts", 0),
    ("resident_bytes", 0),
)


@dataclass(frozen=True, slots=True)
class StepSample:
    """``seconds`` of a whole step with all stages on ``devices`` in turn; ``portion`` as the run was told (0: all)."""

    devices: int
    portion: int
    seconds: float

    def __post_init__(self) -> None:
        good = all(type(n) is int and n >= 0 for n in (self.devices, self.portion))
        if not good or type(self.seconds) not in (int, float) or not 0 <= self.seconds < math.inf:
            raise ProfileError(f"a step has devices, portion and finite seconds, not {self!r}")


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeated samples of one (stage, devices, portion) in one line.

    ``seconds_per_item`` is the median, ``low`` and ``high`` the quartiles; ``peak_bytes`` is the largest
    seen, ``switch_seconds`` the median.
    """

    stage: str
    devices: int
    portion: int
    samples: int
    seconds_per_item: float
    low: float
    high: float
    peak_bytes: int
    switch_seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Samples of the stages of one flow on one kind of hardware."""

    flow: str
    hardware: str
    samples: tuple[ProfileSample, ...]
    steps: tuple[StepSample, ...] = ()

    def __post_init__(self) -> None:
        for name in ("flow", "hardware"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ProfileError(f"{name} is a fingerprint, not {value!r}")

    def check(self, *, flow: str, hardware: str) -> None:
        """Raise ProfileError when the profile was taken on another flow or other hardware."""
        for name, mine, theirs in (("flow", self.flow, flow), ("hardware", self.hardware, hardware)):
            if mine != theirs:
                raise ProfileError(
                    f"the profile was taken on {name} {mine!r}, this is {name} {theirs!r}: profile again"
                )

    def warnings(self, *, flow: str, hardware: str) -> list[str]:
        """What speaks against using the profile here, one sentence each; for those who go on nevertheless."""
        return [
            f"the profile was taken on {name} {mine!r}, this is {name} {theirs!r}: its times may not hold here"
            for name, mine, theirs in (("flow", self.flow, flow), ("hardware", self.hardware, hardware))
            if mine != theirs
        ]

    def summaries(self) -> tuple[Summary, ...]:
        """One line per (stage, devices, portion), in that order."""
        groups: defaultdict[tuple[str, int, int], list[ProfileSample]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.stage, sample.devices, sample.portion].append(sample)
        return tuple(_summary(*key, groups[key]) for key in sorted(groups))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the number of the format."""
        samples = [asdict(sample) for sample in self.samples]
        steps = [asdict(step) for step in self.steps]
        return {"format": FORMAT, "flow": self.flow, "hardware": self.hardware, "samples": samples, "steps": steps}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """The reverse of ``to_dict``; ProfileError names what is missing, unknown or of a wrong type. What is optional
        may be missing, as it is in older files."""
        _same_names(data, {"format", "flow", "hardware", "samples"}, "the profile", {"steps"})
        if data["format"] != FORMAT:
            raise ProfileError(f"format is {FORMAT}, not {data['format']!r}")
        if not isinstance(data["samples"], list):
            raise ProfileError(f"samples is a list, not {type(data['samples']).__name__}")
        samples = _records(ProfileSample, data["samples"], "samples")
        steps = data.get("steps", [])
        if not isinstance(steps, list):
            raise ProfileError(f"steps is a list, not {type(steps).__name__}")
        return cls(data["flow"], data["hardware"], samples, _records(StepSample, steps, "steps"))

    def save(self, path: Path) -> None:
        """Write JSON aside and rename it when whole."""
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file of ``save``. Raises ProfileError, naming the file, when it is not one."""
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise ProfileError(f"{path}: there is no such file") from error
        except OSError as error:
            raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ProfileError(f"{path}: not JSON: {error}") from error
        if isinstance(data, dict) and {"stages", "devices"} <= data.keys():
            raise ProfileError(f"{path}: this looks like a problem file; give the profile.json")
        if not isinstance(data, dict):
            raise ProfileError(f"{path}: a profile is a mapping, not {type(data).__name__}")
        try:
            return cls.from_dict(data)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error


Record = TypeVar("Record", ProfileSample, StepSample)


def _records(kind: type[Record], rows: list[Any], what: str) -> tuple[Record, ...]:
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    optional = {field.name for field in fields(kind)} - needed
    optional -= _ALWAYS
    needed |= _ALWAYS if kind is ProfileSample else set()
    found = []
    for index, row in enumerate(rows):
        where = f"{what}[{index}]"
        if not isinstance(row, Mapping):
            raise ProfileError(f"{where} is a mapping, not {type(row).__name__}")
        _same_names(row, needed, where, optional)
        try:
            values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
            found.append(kind(**values))
        except (ProfileError, TypeError) as error:
            raise ProfileError(f"{where}: {error}") from error
    return tuple(found)


_ALWAYS = {"peak_bytes", "switch_seconds"}
"""Fields of a sample that every file has, although they have defaults."""


def _same_names(data: Mapping[str, Any], names: set[str], where: str, optional: set[str] | None = None) -> None:
    missing, unknown = sorted(names - data.keys()), sorted(data.keys() - names - (optional or set()))
    if missing:
        raise ProfileError(f"{where} lacks {', '.join(missing)}")
    if unknown:
        raise ProfileError(f"{where} has {', '.join(unknown)}, which this format does not know")


def _summary(stage: str, devices: int, portion: int, samples: list[ProfileSample]) -> Summary:
    per_item = np.array([sample.seconds / sample.items for sample in samples])
    low, median, high = (float(value) for value in np.quantile(per_item, [0.25, 0.5, 0.75]))
    return Summary(
        stage=stage,
        devices=devices,
        portion=portion,
        samples=len(samples),
        seconds_per_item=median,
        low=low,
        high=high,
        peak_bytes=max(sample.peak_bytes for sample in samples),
        switch_seconds=float(np.median([sample.switch_seconds for sample in samples])),
    )
