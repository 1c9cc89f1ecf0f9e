"""Costs fitted to profiles: what was put in comes out, and the held-out error says how well."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rlinf_sched import FormulaCost, Graph, Memory, Problem, Profile, ProfileSample, SchedError, Stage, fit, plan
from rlinf_sched.costmodel import slowest
from rlinf_sched.fit import fit_stage
from rlinf_sched.tree import Leaf, Pipe


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


def test_one_disturbed_step_is_no_scatter_of_the_items() -> None:
    calm = [(1.0, 1.02, 0.98, 1.0), (1.01, 0.99, 1.0, 1.0), (0.98, 1.0, 1.0, 1.02)]
    alike = [ProfileSample("a", 4, 64, 64, max(r), ranks=r, taken=(16,) * 4) for r in calm]
    busy = ProfileSample("a", 4, 64, 64, 2.0, ranks=(1.0, 1.0, 2.0, 1.0), taken=(16,) * 4)
    assert fit_stage([*alike, busy], Stage("a")).noise < 2 * fit_stage(alike, Stage("a")).noise
    assert fit_stage([busy, busy, *alike[:1]], Stage("a")).noise > 1.0, "it is what happens more often than not"


# ------------------------------------------------------------------ laws that are not ours

Law = Callable[[int, float], float]
LAWS: dict[str, Law] = {
    "less than linear in the ranks": lambda n, x: 0.01 + 0.01 * x * n**0.2,
    "far less": lambda n, x: 0.01 * x * n**0.4,
    "ranks that talk": lambda n, x: 0.02 + 0.01 * x + 0.03 * math.log2(n),
    "a ring of ranks": lambda n, x: 0.01 * x + 0.01 * (n - 1),
    "staircase": lambda n, x: 0.02 + 0.1 * math.ceil(x / 8 - 1e-9),
    "fewer seconds an item in large portions": lambda n, x: 0.02 + 0.03 * x**0.8,
    "all of it": lambda n, x: 0.03 + 0.01 * x * n**0.3 + 0.02 * math.log2(n),
}


def alone(law: Law, noise: float, steps: int, seed: int) -> list[ProfileSample]:
    """Ranks that work alone on 64 items, as they are profiled: all at once on 1, 4 and 8 devices, two at once on 8, a
    quarter on 1."""
    rng = np.random.default_rng(seed)
    found = []
    for n, each in ((1, 0), (4, 0), (8, 0), (8, 2), (1, 16)):
        for _ in range(steps):
            seconds, taken, left = [0.0] * n, [0] * n, 64
            while left:
                rank = int(np.argmin(seconds)) if each else min(range(n), key=taken.__getitem__)
                k = min(each or math.ceil(64 / n), left)
                sigma = math.sqrt(math.log1p(noise**2 / k))
                seconds[rank] += law(n, k) * float(rng.lognormal(-(sigma**2) / 2, sigma))
                taken[rank] += k
                left -= k
            portion = min(64, each * n) or 64
            found.append(ProfileSample("a", n, portion, 64, max(seconds), 0, 0.0, tuple(seconds), tuple(taken), each))
    return found


def errors(law: Law, noise: float, steps: int, seed: int = 0) -> list[float]:
    """Relative errors on all device counts up to 8 and four portions, profiled or not."""
    cost = fit_stage(alone(law, noise, steps, seed), Stage("a"))
    found = []
    for n in range(1, 9):
        for c in (64, 32, 16, 8):
            true = law(n, math.ceil(c / n))
            found.append(abs(float(cost.alone(np.array([n]), c, 0)[0]) / true - 1))
    return found


@pytest.mark.parametrize("name", LAWS)
def test_counts_and_portions_that_were_not_profiled(name: str) -> None:
    found = errors(LAWS[name], 0.01, 2)
    assert np.mean(found) < 0.01
    assert max(found) < 0.05


def test_long_tails_are_averaged_over_ranks_and_steps() -> None:
    found = [error for name in LAWS for seed in range(3) for error in errors(LAWS[name], 0.5, 8, seed)]
    assert np.mean(found) < 0.05


def test_the_scatter_of_items_is_found_and_makes_the_slowest_rank_slower() -> None:
    cost = fit_stage(alone(LAWS["less than linear in the ranks"], 1.0, 24, 1), Stage("a"))
    assert cost.noise == pytest.approx(1.0, rel=0.25)
    rng = np.random.default_rng(5)
    sigma = math.sqrt(math.log1p(1.0 / 8))
    drawn = float(rng.lognormal(-(sigma**2) / 2, sigma, (20_000, 8)).max(axis=1).mean())
    at = np.array([8])
    assert float(cost.seconds(at, 64, 0)[0] / cost.alone(at, 64, 0)[0]) == pytest.approx(drawn, rel=0.1)


@pytest.mark.parametrize(("ranks", "deviation"), [(1, 0.5), (2, 0.5), (8, 0.3), (64, 1.0)])
def test_the_slowest_of_many(ranks: int, deviation: float) -> None:
    sigma = math.sqrt(math.log1p(deviation**2))
    drawn = np.random.default_rng(1).lognormal(-(sigma**2) / 2, sigma, (40_000, ranks)).max(axis=1).mean()
    assert float(slowest(np.array([ranks]), np.array([deviation]))[0]) == pytest.approx(float(drawn), rel=0.05)


def test_a_portion_that_goes_up_in_whole_items_is_a_staircase_too() -> None:
    cost = fit_stage(alone(lambda n, x: 0.1 * x, 0.0, 1, 0), Stage("a"))
    assert float(cost.seconds(np.array([5]), 16, 0)[0]) == pytest.approx(0.4), "four items on the fullest rank"


# ------------------------------------------------------------------ release, memory, switches


def test_an_early_release_makes_a_stage_stream_and_a_late_one_does_not() -> None:
    early = ProfileSample("a", 1, 8, 8, 8.0, released=(0.2, 0.3, 0.4, 1.0))
    cost = fit_stage([early], Stage("a"))
    assert cost.streams
    assert cost.release(1, 8, 4, 0).tolist() == pytest.approx([1.6, 2.4, 3.2, 8.0])
    late = fit_stage([ProfileSample("a", 1, 8, 8, 8.0, released=(0.95, 1.0))], Stage("a"))
    assert not late.streams
    assert late.release(1, 8, 2, 0).tolist() == [8.0, 8.0]


def test_the_planner_pipes_behind_a_measured_stream() -> None:
    graph = Graph({"a": Stage("a"), "b": Stage("b")}, (("a", "b"),))
    curve = ProfileSample("a", 1, 16, 16, 16.0, released=tuple((k + 1) / 16 for k in range(16)))
    # A fixed cost for every portion: it must take everything at once, and yet b begins early.
    costs = {
        "a": replace(fit_stage([curve], Stage("a")), fixed=8.0, spread=0.5, points=()),
        "b": FormulaCost(spread=1.0),
    }
    found = plan(Problem(graph, costs, 2, 16)).families["spatial"]
    assert isinstance(found.tree, Pipe) and isinstance(found.tree.up, Leaf)
    assert found.tree.up.portion == 16 and found.tree.portion < 16
    assert found.seconds < 16 + 8


def test_resident_bytes_as_measured_and_sharded() -> None:
    def sample(n: int, c: int, resident: int, peak: int) -> ProfileSample:
        return ProfileSample("a", n, c, 8, 1.0, peak, 0.0, resident_bytes=resident)

    whole = fit_stage([sample(1, 8, 100, 180), sample(2, 8, 100, 140), sample(2, 2, 100, 110)], Stage("a"))
    assert float(whole.resident(np.array([4]))[0]) == 100
    assert float((whole.resident(np.array([1])) + whole.working(np.array([1]), 8, 0))[0]) == pytest.approx(180)
    sharded = fit_stage([sample(1, 8, 100, 180), sample(2, 8, 50, 90), sample(4, 8, 25, 45)], Stage("a"))
    assert sharded.resident(np.array([1, 2, 4, 8])).tolist() == [100, 50, 25, 12.5]
    assert fit_stage([sample(1, 8, 0, 0)], Stage("a")).memory == Memory()


def test_a_switch_that_falls_with_the_devices() -> None:
    samples = [ProfileSample("a", n, 8, 8, 1.0, 0, 0.5 + 2.0 / n) for n in (1, 2, 4)]
    cost = fit_stage(samples, Stage("a"))
    assert cost.reload(np.array([1, 8])).tolist() == pytest.approx([2.5, 0.75])
