"""Weights, gradients and optimizer state in parts (torch's ``fully_shard``, "FSDP2"), for the torch trainer.

A parameter is cut along its first dimension, as ``torch.chunk`` does, into one part a rank (the last ones may be
smaller or empty). Each block gathers its weights for its forward and backward, and adds and scatters its gradients.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlinf_core.errors import ConfigError
from rlinf_engines.trainers.group import RankGroup
from rlinf_engines.trainers.norms import sum_of_squares


def shard(network: Any, device: torch.device, ranks: int, dtype: torch.dtype, *, plain: bool = False) -> None:
    """Cut the parameters of a Hugging Face model, block by block, or of another module as a whole (``plain``), and move
    the parts to the device. Collective.

    With bfloat16 the weights are gathered, and the forward computed, in it; gradients are added in float32. Gradients
    are sums over ranks, not means.
    """
    # A network may be made of Hugging Face models: each names its own blocks.
    named = [getattr(module, "_no_split_modules", None) or () for module in network.modules()]
    blocks = {name for names in (named if plain else named[:1]) for name in names}
    found = [module for module in network.modules() if type(module).__name__ in blocks and module is not network]
    scalars = [name for name, parameter in network.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigError(
            f"trainer.sharding: fsdp2 cannot cut the scalar parameter {scalars[0]} of {type(network).__name__}; give "
            "it the shape [1], or use ddp"
        )
    if not found and not plain:
        raise ConfigError(
            f"trainer.sharding: fsdp2 does not know the blocks of {type(network).__name__} (it names none in "
            "_no_split_modules); use ddp"
        )
    # Said of every network whose last layer has a bias; nothing here writes into outputs.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (ranks,))
    low = dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    for module in [*found, network]:
        # The root's weights too are given up after a forward: a step or a load may follow without a backward.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    network.to(device)  # buffers


def average_and_clip(network: Any, count: float, clip: float, group: RankGroup) -> float:
    """Divide the summed gradients by ``count`` and clip them to the norm ``clip`` (0: not); returns the norm before.

    Collective.
    """
    for parameter in network.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad.to_local() for parameter in network.parameters()]
    torch._foreach_div_(grads, count)
    mine = float(sum_of_squares(grads, grads[0].device))
    norm = math.sqrt(math.fsum(group.everyone(mine, "adding gradient norms")))
    if math.isfinite(norm) and 0.0 < clip < norm:
        torch._foreach_mul_(grads, clip / (norm + 1e-12))
    return norm


def part_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of ``whole`` that ``rank`` holds."""
    parts = whole.chunk(ranks)
    return parts[rank] if rank < len(parts) else whole[:0]


def wrap_part(part: torch.Tensor, parameter: Any) -> DTensor:
    """A part of a tensor that is as ``parameter`` is."""
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
