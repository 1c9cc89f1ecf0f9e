"""Random numbers by name: the number of a decision depends on who decides, never on batch, order or worker.

A number is a hash of (root seed, step, environment, decision, place in the decision): nothing is carried on from one
call to the next. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, with Stafford's "mix13"
constants) over each key, added up (each key under a constant of its own, as in tabulation hashing), mixed again, and
once more with the place.

Shape legend: n decisions, C steps per decision, D numbers per step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, SplitMix64's increment
_MUL1, _MUL2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_A, _B = np.uint64(_MUL1), np.uint64(_MUL2)
_S30, _S27, _S31, _S12 = (np.uint64(n) for n in (30, 27, 31, 12))
_KEYS = 3


def uniforms(seed: int, keys: NDArray[np.int64], chunk: int, tokens: int) -> NDArray[np.float64]:
    """Uniform numbers in the open interval (0, 1), multiples of 2^-52 shifted by half of one.

    Args:
        seed: the root seed, any integer (its low 64 bits are used).
        keys: [n, 3] integers: step, environment, decision. Equal rows give equal numbers.
        chunk, tokens: C and D. The number at (c, d) depends on its place c D + d alone, so that a longer chunk begins
            with the numbers of a shorter one.

    Returns:
        float64 [n, C, D].
    """
    if keys.ndim != 2 or keys.shape[1] != _KEYS:
        raise ValueError(f"keys have shape {keys.shape}; they are [n, {_KEYS}]: step, environment, decision")
    bits = np.asarray(keys, dtype=np.int64).view(np.uint64) if keys.flags.c_contiguous else _contiguous(keys)
    steps, offsets, places = _constants(seed & _MASK, chunk * tokens)
    hashed = _mixed(bits * steps + offsets).sum(1, dtype=np.uint64)
    numbers = _mixed(_mixed(hashed)[:, None] + places)
    return ((numbers >> _S12).astype(np.float64) + 0.5).reshape(-1, chunk, tokens) * 2.0**-52


def _contiguous(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys, dtype=np.int64).view(np.uint64)


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every bit of the input moves about half of those of the output. In place."""
    z ^= z >> _S30
    z *= _A
    z ^= z >> _S27
    z *= _B
    z ^= z >> _S31
    return z


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL2) & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=64)
def _constants(seed: int, places: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Of a seed: an odd factor and an offset for each key, and what is added for each place."""
    state, drawn = _mix(seed), []
    for _ in range(2 * _KEYS):
        state = (state + _GOLDEN) & _MASK
        drawn.append(_mix(state))
    steps = np.array([n | 1 for n in drawn[:_KEYS]], dtype=np.uint64)
    offsets = np.array(drawn[_KEYS:], dtype=np.uint64)
    added = np.array([(_GOLDEN * (place + 1)) & _MASK for place in range(places)], dtype=np.uint64)
    return steps, offsets, added
