"""``rlinf plan`` and ``rlinf simulate`` on files; faults go to stderr with exit code 2."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_sched import Profile, ProfileSample, SchedError, plan
from rlinf_sched.commands import plan_command, simulate_command
from rlinf_sched.commands.profile import chosen_of, table
from rlinf_sched.export import yaml_text
from rlinf_sched.problemfile import problem_from_dict
from rlinf_sched.units import counted, size

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
    assert "stage 'train' has no cost: give one, or a profile (--profile)" in capsys.readouterr().err


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
    assert lines[2].startswith("train") and "954 MiB" in lines[2]


def test_why_there_is_no_plan_of_a_family() -> None:
    problem, _ = problem_from_dict(DATA)
    with pytest.raises(
        SchedError, match="^there is no hybrid plan for this problem: it needs three stages on devices; there"
    ):
        chosen_of(plan(problem), "hybrid")


# ------------------------------------------------------------------ one plan, one number; what was asked for, or a word


def profiled(folder: Path, gen: float = 0.2) -> list[str]:
    """A profiled problem as files: a generator of 16 items that scatter, and a trainer."""
    rng = np.random.default_rng(0)
    samples = []
    for n in (1, 2, 4):
        for _ in range(4):
            ranks = tuple(float(16 / n * gen * (1 + 0.2 * x)) for x in rng.standard_normal(n))
            each = (16 // n,) * n
            samples.append(ProfileSample("gen", n, 16, 16, max(ranks), ranks=ranks, taken=each))
            samples.append(ProfileSample("train", n, 16, 16, 1.6 / n, ranks=(1.6 / n,) * n, taken=each))
    data = {
        "devices": 4,
        "items": 16,
        "flow": "flow",
        "hardware": "cpu",
        "stages": {"gen": {}, "train": {"collective": True}},
        "edges": [["gen", "train"]],
    }
    Profile("flow", "cpu", tuple(samples)).save(folder / "profile.json")
    return [written(folder, data), "--profile", str(folder / "profile.json")]


def seconds(shown: str) -> str:
    found = re.search(r": ([0-9.e+-]+) s", shown)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("family", ["temporal", "spatial"])
def test_one_plan_has_one_number(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str) -> None:
    files, out = profiled(tmp_path), tmp_path / "deep" / "plan.json"
    assert plan_command([*files, "--family", family, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert f"wrote {out}" in shown.err
    planned = seconds(shown.out)
    idle = re.search(rf"^{family}:.*\n.*idle (\d+%)", shown.out, re.MULTILINE)
    assert idle is not None
    for arguments in (["--family", family], ["--plan", str(out)]):
        assert simulate_command([*files, *arguments]) == 0
        again = capsys.readouterr().out
        assert seconds(again) == planned
        assert "mean of 8 draws" in again
        assert f"idle {idle[1]}" in again
    assert float(planned) == pytest.approx(json.loads(out.read_text())["predicted"]["step"], rel=1e-3)


def test_a_seed_draws_or_says_that_nothing_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = profiled(tmp_path)
    shown = []
    for seed in ("1", "2"):
        assert simulate_command([*files, "--seed", seed]) == 0
        shown.append(capsys.readouterr())
        assert f"(draw {seed})" in shown[-1].out
    assert seconds(shown[0].out) != seconds(shown[1].out)
    assert "nothing is drawn" not in shown[0].err
    fixed = json.loads(json.dumps(DATA))
    fixed["stages"]["gen"]["cost"] = {"spread": 1.0}
    assert simulate_command([written(tmp_path, fixed), "--seed", "1"]) == 0
    assert "--seed: nothing is drawn" in capsys.readouterr().err


def test_a_family_that_is_slower_is_shown_as_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = profiled(tmp_path)
    for family in ("temporal", "spatial"):
        assert plan_command([*files, "--family", family]) == 0
    shown = capsys.readouterr().out
    assert (
        len(re.findall(r"^(temporal|spatial) as asked, although (temporal|spatial) is [0-9.]+% faster", shown, re.M))
        == 1
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--devices", "0"], "devices is a positive integer, not 0"),
        (["--items", "0"], "items is a positive integer, not 0"),
        (["--png", "{file}"], "this is a file; give a folder"),
        (["--out", "{folder}"], "this is a folder; give the name of a file"),
        (["--out", "{file}/plan.yaml"], "this is a file; give a folder"),
        (["--profile", "{file}"], "this looks like a problem file; give the profile.json"),
        (["--profile", "{folder}"], "Is a directory"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    file = written(tmp_path, DATA)
    filled = [argument.format(file=file, folder=tmp_path) for argument in arguments]
    assert plan_command([file, *filled]) == 2
    shown = capsys.readouterr()
    assert why in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_plan_file_is_for_its_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = written(tmp_path, DATA), tmp_path / "plan.json"
    assert plan_command([file, "--out", str(out)]) == 0
    assert simulate_command([file, "--plan", str(out), "--devices", "8"]) == 2
    assert f"--devices 8: {out} is a plan for 4 devices" in capsys.readouterr().err
    assert simulate_command([file, "--plan", str(out), "--rule", "lock", "--spread", "0.1"]) == 2
    assert "--rule, --spread: not with --plan" in capsys.readouterr().err


def test_more_devices_than_were_profiled_are_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = profiled(tmp_path)
    assert plan_command([*files, "--devices", "16"]) == 0
    assert capsys.readouterr().err.count("taken on at most 4 devices") == 1
    assert plan_command(files) == 0
    assert "taken on at most" not in capsys.readouterr().err


def test_the_table_marks_what_was_not_measured() -> None:
    samples = tuple(ProfileSample("gen", 2, 16, 16, 1.0) for _ in range(2))
    data = {"devices": 4, "items": 16, "stages": {"gen": {}}}
    lines = table(problem_from_dict(data, Profile("flow", "cpu", samples))[0]).splitlines()
    assert lines[1].split() == ["gen", "2", "s*", "1", "s", "0.5", "s*", "-", "-", "0", "s"]
    assert lines[-2].startswith("*: not measured")
    assert lines[-1].startswith("error -: too few points")


def test_a_plan_as_yaml_says_the_same() -> None:
    yaml = pytest.importorskip("yaml")
    data = {"cpu": {"on": 1, "reward-model": 2}, "order": ["a", "b"], "cpu_portion": {}, "tree": {"leaf": {"x": None}}}
    assert yaml.safe_load(yaml_text(data)) == data


def test_bytes_and_counts_for_people() -> None:
    assert [size(n) for n in (0, 40, 1536, 47e9, 2e15)] == ["0 B", "40 B", "1.5 KiB", "43.8 GiB", "1819 TiB"]
    assert counted(1, "device") == "1 device" and counted(2, "device") == "2 devices"
