"""Episode statistics: computed by hand, then against a plain loop over each environment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.errors import ConfigError
from rlinf_embodied import Episode, EpisodeTracker, summarise


def test_two_environments_by_hand() -> None:
    tracker = EpisodeTracker(2)
    assert tracker.update([1.0, 2.0], [False, False], [False, False], [True, False]) == []
    assert tracker.update([0.5, -1.0], [True, False], [False, False], [False, False]) == [
        Episode(env=0, ret=1.5, length=2, success_once=True, success_at_end=False, truncated=False)
    ]
    # The first environment has been reset within that step: this one begins its next episode.
    assert tracker.update([3.0, 4.0], [True, False], [True, True], [False, True]) == [
        Episode(env=0, ret=3.0, length=1, success_once=False, success_at_end=False, truncated=False),
        Episode(env=1, ret=5.0, length=3, success_once=True, success_at_end=True, truncated=True),
    ]


def test_masked_step_belongs_to_no_episode() -> None:
    tracker = EpisodeTracker(1)
    tracker.update([1.0], [True], [False])
    assert tracker.update([9.0], [True], [False], [True], active=[False]) == []
    assert tracker.update([2.0], [True], [False]) == [Episode(0, 2.0, 1, False, False, False)]


def test_partial_reset_forgets_only_those() -> None:
    tracker = EpisodeTracker(3)
    tracker.update(np.ones(3), np.zeros(3), np.zeros(3), np.ones(3))
    tracker.reset([1])
    done = tracker.update(np.ones(3), np.ones(3), np.zeros(3))
    assert [(e.ret, e.length, e.success_once) for e in done] == [
        (2.0, 2, True),
        (1.0, 1, False),
        (2.0, 2, True),
    ]
    tracker.update(np.ones(3), np.zeros(3), np.zeros(3))
    tracker.reset()
    assert {e.length for e in tracker.update(np.ones(3), np.ones(3), np.zeros(3))} == {1}


STEP = st.tuples(st.integers(-3, 3), st.booleans(), st.booleans(), st.booleans(), st.booleans())


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(STEP, min_size=n, max_size=n), min_size=1, max_size=12)))
@settings(deadline=None)
def test_equal_to_a_loop_over_each_environment(steps: list[list[tuple[int, bool, bool, bool, bool]]]) -> None:
    n = len(steps[0])
    tracker = EpisodeTracker(n)
    found = [e for step in steps for e in tracker.update(*(np.array(column) for column in zip(*step, strict=True)))]
    expected = []
    for env in range(n):
        open_steps: list[tuple[int, bool]] = []
        for reward, ended, cut, success, active in (step[env] for step in steps):
            if not active:
                continue
            open_steps.append((reward, success))
            if ended or cut:
                rewards, successes = zip(*open_steps, strict=True)
                expected.append(
                    Episode(env, float(sum(rewards)), len(rewards), any(successes), success, cut and not ended)
                )
                open_steps = []
    assert sorted(found, key=lambda e: e.env) == expected


def test_summary_counts_each_episode_once() -> None:
    rows = [Episode(0, 2.0, 10, True, False, True), Episode(1, 4.0, 30, True, True, False)]
    assert summarise(rows) == {
        "episodes": 2.0,
        "return": 3.0,
        "length": 20.0,
        "success_once": 1.0,
        "success_at_end": 0.5,
        "truncated": 0.5,
    }
    assert summarise([]) == {"episodes": 0.0}


def test_wrong_shapes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_envs is at least 1, not 0"):
        EpisodeTracker(0)
    with pytest.raises(ValueError, match=r"truncated has shape \(1,\), and there are 2 environments"):
        EpisodeTracker(2).update([0, 0], [False, False], [False])
