"""Which run goes on, what is refused, and that a killed run comes to the metrics of one that was not."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf_core.checkpoints import Checkpoints, State
from rlinf_core.errors import ConfigError, RunDirectoryError
from rlinf_core.resume import DRIVER_LOCK, WORKERS_LOCK, differences, find, hold, lock_run, running, take_over

CONFIG = {"num_steps": 4, "seed": 1, "trainer": {"lr": 0.1}, "cluster": {"debug": True}, "resume": "auto"}


def a_run(root: Path, name: str, *, config: Mapping[str, Any] = CONFIG, steps: int = 2) -> Path:
    run = root / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    if steps:
        with Checkpoints(run).saving(steps, lambda: State(steps, 3, {"train": steps}, {"metrics.jsonl": 4})):
            pass
    return run


def test_auto_takes_the_newest_unfinished_run_of_the_same_configuration(tmp_path: Path) -> None:
    assert find("none", tmp_path, CONFIG, 4).resumed is None
    assert "nothing to go on with" in find("auto", tmp_path / "nowhere", CONFIG, 4).notes[0]
    older, newer = a_run(tmp_path, "2026-01-01_00-00-00"), a_run(tmp_path, "2026-01-02_00-00-00")
    a_run(tmp_path, "2026-01-03_00-00-00", steps=0)
    other = a_run(tmp_path, "2026-01-04_00-00-00", config={**CONFIG, "trainer": {"lr": 0.2}})
    choice = find("auto", tmp_path, {**CONFIG, "cluster": {"debug": False}, "num_steps": 9}, 9)
    assert choice.resumed is not None and choice.resumed.run == newer.resolve()
    assert choice.resumed.checkpoint == (newer / "checkpoints" / "step-00000002").resolve()
    assert f"{other} is left alone" in choice.notes[0] and "trainer.lr was 0.2 and is 0.1 now" in choice.notes[0]
    held = lock_run(newer)
    assert running(newer) == os.getpid()
    choice = find("auto", tmp_path, CONFIG, 4)
    assert choice.resumed is not None and choice.resumed.run == older.resolve()
    assert any("still running" in note for note in choice.notes)
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        lock_run(newer)
    assert held is not None
    os.close(held)
    assert running(newer) is None


def test_a_finished_run_is_not_run_again_but_longer(tmp_path: Path) -> None:
    run = a_run(tmp_path, "2026-01-01_00-00-00", steps=4)
    (run / "summary.json").write_text(json.dumps({"finished": True}))
    assert find("auto", tmp_path, CONFIG, 4).finished == run
    longer = find("auto", tmp_path, {**CONFIG, "num_steps": 6}, 6)
    assert longer.finished is None and longer.resumed is not None and longer.resumed.state.steps_done == 4


def test_paths_are_refused_by_name(tmp_path: Path) -> None:
    run = a_run(tmp_path, "a")
    forked = find(str(run / "checkpoints" / "step-00000002"), tmp_path, {**CONFIG, "seed": 5}, 4)
    assert forked.resumed is not None and forked.resumed.run is None
    for path, why in (
        (tmp_path / "b", "does not exist"),
        (tmp_path, "is neither"),
        (a_run(tmp_path, "c", steps=0), "no whole checkpoint"),
    ):
        with pytest.raises(ConfigError, match=why):
            find(str(path), tmp_path, CONFIG, 4)
    with pytest.raises(ConfigError, match="another configuration: seed was 1 and is 2 now"):
        find(str(run), tmp_path, {**CONFIG, "seed": 2}, 4)
    held = lock_run(run)
    assert held is not None
    with pytest.raises(ConfigError, match=f"still running .process {os.getpid()}"):
        find(str(run), tmp_path, CONFIG, 4)
    os.close(held)
    (run / "config.yaml").write_text("[")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        find(str(run), tmp_path, CONFIG, 4)


def test_only_what_decides_results_is_compared() -> None:
    assert differences(CONFIG, {**CONFIG, "plan": "spatial", "loggers": [], "num_steps": 1}) == []
    assert differences({"a": {"b": 1}}, {"a": {}}) == ["a is only here", "a.b is only there"]


def test_what_came_after_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    run = a_run(tmp_path, "a")
    (run / "metrics.jsonl").write_text("one\ntwo\n")
    (run / "samples.jsonl").write_text("x")
    (run / "summary.json").write_text("{}")
    (run / "checkpoints" / ".step-00000003.partial").mkdir()
    (run / WORKERS_LOCK).touch()
    (run / ".rendezvous-actor-0a1b2c3d.0").touch()
    take_over(run, State(2, sizes={"metrics.jsonl": 4, "samples.jsonl": 7}))
    assert (run / "metrics.jsonl").read_text() == "one\n"
    assert (run / "samples.jsonl").read_text() == "x"
    assert not (run / "summary.json").exists() and not list(run.glob(".rendezvous-*"))
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000002"]


def test_workers_of_the_old_driver_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, "a")
    held = hold(run / WORKERS_LOCK, shared=True)
    assert held is not None
    monkeypatch.setattr("rlinf_core.resume.OLD_WORKERS_S", 0.0)
    with pytest.raises(RunDirectoryError, match="still alive"):
        take_over(run, State(2))
    os.close(held)
    take_over(run, State(2))
    assert not (run / DRIVER_LOCK).exists()


def test_a_file_system_without_locks_is_not_a_run_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    run = a_run(tmp_path, "a")
    (run / WORKERS_LOCK).touch()
    assert lock_run(run) is None and running(run) is None
    choice = find("auto", tmp_path, CONFIG, 4)
    assert choice.resumed is not None and choice.resumed.run == run.resolve()
    take_over(run, choice.resumed.state)


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    run = a_run(tmp_path, "a")
    whole = run / "checkpoints" / "step-00000002"
    whole.rename(whole.with_name(".step-00000002.old"))
    held = lock_run(run)
    assert held is not None and find("auto", tmp_path, CONFIG, 4).resumed is None, "its process may be at it"
    os.close(held)
    choice = find("auto", tmp_path, CONFIG, 4)
    assert choice.resumed is not None and choice.resumed.checkpoint == whole.resolve()
    take_over(run, choice.resumed.state)
    assert (whole / "state.json").is_file()


RECIPE = """
from __future__ import annotations
import json, os, random, signal
from dataclasses import dataclass
from pathlib import Path
from rlinf_core import In, Out, Prompt, Worker, recipe, task

