"""Seeds of episodes: 63-bit numbers from the root seed and a tuple of names and numbers. Standard library only."""

from __future__ import annotations

import hashlib

_MASK_63 = (1 << 63) - 1


def derive_seed(seed: int, *key: int | str) -> int:
    """A seed in [0, 2**63) that is a function of ``seed`` and ``key`` alone, in every process.

    Parts are typed and length-prefixed before they are hashed (BLAKE2b), so that ``("a", "bc")`` and ``("ab", "c")``,
    ``(1,)`` and ``("1",)`` differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *key):
        data = f"{'s' if isinstance(part, str) else 'i'}{part}".encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") & _MASK_63


def episode_seed(seed: int, index: int, number: int) -> int:
    """What episode ``number`` (from 0) of environment ``index`` begins with, in a run whose root seed is ``seed``."""
    key = f"episode {seed} {index} {number}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") & _MASK_63


def narrow(seed: int) -> int:
    """``seed`` in [0, 2**31), for simulators that take no larger ones; small ones stay as they are."""
    return seed if 0 <= seed < 1 << 31 else (seed ^ (seed >> 32)) & 0x7FFFFFFF
