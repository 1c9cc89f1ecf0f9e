"""What is said of a run that was interrupted or has failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core import lastwords
from rlinf_core.lastwords import describe, going_on, leave

LINE = '{"step": 0, "phase": "train", "reward/mean": 0.5, "time/step_s": 1.0}\n'

RECIPE = """
from rlinf_core import In, Prompt, Worker, recipe, task
from rlinf_core.errors import ConfigError

class Maker(Worker):
    @task
    def make(self, prompts: In[Prompt]):
        for prompt in prompts:
            if self.step_index == 2:
                raise FAULT
            self.trained(prompt)
        return {"reward/mean": 0.5}

    @task
    def save_checkpoint(self, path):
        pass

@recipe
def program(flow, cfg):
    group = flow.group("maker", Maker, cfg)
    for step in flow.steps(cfg.num_steps):
        prompts = step.channels("prompts")
        step.feed(prompts, [Prompt("p", "text")])
        step.report(group.make(prompts))
        step.join()
        if flow.every(step, cfg.checkpoint.every) and not step.last:
            with flow.checkpoint(step.index + 1) as path:
                for saving in flow.steps(1, name="save"):
                    group.save_checkpoint(path)
                    saving.join()
"""


def run_of(folder: Path, *names: str, metrics: str = "", steps: tuple[int, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    if metrics:
        (folder / "metrics.jsonl").write_text(metrics)
    for step in steps:
        path = folder / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "state.json").write_text(json.dumps({"format": 1, "steps_done": step}))
    return folder


@pytest.mark.parametrize(
    ("steps", "saves", "every", "said"),
    [
        ((20, 40), True, 20, "; last checkpoint: checkpoints/step-00000040, after 40 steps; "),
        ((), True, 0, "; no checkpoint to go on from (checkpoint.every=N makes one"),
        ((), True, 5, "; no checkpoint was complete yet (checkpoint.every=5); `/a/rlinf run x/y "),
        ((), False, 0, "(metrics.jsonl, trace.json)"),
    ],
)
def test_the_line_says_what_is_there_and_how_to_go_on(
    tmp_path: Path, steps: tuple[int, ...], saves: bool, every: int, said: str
) -> None:
    run = run_of(tmp_path / "run", "config.yaml", "trace.json", metrics=LINE, steps=steps)
    line = describe(
        run, saves=saves, every=every, words=["/a/rlinf", "run", "x/y", "task.template='{a} b'", "resume=none"]
    )
    assert line.startswith(f"run directory: {run} (metrics.jsonl, trace.json)") and said in line and "\n" not in line
    command = "`/a/rlinf run x/y 'task.template='\"'\"'{a} b'\"'\"'' resume=auto` goes on from it"
    assert (command in line) == bool(steps)
    assert line.endswith(" resume=none` starts again") == (saves and every == 5)


def test_a_command_of_another_program_is_told_in_words() -> None:
    assert going_on(["/x/main.py", "run"]) == going_on([]) == "the same command with resume=auto"
    assert going_on([".venv/bin/rlinf", "run", "a"]) == "`.venv/bin/rlinf run a resume=auto`"


@pytest.mark.parametrize(
    ("names", "metrics", "bad_input", "said"),
    [
        (["plan.yaml"], "", False, True),
        (["plan.yaml"], "", True, False),
        ([], "", False, False),
        (["plan.yaml"], LINE, True, True),
    ],
)
def test_a_run_that_has_come_to_nothing_is_not_spoken_of(
    tmp_path: Path, names: list[str], metrics: str, bad_input: bool, said: bool
) -> None:
    lines: list[str] = []
    leave(run_of(tmp_path / "run", *names, metrics=metrics), lines.append, saves=False, bad_input=bad_input)
    assert len(lines) == said
    assert (tmp_path / "run" / "run.png").is_file() == bool(metrics)
    assert not metrics or "run.png" in lines[0]


def test_nothing_in_here_hides_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Path) -> None:
        raise KeyboardInterrupt

    lines: list[str] = []
    monkeypatch.setattr(lastwords, "_draw", broken)
    leave(run_of(tmp_path / "run", metrics=LINE), lines.append, saves=False, bad_input=False)
    assert lines == []


@pytest.mark.parametrize(
    ("fault", "every", "said"),
    [
        ('ValueError("the reason")', 1, "last checkpoint: checkpoints/step-00000002, after 2 steps; the same command"),
        ('ConfigError("the reason")', 0, "no checkpoint to go on from (checkpoint.every=N"),
        ('ValueError("the reason")', 3, "no checkpoint was complete yet (checkpoint.every=3); the same command starts"),
    ],
)
def test_a_failed_run_says_it_before_the_cause(tmp_path: Path, fault: str, every: int, said: str) -> None:
    (tmp_path / "failing.py").write_text(RECIPE.replace("FAULT", fault))
    words = ["run", "failing.py", "num_steps=4", "cluster.debug=true", f"checkpoint.every={every}"]
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_core.cli.main", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("rlinf: error: ") and lines[-1].endswith("the reason"), done.stderr
    (line,) = (line for line in lines if line.startswith("run directory: ") and "(" in line)
    assert said in line and "run.png" in line
    assert len(list(tmp_path.rglob("run.png"))) == 1
