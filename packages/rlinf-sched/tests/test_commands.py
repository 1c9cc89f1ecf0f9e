"""``rlinf plan`` and ``rlinf simulate`` on files; faults go to stderr with exit code 2."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlinf_sched import Profile, ProfileSample, SchedError, plan
from rlinf_sched.commands import plan_command, simulate_command
from rlinf_sched.commands.profile import chosen_of, table
from rlinf_sched.problemfile import problem_from_dict

DATA: dict[str, Any] = {
    "devices": 4,
    "items": 16,
    "hardware": "cpu",
    "stages": {
        "gen": {
            "group": 2,
            "cost": {"kind": "stream", "lengths": {"weibull": [1.8, 7, 26]}, "slots": [4], "alpha": 0.1, "group": 2},
        },
        "train": {"barrier": "group", "group": 2, "cost": {"spread": 0.5, "memory": {"resident": 1e9}}},
    },
    "edges": [["gen", "train"]],
}


def written(folder: Path, data: dict[str, Any]) -> str:
    path = folder / "problem.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_plan_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert plan_command([written(tmp_path, DATA), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "loses:" in shown
    data = json.loads(out.read_text())
    assert data["name"] in ("temporal", "spatial")
    assert data["devices"] == 4
    assert plan_command([written(tmp_path, DATA), "--json", "--family", "spatial"]) == 0
    assert "pipe" in json.loads(capsys.readouterr().out)["plan"]["tree"]


@pytest.mark.skipif(find_spec("yaml") is None, reason="needs pyyaml")
def test_yaml_in_and_out(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "problem.yaml"
    path.write_text(yaml.safe_dump(DATA))
    out, other = tmp_path / "plan.yaml", tmp_path / "plan.json"
    assert plan_command([str(path), "--out", str(out)]) == 0
    assert plan_command([str(path), "--out", str(other)]) == 0
    assert yaml.safe_load(out.read_text()) == json.loads(other.read_text())


def test_simulate_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    arguments = [written(tmp_path, DATA), "--devices", "8", "--seed", "1", "--spread", "0.1", "--perfetto", str(trace)]
    assert simulate_command(arguments) == 0
    assert "idle" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]


def test_stages_without_a_cost_come_from_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(json.dumps(DATA))
    del data["stages"]["train"]["cost"]
    samples = tuple(ProfileSample("train", n, c, 16, 8 / n) for n in (1, 2) for c in (2, 16))
    Profile("flow", "gpu", samples).save(tmp_path / "profile.json")
    assert plan_command([written(tmp_path, data), "--profile", str(tmp_path / "profile.json")]) == 0
    assert "taken on hardware 'gpu', this is hardware 'cpu'" in capsys.readouterr().err
    assert plan_command([written(tmp_path, data)]) == 2
    assert "stage 'train' has no cost: give one, or a profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"devises": 4}, "unknown key 'devises' (did you mean 'devices'?)"),
        ({"stages": {"a": {"cost": {"kind": "strem"}}}}, "stages.a.cost.kind: 'strem' is not one of"),
        ({"stages": {"a": {"cost": {"spred": 1}}}}, "unknown key 'spred' (did you mean 'spread'?)"),
        ({"stages": {"a": {"cost": {"spread": -1}}}}, "spread: finite and not negative, not -1"),
        (
            {"stages": {"a": {"cost": {"kind": "table", "points": [1]}}}},
            "points: a list of [devices, portion, seconds]",
        ),
        ({"device_bytes": 1e6}, "does not fit"),
        ({"items": 15}, "no whole number of groups"),
    ],
)
def test_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], why: str) -> None:
    data = DATA | change
    if "stages" in change:
        data["edges"] = []
    assert plan_command([written(tmp_path, data)]) == 2
    assert why in capsys.readouterr().err


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([str(tmp_path / "absent.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert simulate_command([str(tmp_path / "bad.json")]) == 2
    assert "not valid JSON" in capsys.readouterr().err
    assert plan_command([written(tmp_path, DATA), "--family", "hybrid"]) == 2
    assert "there is no hybrid plan" in capsys.readouterr().err
    assert plan_command([]) == 2


def test_a_plan_of_the_runtime_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, path = written(tmp_path, DATA), tmp_path / "plan.json"
    leaves = [{"leaf": {"stage": name, "devices": "0-5"}} for name in ("gen", "train")]
    path.write_text(
        json.dumps({"devices": 6, "flow": "f00d", "tree": {"share": {"first": leaves[0], "then": leaves[1]}}})
    )
    trace = tmp_path / "trace.json"
    assert simulate_command([file, "--plan", str(path), "--perfetto", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{path}: ") and "gen: busy" in shown
    assert json.loads(trace.read_text())["traceEvents"]
    path.write_text(json.dumps({"tree": {"leaf": {"stage": "trian", "devices": "0"}}}))
    assert simulate_command([file, "--plan", str(path)]) == 2
    assert "there is no stage 'trian' (did you mean 'train'?)" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_chart_of_every_family(tmp_path: Path) -> None:
    assert plan_command([written(tmp_path, DATA), "--png", str(tmp_path / "charts")]) == 0
    names = {path.name for path in (tmp_path / "charts").iterdir()}
    assert names == {"temporal.png", "spatial.png"}


def test_stages_as_a_table() -> None:
    problem, _ = problem_from_dict(DATA)
    lines = table(problem).splitlines()
    assert lines[0].split()[:5] == ["stage", "1", "dev.", "2", "dev."]
    assert lines[2].startswith("train") and "0.931 GiB" in lines[2]


def test_why_there_is_no_plan_of_a_family() -> None:
    problem, _ = problem_from_dict(DATA)
    with pytest.raises(SchedError, match="no hybrid plan: it needs three stages on devices; there are: "):
        chosen_of(plan(problem), "hybrid")