@dataclass
class Keys:
    num_steps: int = 5
    kill: str = ""
    where: str = ""
    factor: int = 3

def here(cfg, what):
    if cfg.kill == what:
        if cfg.where:
            Path(cfg.where).write_text(str(os.getppid()))
            import threading
            threading.Event().wait(120)
        os.kill(os.getpid(), signal.SIGKILL)

class Learner(Worker):
    collective = True
    barrier = "batch"
    process_group = False
    def setup(self):
        self.total, self.random = 1.0, random.Random(0)
    @task
    def learn(self, numbers: In[Prompt]):
        for portion in numbers.batches():
            here(self.cfg, f"learn {self.step_index}")
            self.total = (self.cfg.factor * self.total + sum(int(p.text) for p in portion) + self.random.random()) % 97
            self.trained(portion)
        return {"total": self.total}
    @task
    def save(self, path: str):
        Path(path, "learner").mkdir()
        file = Path(path, "learner", "state.json")
        file.write_text(json.dumps([self.total]))
        here(self.cfg, f"save {self.step_index}")
        file.write_text(json.dumps([self.total, self.random.getstate()]))
    @task
    def load(self, path: str):
        self.total, state = json.loads(Path(path, "learner", "state.json").read_text())
        self.random.setstate((state[0], tuple(state[1]), state[2]))
    def weights(self):
        return iter(())

class Taker(Worker):
    device = False
    def install_weights(self, version, weights):
        self.version = version
    @task
    def look(self):
        return {"version": self.version}

@recipe(schema=Keys)
def program(flow, cfg):
    learner = flow.group("learner", Learner, cfg)
    taker = flow.group("taker", Taker, cfg)
    if flow.resumed_steps:
        for step in flow.steps(1, name="restore"):
            learner.load(flow.resumed_path)
            learner.publish_weights(to=taker)
            step.join()
    else:
        for step in flow.steps(1, name="begin"):
            learner.publish_weights(to=taker)
            step.join()
    for step in flow.steps(cfg.num_steps, start=flow.resumed_steps):
        numbers = step.channels("numbers")
        step.feed(numbers, [Prompt(id=f"{step.index}/{i}", text=str(step.index + i)) for i in range(4)])
        step.report(learner.learn(numbers))
        learner.publish_weights(to=taker)
        step.report(taker.look())
        step.join()
        if flow.every(step, cfg.checkpoint.every):
            with flow.checkpoint(step.index + 1) as path:
                for inner in flow.steps(1, name="save"):
                    learner.save(path)
                    inner.join()
