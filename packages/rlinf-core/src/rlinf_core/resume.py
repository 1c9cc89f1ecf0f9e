"""Where a run goes on: ``resume=none``, ``resume=auto`` or ``resume=PATH``.

``auto`` looks for the newest run of the recipe with the same configuration and continues it in its own directory, where
steps are left (a finished run too, when ``num_steps`` is larger now); with none, a new run begins. The path of a run
directory continues that run in the same way and refuses another configuration; the path of a checkpoint
(``…/checkpoints/step-00000010``) begins a new run from it, whatever else the configuration says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_core.checkpoints import STATE, Checkpoints, State, read_state
from rlinf_core.errors import ConfigError, RunDirectoryError
from rlinf_core.rundir import guard, to_json

NONE, AUTO = "none", "auto"
APPENDED = ("metrics.jsonl", "samples.jsonl")
"""Files that a run appends to: what came after the checkpoint is cut off when the run goes on."""
FREE = ("num_steps", "resume", "run_dir", "loggers", "plan", "portion", "placement", "scheduler", "stop_after")
FREE_BELOW = ("cluster.", "channels.", "checkpoint.", "profile.", "placement.", "logging.")
"""Keys that may differ when a run goes on: they say how long, where and in what portions, not what is computed."""
DRIVER_LOCK, WORKERS_LOCK = ".driver.lock", ".workers.lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What a lock that another process holds answers; anything else: the file system has none."""
MEETING = ".rendezvous-"
"""How the names of the files begin in which ranks that compute together meet; a run that is killed leaves them."""
OLD_WORKERS_S = 60.0
"""How long the workers of a driver that was killed may take to notice and end."""


@dataclass(frozen=True)
class Resumed:
    """``checkpoint``: the folder to load. ``run``: the directory that goes on; ``None`` for a new one."""

    checkpoint: Path
    state: State
    run: Path | None


@dataclass(frozen=True)
class Choice:
    """What ``find`` came to: ``resumed`` or a new run, ``finished`` when nothing is left to do, and what to say."""

    resumed: Resumed | None = None
    finished: Path | None = None
    notes: tuple[str, ...] = ()


def find(resume: str, root: Path, config: Mapping[str, Any], num_steps: int) -> Choice:
    """Where to go on. ``root`` is the folder of the recipe's runs, ``config`` the composed configuration.

    Raises:
        ConfigError: a path that is neither a run nor a checkpoint, a run of another configuration, one that is still
            running.
    """
    if resume == NONE:
        return Choice()
    if resume != AUTO:
        return _of_path(Path(resume).expanduser(), config, num_steps)
    notes = []
    for run in (
        sorted((p for p in root.iterdir() if (p / "config.yaml").is_file()), reverse=True) if root.is_dir() else ()
    ):
        pid = running(run)
        whole = _whole(run, pid)
        if not whole:
            continue
        changed = differences(_config_of(run), config)
        if changed:
            notes.append(f"resume=auto: {run} is left alone, its configuration differs: {changed[0]}")
            continue
        if pid is not None:
            notes.append(f"resume=auto: {run} is left alone, it is still running (process {pid})")
            continue
        return _continued(run, whole[-1][1], num_steps, notes)
    return Choice(notes=(*notes, f"resume=auto: nothing to go on with in {root}, a new run begins"))


def _of_path(path: Path, config: Mapping[str, Any], num_steps: int) -> Choice:
    if (path / STATE).is_file():
        state = read_state(path)
        note = f"a new run from {path}, after {state.steps_done} steps"
        return Choice(Resumed(path.resolve(), state, None), notes=(note,))
    if not path.exists():
        raise ConfigError(f"resume: {path} does not exist; give a run directory, a checkpoint in it, auto or none")
    if not (path / "config.yaml").is_file():
        what = f"lacks {STATE}, so it is half a checkpoint or none" if path.name.startswith("step-") else "is neither"
        raise ConfigError(
            f"resume: {path} {what}; give a run directory (with config.yaml), a whole checkpoint, auto or none"
        )
    if (pid := running(path)) is not None:
        raise ConfigError(f"resume: {path} is still running (process {pid}); stop it first")
    changed = differences(_config_of(path), config)
    if changed:
        raise ConfigError(
            f"resume: {path} was made with another configuration: {'; '.join(changed[:5])}. To change it, begin a new "
            "run from one of its checkpoints: resume=…/checkpoints/step-…"
        )
    whole = _whole(path, None)
    if not whole:
        raise ConfigError(f"resume: {path} has no whole checkpoint (checkpoint.every says when one is made)")
    return _continued(path, whole[-1][1], num_steps, [])


