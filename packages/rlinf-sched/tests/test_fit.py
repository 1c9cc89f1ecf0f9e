"""Costs fitted to profiles: what was put in comes out, and the held-out error says how well."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_sched import FormulaCost, Profile, ProfileSample, SchedError, Stage, fit


def profile_of(cost: FormulaCost, noise: float = 0.0, micro: int = 0) -> Profile:
    rng = np.random.default_rng(3)
    samples = []
    for n in (1, 2, 4):
        for c in (8, 32):
            seconds = float(cost.seconds(np.array([n]), c, micro)[0]) * (1 + noise * float(rng.standard_normal()))
            samples.append(ProfileSample("a", n, c, 64, seconds * 64 / c, 100 + 10 * c // n, 3.0))
    return Profile("flow", "hardware", tuple(samples))


@pytest.mark.parametrize(
    "cost", [FormulaCost(fixed=1, spread=0.5), FormulaCost(serial=0.25), FormulaCost(fixed=0.2, spread=1, log=0.3)]
)
def test_a_formula_is_found_again_and_holds_where_it_was_not_measured(cost: FormulaCost) -> None:
    found = fit(profile_of(cost), {"a": Stage("a")})["a"]
    assert found.error < 0.15
    for n, c in ((8, 64), (2, 16)):
        at = np.array([n])
        assert float(found.seconds(at, c, 0)[0]) == pytest.approx(float(cost.seconds(at, c, 0)[0]), rel=0.05)


def test_a_staircase_is_found_again() -> None:
    cost = FormulaCost(spread=0.1, step=2.0, micro=(8,))
    found = fit(profile_of(cost, micro=8), {"a": Stage("a")}, {"a": (8,)})["a"]
    assert float(found.seconds(np.array([3]), 40, 8)[0]) == pytest.approx(2 * 2.8, rel=0.05)


def test_noise_shows_in_the_held_out_error() -> None:
    cost = FormulaCost(fixed=1, spread=0.5)
    quiet, loud = (fit(profile_of(cost, noise), {"a": Stage("a")})["a"].error for noise in (0.001, 0.1))
    assert quiet < 0.02 < loud < 0.5


def test_switches_and_memory_are_taken_over() -> None:
    found = fit(profile_of(FormulaCost(spread=1)), {"a": Stage("a")})["a"]
    assert found.load + found.offload == 3.0
    for n, c in ((1, 8), (1, 32), (4, 8)):
        peak = found.resident(np.array([n])) + found.working(np.array([n]), c, 0)
        assert float(peak[0]) == pytest.approx(100 + 10 * c // n, rel=1e-6)


def test_a_stage_without_samples_is_named() -> None:
    with pytest.raises(SchedError, match="no sample of stage 'b'"):
        fit(profile_of(FormulaCost(spread=1)), {"b": Stage("b")})


def test_a_profile_from_elsewhere_warns() -> None:
    profile = profile_of(FormulaCost(spread=1))
    assert profile.warnings(flow="flow", hardware="hardware") == []
    (text,) = profile.warnings(flow="flow", hardware="h200")
    assert "taken on hardware 'hardware', this is hardware 'h200'" in text
