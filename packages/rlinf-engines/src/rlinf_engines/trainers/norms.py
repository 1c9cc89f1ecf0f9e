"""Norms of gradients, however many elements they have.

Added up in float32, the squares of a million elements are off in the fourth digit, those of a hundred million in the
second. Here they are added in float64.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# On a CPU torch makes a float64 copy of what it takes the norm of: parts of this many elements stay in its caches, and
# the copy small.
_PART = 1 << 16


def sum_of_squares(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the squares of all elements: a float64 scalar on ``device``, where the tensors are.

    No tensors, or empty ones, give 0; NaN and infinite elements give NaN or infinity.
    """
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            # A GPU's kernel cuts by itself, and needs no copy.
            parts += tensor.detach().reshape(-1).split(_PART) if tensor.device.type == "cpu" else (tensor.detach(),)
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square().sum()