def _whole(run: Path, pid: int | None) -> list[tuple[int, Path]]:
    """The whole checkpoints of a run that process ``pid`` drives, or none."""
    checkpoints = Checkpoints(run)
    if pid is None:
        checkpoints.restore()
    return checkpoints.whole()


def _continued(run: Path, checkpoint: Path, num_steps: int, notes: list[str]) -> Choice:
    state = read_state(checkpoint)
    if state.steps_done >= num_steps and _finished(run):
        return Choice(finished=run, notes=(*notes, f"{run} has all of its {num_steps} steps; nothing to do"))
    note = f"going on with {run} after {state.steps_done} of {num_steps} steps"
    return Choice(Resumed(checkpoint.resolve(), state, run.resolve()), notes=(*notes, note))


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ between an earlier run's configuration and this one's, in words."""
    a, b = _flat(there), _flat(to_json(here)[0])
    return [
        f"{key} was {a[key]!r} and is {b[key]!r} now" if key in a and key in b else f"{key} is only {where}"
        for key in sorted(a.keys() | b.keys())
        if not _free(key) and a.get(key, _ABSENT) != b.get(key, _ABSENT)
        for where in ("there" if key in a else "here",)
    ]


_ABSENT = object()


def _free(key: str) -> bool:
    return key in FREE or key.startswith(FREE_BELOW)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _config_of(run: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"resume: {run / 'config.yaml'} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"resume: {run / 'config.yaml'} is no configuration")
    return data


def _finished(run: Path) -> bool:
    try:
        return json.loads((run / "summary.json").read_text(encoding="utf-8")).get("finished") is True
    except (OSError, ValueError):
        return False


def hold(path: Path, *, shared: bool) -> int | None:
    """Lock a file of a run directory until this process ends; returns its descriptor, or ``None`` where the file system
    has no locks or another process holds it."""
    return _try_hold(path, shared=shared)[0]


def _try_hold(path: Path, *, shared: bool) -> tuple[int | None, bool]:
    """(as ``hold``, whether another process holds the file)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None, False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return None, error.errno in HELD
    return descriptor, False


def lock_run(run: Path) -> int | None:
    """Hold the run's directory for this process; returns the descriptor whose closing lets it go (``None`` where the
    file system has no locks). Raises RunDirectoryError when another process drives the run."""
    path = run / DRIVER_LOCK
    held = hold(path, shared=False)
    if held is not None:
        with guard(path):
            path.write_text(str(os.getpid()))
    elif (pid := running(run)) is not None:
        raise RunDirectoryError(f"{run} is in use by process {pid}")
    return held


def running(run: Path) -> int | None:
    """The process that drives this run now; ``None`` when there is none."""
    path = run / DRIVER_LOCK
    if not path.is_file():
        return None
    held, taken = _try_hold(path, shared=False)
    if held is not None:
        os.close(held)
    if not taken:
        return None
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def take_over(run: Path, state: State) -> None:
    """Make an interrupted run's directory what it was when the checkpoint was made.

    Waits for workers of the old driver that have not ended yet; cuts off what was appended since; removes later and
    half-written checkpoints.
    """
    deadline = time.monotonic() + OLD_WORKERS_S
    lock = run / WORKERS_LOCK
    held = None
    while lock.exists():
        held, taken = _try_hold(lock, shared=False)
        if not taken:
            break
        if time.monotonic() > deadline:
            raise RunDirectoryError(
                f"{run}: workers of the earlier process are still alive after {OLD_WORKERS_S:g} s and may write into "
                f"it; they hold {WORKERS_LOCK}: end them"
            )
        time.sleep(0.1)
    if held is not None:
        os.close(held)
    for name in APPENDED:
        path, size = run / name, state.sizes.get(name, 0)
        if path.is_file() and path.stat().st_size > size:
            with guard(path):
                os.truncate(path, size)
    for meeting in run.glob(f"{MEETING}*"):
        meeting.unlink(missing_ok=True)
    (run / "summary.json").unlink(missing_ok=True)
    checkpoints = Checkpoints(run)
    checkpoints.drop_partial()
    checkpoints.drop_after(state.steps_done)
