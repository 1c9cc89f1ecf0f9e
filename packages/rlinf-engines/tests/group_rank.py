"""One of two ranks that open a group twice at one place: ``group_rank.py RANK FOLDER``.

Rank 1 is still in the first group when rank 0 has opened the store of the second.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlinf_core.types import ParallelInfo
from rlinf_engines.trainers.group import RankGroup


def main(rank: int, folder: Path) -> None:
    place = ParallelInfo(rank=rank, world_size=2, init_method=f"file://{folder}/meet", timeout_s=60.0)
    store, opened = dist.FileStore, 0

    def tell(*args: Any) -> Any:
        nonlocal opened
        made = store(*args)
        opened += 1
        if rank == 0 and opened == 2:
            (folder / "second").open("w").close()
        return made

    dist.FileStore = tell  # type: ignore[assignment,misc]
    for opening in range(2):
        group = RankGroup(place, torch.device("cpu"))
        group.join()
        assert group.everyone((opening, rank)) == [(opening, 0), (opening, 1)]
        if rank == 1 and opening == 0:
            (folder / "second").open("r").close()  # until rank 0 opens the other end
        group.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
