"""Profiles: round trip, validation by name, summaries computed by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_sched import Profile, ProfileError, ProfileSample, StepSample, Summary

SAMPLES = st.builds(
    ProfileSample,
    stage=st.text(min_size=1),
    devices=st.integers(0, 64),
    portion=st.integers(1, 512),
    items=st.integers(1, 512),
    seconds=st.floats(0, 1e6),
    peak_bytes=st.integers(0, 2**50),
    switch_seconds=st.floats(0, 1e6),
)


def profile(*samples: ProfileSample) -> Profile:
    return Profile("flow-1", "cpu-2", samples)


@given(st.lists(SAMPLES, max_size=4))
def test_plain_data_and_back(samples: list[ProfileSample]) -> None:
    whole = profile(*samples)
    assert Profile.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_file_round_trip_leaves_one_file(tmp_path: Path) -> None:
    whole = profile(ProfileSample("actor", 2, 8, 64, 1.5, 10, 0.25))
    path = tmp_path / "profile.json"
    whole.save(path)
    whole.save(path)
    assert Profile.load(path) == whole
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_what_is_optional_comes_back_and_older_files_are_read() -> None:
    sample = ProfileSample("a", 2, 8, 8, 1.5, 10, 0.25, (1.5, 1.0), (5, 3), 2, 7, (0.5, 1.0), 4, 0.01)
    whole = Profile("flow-1", "cpu-2", (sample,), (StepSample(2, 0, 3.0),))
    data = json.loads(json.dumps(whole.to_dict()))
    assert Profile.from_dict(data) == whole
    old = {
        "stage": "a",
        "devices": 2,
        "portion": 8,
        "items": 8,
        "seconds": 1.5,
        "peak_bytes": 10,
        "switch_seconds": 0.25,
    }
    del data["steps"]
    assert Profile.from_dict(data | {"samples": [old]}).samples == (ProfileSample("a", 2, 8, 8, 1.5, 10, 0.25),)


def test_summaries_by_hand() -> None:
    samples = [ProfileSample("g", 1, 4, 4, s, peak, switch) for s, peak, switch in [(4, 5, 0), (8, 9, 2), (12, 7, 1)]]
    other = ProfileSample("g", 1, 2, 2, 1.0)
    assert profile(*samples, other).summaries() == (
        Summary("g", 1, 2, 1, 0.5, 0.5, 0.5, 0, 0.0),
        Summary("g", 1, 4, 3, 2.0, 1.5, 2.5, 9, 1.0),
    )


@given(st.permutations([ProfileSample("a", d, 1, 1, float(s)) for d in (1, 2) for s in (1, 2, 3)]))
def test_summaries_do_not_depend_on_the_order_of_samples(samples: list[ProfileSample]) -> None:
    assert profile(*samples).summaries() == profile(*sorted(samples, key=repr)).summaries()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stage": ""}, "stage is the name of a stage"),
        ({"devices": -1}, "devices of stage 'a' is an integer of at least 0, not -1"),
        ({"portion": 0}, "portion of stage 'a' is an integer of at least 1, not 0"),
        ({"items": 1.5}, "items of stage 'a'"),
        ({"items": True}, "items of stage 'a'"),
        ({"seconds": math.nan}, "seconds of stage 'a' is finite"),
        ({"seconds": "1"}, "seconds of stage 'a' is finite"),
        ({"switch_seconds": -0.1}, "switch_seconds of stage 'a'"),
        ({"ranks": [1.0]}, "taken of stage 'a' are items, one number for each of ranks"),
        ({"ranks": [math.inf], "taken": [1]}, "ranks of stage 'a' is finite and not negative"),
        ({"released": [0.5, 0.4]}, "released of stage 'a' never falls"),
        ({"memory": 3}, "has memory, which this format does not know"),
    ],
)
def test_wrong_samples_are_refused_by_name(change: dict[str, Any], why: str) -> None:
    data = profile(ProfileSample("a", 1, 1, 1, 1.0)).to_dict()
    data["samples"][0] |= change
    with pytest.raises(ProfileError) as caught:
        Profile.from_dict(data)
    assert str(caught.value).startswith("samples[0]")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "a profile is a mapping, not list"),
        ('{"format": 1}', "the profile lacks flow, hardware, samples"),
        ('{"format": 2, "flow": "f", "hardware": "h", "samples": []}', "format is 1, not 2"),
        ('{"format": 1, "flow": "", "hardware": "h", "samples": []}', "flow is a fingerprint, not ''"),
        ('{"format": 1, "flow": "f", "hardware": "h", "samples": {}}', "samples is a list, not dict"),
        ('{"format": 1, "flow": "f", "hardware": "h", "samples": [1]}', "samples[0] is a mapping, not int"),
        (
            '{"format": 1, "flow": "f", "hardware": "h", "samples": [], "steps": [{"devices": 1}]}',
            "steps[0] lacks portion, seconds",
        ),
        (
            '{"format": 1, "flow": "f", "hardware": "h", "samples": [], '
            '"steps": [{"devices": 1, "portion": 0, "seconds": -1}]}',
            "steps[0]: a step has devices, portion and finite seconds",
        ),
        (
            '{"format": 1, "flow": "f", "hardware": "h", "samples": [{"stage": "a"}]}',
            "samples[0] lacks devices",
        ),
    ],
)
def test_wrong_files_are_refused_with_their_path(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert why in str(caught.value)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="there is no such file"):
        Profile.load(tmp_path / "none.json")


def test_a_profile_of_something_else_is_no_evidence() -> None:
    whole = profile()
    whole.check(flow="flow-1", hardware="cpu-2")
    with pytest.raises(ProfileError, match="taken on hardware 'cpu-2', this is hardware 'gpu-8'"):
        whole.check(flow="flow-1", hardware="gpu-8")


def test_importing_the_package_loads_neither_ray_nor_torch() -> None:
    code = "import sys, rlinf_sched; sys.exit(bool({'ray', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
