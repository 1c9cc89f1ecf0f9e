"""Checks of the first lines: shapes, dtypes, options. Each names the argument and what would be right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from rlinf_algos.errors import AlgorithmError, nearest

# Below it a temperature is greedy decoding, and the scaled logits leave the range of float32.
LOWEST_TEMPERATURE = 1e-6


def shape_of(tensor: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def _given(tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are there (``None`` is passed over); anything else is refused."""
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise AlgorithmError(f"{name} must be a tensor, got {type(x).__name__}")
        yield name, x


def floating(**tensors: Tensor | None) -> None:
    """Refuse what is not a floating-point tensor."""
    for name, tensor in _given(tensors):
        if not tensor.is_floating_point():
            raise AlgorithmError(f"{name} must be floating point, got {tensor.dtype}: use {name}.float()")


def integral(**tensors: Tensor | None) -> None:
    """Refuse what is not an integer tensor."""
    for name, tensor in _given(tensors):
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise AlgorithmError(f"{name} must be an integer tensor, got {tensor.dtype}")


def ndim(count: int | tuple[int, ...], legend: str, **tensors: Tensor | None) -> None:
    """Refuse a wrong number of dimensions; ``legend`` is the expected shape in words, e.g. ``[B, T]``."""
    allowed = (count,) if isinstance(count, int) else count
    for name, tensor in _given(tensors):
        if tensor.ndim not in allowed:
            raise AlgorithmError(f"{name} must have shape {legend}, got {shape_of(tensor)}")


def shape(expected: Sequence[int], legend: str, **tensors: Tensor | None) -> None:
    """Refuse a shape that is not ``expected``; ``legend`` says it in words, e.g. ``[B]``."""
    for name, tensor in _given(tensors):
        if tuple(tensor.shape) != tuple(expected):
            sizes = ", ".join(str(n) for n in expected)
            raise AlgorithmError(f"{name} must have shape {legend} = [{sizes}], got {shape_of(tensor)}")


def same_shape(**tensors: Tensor | None) -> None:
    """Refuse tensors whose shapes differ from the first one's (``None`` is passed over)."""
    first: tuple[str, Tensor] | None = None
    for name, tensor in _given(tensors):
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


def number(**values: object) -> None:
    """Refuse options that are not numbers, such as ``"5e-4"`` (text from YAML), ``None`` or a tensor."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise AlgorithmError(f"{name} must be a number, got {_said(value)}")


def whole(least: int | None = None, /, **values: object) -> None:
    """Refuse options that are not integers, or are below ``least``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise AlgorithmError(f"{name} must be an integer, got {_said(value)}")
        if least is not None and value < least:
            raise AlgorithmError(f"{name} must be at least {least}, got {value}")


def flag(**values: object) -> None:
    """Refuse options that are not true or false, such as ``"false"``."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise AlgorithmError(f"{name} must be true or false, got {_said(value)}")


def _said(value: object) -> str:
    return type(value).__name__ if isinstance(value, Tensor) else f"{value!r} ({type(value).__name__})"


def given(**values: float | None) -> dict[str, float]:
    """The optional values that are not ``None``: ``positive(**given(clip=clip))``."""
    return {name: value for name, value in values.items() if value is not None}


def positive(**values: float) -> None:
    """Refuse options that are not finite numbers above zero."""
    number(**values)
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise AlgorithmError(f"{name} must be a finite number above 0, got {value}")


def not_negative(**values: float) -> None:
    """Refuse options that are not finite numbers of at least zero."""
    number(**values)
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise AlgorithmError(f"{name} must be a finite number of at least 0, got {value}")


def unit(**values: float) -> None:
    """Refuse options outside [0, 1]."""
    number(**values)
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise AlgorithmError(f"{name} must lie in [0, 1], got {value}")


def temperature_of(temperature: float) -> None:
    """Refuse a temperature that no policy samples with."""
    positive(temperature=temperature)
    if temperature < LOWEST_TEMPERATURE:
        raise AlgorithmError(f"temperature must be at least {LOWEST_TEMPERATURE:g}, got {temperature}")


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
