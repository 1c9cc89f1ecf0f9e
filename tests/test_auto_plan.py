"""From a recipe to a plan: ``rlinf profile``, ``rlinf plan``, ``plan=FILE`` and ``plan=auto`` on the real recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rlinf_core import compose
from rlinf_core.cluster import SLOT
from rlinf_core.errors import ConfigError
from rlinf_core.runner import run
from rlinf_sched import Profile
from rlinf_sched.commands import plan_command
from rlinf_sched.commands.profile import profile_command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

RECIPE = "reasoning/grpo_arithmetic"
SMALL = [
    "num_steps=2",
    "prompts_per_step=8",
    "algorithm.group_size=4",
    "algorithm.minibatches=1",
    "eval.problems=16",
    "warm_start.max_steps=2",
    "warm_start.batch_size=16",
    "loggers=[jsonl]",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        resources={SLOT + str(i): 1.0 for i in range(2)},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


@pytest.mark.slow
def test_profile_plan_and_run(tmp_path: Path, cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "profile"
    overrides = [*SMALL, "profile.steps=1"]
    assert profile_command([RECIPE, *overrides, "--devices", "1,2", "--portions", "all,2", "--out", str(place)]) == 0
    profile = Profile.load(place / "profile.json")
    assert {s.stage for s in profile.samples} == {"generator", "reward", "actor"}
    assert {s.devices for s in profile.samples if s.stage == "actor"} == {1, 2}
    assert {s.portion for s in profile.samples if s.stage == "generator"} == {2, 4, 8}
    problem = json.loads((place / "problem.json").read_text())
    assert problem["items"] == 8 and problem["stages"]["actor"]["per_item"] == 4
    out = tmp_path / "plan.yaml"
    files = [str(place / "problem.json"), "--profile", str(place / "profile.json"), "--out", str(out)]
    for family in ("temporal", "spatial"):
        assert plan_command([*files, "--family", family]) == 0
        said = capsys.readouterr().out
        assert "temporal:" in said and "spatial:" in said, "the best of each family is shown"
        assert f'name: "{family}"' in out.read_text()
    assert run(compose(RECIPE, [*SMALL, f"plan={out}", f"run_dir={tmp_path / 'run'}"]), RECIPE) == 0
    (used,) = (tmp_path / "run").rglob("plan.yaml")
    assert "name: spatial" in used.read_text()


@pytest.mark.slow  # with threads instead of processes it is one of the runs of test_config_keys
def test_auto_profiles_plans_and_goes_on(tmp_path: Path, cluster: None) -> None:
    cfg = compose(RECIPE, [*SMALL, "plan=auto", "profile.steps=1", f"run_dir={tmp_path}"])
    assert run(cfg, RECIPE) == 0
    (auto,) = (p.parent for p in tmp_path.rglob("problem.json"))
    assert (auto / "profile.json").exists()
    (rows,) = (p for p in (tmp_path / RECIPE).rglob("metrics.jsonl"))
    assert sum('"phase": "train"' in line for line in rows.read_text().splitlines()) == 2


def test_a_wrong_scheduler_or_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="m2flov.*did you mean 'm2flow'"):
        run(compose(RECIPE, [*SMALL, "plan=auto", "scheduler=m2flov", f"run_dir={tmp_path}"]), RECIPE)
    with pytest.raises(ConfigError):
        compose(RECIPE, ["profile.steps=0"])
    options = [RECIPE, *SMALL, "+profile.overrides.warm_strat=1", "--out", str(tmp_path / "x")]
    with pytest.raises(ConfigError, match="warm_strat"):
        profile_command(options)
    assert profile_command([RECIPE, *SMALL, "--devices", "none"]) == 2
