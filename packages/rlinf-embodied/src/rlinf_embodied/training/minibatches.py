"""Which decisions an optimizer step takes.

Shape legend: M decisions of all ranks, N of this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


class Dealing:
    """Cuts the decisions of all ranks, ordered by slot id and time, into minibatches, whoever has which.

    ``counts`` are the decisions of each slot of all ranks.
    """

    def __init__(self, counts: Mapping[str, int], mine: Sequence[str], size: int, seed: int, step: int) -> None:
        starts: dict[str, int] = {}
        total = 0
        for slot in sorted(counts):
            starts[slot] = total
            total += counts[slot]
        self.total = total
        self.key = [seed & 0xFFFFFFFFFFFFFFFF, step]
        self.parts = -(-total // size) if total else 0
        local = [torch.arange(starts[slot], starts[slot] + counts[slot]) for slot in mine]
        self.numbers = torch.cat(local) if local else torch.zeros(0, dtype=torch.long)
        """The number of each of this rank's decisions among all [N]."""
        self.place = torch.full((total,), -1)
        self.place[self.numbers] = torch.arange(len(self.numbers))

    def epoch(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """(numbers among all, this rank's own places) of each minibatch of an epoch, shuffled by (seed, step, epoch).

        Minibatches are as equal in size as can be, so that none is a small rest.
        """
        order = torch.from_numpy(np.random.default_rng([*self.key, number]).permutation(self.total))
        everyone = list(torch.tensor_split(order, self.parts))
        own = [self.place[part] for part in everyone]
        return everyone, own if len(self.numbers) == self.total else [part[part >= 0] for part in own]
