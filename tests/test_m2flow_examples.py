"""The workloads of examples/m2flow: run as a user runs them (in one process, in no time), and their clockwork."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "m2flow"
QUICK = {
    "long_tail": ["prompts=6", "group_size=3", "generator.alpha=0.0002", "generator.beta=0.00001", "reward.item=0.001"],
    "training_heavy": ["prompts=6", "group_size=2", "generator.alpha=0.0002", "trainer.item=0.001"],
    "ppo": ["prompts=6", "group_size=2", "generator.alpha=0.0002", "reference.fixed=0.001", "critic.fixed=0.001"],
    "embodied": ["simulator.envs=10", "simulator.rounds=3", "simulator.fixed=0.001", "policy.fixed=0.001"],
}
SAMPLES = {"long_tail": 18, "training_heavy": 12, "ppo": 12, "embodied": 10}


@lru_cache
def stages() -> ModuleType:
    """The shared module under another name: its own may not stay in this process's table of modules."""
    spec = importlib.util.spec_from_file_location("m2flow_stages", FOLDER / "stages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["m2flow_stages"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rows(recipe: str, place: Path, *overrides: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", f"./examples/m2flow/{recipe}.py"]
    common = ["cluster.debug=true", "num_steps=2", "loggers=[jsonl]", f"run_dir={place}"]
    done = subprocess.run([*command, *common, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (run,) = (place / recipe).iterdir()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", QUICK)
def test_every_plan_computes_the_same(recipe: str, tmp_path: Path) -> None:
    found = {}
    for plan, portion in (("temporal", "null"), ("spatial", "2")):
        overrides = [f"plan={plan}", "cluster.virtual_devices=4", f"portion={portion}"]
        place = tmp_path / f"{plan}{portion}"
        found[plan, portion] = rows(recipe, place, *overrides, *QUICK[recipe])
    for steps in found.values():
        assert [row["samples"] for row in steps] == [SAMPLES[recipe]] * 2
    sums = {key: [row["checksum"] for row in steps] for key, steps in found.items()}
    first = sums["temporal", "null"]
    assert first[0] != first[1]
    assert all(other == first for other in sums.values())


def test_another_seed_draws_other_times(tmp_path: Path) -> None:
    common = ["cluster.virtual_devices=1", *QUICK["long_tail"]]
    one, other = (rows("long_tail", tmp_path / str(seed), f"seed={seed}", *common) for seed in (1, 2))
    sums = [[row["checksum"] for row in steps] for steps in (one, other)]
    assert sums[0] == sums[1], "what is computed does not depend on the times"
    assert one[0]["time/generate_s"] != pytest.approx(other[0]["time/generate_s"], rel=1e-3)


def test_decoding_refills_slots_and_finishes_in_the_order_of_lengths() -> None:
    # Two slots: 0 (3 tokens) and 1 (1 token) start; 2 (4 tokens) takes the slot of 1 and ends at token 5, alone.
    found = list(stages().decode([3, 1, 4], 2, 1.0, 0.25))
    assert [index for _, index in found] == [1, 0, 2]
    assert [seconds for seconds, _ in found] == [1.5, 4.5, 4.5 + 2 * 1.25]


def test_one_slot_takes_one_after_the_other() -> None:
    assert list(stages().decode([2, 1], 1, 1.0, 0.5)) == [(3.0, 0), (4.5, 1)]
    assert list(stages().decode([], 4, 1.0, 0.5)) == []


def test_luck_has_mean_one_a_long_tail_and_a_key() -> None:
    luck = stages().luck
    drawn = [luck(0.6, "a", i) for i in range(4000)]
    assert drawn[7] == luck(0.6, "a", 7) != luck(0.6, "b", 7)
    assert sum(drawn) / len(drawn) == pytest.approx(1.0, abs=0.05)
    assert max(drawn) > 4.0
    assert luck(0.0, "a") == 1.0


def test_late_awakenings_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that oversleeps every time by 10 ms: after five sleeps it is 10 ms late, not 50."""
    module, now, late = stages(), [100.0], 0.01

    def sleep(seconds: float) -> None:
        now[0] += seconds + late

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", sleep)
    watch = module.Stopwatch()
    for _ in range(5):
        watch.spend(0.1)
    assert now[0] - 100.0 == pytest.approx(0.5 + late)
