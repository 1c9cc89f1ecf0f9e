"""The line that says how a run is doing."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(frozen=True)
class ProgressState:
    """What the line shows. ``step`` counts finished steps; times are in seconds; None is left out."""

    phase: str
    step: int
    total: int
    reward: float | None = None
    accuracy: float | None = None
    tokens_per_s: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None
    left_s: float | None = None
    device_use: float | None = None
    activity: str = ""
    episode_return: float | None = None
    success: float | None = None
    env_steps_per_s: float | None = None


def format_seconds(seconds: float) -> str:
    """``0.42 s``, ``3.1 s``, ``2m05s``, ``1h07m``: three digits that matter."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def format_count(number: float) -> str:
    """``950``, ``12.3k``, ``4.56M``."""
    for limit, unit, scale in ((1e4, "", 1.0), (1e6, "k", 1e3), (1e9, "M", 1e6)):
        if number < limit:
            return f"{number / scale:.0f}" if not unit else f"{number / scale:.3g}{unit}"
    return f"{number / 1e9:.3g}G"


def format_line(state: ProgressState, width: int | None = None) -> str:
    """The live line, e.g. ``train 12/80 | reward 0.512 | 3.4 s/step | 3m20s left | 1.2k tok/s | generate 2.1 s``.

    No longer than ``width`` when given: what is asked for least stands last and is left out, piece by piece.
    """
    total = f"/{state.total}" if state.total else ""
    parts = [f"{state.phase} {state.step}{total}"]
    if state.activity:
        parts.append(state.activity)
    if state.reward is not None:
        parts.append(f"reward {state.reward:.3f}")
    if state.accuracy is not None:
        parts.append(f"accuracy {state.accuracy:.1%}")
    if state.episode_return is not None:
        parts.append(f"return {state.episode_return:.4g}")
    if state.success:  # environments without a notion of success always say 0
        parts.append(f"success {state.success:.1%}")
    if state.step_s is not None:
        parts.append(f"{format_seconds(state.step_s)}/step")
    if state.left_s is not None:
        parts.append(f"{format_seconds(state.left_s)} left")
    if state.tokens_per_s is not None:
        parts.append(f"{format_count(state.tokens_per_s)} tok/s")
    if state.env_steps_per_s is not None:
        parts.append(f"{format_count(state.env_steps_per_s)} env steps/s")
    if state.device_use is not None:
        parts.append(f"devices {state.device_use:.0%}")
    pieces = [(" | ", part) for part in parts]
    for index, (name, seconds) in enumerate(state.stages.items()):
        pieces.append((", " if index else " | ", f"{name} {format_seconds(seconds)}"))
    return _joined(pieces, width)


def _joined(pieces: Sequence[tuple[str, str]], width: int | None) -> str:
    """(separator before it, text) of each piece as one line; the first is cut where not even it has room."""
    line = pieces[0][1]
    for index, (separator, text) in enumerate(pieces[1:], start=1):
        longer = f"{line}{separator}{text}"
        more = index < len(pieces) - 1  # the mark that something is left out needs room too
        if width is not None and len(longer) + (2 if more else 0) > width:
            line += " …"
            break
        line = longer
    return line if width is None or len(line) <= width else f"{line[: max(width - 1, 0)]}…"


_REPEATS = {"pass@1": "accuracy", "answers": "problems"}
"""Metrics that say the same as another where their values are equal."""
_FAULTS = ("/errors", "/truncated", "/dropped")
"""Endings of metrics that are worth a word only when they are not 0."""


def format_record(metrics: Mapping[str, float]) -> str:
    """What was measured once, for people: ``accuracy 0.332 (0.277 to 0.392), problems 256, reward/mean 0.332``.

    ``NAME/low`` and ``NAME/high`` are shown as the interval of ``NAME``; repetitions and faults that did not occur are
    left out.
    """
    shown = []
    for name, value in metrics.items():
        base, _, end = name.rpartition("/")
        if (end in ("low", "high") and base in metrics) or (name.endswith(_FAULTS) and value == 0):
            continue
        if metrics.get(_REPEATS.get(name, "")) == value:
            continue
        low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
        interval = f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else ""
        shown.append(f"{name} {value:.4g}{interval}")
    return ", ".join(shown)


def stage_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Stage -> seconds from metrics named ``time/<stage>_s``; ``time/step_s``, the whole step, is not a stage."""
    times = {
        name.removeprefix("time/").removesuffix("_s"): value
        for name, value in metrics.items()
        if name.startswith("time/") and name.endswith("_s")
    }
    times.pop("step", None)
    return times


class Progress:
    """Prints the line: redrawn in place on a terminal, one plain line per step elsewhere.

    It reads the metrics ``reward/mean``, ``accuracy``, ``return``, ``success_once``, ``tokens_per_s``,
    ``env_steps_per_s``, ``device/use`` and ``time/<stage>_s``. The time left is the mean of the last ten steps times
    the steps that are left.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._live = self._stream.isatty()
        self._drawn = 0
        self._recent: deque[float] = deque(maxlen=10)
        self._state = ProgressState("", 0, 0)
        self._started = clock()

    def phase(self, name: str, total: int) -> None:
        """A phase of ``total`` steps begins (0: unknown)."""
        if name != self._state.phase:
            self._finish_line()
            self._recent.clear()
        self._state = ProgressState(name, 0, total)
        self._started = self._clock()

    def tick(self, activity: str) -> None:
        """Show what runs now. Only a terminal shows it."""
        if self._live:
            self._draw(ProgressState(**{**self._state.__dict__, "activity": activity}))

    def step(self, finished: int, metrics: Mapping[str, float]) -> None:
        """``finished`` steps of the phase are done; ``metrics`` are those of the last one."""
        now = self._clock()
        self._recent.append(now - self._started)
        self._started = now
        mean = sum(self._recent) / len(self._recent)
        remaining = self._state.total - finished
        self._state = ProgressState(
            self._state.phase,
            finished,
            self._state.total,
            reward=metrics.get("reward/mean"),
            accuracy=metrics.get("accuracy"),
            tokens_per_s=metrics.get("tokens_per_s"),
            stages=stage_times(metrics),
            step_s=self._recent[-1],
            left_s=mean * remaining if remaining > 0 else None,
            device_use=metrics.get("device/use"),
            episode_return=metrics.get("return"),
            success=metrics.get("success_once"),
            env_steps_per_s=metrics.get("env_steps_per_s"),
        )
        self._draw(self._state)

    def note(self, text: str) -> None:
        """Print a line of its own without breaking the live one."""
        if self._live and self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
        self._stream.write(f"{text}\n")
        if self._live and self._drawn:
            self._drawn = 0
            self._draw(self._state)
        self._stream.flush()

    def close(self) -> None:
        """End the live line, so that whatever is printed next starts on its own."""
        self._finish_line()

    def _draw(self, state: ProgressState) -> None:
        if not self._live:
            self._stream.write(format_line(state) + "\n")
        else:
            line = format_line(state, shutil.get_terminal_size().columns - 1)
            self._stream.write("\r" + line.ljust(self._drawn))
            self._drawn = len(line)
        self._stream.flush()

    def _finish_line(self) -> None:
        if self._live and self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = 0
