"""64-bit seeds from the root seed and a tuple of names and numbers. Standard library only."""

from __future__ import annotations

import hashlib

_MASK_63 = (1 << 63) - 1


def derive_seed(seed: int, *key: int | str) -> int:
    """A seed in [0, 2**63) that is a function of ``seed`` and ``key`` alone, in every process.

    Distinct keys give independent seeds: the parts are length-prefixed and typed before they are hashed
    (BLAKE2b), so ``("a", "bc")``, ``("ab", "c")`` and ``(1,)``, ``("1",)`` all differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *key):
        if isinstance(part, bool) or not isinstance(part, (int, str)):
            raise TypeError(f"a random key has int and str parts, not {part!r}")
        data = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") & _MASK_63
