"""The embodied recipes on the real runtime: they learn, and plans, stages, ranks and kills change nothing but time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf_core import compose
from rlinf_core.errors import PlanError
from rlinf_core.runner import run

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.timeout(600)

RECIPE = "embodied/ppo_cartpole"
PATIENCE_S = 240.0
# Where every group has one rank, threads compute what processes would, and start at once.
THREADS = ["cluster.debug=true", "loggers=[jsonl]"]
SMALL = ["num_steps=3", "num_envs=8", "rollout_steps=24", "algorithm.minibatch_size=64", "algorithm.epochs=2"]
EVALUATED = ["eval.episodes=6"]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the metrics without what the clock says."""
    return {k: v for k, v in row.items() if k != "time" and not k.endswith("_s") and k != "device/use"}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def metrics(folder: Path, *overrides: str, recipe: str = RECIPE) -> list[dict[str, Any]]:
    """What a run comes to, in training and evaluation."""
    cfg = compose(recipe, [*THREADS, *EVALUATED, *SMALL, f"run_dir={folder}", *overrides])
    assert run(cfg, recipe, quiet=True) == 0
    return [timeless(row) for row in rows_of(folder) if row["phase"] in ("train", "evaluate")]


def hybrid(folder: Path, *, local: bool) -> str:
    """Simulator and policy each on a device of their own, or simulators on both, then the trainer."""
    cycle = {"a": {"leaf": {"stage": "simulator", "devices": "0"}}, "b": {"leaf": {"stage": "policy", "devices": "1"}}}
    acting = {"leaf": {"stage": "simulator", "devices": "0-1"}}
    train = {"leaf": {"stage": "actor", "devices": "0"}}
    tree = {"share": {"first": acting if local else {"cycle": cycle | {"portion": 2}}, "then": train}}
    path = folder / "hybrid.yaml"
    path.write_text(yaml.safe_dump({"name": "by hand", "devices": 2, "cpu": {"scorer": 1}, "tree": tree}))
    return f"plan={path}"


