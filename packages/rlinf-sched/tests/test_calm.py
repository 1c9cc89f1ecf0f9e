"""Disturbed steps are cut to what calm ones allow; what the items' own scatter explains is left alone."""

from __future__ import annotations

import pytest

from rlinf_sched import ProfileSample, Stage
from rlinf_sched.calm import calm, lower_median

ONE = Stage("a")


def sample(seconds: float, devices: int = 1, portion: int = 16) -> ProfileSample:
    each = 0 if portion == 16 else portion // devices
    ranks, taken = (seconds,) * devices, (16 // devices,) * devices
    return ProfileSample("a", devices, portion, 16, seconds, ranks=ranks, taken=taken, each=each)


def cut(samples: list[ProfileSample], noise: float = 0.0) -> list[float]:
    return [s.seconds for s in calm(samples, ONE, noise)]


def test_calm_steps_stay_as_they_are() -> None:
    samples = [sample(t) for t in (1.0, 1.1, 1.2)]
    assert calm(samples, ONE, 0.0) == samples


def test_one_disturbed_step_is_cut() -> None:
    found = calm([sample(t) for t in (1.0, 1.0, 5.0)], ONE, 0.0)
    assert [s.seconds for s in found] == pytest.approx([1.0, 1.0, 1.25])
    assert found[2].ranks == pytest.approx((1.25,))


def test_of_two_steps_the_faster_one_is_believed() -> None:
    assert cut([sample(0.3), sample(1.9)]) == pytest.approx([0.3, 0.375])


def test_what_scatter_explains_is_left() -> None:
    samples = [sample(t) for t in (1.0, 1.0, 1.9)]
    assert cut(samples, noise=1.0) == [1.0, 1.0, 1.9]  # 16 items: four deviations of the mean are 100 %
    assert cut(samples, noise=0.1) == pytest.approx([1.0, 1.0, 1.25])


def test_all_at_once_takes_no_longer_than_in_parts_and_one_rank_no_longer_than_all_of_many() -> None:
    whole = [sample(t) for t in (0.2, 1.4, 1.7)]
    assert cut([*whole, sample(0.3, portion=4), sample(0.3, portion=4)])[:3] == pytest.approx([0.2, 0.375, 0.375])
    assert cut([*whole, sample(0.2, devices=2)])[:3] == pytest.approx([0.2, 0.5, 0.5])


def test_nothing_is_cut_below_what_the_setting_took_at_best() -> None:
    # It is slow whenever it takes all at once: that is no disturbance.
    whole = [sample(t) for t in (2.0, 2.1, 2.2)]
    assert cut([*whole, sample(0.3, portion=4)])[:3] == [2.0, 2.1, 2.2]


def test_lower_median() -> None:
    assert [lower_median(v) for v in ([3.0], [1.0, 2.0], [5.0, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0])] == [3.0, 1.0, 2.0, 2.0]
