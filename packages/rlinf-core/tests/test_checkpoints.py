"""Checkpoints are whole or not there; which are kept; faults of the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_core import rundir
from rlinf_core.checkpoints import STATE, Checkpoints, State, read_state
from rlinf_core.errors import ConfigError, RunDirectoryError, WaitTimeout
from rlinf_core.rundir import explain_save_error


def state(steps: int, **latest: float) -> Callable[[], State]:
    return lambda: State(steps, version=steps + 1, next_index={"train": steps}, latest=latest)


def save(checkpoints: Checkpoints, steps: int, **latest: float) -> Path:
    with checkpoints.saving(steps, state(steps, **latest)) as path:
        (path / "weights").write_text(str(steps))
    return checkpoints.path(steps)


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_checkpoints_are_whole_and_the_last_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for steps in (1, 2, 10):
        save(checkpoints, steps)
    assert [steps for steps, _ in checkpoints.whole()] == [2, 10]
    with pytest.raises(ZeroDivisionError), checkpoints.saving(11, state(11)) as path:
        (path / "weights").write_text(str(1 // 0))
    assert names(checkpoints) == ["step-00000002", "step-00000010"]
    with checkpoints.saving(10, state(10)) as path:
        (path / "weights").write_text("again")
    assert (checkpoints.path(10) / "weights").read_text() == "again"
    assert read_state(checkpoints.path(10)) == State(10, 11, {"train": 10})


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 2), ("-loss", 3)])
def test_the_best_is_kept_beside_the_last(metric: str, best: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=metric)
    for steps, accuracy, loss in ((1, 0.1, 3.0), (2, 0.9, 2.0), (3, 0.5, 1.0), (4, 0.6, 1.5)):
        save(checkpoints, steps, accuracy=accuracy, loss=loss)
    assert [steps for steps, _ in checkpoints.whole()] == [best, 4]
    assert (checkpoints.folder / "best").resolve() == checkpoints.path(best)
    save(checkpoints, 5, accuracy=0.9, loss=1.0)
    assert (checkpoints.folder / "best").resolve() == checkpoints.path(5), "the later of equal ones"
    assert [steps for steps, _ in checkpoints.whole()] == [5]


def test_a_best_metric_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_best="acuracy")
    save(checkpoints, 1, accuracy=0.5)
    assert not (checkpoints.folder / "best").exists()
    why = checkpoints.no_best({"accuracy": 0.5})
    assert why is not None and "no metric 'acuracy'" in why and "accuracy" in why
    assert checkpoints.no_best({"accuracy": 0.5}) is None
    assert Checkpoints(tmp_path, keep_best="accuracy").no_best({"accuracy": 0.5}) is None


def test_going_on_from_an_earlier_one_removes_the_later(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=5, keep_best="accuracy")
    for steps in (1, 2, 3):
        save(checkpoints, steps, accuracy=float(steps))
    (checkpoints.folder / ".step-00000004.partial").mkdir()
    checkpoints.drop_partial()
    checkpoints.drop_after(2)
    assert names(checkpoints) == ["best", "step-00000001", "step-00000002"]
    assert (checkpoints.folder / "best").resolve() == checkpoints.path(2)


def test_a_folder_without_a_state_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = save(checkpoints, 1)
    (path / STATE).rename(path / "other")
    assert checkpoints.whole() == []
    with pytest.raises(ConfigError, match="half of one"):
        read_state(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_state(tmp_path / "nowhere")
    (path / STATE).write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        read_state(path)
    (path / STATE).write_text(json.dumps({"format": 99, "steps_done": 1}))
    with pytest.raises(ConfigError, match="another format"):
        read_state(path)
    (path / STATE).write_text(json.dumps({"format": 1}))
    with pytest.raises(ConfigError, match="steps_done"):
        read_state(path)


def test_native_code_that_meets_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = pytest.raises(RunDirectoryError, match=r"cannot write .*step-00000001.*: No space left on device")
    with full, Checkpoints(tmp_path).saving(1, state(1)):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    assert explain_save_error(tmp_path / "not" / "yet", RuntimeError("shapes differ")) is None
    assert explain_save_error(tmp_path, WaitTimeout("x")) is None
    monkeypatch.setattr(rundir.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    assert explain_save_error(tmp_path, RuntimeError("unexpected pos 64 vs 0")) is not None


def test_waits_inside_a_checkpoint_stay_what_they_are(tmp_path: Path) -> None:
    for error in (WaitTimeout("too long"), ConnectionResetError("gone")):
        with pytest.raises(type(error)), Checkpoints(tmp_path).saving(1, state(1)):
            raise error