ONE = ["cluster.virtual_devices=1", "plan=temporal"]
CHANNEL = "inference=channel"
LAYOUTS: dict[str, list[str]] = {
    "over channels": [*ONE, CHANNEL],
    "over channels, two stages": [*ONE, CHANNEL, "num_stages=2"],
    "over channels, portions of 3": [*ONE, CHANNEL, "portion=3"],
    "over channels, spatial": ["cluster.virtual_devices=3", "plan=spatial", CHANNEL, "portion=4"],
    "over channels, temporal, two simulators, two policies": [
        "cluster.virtual_devices=2",
        "plan=temporal",
        CHANNEL,
        "num_stages=2",
        "placement.actor=0",
    ],
    "over channels, hybrid": ["cluster.virtual_devices=2", CHANNEL],
    "spatial": ["cluster.virtual_devices=2", "plan=spatial", "portion=3"],
    "temporal, four simulators": ["cluster.virtual_devices=4", "plan=temporal", "placement.actor=0"],
    "hybrid": ["cluster.virtual_devices=2"],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One rank of everything, in turn on one device; the simulator decides for itself."""
    found = metrics(tmp_path_factory.mktemp("alone"), *ONE)
    assert [row["phase"] for row in found] == ["evaluate", "train", "train", "train", "evaluate"]
    train = [row for row in found if row["phase"] == "train"]
    assert all(row["env_steps"] == 8 * 24 and row["grad_norm"] > 0.0 for row in train)
    assert found[0]["return"] != found[-1]["return"], "training changes what the policy does"
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_nothing_but_time(layout: str, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    plan = [hybrid(tmp_path, local=layout == "hybrid")] if "hybrid" in layout else []
    assert metrics(tmp_path / "run", *LAYOUTS[layout], *plan) == alone


def test_another_seed_is_another_run(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    other = metrics(tmp_path, *ONE, "seed=1")
    assert all(a["loss"] != b["loss"] for a, b in zip(alone, other, strict=True) if a["phase"] == "train")


def test_environments_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"group 'simulator': num_envs=8 cannot be shared out over 3 ranks × num_stages=1"
    ):
        metrics(tmp_path, "cluster.virtual_devices=3", "plan=temporal", "placement.actor=0")


def test_cartpole_is_learnt(tmp_path: Path) -> None:
    cfg = compose(RECIPE, [*THREADS, *ONE, "num_steps=35", "eval.episodes=20", f"run_dir={tmp_path}"])
    assert run(cfg, RECIPE) == 0
    before, after = (row for row in rows_of(tmp_path) if row["phase"] == "evaluate")
    assert after["return/low"] > before["return/high"] and after["return"] > 2 * before["return"]
    (folder,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert (folder / "run.png").stat().st_size > 10_000 and (folder / "export" / "policy.json").is_file()
    lines = (folder / "evaluations" / "after.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["return"] for line in lines) / 20 == pytest.approx(after["return"])


KILLED = (*THREADS, *ONE, *SMALL, *EVALUATED, "num_steps=5", "checkpoint.every=2", "eval.every=2", "resume=auto")


def command(folder: Path, inference: str) -> list[str]:
    own = (f"inference={inference}", f"run_dir={folder}")
    return [sys.executable, "-m", "rlinf_core.cli.main", "run", RECIPE, *KILLED, *own]


def finish(folder: Path, inference: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, inference), capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["local", "channel"])
def test_a_killed_run_comes_to_the_same_metrics(inference: str, tmp_path: Path) -> None:
    """Environments are in the middle of episodes at the checkpoint: they must go on from there."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with ThreadPoolExecutor(1) as pool:
        left_alone = pool.submit(finish, whole, inference)
        kill_and_go_on(killed, inference)
        done = left_alone.result()
    assert done.returncode == 0, done.stderr
    assert curve(killed) == curve(whole)
    finished = finish(killed, inference)
    assert finished.returncode == 0 and "nothing to do" in finished.stderr, finished.stderr


def curve(folder: Path) -> list[dict[str, Any]]:
    return [timeless(row) for row in rows_of(folder) if row["phase"] in ("train", "evaluate")]


def kill_and_go_on(killed: Path, inference: str) -> None:
    run = subprocess.Popen(command(killed, inference), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    while not any(row["phase"] == "train" and row["step"] == 2 for row in (rows_of(killed) if began(killed) else [])):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)  # another process's file: there is nothing to wait on
    run.kill()
    run.wait(30)
    again = finish(killed, inference)
    assert again.returncode == 0, again.stderr
    assert "going on with" in again.stderr


def began(folder: Path) -> bool:
    return any(folder.rglob("metrics.jsonl"))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for LIBERO, which has a Python environment of its own."""
    (tmp_path / "suite").mkdir()
    for name in ("push_the_plate", "open_the_drawer"):
        (tmp_path / "suite" / f"{name}.bddl").write_text("")
    monkeypatch.setenv("FAKE_LIBERO", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path("packages/rlinf-embodied/tests/toys/fake_libero").resolve()))


VLA = [
    "num_steps=2",
    "num_envs=4",
    "algorithm.group_size=2",
    "algorithm.minibatch_size=8",
    "rollout_steps=8",
    "env.image_size=16",
    "env.settle_steps=0",
    "env.max_episode_steps=12",
    "model.tiny.image_size=16",
    "model.tiny.patch_size=8",
    "model.tiny.vision_size=16",
    "model.tiny.vision_heads=2",
    "model.tiny.hidden_size=32",
    "model.tiny.heads=2",
    "model.tiny.kv_heads=1",
    "model.tiny.intermediate_size=48",
    "eval.episodes=2",
]


def test_a_vision_language_action_policy_is_trained_by_group(stand_in: None, tmp_path: Path) -> None:
    """The whole GRPO recipe: neither two stages change what is done, nor that simulators decide for themselves."""
    pytest.importorskip("transformers")
    recipe = "embodied/grpo_libero_vla"
    found = metrics(tmp_path / "1", *VLA, *ONE, recipe=recipe)
    train = [row for row in found if row["phase"] == "train"]
    assert [row["phase"] for row in found] == ["evaluate", "train", "train", "evaluate"]
    assert all(row["grad_norm"] > 0.0 and row["episodes"] == 4 for row in train)
    assert metrics(tmp_path / "2", *VLA, *ONE, "num_stages=2", recipe=recipe)[1]["return"] == train[0]["return"]
    assert metrics(tmp_path / "3", *VLA, *ONE, "inference=local", recipe=recipe) == found
