"""The few collectives that some functions need, on a process group that the caller gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Group = Any
"""A ``torch.distributed.ProcessGroup``, or ``None`` for this process alone."""


def sum_over_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the ranks of ``group``; the tensor itself when there is no group."""
    return _reduce(tensor, group, "SUM")


def max_over_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Maximum over the ranks of ``group``; the tensor itself when there is no group."""
    return _reduce(tensor, group, "MAX")


def _reduce(tensor: Tensor, group: Group, op: str) -> Tensor:
    if group is None:
        return tensor
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = getattr(torch.distributed.ReduceOp, op)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    # The group's own method, not torch.distributed.all_reduce: a group outside the default world works too.
    group.allreduce([result], options).wait()
    return result
