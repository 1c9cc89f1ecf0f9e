"""Checks of the first lines: shapes, dtypes, options. Each names the argument and what would be right."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf_algos.errors import AlgorithmError, nearest


def shape_of(tensor: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def floating(**tensors: Tensor | None) -> None:
    """Refuse what is not a floating-point tensor."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise AlgorithmError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise AlgorithmError(f"{name} must be floating point, got {tensor.dtype}: use {name}.float()")


def integral(**tensors: Tensor | None) -> None:
    """Refuse what is not an integer tensor."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise AlgorithmError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise AlgorithmError(f"{name} must be an integer tensor, got {tensor.dtype}")


def ndim(count: int | tuple[int, ...], legend: str, **tensors: Tensor | None) -> None:
    """Refuse a wrong number of dimensions; ``legend`` is the expected shape in words, e.g. ``[B, T]``."""
    allowed = (count,) if isinstance(count, int) else count
    for name, tensor in tensors.items():
        if tensor is not None and tensor.ndim not in allowed:
            raise AlgorithmError(f"{name} must have shape {legend}, got {shape_of(tensor)}")


def same_shape(**tensors: Tensor | None) -> None:
    """Refuse tensors whose shapes differ from the first one's (``None`` is passed over)."""
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise AlgorithmError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if first is None:
            first = (name, tensor)
        elif tensor.shape != first[1].shape:
            raise AlgorithmError(
                f"{name} has shape {shape_of(tensor)} but {first[0]} has {shape_of(first[1])}: they must be equal"
            )


def boolean(mask: Tensor, name: str = "mask") -> Tensor:
    """Return ``mask`` as bool. Integers count as 0 / not 0; a floating mask is refused, since a
    fractional weight would be lost without a word."""
    if not isinstance(mask, Tensor):
        raise AlgorithmError(f"{name} must be a tensor, got {type(mask).__name__}")
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex():
        raise AlgorithmError(f"{name} must be bool or integer, got {mask.dtype}: use {name}.bool()")
    return mask != 0


def positive(**values: float | None) -> None:
    """Refuse options that are not finite numbers above zero."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise AlgorithmError(f"{name} must be a finite number above 0, got {value}")


def not_negative(**values: float | None) -> None:
    """Refuse options that are negative, infinite or NaN."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise AlgorithmError(f"{name} must be a finite number of at least 0, got {value}")


def unit(**values: float) -> None:
    """Refuse options outside [0, 1]."""
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise AlgorithmError(f"{name} must lie in [0, 1], got {value}")


def choice(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a word that is not among ``known``, with the nearest one."""
    if value not in known:
        raise AlgorithmError(f"{name} must be one of {', '.join(known)}; got {value!r}{nearest(str(value), known)}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 stays, everything narrower becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def precise(tensor: Tensor) -> Tensor:
    """``tensor`` in float64, for statistics of few numbers (float32 on a device that has nothing wider)."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype that sums and exponentials are computed in."""
    return tensor.to(wide(tensor.dtype))
