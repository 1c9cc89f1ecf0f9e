"""No dead keys: whatever a recipe's configuration offers is read by some run of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rlinf_core import compose
from rlinf_core.cluster import SLOT
from rlinf_core.runner import run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

RECIPE = "reasoning/grpo_arithmetic"
SMALL = [
    "num_steps=1",
    "prompts_per_step=4",
    "algorithm.group_size=2",
    "warm_start.max_steps=2",
    "warm_start.batch_size=8",
]
DEBUG = ["cluster.debug=true", "cluster.virtual_devices=1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        resources={SLOT + "0": 1.0},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


def unread(tmp_path: Path, name: str, *overrides: str) -> tuple[set[str], set[str]]:
    """(keys that the run has, those of them that nothing read)."""
    cfg = compose(RECIPE, [*SMALL, f"run_dir={tmp_path / name}", *overrides])
    keys = set(cfg.unread())
    assert run(cfg, RECIPE) == 0
    left = set(cfg.unread())
    return keys, left


def test_every_key_is_read_by_some_run(tmp_path: Path, cluster: None) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(12) for b in range(12)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["eval.problems=8", "warm_start.problems=64", "warm_start.held_out=8"]
    runs = [
        unread(tmp_path, "default", *DEBUG, "eval.problems=8", "checkpoint.every=1", "eval.every=1"),
        unread(
            tmp_path,
            "jsonl",
            *DEBUG,
            *sizes,
            "task=jsonl",
            f"task.path={problems}",
            "reward=math",
            "algorithm.kl_coef=0.1",
            "algorithm.minibatches=2",
            "trainer.schedule=cosine",
            "trainer.schedule_steps=100",
        ),
    ]
    runs.append(unread(tmp_path, "auto", *DEBUG, "plan=auto", "profile.steps=1", "eval.problems=8"))
    if importlib.util.find_spec("vllm") is not None:
        runs.append(unread(tmp_path, "vllm", "rollout=vllm", "eval.problems=8"))
    keys = set().union(*(k for k, _ in runs))
    read = set().union(*(k - left for k, left in runs))
    assert sorted(keys - read) == []
