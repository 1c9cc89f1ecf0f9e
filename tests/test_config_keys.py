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
MATH = ("reasoning/grpo_math", "reasoning/dapo_math", "reasoning/ppo_math")


def unread(tmp_path: Path, name: str, *overrides: str, recipe: str = RECIPE) -> tuple[set[str], set[str]]:
    """(keys that the run has, those of them that nothing read)."""
    small = SMALL if recipe.startswith("reasoning/") and recipe != "reasoning/eval" else []
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
    for recipe in MATH:
        keys |= set(compose(recipe, [*known, "prompts_per_step=4"]).unread())
    assert dead(keys, runs) == []


def dead(keys: set[str], runs: list[tuple[set[str], set[str]]]) -> list[str]:
    """Those of ``keys`` that no run has read."""
    read = set().union(*(k - left for k, left in runs))
    # An empty mapping is a key of its own; with something in it, what is in it is.
    return sorted(key for key in keys - read if not any(other.startswith(f"{key}.") for other in read))


EMBODIED = [
    *DEBUG,
    "num_steps=1",
    "num_envs=2",
    "rollout_steps=8",
    "algorithm.minibatch_size=8",
    "algorithm.epochs=1",
    "eval.episodes=1",
    "env.max_episode_steps=8",
    "loggers=[jsonl]",
]
OWN = ("env", "model", "algorithm", "eval", "num_envs", "inference", "num_stages", "rollout_steps")
"""What the embodied recipes add; the rest is read in the same places as that of the reasoning ones."""
SIMULATORS = {"ppo_reach": "metaworld", "ppo_pushcube": "mani_skill"}


@pytest.mark.filterwarnings("default")  # simulators warn of what they do themselves
def test_every_embodied_key_is_read_by_some_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "push_the_plate.bddl").write_text("")
    monkeypatch.setenv("FAKE_LIBERO", str(tmp_path))
    toys = Path(__file__).parents[1] / "packages" / "rlinf-embodied" / "tests" / "toys"
    monkeypatch.syspath_prepend(str(toys / "fake_libero"))  # a stand-in for LIBERO
    tiny = "image_size=16 patch_size=8 vision_size=16 vision_heads=2 hidden_size=32 heads=2 kv_heads=1"
    vla = [f"model.tiny.{text}" for text in tiny.split()]
    drawing = all(importlib.util.find_spec(name) for name in ("imageio_ffmpeg", "pygame"))
    films = ["eval.videos=1", "eval.every=1"] if drawing else []
    runs = [
        unread(tmp_path, "pole", *EMBODIED, *films, recipe="embodied/ppo_cartpole"),
        unread(
            tmp_path, "apart", *EMBODIED, "env.isolate=true", "model.squash=false", recipe="embodied/ppo_cartpole"
        ),
        unread(
            tmp_path, "groups", *EMBODIED, *vla, "algorithm.group_size=2", "env.image_size=16",
            recipe="embodied/grpo_libero_vla",
        ),
    ]  # fmt: skip
    (model,) = (tmp_path / "groups").glob("embodied/grpo_libero_vla/*/export")
    again = ["algorithm.group_size=2", f"model.path={model}"]
    runs.append(unread(tmp_path, "again", *EMBODIED, *again, recipe="embodied/grpo_libero_vla"))
    for name, module in SIMULATORS.items():
        if importlib.util.find_spec(module) is not None:
            runs.append(unread(tmp_path, name, *EMBODIED, recipe=f"embodied/{name}"))
    keys = set().union(*(k for k, _ in runs)) - (set() if films else {"eval.video_fps"})
    assert dead({key for key in keys if key.partition(".")[0] in OWN}, runs) == []
