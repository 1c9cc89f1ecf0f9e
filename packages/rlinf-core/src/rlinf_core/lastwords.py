"""What a run that was interrupted or has failed leaves, in one line: where it is, what is in it, how to go on."""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rlinf_core.checkpoints import Checkpoints
from rlinf_core.errors import RLinfError
from rlinf_core.loggers.jsonl import FILE

PLOT_S = 15.0
"""How long the picture of a run that has ended badly may take; ``rlinf plot`` draws it at leisure."""
SHOWN = ("metrics.jsonl", "samples.jsonl", "evaluations", "export", "trace.json", "run.png", "logs")


def leave(run: Path, note: Callable[[str], None], *, saves: bool, bad_input: bool, every: int = 0) -> None:
    """Draw ``run.png`` where there are metrics, and say with ``note`` what the directory has.

    Nothing is said of a run that had not come to its workers, nor of one that was refused before its first metrics.
    ``saves``: the recipe makes checkpoints when ``checkpoint.every`` (``every``) says so. Whatever fails in here is
    left out: what the run has failed of is what its user must see, and comes after this.
    """
    with contextlib.suppress(Exception, KeyboardInterrupt):
        measured = (run / FILE).is_file() and (run / FILE).stat().st_size > 0
        if not measured and (bad_input or not (run / "plan.yaml").is_file()):
            return
        if measured:
            _draw(run)
        note(describe(run, saves=saves, every=every, words=sys.argv))


def describe(run: Path, *, saves: bool, every: int = 0, words: Sequence[str] = ()) -> str:
    """The line about ``run``; ``words`` are those of the command that began it."""
    there = [name for name in SHOWN if (run / name).exists()]
    text = f"run directory: {run} ({', '.join(there) or 'its configuration and plan'})"
    whole = Checkpoints(run).whole()
    if whole:
        step, path = whole[-1]
        return (
            f"{text}; last checkpoint: {path.relative_to(run)}, after {step} steps; {going_on(words)} goes on from it"
        )
    if saves and every:
        text += f"; no checkpoint was complete yet (checkpoint.every={every}); {_said(words)} starts again"
    elif saves:
        text += (
            "; no checkpoint to go on from (checkpoint.every=N makes one every N steps, resume=auto goes on from it)"
        )
    return text


def going_on(words: Sequence[str]) -> str:
    """The command ``words`` with ``resume=auto``; told in words where it was not one of ``rlinf``."""
    if not _is_ours(words):
        return "the same command with resume=auto"
    return _said([*(word for word in words if not word.startswith("resume=")), "resume=auto"])


def _said(words: Sequence[str]) -> str:
    return f"`{shlex.join(words)}`" if _is_ours(words) else "the same command"


def _is_ours(words: Sequence[str]) -> bool:
    return bool(words) and Path(words[0]).name == "rlinf"


def _draw(run: Path) -> None:
    def draw() -> None:
        from rlinf_core.plots import plot_run

        with contextlib.suppress(RLinfError):  # there may be nothing to draw yet
            plot_run(run)

    thread = threading.Thread(target=draw, name="rlinf-plot", daemon=True)
    thread.start()
    thread.join(PLOT_S)
