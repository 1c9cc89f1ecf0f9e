"""Running mean and variance of observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# Normalised numbers are clipped to this many standard deviations.
CLIP = 10.0
EPS = 1e-8


class RunningNorm(nn.Module):
    """(x - mean) / std, clipped to 10, with the mean and standard deviation of all rows that ``update`` was given.

    The moments are merged in float64 (Chan, Golub and LeVeque 1983), so that the order of batches matters up to
    rounding alone. Before the first update numbers go through as they are, but for the clipping.
    """

    count: Tensor
    mean: Tensor
    square: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(size, dtype=torch.float64))
        # What is subtracted and multiplied by, in the network's format.
        self.register_buffer("shift", torch.zeros(size, dtype=dtype))
        self.register_buffer("scale", torch.ones(size, dtype=dtype))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take rows [B, K] in."""
        x = rows.detach().to(self.mean.device, torch.float64)
        if not len(x):
            return
        mean = x.mean(0)
        square = (x - mean).square().sum(0)
        total = self.count + len(x)
        gap = mean - self.mean
        self.square += square + gap.square() * (self.count * len(x) / total)
        self.mean += gap * (len(x) / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.square / self.count + EPS).rsqrt())

    def forward(self, x: Tensor) -> Tensor:
        """Rows [B, K] normalised."""
        return ((x - self.shift) * self.scale).clamp(-CLIP, CLIP)

    def apply_to(self, x: NDArray[Any]) -> None:
        """Rows [B, K] normalised in place, as ``forward`` does."""
        x -= self.shift.detach().cpu().numpy()
        x *= self.scale.detach().cpu().numpy()
        np.minimum(np.maximum(x, -CLIP, out=x), CLIP, out=x)
