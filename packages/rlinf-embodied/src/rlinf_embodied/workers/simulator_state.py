"""Where environments are, as files of a checkpoint: one for each simulator rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

from rlinf_embodied.workers.block import Block


def save_blocks(folder: Path, rank: int, blocks: Sequence[Block]) -> None:
    """Write ``folder/rank<rank>.pickle``."""
    folder.mkdir(parents=True, exist_ok=True)
    data = [(list(block.env.indices), block.state()) for block in blocks]
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(data, protocol=5))


def load_blocks(folder: Path, blocks: list[Block], make: Callable[[list[list[int]]], None], mine: Sequence[int]) -> str:
    """Bring the blocks back to where they were; ``make`` gives a rank, which owns the environments ``mine``, the
    sub-batches that were saved. Returns why it cannot be done: the environments were shared out otherwise.
    ``blocks`` is read again after ``make``.
    """
    for file in sorted(folder.glob("rank*.pickle")):
        saved = pickle.loads(file.read_bytes())
        if sorted(env for indices, _ in saved for env in indices) != sorted(mine):
            continue
        make([indices for indices, _ in saved])
        for block, (_, state) in zip(blocks, saved, strict=True):
            block.restore(state)
        return ""
    return f"{folder} has no state of environments {list(mine)} together (another number of simulator ranks saved it)"
