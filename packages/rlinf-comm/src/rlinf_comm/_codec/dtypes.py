"""Element types as plain data, and back: numpy's with structures, torch's by name."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm._codec.format import CodecError, Unknown

if TYPE_CHECKING:
    import torch

SIMPLE_KINDS = frozenset("biufcSUMm")
_ALSO_NUMPY = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + ["bool", "float16", "float32", "float64", "complex64", "complex128"]
)

_TEXT = re.compile(r"[<>|][biufcSUMmV]\d{1,9}(\[\w{1,12}\])?", re.ASCII)

Spec = str | list[Any]
"""``"<f4"``; ``[names, formats, offsets, itemsize]`` of a structure; ``[base, shape]`` of a fixed array in one."""


def numpy_spec(dtype: np.dtype[Any]) -> Spec:
    """Raises Unknown for what would not come back equal: objects, variable-length text, types of other packages."""
    if dtype.kind in SIMPLE_KINDS and dtype.itemsize:
        return dtype.str
    try:
        spec = _spec(dtype)
        back = numpy_dtype(spec)
    except (CodecError, ValueError, TypeError) as error:
        raise Unknown(f"an array of dtype {dtype} cannot be sent") from error
    if back != dtype or back.type is not dtype.type:
        raise Unknown(f"an array of dtype {dtype} cannot be sent")
    return spec


def _spec(dtype: np.dtype[Any]) -> Spec:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_spec(base), list(shape)]
    if dtype.names is None or dtype.fields is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return [list(dtype.names), [_spec(field[0]) for field in fields], [field[1] for field in fields], dtype.itemsize]


def numpy_dtype(spec: object) -> np.dtype[Any]:
    """The dtype of a spec. Raises CodecError, ValueError or TypeError for what ``numpy_spec`` never writes."""
    if isinstance(spec, str):
        return _simple(spec)
    if isinstance(spec, list) and len(spec) == 2:
        base = numpy_dtype(spec[0])
        return _sized(np.dtype((base, tuple(spec[1]))))
    if isinstance(spec, list) and len(spec) == 4:
        names, formats, offsets, itemsize = spec
        if not all(type(name) is str for name in names) or type(itemsize) is not int:
            raise CodecError("the skeleton describes a malformed structure")
        layout = {
            "names": names,
            "formats": [numpy_dtype(f) for f in formats],
            "offsets": offsets,
            "itemsize": itemsize,
        }
        return _sized(np.dtype(layout))  # type: ignore[call-overload]
    raise CodecError(f"the skeleton asks for an array of dtype {spec!r}")


def _sized(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.itemsize == 0 or dtype.hasobject:
        raise CodecError(f"the skeleton asks for an array of dtype {dtype}")
    return dtype


@lru_cache(maxsize=256)
def _simple(text: str) -> np.dtype[Any]:
    # numpy reads much more than this: names, aliases, lists of types.
    if not _TEXT.fullmatch(text):
        raise CodecError(f"the skeleton asks for an array of dtype {text}")
    return _sized(np.dtype(text))


@cache
def torch_names() -> dict[torch.dtype, str]:
    """Name of each dtype that has whole bytes and no scale beside them."""
    import torch

    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in found}
    return {dtype: name for dtype, name in names.items() if not name.startswith(("q", "bits"))}


@cache
def torch_dtypes() -> dict[str, tuple[torch.dtype, np.dtype[Any], torch.dtype | None]]:
    """By name: the dtype, the numpy dtype to read it with and, where numpy has no such type, torch's for the latter."""
    import torch

    stand_in = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    table: dict[str, tuple[torch.dtype, np.dtype[Any], torch.dtype | None]] = {}
    for dtype, name in torch_names().items():
        if name in _ALSO_NUMPY:
            table[name] = (dtype, np.dtype(name), None)
        else:
            other = stand_in[dtype.itemsize]
            table[name] = (dtype, np.dtype(str(other).removeprefix("torch.")), other)
    return table
