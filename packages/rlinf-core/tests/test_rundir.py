"""The run directory: what is written where, and what happens when it cannot be."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlinf_core.rundir as rundir
from rlinf_core.errors import RLinfError, RunDirectoryError
from rlinf_core.loggers.jsonl import read_metrics
from rlinf_core.rundir import RunDirectory, to_json

NOW = datetime(2026, 1, 2, 3, 4, 5)


class Colour(Enum):
    RED = 1


@dataclass
class Item:
    id: str
    score: float
    fields: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path, "toys/count", loggers=["jsonl"], now=NOW) as made:
        yield made


def test_runs_of_one_second_get_directories_of_their_own(tmp_path: Path) -> None:
    made = [RunDirectory.create(tmp_path, "toys/count", loggers=[], now=NOW).path for _ in range(3)]
    assert [path.name for path in made] == [f"2026-01-02_03-04-05{end}" for end in ("", "-2", "-3")]
    assert made[0].parent == tmp_path.resolve() / "toys" / "count" and not list(made[0].iterdir())


def test_files_are_written(run: RunDirectory) -> None:
    run.write_config({"seed": 1, "path": Path("a"), "kind": Colour.RED, "text": "ümlaut"})
    run.write_plan("tree: x\n")
    run.trace.add("generate", "generator", 0, 0.0, 1.0)
    run.write_trace()
    run.log(0, "train", {"reward/mean": 0.5, "loss": float("nan")})
    assert run.write_samples([Item("a/0", float("inf"), {"t": (1, 2)}), {"id": "a/1"}]) == 2
    run.write_summary({"accuracy": 0.5})
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == {
        "seed": 1,
        "path": "a",
        "kind": "RED",
        "text": "ümlaut",
    }
    assert (run.path / "plan.yaml").read_text() == "tree: x\n"
    assert len(json.loads((run.path / "trace.json").read_text())["traceEvents"]) == 4
    assert read_metrics(run.path)[0]["loss"] is None
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert samples == [{"id": "a/0", "score": None, "fields": {"t": [1, 2]}}, {"id": "a/1"}]
    assert json.loads((run.path / "summary.json").read_text()) == {"accuracy": 0.5, "non_finite": 2}
    assert not [path.name for path in run.path.iterdir() if path.name.startswith(".")]


def test_json_takes_numbers_of_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    assert to_json({"a": numpy.float32(0.5), "b": numpy.arange(2), "c": numpy.array(3), "d": {1}}) == (
        {"a": 0.5, "b": [0, 1], "c": 3, "d": [1]},
        0,
    )
    assert to_json([True, None, object])[1] == 0


def test_a_metric_that_is_no_number_is_named(run: RunDirectory) -> None:
    with pytest.raises(RLinfError, match="metric 'name' of train step 3 is not a number: 'x'"):
        run.log(3, "train", {"name": "x"})  # type: ignore[dict-item]


def test_a_place_below_a_regular_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot create the run directory below .*file.*: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "runs", "toys/count")


def test_an_unwritable_place_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(
        self: Path, *args: object, **kwargs: object
    ) -> None:  # the tests may run as root, whom modes do not stop
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunDirectoryError, match=r"toys/count.*: Permission denied"):
        RunDirectory.create(tmp_path, "toys/count")


class FullDisk:
    """A file of a full disk: opening works, writing does not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fileno(self) -> int:
        return 1

    def close(self) -> None: ...

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *exc: object) -> None: ...


def test_a_full_disk_is_found_when_the_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "open", lambda path, *a, **k: FullDisk(str(path)), raising=False)
    with pytest.raises(RunDirectoryError, match=r"cannot write in .*2026-01-02.*: No space left on device"):
        RunDirectory.create(tmp_path, "toys/count", now=NOW)
    assert not list((tmp_path / "toys" / "count").iterdir())


def test_a_full_disk_is_named_at_every_later_write(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "open", lambda path, *a, **k: FullDisk(str(path)), raising=False)
    monkeypatch.setattr(run._loggers[0], "_file", FullDisk("metrics.jsonl"))
    for write in (
        lambda: run.write_samples([{"a": 1}]),
        lambda: run.log(0, "train", {"a": 1.0}),
    ):
        with pytest.raises(RunDirectoryError, match="No space left on device"):
            write()


def test_a_real_full_device_is_named(run: RunDirectory) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (run.path / "samples.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match=r"cannot write .*samples\.jsonl: No space left on device"):
        run.write_samples([{"a": 1}])
    with pytest.raises(RunDirectoryError, match="No space left"):
        run.close()
    run.close()


def test_closing_does_not_hide_the_first_cause(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    close = run._loggers[0].close

    def full() -> None:
        close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run._loggers[0], "close", full)
    with pytest.raises(ZeroDivisionError), run:
        _ = 1 // 0
