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


# What a recipe may be run with; the keys of all of these are looked at, few of them are run.
OPTIONS = (
    ("reasoning/grpo_arithmetic", ()),
    ("reasoning/grpo_arithmetic", ("task=reasoning_gym",)),
    ("reasoning/grpo_arithmetic", ("reward=math", "trainer=deepspeed")),
    ("reasoning/async_arithmetic", ("trainer=megatron",)),
    ("reasoning/dapo_arithmetic", ("rollout=vllm",)),
    ("reasoning/ppo_arithmetic", ()),
)


def unread(tmp_path: Path, name: str, *overrides: str, recipe: str = RECIPE) -> tuple[set[str], set[str]]:
    """(keys that the run has, those of them that nothing read)."""
    small = [] if recipe == "reasoning/eval" else SMALL
    cfg = compose(recipe, [*small, f"run_dir={tmp_path / name}", *overrides])
    keys = set(cfg.unread())
    assert run(cfg, recipe) == 0
    left = set(cfg.unread())
    return keys, left


def test_every_key_is_read_by_some_run(tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(12) for b in range(12)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_rewards.py").write_text("def length(text, answer, fields):\n    return float(len(text))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = ["eval.problems=8", "warm_start.problems=64", "warm_start.held_out=8"]
    jsonl = ["task=jsonl", f"task.path={problems}"]
    runs = [
        unread(tmp_path, "plain", *DEBUG, "eval.problems=8", "eval.every=1", "checkpoint.every=1", "resume=auto"),
        unread(
            tmp_path,
            "jsonl",
            *DEBUG,
            *sizes,
            *jsonl,
            "reward=math",
            "algorithm.kl_coef=0.1",
            "algorithm.minibatches=2",
            "trainer.schedule=cosine",
            "trainer.schedule_steps=100",
        ),
        unread(tmp_path, "auto", *DEBUG, *sizes, "plan=auto", "profile.steps=1"),
        unread(tmp_path, "critic", *DEBUG, *sizes, "trainer=deepspeed", recipe="reasoning/ppo_arithmetic"),
        unread(
            tmp_path,
            "refills",
            *DEBUG,
            *sizes,
            "trainer=megatron",
            "reward=function",
            "reward.function=own_rewards:length",
            recipe="reasoning/dapo_arithmetic",
        ),
    ]
    (model,) = (tmp_path / "plain").glob("reasoning/grpo_arithmetic/*/export")
    known = [*jsonl, f"model.path={model}", "eval.problems=4", "sampling.max_new_tokens=4"]
    runs.append(unread(tmp_path, "answers", *DEBUG, *known, recipe="reasoning/eval"))
    if importlib.util.find_spec("vllm") is not None:
        runs.append(unread(tmp_path, "vllm", *sizes, "rollout=vllm"))
    keys = set().union(*(k for k, _ in runs))
    for recipe, chosen in OPTIONS:
        if importlib.util.find_spec("vllm") is not None or "rollout=vllm" not in chosen:
            keys |= set(compose(recipe, list(chosen)).unread())
    read = set().union(*(k - left for k, left in runs))
    # An empty mapping is a key of its own; with something in it, what is in it is.
    dead = {key for key in keys - read if not any(other.startswith(f"{key}.") for other in read)}
    assert sorted(dead) == []
