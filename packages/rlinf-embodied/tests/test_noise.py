"""Keyed uniform numbers: what they depend on, and that they look like independent uniform ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.noise import uniforms

WORDS = st.integers(-(2**63), 2**63 - 1)
KEYS = st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=6)


def grid(steps: int, envs: int, decisions: int) -> np.ndarray:
    axes = np.meshgrid(range(steps), range(envs), range(decisions), indexing="ij")
    return np.stack(axes, -1).reshape(-1, 3)


@given(KEYS, st.integers(), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_a_number_depends_on_its_own_key_alone(keys, seed, chunk, tokens, random):
    whole = uniforms(seed, np.array(keys), chunk, tokens)
    assert whole.shape == (len(keys), chunk, tokens)
    assert whole.dtype == np.float64
    assert ((whole > 0.0) & (whole < 1.0)).all()
    order = random.sample(range(len(keys)), len(keys))
    for i in order:
        np.testing.assert_array_equal(uniforms(seed, np.array([keys[i]]), chunk, tokens)[0], whole[i])
    np.testing.assert_array_equal(uniforms(seed, np.array(keys)[order], chunk, tokens), whole[order])
    np.testing.assert_array_equal(uniforms(seed, np.array(keys), chunk + 1, tokens)[:, :chunk], whole)


def test_numbers_stay_what_they_are():
    """Of SplitMix64's finalizer, written out in Python's integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    state = mix(7)
    drawn = [mix((state + golden * (i + 1)) & mask) for i in range(6)]
    keys = (12, 3, -1)
    total = sum(mix(((k & mask) * (drawn[i] | 1) + drawn[3 + i]) & mask) for i, k in enumerate(keys)) & mask
    expected = [((mix((mix(total) + golden * (place + 1)) & mask) >> 12) + 0.5) * 2.0**-52 for place in range(4)]
    assert uniforms(7, np.array([keys]), 2, 2).ravel().tolist() == expected


def test_every_part_of_the_key_and_the_seed_matters():
    base = uniforms(1, np.array([[5, 6, 7]]), 1, 4)
    others = [uniforms(1, np.array([key]), 1, 4) for key in ([6, 6, 7], [5, 7, 7], [5, 6, 8], [6, 5, 7], [7, 6, 5])]
    others.append(uniforms(2, np.array([[5, 6, 7]]), 1, 4))
    numbers = np.concatenate([base, *others]).ravel()
    assert len(set(numbers.tolist())) == numbers.size


def test_numbers_are_uniform():
    numbers = uniforms(0, grid(25, 32, 50), 2, 2).ravel()
    counts = np.histogram(numbers, 1000, (0.0, 1.0))[0]
    expected = numbers.size / 1000
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 999) < 5 * math.sqrt(2 * 999)
    gap = np.abs(np.sort(numbers) - (np.arange(numbers.size) + 0.5) / numbers.size).max()
    assert gap < 2.0 / math.sqrt(numbers.size)  # Kolmogorov and Smirnov: 1.95 at one in a thousand


@pytest.mark.parametrize("axis", range(4))
def test_neighbours_do_not_depend_on_each_other(axis):
    numbers = uniforms(3, grid(25, 32, 50), 1, 4).reshape(25, 32, 50, 4)
    one = np.take(numbers, range(numbers.shape[axis] - 1), axis)
    two = np.take(numbers, range(1, numbers.shape[axis]), axis)
    correlation = 12.0 * ((one - 0.5) * (two - 0.5)).mean()
    assert abs(correlation) < 5.0 / math.sqrt(one.size)
    pairs = np.histogram2d(one.ravel(), two.ravel(), 16, [(0.0, 1.0)] * 2)[0]
    expected = one.size / 256
    assert abs(((pairs - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


def test_sums_of_keys_leave_no_trace():
    """Keys are added up inside: the numbers of (s, e), (s', e), (s, e') and (s', e') must not."""
    u = uniforms(4, grid(60, 60, 20), 1, 1).reshape(60, 60, 20)
    mixed = u[1:, 1:] - u[:-1, 1:] - u[1:, :-1] + u[:-1, :-1]
    assert mixed.var() * 12.0 / 4.0 == pytest.approx(1.0, abs=0.02)


def test_neighbouring_seeds_are_independent():
    keys = grid(10, 20, 50)
    one, two = (uniforms(seed, keys, 1, 4) - 0.5 for seed in (0, 1))
    assert abs(12.0 * (one * two).mean()) < 5.0 / math.sqrt(one.size)


@pytest.mark.parametrize("shape", [(3,), (4, 2)])
def test_keys_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="step, environment, decision"):
        uniforms(0, np.zeros(shape, np.int64), 1, 1)
