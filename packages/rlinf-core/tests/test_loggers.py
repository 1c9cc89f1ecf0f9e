"""Metric loggers: what they write can be read back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.errors import MissingExtraError, RLinfError
from rlinf_core.loggers import axis, read_config, run_name
from rlinf_core.loggers.jsonl import JsonlLogger, read_metrics
from rlinf_core.loggers.mlflow import PATIENCE, MlflowLogger, metric_name
from rlinf_core.registry import Entry, Registry


def test_jsonl_lines_hold_numbers_and_name_what_json_cannot(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log(0, "train", {"reward/mean": 0.1, "kl": float("inf")})
    first = (tmp_path / "metrics.jsonl").read_text()  # flushed before the run goes on
    logger.log(1, "evaluate", {"accuracy": 1.0})
    logger.close()
    row = json.loads(first)
    assert (row["step"], row["phase"], row["reward/mean"], row["kl"]) == (0, "train", 0.1, None)
    assert row["non_finite"] == ["kl"] and row["time"] > 0
    assert [row["phase"] for row in read_metrics(tmp_path)] == ["train", "evaluate"]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(tmp_path) == [{"step": 0}]
    (tmp_path / "metrics.jsonl").write_text('{"step": \n{"step": 1}\n')
    with pytest.raises(ValueError, match="Expecting"):
        read_metrics(tmp_path)


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    """In a process of its own, which shows that neither torch nor tensorflow is loaded."""
    code = f"""
import sys
from pathlib import Path
from rlinf_core.loggers.tensorboard import TensorBoardLogger
folder = Path({str(tmp_path)!r})
logger = TensorBoardLogger(folder)
logger.log(3, "train", {{"reward/mean": 0.25, "loss": float("nan")}})
logger.log(4, "train", {{"reward/mean": 0.5}})
logger.close()
print(sorted({{"torch", "tensorflow", "ray"}} & set(sys.modules)))
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
file, = folder.glob("events.out.tfevents.*")
for event in EventFileLoader(str(file)).Load():
    for value in event.summary.value:
        print(event.step, value.tag, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines == ["[]", "3 train/reward/mean 0.25", "3 train/loss nan", "4 train/reward/mean 0.5"]


def test_phases_other_than_training_stand_at_the_training_steps_done() -> None:
    assert axis(3, {"reward/mean": 1.0}) == 3
    assert axis(0, {"accuracy": 1.0, "train/steps": 40.0}) == 40


def test_the_configuration_is_read_flat(tmp_path: Path) -> None:
    assert read_config(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("seed: 3\nmodel: {path: null, tiny: {layers: 2}}\nplacement: {}\nk: [1, 2]\n")
    assert read_config(tmp_path) == {
        "seed": 3,
        "model.path": None,
        "model.tiny.layers": 2,
        "placement": {},
        "k": [1, 2],
    }
    assert run_name(Path("/runs/reasoning/grpo_math/2026-01-31_12-00-00")) == "grpo_math/2026-01-31_12-00-00"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracking_package_that_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda top: None if top == name else real(top))
    entry = Entry("rlinf.loggers", name, f"rlinf_core.loggers.{name}:{name.capitalize()}Logger", "rlinf-core")
    with pytest.raises(MissingExtraError, match=rf"logger '{name}' .*needs {name}.*rlinf-core\[{name}\]"):
        Registry("rlinf.loggers", [entry]).load(name)


TRACKED = """
import sys
from pathlib import Path
from rlinf_core.loggers.{module} import {cls} as Logger
folder = Path("runs/reasoning/grpo/now")
for start in (0, 2):  # the second is the run that goes on
    logger = Logger(folder)
    for step in (start, start + 1):
        logger.log(step, "train", {{"reward/mean": 0.125 * (step + 1), "loss": float("nan")}})
    logger.log(0, "evaluate", {{"pass@4": 0.75, "train/steps": 2.0}})
    try:
        if start:
            raise ValueError
        logger.close()
    except ValueError:
        logger.close()
{then}
"""


def tracked(tmp_path: Path, module: str, cls: str, then: str = "", **environment: str) -> str:
    """What ``then`` prints after two processes' worth of logging into one run directory."""
    folder = tmp_path / "runs" / "reasoning" / "grpo" / "now"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 3\nmodel: {path: somewhere}\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRACKED.format(module=module, cls=cls, then=then)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wandb_keeps_runs_offline_under_one_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tracked(tmp_path, "wandb", "WandbLogger", WANDB_MODE="offline")
    folder = tmp_path / "runs" / "reasoning" / "grpo" / "now"
    identity = (folder / "wandb-id").read_text().strip()
    files = sorted(folder.glob(f"**/offline-run-*-{identity}/run-{identity}.wandb"))
    assert len(files) == 2  # although both begin in the same second
    kept = b"".join(file.read_bytes() for file in files)
    for part in (b"grpo/now", b"model.path", b"somewhere", b"train/reward/mean", b"0.125", b"0.5", b"evaluate/pass@4"):
        assert part in kept, part


def test_wandb_that_cannot_log_in_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = "from pathlib import Path; from rlinf_core.loggers.wandb import WandbLogger; WandbLogger(Path('.'))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    assert "RLinfError: loggers: wandb cannot begin a run" in done.stderr and "WANDB_MODE=offline" in done.stderr


def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    then = """
run = logger._client.get_run(logger._id)
print(run.info.status, run.info.run_name, sorted(run.data.params.items()))
print([(m.step, m.value) for m in logger._client.get_metric_history(logger._id, "train/reward/mean")])
print([(m.step, m.value) for m in logger._client.get_metric_history(logger._id, "evaluate/pass_at_4")])
"""
    printed = tracked(tmp_path, "mlflow", "MlflowLogger", then, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db")
    assert printed.splitlines()[-3:] == [
        "FAILED grpo/now [('model.path', 'somewhere'), ('seed', '3')]",
        "[(0, 0.125), (1, 0.25), (2, 0.375), (3, 0.5)]",
        "[(2, 0.75), (2, 0.75)]",
    ]


@pytest.mark.parametrize(("given", "said"), [({}, "3 10"), ({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "9"}, "9 10")])
def test_an_mlflow_server_that_does_not_answer_is_not_waited_for_long(
    given: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in PATIENCE:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            raise mlflow.exceptions.MlflowException(" ".join(os.environ[name] for name in PATIENCE))

    monkeypatch.setattr(mlflow, "MlflowClient", Client)
    with pytest.raises(RLinfError, match=f"MLFLOW_TRACKING_URI. cannot begin a run: {said}"):
        MlflowLogger(tmp_path)


def test_mlflow_takes_only_some_characters() -> None:
    assert metric_name("evaluate/pass@4") == "evaluate/pass_at_4"
    assert metric_name("model.tiny[ä]+b") == "model.tiny____b"