"""


def command(folder: Path, *overrides: str) -> list[str]:
    recipe = folder / "killed.py"
    recipe.write_text(RECIPE)
    keys = (
        "loggers=[jsonl]",
        f"run_dir={folder / 'runs'}",
        "checkpoint.every=2",
        "resume=auto",
        "cluster.virtual_devices=1",
    )
    return [sys.executable, "-m", "rlinf_core.cli.main", "run", str(recipe), *keys, *overrides]


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *overrides), capture_output=True, text=True, timeout=180)


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """What the training steps of the only run came to, times left out."""
    (place,) = (folder / "runs" / "killed").iterdir()
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["total"], line["version"]) for line in lines if line["phase"] == "train"]


@pytest.fixture(scope="module", name="expected")
def _expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, "cluster.debug=true")
    assert done.returncode == 0, done.stderr
    found = curve(folder)
    assert [step for step, *_ in found] == [0, 1, 2, 3, 4]
    return found


# Before the first save, after one, and in the middle of another; the slow ones are the same at other steps.
MOMENTS = ["save 0", "learn 3", "save 1"]


@pytest.mark.parametrize(
    "moment", [*MOMENTS, *(pytest.param(m, marks=pytest.mark.slow) for m in ("learn 0", "learn 2", "learn 4"))]
)
def test_a_killed_run_goes_on_to_the_same_metrics(moment: str, expected: list[Any], tmp_path: Path) -> None:
    """Steps are saved after the second and the fourth; ``save`` kills in the middle of saving."""
    killed = run(tmp_path, "cluster.debug=true", f"kill={moment}")
    assert killed.returncode == -signal.SIGKILL
    early = moment in ("learn 0", "save 0")
    if early:  # nothing was saved: another run begins
        done = run(tmp_path, "cluster.debug=true")
        assert done.returncode == 0 and "nothing to go on with" in done.stderr, done.stderr
        assert len(list((tmp_path / "runs" / "killed").iterdir())) == 2
        return
    (place,) = (tmp_path / "runs" / "killed").iterdir()
    text = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(text.replace(f"kill: {moment}", "kill: ''"))
    done = run(tmp_path, "cluster.debug=true")
    assert done.returncode == 0, done.stderr
    steps = 4 if moment == "learn 4" else 2
    assert f"after {steps} of 5 steps" in done.stderr
    assert curve(tmp_path) == expected
    again = run(tmp_path, "cluster.debug=true")
    assert again.returncode == 0 and curve(tmp_path) == expected


def test_a_run_made_longer_goes_on(expected: list[Any], tmp_path: Path) -> None:
    assert run(tmp_path, "cluster.debug=true", "num_steps=2").returncode == 0
    done = run(tmp_path, "cluster.debug=true", "num_steps=2")
    assert done.returncode == 0 and "nothing to do" in done.stderr, done.stderr
    assert run(tmp_path, "cluster.debug=true", "num_steps=5").returncode == 0
    assert curve(tmp_path) == expected
    changed = run(tmp_path, "cluster.debug=true", "factor=4", "num_steps=1")
    assert changed.returncode == 0 and "factor was 3 and is 4 now" in changed.stderr


@pytest.mark.ray
def test_a_driver_that_was_killed_is_taken_over(expected: list[Any], tmp_path: Path) -> None:
    """With real processes: the driver dies while a worker is at work, and the next one starts at once."""
    where = tmp_path / "here"
    first = subprocess.Popen(
        command(tmp_path, "kill=learn 3", f"where={where}"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not where.exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)  # another process's file: nothing to wait on
    first.kill()
    first.wait(30)
    (place,) = (tmp_path / "runs" / "killed").iterdir()
    text = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(
        text.replace("kill: learn 3", "kill: ''").replace(f"where: {where}", "where: ''")
    )
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path) == expected
