"""What is moved: items of four sizes and a dict of eight tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

TENSORS = 8
BATCH = 64
BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """``nbytes`` of payload; ``tensors``: as a dict of eight float32 tensors instead of one array of bytes."""

    name: str
    nbytes: int
    tensors: bool = False

    @property
    def what(self) -> str:
        """The object, in words."""
        return f"a dict of {TENSORS} float32 tensors" if self.tensors else f"a numpy array of {self.nbytes:,} bytes"

    def make(self) -> Any:
        values = np.arange(self.nbytes, dtype=np.uint8)
        if not self.tensors:
            return values
        parts = np.split(values.view(np.float32), TENSORS)
        return {f"t{n}": torch.from_numpy(part.copy()) for n, part in enumerate(parts)}

    def batch(self) -> list[Any]:
        """What a producer sends in turn, or at once in a call that takes many. Each is its own: one that is sent again
        and again stays in the cache, and what is pickled twice in one call goes once."""
        return [self.make() for _ in range(self.batch_size)]

    @property
    def batch_size(self) -> int:
        return max(1, min(BATCH, BATCH_BYTES // self.nbytes))

    def flat(self, item: Any) -> torch.Tensor:
        """The item as one tensor, for ways that move nothing else; the eight are joined by a copy."""
        return torch.cat(list(item.values())) if self.tensors else torch.from_numpy(item)

    def blank(self) -> torch.Tensor:
        """Where such a tensor is received."""
        return torch.empty(self.nbytes // 4) if self.tensors else torch.empty(self.nbytes, dtype=torch.uint8)

    def whole(self, flat: torch.Tensor) -> Any:
        return {f"t{n}": part for n, part in enumerate(flat.view(TENSORS, -1))} if self.tensors else flat.numpy()

    def touch(self, item: Any) -> None:
        """What every receiver does with every item: look at it."""
        if len(item) != (TENSORS if self.tensors else self.nbytes):
            raise RuntimeError(f"{self.name}: something else came")

    def check(self, item: Any) -> None:
        """Compare all of it; done with the last item of a measurement, outside its time."""
        theirs = item if self.tensors else np.array(item)  # torch warns of memory that it may not write
        if not torch.equal(self.flat(self.make()).view(torch.uint8), self.flat(theirs).view(torch.uint8)):
            raise RuntimeError(f"{self.name}: the item came changed")


CASES = {
    case.name: case
    for case in (
        Case("4 B", 4),
        Case("64 KiB", 64 << 10),
        Case("1 MiB", 1 << 20),
        Case("64 MiB", 64 << 20),
        Case("8 tensors", 64 << 10, tensors=True),
    )
}
