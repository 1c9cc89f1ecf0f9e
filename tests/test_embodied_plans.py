"""Plans of the embodied recipe: whatever is placed where, and in whatever sub-batches, the same numbers come out; and
the way from a profile to a plan of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="the extra `gymnasium` is not installed")

from rlinf_core import compose
from rlinf_core.placement import ClusterInfo
from rlinf_core.runner import plan_for, prepare, run
from rlinf_sched import Profile
from rlinf_sched.commands import plan_command, simulate_command
from rlinf_sched.commands.profile import profile_command

pytestmark = pytest.mark.timeout(600)

RECIPE = "embodied/ppo_cartpole"
SMALL = [
    "inference=channel",
    "num_envs=12",
    "num_steps=2",
    "rollout_steps=6",
    "model.dtype=float64",
    "algorithm.epochs=2",
    "algorithm.minibatch_size=24",
    "eval.episodes=3",
    "loggers=[jsonl]",
]
THREADS = "cluster.debug=true"
TIMES = (
    "time",
    "wait/",
    "device/",
    "rollout/stepping_s",
    "rollout/waiting_s",
    "rollout/inference_s",
    "rollout/env_steps_per_s",
    "env_steps_per_s",
)


def leaf(stage: str, devices: str) -> dict[str, Any]:
    return {"leaf": {"stage": stage, "devices": devices}}


def cycle(simulator: str, policy: str, portion: int | None = None) -> dict[str, Any]:
    return {"cycle": {"a": leaf("simulator", simulator), "b": leaf("policy", policy), "portion": portion}}


def then(part: dict[str, Any], actor: str) -> dict[str, Any]:
    return {"share": {"first": part, "then": leaf("actor", actor)}}


def beside(part: dict[str, Any], actor: str, portion: int) -> dict[str, Any]:
    return {"pipe": {"up": part, "down": leaf("actor", actor), "portion": portion}}


# Always four devices, so that every rank has as many threads; and one rank of the trainer: sums over several are
# rounded otherwise.
DEVICES = "cluster.virtual_devices=4"
ALONE = ["plan=temporal", *(f"placement.{name}=0" for name in ("simulator", "policy", "actor"))]
PAIRS = ["plan=temporal", "placement.simulator=0-1", "placement.policy=0-1", "placement.actor=0"]
LAYOUTS: dict[str, list[str] | dict[str, Any]] = {
    "temporal, two ranks": PAIRS,
    "every simulator decides for itself, temporal": ["plan=temporal", "placement.actor=0", "inference=local"],
    "every simulator decides for itself, spatial": ["plan=spatial", "placement.actor=2", "inference=local"],
    "every simulator decides for itself, hybrid": then(leaf("simulator", "0-2"), "2"),
    "temporal, four ranks, sub-batches of 1": ["plan=temporal", "placement.actor=0", "portion=1"],
    "spatial, two sub-batches": ["plan=spatial", "num_stages=2"],
    "spatial, sub-batches of 5, 5 and 2": ["plan=spatial", "portion=5"],
    "hybrid, apart": then(cycle("0", "1"), "0"),
    "hybrid, one simulator and three policies, sub-batches of 4": then(cycle("0", "1-3", 4), "2"),
    "hybrid, three simulators and one policy": then(cycle("0-2", "3", 2), "2"),
    "hybrid, simulators and policies in turn beside the trainer": beside(cycle("0-1", "0-1"), "2", 12),
}


def result(place: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Metrics of all steps without times, and the evaluations' episodes."""
    assert run(compose(RECIPE, [*SMALL, THREADS, DEVICES, f"run_dir={place}", *overrides]), RECIPE) == 0
    (folder,) = (path.parent for path in place.glob(f"{RECIPE}/*/metrics.jsonl"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]
    return metrics, {path.name: path.read_text() for path in sorted(folder.glob("evaluations/*.jsonl"))}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Everything in turn on one device."""
    return result(tmp_path_factory.mktemp("alone"), *ALONE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_plan_gives_the_same_numbers(name: str, alone: Any, tmp_path: Path) -> None:
    plan = LAYOUTS[name]
    if isinstance(plan, dict):
        file = tmp_path / "plan.json"
        file.write_text(json.dumps({"name": name, "tree": plan}))
        plan = [f"plan={file}", *(["inference=local"] if "for itself" in name else [])]
    metrics, episodes = result(tmp_path / "run", *plan)
    assert metrics == alone[0]
    assert episodes == alone[1] and set(episodes) == {"before.jsonl", "after.jsonl"}


def test_what_was_compared(alone: Any) -> None:
    trained = [row for row in alone[0] if row["phase"] == "train"]
    assert [row["rollout/env_steps"] for row in trained] == [72, 72]
    assert all(row["grad_norm"] > 0 for row in trained), "the policy changed between the steps"


def test_auto_plans_simulators_that_decide_for_themselves(tmp_path: Path) -> None:
    """The profile, the choice and the run; there is no cycle to plan."""
    one = ["cluster.virtual_devices=1", "inference=local"]
    assert result(tmp_path / "auto", "plan=auto", "profile.steps=1", *one) == result(tmp_path / "temporal", *one)


@pytest.mark.slow
def test_from_a_profile_to_plans_of_every_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "profile"
    one = ["cluster.virtual_devices=1", THREADS, "profile.steps=1", f"run_dir={tmp_path}"]
    assert profile_command([RECIPE, *SMALL, *one, "--out", str(place)]) == 0
    profile = Profile.load(place / "profile.json")
    problem = json.loads((place / "problem.json").read_text())
    assert problem["items"] == 12 and "scorer" not in problem["stages"]
    (found,) = problem["cycles"]
    assert found["members"] == ["simulator", "policy"] and found["rounds"] in (6, 7)
    assert {s.each for s in profile.samples if s.stage == "simulator"} == {12, 3}
    assert {s.waits for s in profile.samples if s.stage == "simulator"} == {0.0}
    capsys.readouterr()
    cfg = compose(RECIPE, [*SMALL, "cluster.virtual_devices=3"])
    _, graph, groups = prepare(cfg, tmp_path)
    for family in ("temporal", "spatial", "hybrid"):
        out = tmp_path / f"{family}.yaml"
        files = [str(place / "problem.json"), "--profile", str(place / "profile.json")]
        assert plan_command([*files, "--devices", "3", "--family", family, "--out", str(out)]) == 0
        assert f'name: "{family}"' in out.read_text() and "simulator+policy" in capsys.readouterr().out
        plan_for(compose(RECIPE, [*SMALL, f"plan={out}"]), graph, groups, ClusterInfo.virtual(3))
        assert simulate_command([*files, "--devices", "3", "--plan", str(out)]) == 0
        assert "simulator+policy: busy" in capsys.readouterr().out


def test_ranks_that_do_not_divide_the_environments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="num_envs=12 cannot be shared out over 5 ranks .* give num_envs=15"):
        run(compose(RECIPE, [*SMALL, "cluster.virtual_devices=5", f"run_dir={tmp_path}"]), RECIPE)
    assert not list(tmp_path.rglob("metrics.jsonl"))
