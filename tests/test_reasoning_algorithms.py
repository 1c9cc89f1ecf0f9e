"""DAPO, PPO and asynchronous training with the real engines: plans change nothing but time, runs go on where they were.

As in ``test_determinism``: in float64 on the tiny model the same tokens are drawn, kept and trained on under every
plan, and gradient norms agree within 1e-9.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlinf_core import compose
from rlinf_core.cluster import SLOT
from rlinf_core.runner import run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SMALL = [
    "prompts_per_step=8",
    "algorithm.group_size=4",
    "eval.problems=16",
    "warm_start.max_steps=60",
    "warm_start.batch_size=32",
    "loggers=[jsonl]",
]
SHORT = "warm_start.max_steps=10"
"""Where it does not matter whether an answer is right."""
TIMES = ("time", "time/", "wait/", "device/", "tokens_per_s")
DEBUG = ["cluster.debug=true", "cluster.virtual_devices=1"]
SPATIAL = ["plan=spatial", "portion=3"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=4,
        resources={SLOT + str(i): 1.0 for i in range(4)},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


def result(recipe: str, folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics of the training steps without times, and the samples trained on by id, in order."""
    cfg = compose(f"reasoning/{recipe}", [*SMALL, "num_steps=3", f"run_dir={folder}", *overrides])
    assert run(cfg, f"reasoning/{recipe}") == 0
    return read(folder)


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    (found,) = (p.parent for p in folder.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in rows if r["phase"] == "train"]
    lines = [json.loads(line) for line in (found / "samples.jsonl").read_text().splitlines()]
    samples = {line["id"]: line for line in lines}
    assert len(samples) == len(lines), "a sample is written once"
    return metrics, samples


def tokens(samples: dict[str, Any]) -> dict[str, list[int]]:
    return {name: sample["response_ids"] for name, sample in samples.items()}


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], *names: str) -> None:
    assert len(found) == len(expected)
    for row, want in zip(found, expected, strict=True):
        for name in names:
            assert row[name] == pytest.approx(want[name], rel=1e-9, abs=1e-12), name


GROUPS = [f"groups/{name}" for name in ("drawn", "kept", "missing", "refills", "all_right", "all_wrong", "surplus")]


@pytest.mark.parametrize("minibatches", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_dapo_draws_keeps_and_trains_on_the_same_under_every_plan(
    tmp_path: Path, cluster: None, minibatches: int
) -> None:
    how = ["model.dtype=float64", f"algorithm.minibatches={minibatches}"]
    one, samples = result("dapo_arithmetic", tmp_path / "1", *how, *DEBUG)
    for row in one:
        assert row["groups/kept"] + row["groups/missing"] == 8.0 and row["groups/refills"] > 0.0
        dropped = row["groups/drawn"] - row["groups/kept"]
        assert row["samples/dropped"] == 4 * dropped > 0.0, "everything that was drawn is accounted for"
        assert row["samples"] == 4 * row["groups/kept"]
        assert row["groups/without_signal"] == 0.0 or row["reward/overlong_penalty"] < 0.0
    by_group: dict[str, set[float]] = {}
    for name, sample in samples.items():
        by_group.setdefault(name.rpartition("/")[0], set()).add(sample["reward"])
    assert all(rewards == {0.0, 1.0} for rewards in by_group.values())
    assert any(int(name.rpartition("p")[2]) >= 8 for name in by_group), "some of them were drawn again"
    # Portions alone can matter where the trainer takes groups as they come.
    layouts = [SPATIAL] if minibatches == 2 else [[*DEBUG, "portion=3"], SPATIAL]
    for number, layout in enumerate(layouts, start=2):
        other, drawn = result("dapo_arithmetic", tmp_path / str(number), *how, *layout)
        assert tokens(drawn) == tokens(samples)
        same(other, one, "grad_norm", "reward/mean", "loss", *GROUPS)


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ppo_is_the_same_under_every_plan(tmp_path: Path, cluster: None, streamed: bool) -> None:
    how = [SHORT, "model.dtype=float64", "algorithm.critic_warmup_steps=1", "algorithm.lam=0.9"]
    if streamed:
        how += ["algorithm.minibatches=1", "algorithm.whiten=false"]
    one, samples = result("ppo_arithmetic", tmp_path / "1", *how, *DEBUG)
    assert "grad_norm" not in one[0] and one[1]["grad_norm"] > 0.0, "the critic alone learns in the first step"
    assert all(row["critic/grad_norm"] > 0.0 for row in one)
    other, drawn = result("ppo_arithmetic", tmp_path / "2", *how, *SPATIAL, "cluster.virtual_devices=4")
    assert tokens(drawn) == tokens(samples)
    critic = [f"critic/{name}" for name in ("loss", "grad_norm", "explained_variance", "value", "return")]
    same(other, one, "reward/mean", *critic)
    same(other[1:], one[1:], "grad_norm", "loss", "policy/entropy")


def test_ppo_with_the_kl_in_the_reward(tmp_path: Path) -> None:
    keys = [SHORT, "algorithm.kl_coef=100", "algorithm.kl_in=reward", "algorithm.critic_warmup_steps=0"]
    rows, _ = result("ppo_arithmetic", tmp_path, *keys, *DEBUG)
    assert rows[0]["critic/return"] >= -1e-6, "at first the policy is the reference"
    assert rows[-1]["critic/return"] < 0.0, "it has moved, and k3 is never negative"


def test_samples_of_an_older_policy_are_counted(tmp_path: Path, cluster: None) -> None:
    rows, _ = result("async_arithmetic", tmp_path, SHORT, "num_steps=5", *SPATIAL)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(0.0 <= row["staleness/mean"] <= row["staleness/max"] <= 1.0 for row in rows)
    assert rows[0]["policy/engine_gap_max"] < 1e-4, "the first step's samples are of the policy that is trained"


# test_resume_recipe does this with processes that are killed, for the one that is slow here.
@pytest.mark.parametrize("recipe", ["dapo_arithmetic", pytest.param("ppo_arithmetic", marks=pytest.mark.slow)])
def test_a_run_goes_on_to_the_metrics_of_the_uninterrupted_one(tmp_path: Path, recipe: str) -> None:
    whole, samples = result(recipe, tmp_path / "whole", *DEBUG, "num_steps=4")
    part = tmp_path / "part"
    result(recipe, part, *DEBUG, "num_steps=2")
    (checkpoint,) = part.rglob("step-00000002")
    cfg = compose(
        f"reasoning/{recipe}", [*SMALL, *DEBUG, "num_steps=4", f"run_dir={tmp_path / 'on'}", f"resume={checkpoint}"]
    )
    assert run(cfg, f"reasoning/{recipe}") == 0
    rows, drawn = read(tmp_path / "on")
    assert [row for row in rows if row["step"] >= 2] == whole[2:]
    later = {name: ids for name, ids in tokens(samples).items() if name.split("/")[1] in ("2", "3")}
    assert {name: ids for name, ids in tokens(drawn).items() if name in later} == later
