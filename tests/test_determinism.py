"""DESIGN's determinism classes on the real recipe: plans, ranks and portions change nothing but time.

(a) the same plan and seed: bit-equal metrics and samples; (b) in float64 on the tiny model: equal token ids over
plans, ranks and portions for three steps, gradient norms within 1e-9; (c) in float32: the first step's samples are
the same, its gradient norm within 1e-5.
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

RECIPE = "reasoning/grpo_arithmetic"
SMALL = [
    "num_steps=3",
    "prompts_per_step=8",
    "algorithm.group_size=4",
    "eval.problems=32",
    "warm_start.max_steps=30",
    "warm_start.batch_size=32",
    "loggers=[jsonl]",
]
TIMES = ("time", "time/", "wait/", "device/", "tokens_per_s")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs; two of its four slots are pinned to a core each, as on a two-core machine."""
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


def result(tmp_path: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics of the run's steps without times, and its samples by (step, id)."""
    cfg = compose(RECIPE, [*SMALL, f"run_dir={tmp_path}", *overrides])
    assert run(cfg, RECIPE) == 0
    (folder,) = (p.parent for p in tmp_path.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]
    samples: dict[str, Any] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["id"] not in samples, "a sample is written once"
        samples[sample["id"]] = sample
    return metrics, samples


def tokens(samples: dict[str, Any]) -> dict[str, list[int]]:
    return {name: sample["response_ids"] for name, sample in samples.items()}


def train_rows(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in metrics if row["phase"] == "train"]


STREAMED = ["algorithm.minibatches=1"]
"""The trainer takes whole groups as they come (in the order of the step) instead of the batch at once."""
# Where every group has one rank, threads compute what processes would, and start at once.
THREADS = ["cluster.debug=true", "cluster.virtual_devices=2"]
LAYOUTS = {
    "temporal, one rank": [*THREADS, "plan=temporal", "placement.generator=0", "placement.actor=0"],
    "temporal, two ranks": ["plan=temporal", "placement.generator=0-1", "placement.actor=0-1"],
    "spatial, one rank each, portions of 2": [
        *THREADS,
        "plan=spatial",
        "portion=2",
        "placement.generator=0",
        "placement.actor=1",
    ],
    "spatial, two ranks each, portions of 3": ["plan=spatial", "portion=3"],
}
STREAMED_LAYOUTS = {
    "temporal, one rank": LAYOUTS["temporal, one rank"],
    "temporal, one rank, portions of 8": [*LAYOUTS["temporal, one rank"], "portion=8"],
    "spatial, two ranks each, portions of 3": LAYOUTS["spatial, two ranks each, portions of 3"],
}


SPREAD = "spatial, two ranks each, portions of 3"
EXACT = "model.dtype=float64"


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A run in float64 that is spread over all devices, for the tests that compare others with it."""
    return result(tmp_path_factory.mktemp("spread"), EXACT, *LAYOUTS[SPREAD])


def test_a_same_plan_and_seed_is_bit_equal(tmp_path: Path, spread: tuple[Any, Any]) -> None:
    metrics, samples = result(tmp_path, EXACT, *LAYOUTS[SPREAD])
    assert metrics == spread[0]
    assert samples == spread[1]


@pytest.mark.slow
def test_a_same_plan_and_seed_is_bit_equal_in_float32_as_groups_come(tmp_path: Path) -> None:
    first, again = (result(tmp_path / name, *LAYOUTS[SPREAD], *STREAMED) for name in ("1", "2"))
    assert first[0] == again[0]
    assert first[1] == again[1]


def check_all_alike(runs: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]) -> None:
    reference = runs["temporal, one rank"]
    assert len(reference[1]) == 3 * 8 * 4
    rewards = [sample["reward"] for sample in reference[1].values()]
    assert 0 < sum(rewards) < len(rewards), "some right and some wrong answers, else there is no gradient to compare"
    for name, (metrics, samples) in runs.items():
        assert tokens(samples) == tokens(reference[1]), name
        for row, want in zip(train_rows(metrics), train_rows(reference[0]), strict=True):
            assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-9, abs=1e-12), name
            assert row["reward/mean"] == pytest.approx(want["reward/mean"], rel=1e-12), name


def test_b_float64_gives_equal_tokens_and_gradients_under_every_layout(tmp_path: Path, spread: tuple[Any, Any]) -> None:
    runs = {
        name: result(tmp_path / str(i), EXACT, *layout)
        for i, (name, layout) in enumerate(LAYOUTS.items())
        if name != SPREAD
    }
    check_all_alike({**runs, SPREAD: spread})
    _, other = result(tmp_path / "other", EXACT, *LAYOUTS["temporal, one rank"], "num_steps=1", "seed=1")
    drawn = tokens(spread[1])
    assert len(other) == 8 * 4 and any(drawn[name] != ids for name, ids in tokens(other).items())


@pytest.mark.slow
def test_b_float64_is_the_same_as_groups_come(tmp_path: Path) -> None:
    check_all_alike(
        {
            name: result(tmp_path / str(i), EXACT, *layout, *STREAMED)
            for i, (name, layout) in enumerate(STREAMED_LAYOUTS.items())
        }
    )


@pytest.mark.slow
def test_c_float32_gives_the_same_first_step(tmp_path: Path) -> None:
    short = ["num_steps=1", "warm_start.max_steps=0"]
    one = result(tmp_path / "1", *LAYOUTS["temporal, one rank"], *short)
    two = result(tmp_path / "2", *LAYOUTS[SPREAD], *short)
    assert tokens(one[1]) == tokens(two[1])
    for row, want in zip(train_rows(two[0]), train_rows(one[0]), strict=True):
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5, abs=1e-7)
