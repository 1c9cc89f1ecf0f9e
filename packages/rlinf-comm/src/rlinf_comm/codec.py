"""``encode(obj) -> (skeleton, buffers)`` and back: the form in which an object moves between two workers.

One walk over nested dict, list, tuple, set, namedtuple, dataclass, tensors, arrays and bytes. What is large
is never copied into a pickle, and nothing is pickled at all: the skeleton is JSON, and each array, tensor or
bytes object is one buffer beside it. Types come back as they went (a tuple stays a tuple, None is a value).

- A dense tensor or array of any axis order (C, Fortran, permuted) is sent without a copy and comes back with
  the strides it had. One with gaps or repeated elements is packed by one copy and comes back dense, axes in
  the same order.
- Decoded arrays and tensors are views of the buffers they came in. A read-only buffer gives a read-only
  array; torch has no read-only tensors, so there the bytes are copied.
- An object met twice is sent twice. A cycle is refused.
- Tensors must be on the CPU and not part of an autograd graph (a leaf keeps ``requires_grad``).
- Dataclasses and namedtuples are found again by module and name, and only such classes are: a skeleton cannot
  make the reader call anything else. They are filled field by field, without their ``__init__``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_core.errors import RLinfError

if TYPE_CHECKING:
    import torch

Buffer = bytes | bytearray | memoryview
_ARRAY_KINDS = frozenset("biufcSUMm")
_SCALARS = (bool, int, float, str, type(None))


class CodecError(RLinfError):
    """An object cannot be sent, or a frame does not describe one. ``path`` says where in the object."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"at {path or 'the top'}: {message}")
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (_codec_error, (self.args[0], self.path))


def _codec_error(message: str, path: str) -> CodecError:
    error = CodecError("", path=path)
    error.args = (message,)
    return error


def encode(obj: object) -> tuple[bytes, list[memoryview]]:
    """Split ``obj`` into a skeleton (JSON, UTF-8) and its buffers, which share memory with ``obj``.

    Raises CodecError naming the place of whatever cannot be sent.
    """
    buffers: list[memoryview] = []
    node = _Encoder(buffers).walk(obj, "")
    return json.dumps(node, separators=(",", ":")).encode(), buffers


def decode(skeleton: bytes, buffers: Sequence[Buffer]) -> Any:
    """Build the object again. Raises CodecError when skeleton and buffers do not fit each other."""
    try:
        node = json.loads(skeleton)
    except ValueError as error:
        raise CodecError(f"the skeleton is not JSON: {error}") from error
    decoder = _Decoder([memoryview(buffer).cast("B") for buffer in buffers])
    obj = decoder.walk(node, "")
    if decoder.used != len(buffers):
        raise CodecError(f"{len(buffers)} buffers came, the skeleton names {decoder.used}")
    return obj


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _torch_tensor(obj: object) -> bool:
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(obj, loaded.Tensor)


class _Encoder:
    """Scalars stand for themselves; everything else is a list whose head names its kind."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers
        self.open: set[int] = set()

    def walk(self, obj: object, path: str) -> Any:
        cls = type(obj)
        if cls in _SCALARS:
            return obj
        if id(obj) in self.open:
            raise CodecError("the object contains itself", path=path)
        self.open.add(id(obj))
        try:
            return self.compound(obj, cls, path)
        finally:
            self.open.discard(id(obj))

    def compound(self, obj: Any, cls: type, path: str) -> list[Any]:
        if cls is dict:
            return ["dict", [[self.walk(k, path), self.walk(v, f"{path}[{k!r}]")] for k, v in obj.items()]]
        if cls in (list, tuple):
            return [cls.__name__, [self.walk(value, f"{path}[{i}]") for i, value in enumerate(obj)]]
        if cls in (set, frozenset):
            return [cls.__name__, [self.walk(value, path) for value in obj]]
        if cls in (bytes, bytearray):
            self.buffers.append(memoryview(obj))
            return [cls.__name__, len(obj)]
        if _torch_tensor(obj):
            return self.tensor(obj, path)
        if isinstance(obj, np.generic):
            return ["scalar", self.array(np.asarray(obj), path)]
        if cls is np.ndarray:
            return self.array(obj, path)
        if _is_namedtuple(cls):
            values = [self.walk(value, f"{path}.{name}") for name, value in obj._asdict().items()]
            return ["named", _class_name(cls, path), values]
        if dataclasses.is_dataclass(cls):
            names = [field.name for field in dataclasses.fields(cls)]
            fields = [[name, self.walk(getattr(obj, name), f"{path}.{name}")] for name in names]
            return ["dataclass", _class_name(cls, path), fields]
        raise CodecError(f"an object of type {cls.__module__}.{cls.__qualname__} cannot be sent", path=path)

    def array(self, array: np.ndarray[Any, Any], path: str) -> list[Any]:
        if array.dtype.kind not in _ARRAY_KINDS:
            raise CodecError(f"an array of dtype {array.dtype} cannot be sent", path=path)
        axes = _axis_order(array.strides)
        dense = np.ascontiguousarray(array.transpose(axes)) if array.ndim else array
        # reshape and view cover what the buffer protocol refuses: no elements, datetimes, unicode.
        self.buffers.append(dense.reshape(-1).view(np.uint8).data if array.size else memoryview(b""))
        return ["array", array.dtype.str, list(dense.shape), axes]

    def tensor(self, tensor: torch.Tensor, path: str) -> list[Any]:
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            what = f"{type(tensor).__qualname__} with layout {tensor.layout}"
            raise CodecError(f"only plain strided tensors can be sent, not {what}", path=path)
        if tensor.device.type != "cpu":
            raise CodecError(f"the tensor is on {tensor.device}: move it to the CPU first", path=path)
        if tensor.requires_grad and not tensor.is_leaf:
            raise CodecError("the tensor is part of an autograd graph: detach it first", path=path)
        plain = tensor.detach().resolve_conj().resolve_neg()
        axes = _axis_order(plain.stride())
        dense = plain.permute(axes).contiguous()
        raw = dense.reshape(-1).view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)
        self.buffers.append(raw.numpy().data)
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [kind, dtype, list(dense.shape), axes, tensor.requires_grad]


def _axis_order(strides: Sequence[int]) -> list[int]:
    """Axes from the slowest to the fastest, so that a dense array of any order is contiguous along them."""
    return sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))


def _class_name(cls: type, path: str) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in name:
        raise CodecError(f"{name} is defined in a function, so that the reader could not find it", path=path)
    return name


class _Decoder:
    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.used = 0
        self.kinds: dict[str, Callable[[list[Any], str], Any]] = {
            "dict": lambda a, p: {self.walk(k, p): self.walk(v, f"{p}[{k!r}]") for k, v in a[0]},
            "list": lambda a, p: self.items(a[0], p),
            "tuple": lambda a, p: tuple(self.items(a[0], p)),
            "set": lambda a, p: set(self.items(a[0], p)),
            "frozenset": lambda a, p: frozenset(self.items(a[0], p)),
            "bytes": lambda a, p: bytes(self.take(a[0], p)),
            "bytearray": lambda a, p: bytearray(self.take(a[0], p)),
            "array": self.array,
            "scalar": lambda a, p: self.array(a[0][1:], p)[()],
            "tensor": self.tensor,
            "parameter": self.tensor,
            "named": self.named,
            "dataclass": self.instance,
        }

    def walk(self, node: Any, path: str) -> Any:
        if not isinstance(node, list):
            return node
        kind = node[0] if node and isinstance(node[0], str) else ""
        if kind not in self.kinds:
            raise CodecError(f"the skeleton has an unknown kind {kind!r}", path=path)
        try:
            if kind in ("tensor", "parameter"):
                return self.tensor([kind, *node[1:]], path)
            return self.kinds[kind](node[1:], path)
        except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError(f"the skeleton of a {kind} is malformed: {error}", path=path) from error

    def items(self, nodes: list[Any], path: str) -> list[Any]:
        return [self.walk(node, f"{path}[{i}]") for i, node in enumerate(nodes)]

    def take(self, nbytes: int, path: str) -> memoryview:
        if self.used >= len(self.buffers):
            raise CodecError(f"buffer {self.used} is missing", path=path)
        buffer = self.buffers[self.used]
        self.used += 1
        if buffer.nbytes != nbytes:
            message = f"buffer {self.used - 1} has {buffer.nbytes} bytes, the skeleton says {nbytes}"
            raise CodecError(message, path=path)
        return buffer

    def array(self, arguments: list[Any], path: str) -> np.ndarray[Any, Any]:
        descr, shape, axes = arguments
        dtype = np.dtype(descr)
        if dtype.kind not in _ARRAY_KINDS:
            raise CodecError(f"the skeleton asks for an array of dtype {dtype}", path=path)
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        flat = np.frombuffer(self.take(count * dtype.itemsize, path), dtype=dtype, count=count)
        return flat.reshape(shape).transpose(_inverse(axes))

    def tensor(self, arguments: list[Any], path: str) -> torch.Tensor:
        import torch

        kind, name, shape, axes, requires_grad = arguments
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise CodecError(f"the skeleton asks for a tensor of dtype {name}", path=path)
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        raw = self.take(count * dtype.itemsize, path)
        if count == 0:
            flat = torch.empty(0, dtype=dtype)
        else:
            flat = torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=dtype, count=count)
        tensor = flat.reshape(shape).permute(_inverse(axes))
        if kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_() if requires_grad else tensor

    def named(self, arguments: list[Any], path: str) -> Any:
        cls = _find_class(arguments[0], path)
        if not _is_namedtuple(cls):
            raise CodecError(f"{arguments[0]} is not a namedtuple", path=path)
        return cls._make(self.items(arguments[1], path))  # type: ignore[attr-defined]

    def instance(self, arguments: list[Any], path: str) -> Any:
        cls = _find_class(arguments[0], path)
        if not dataclasses.is_dataclass(cls):
            raise CodecError(f"{arguments[0]} is not a dataclass", path=path)
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: self.walk(node, f"{path}.{name}") for name, node in arguments[1]}
        if values.keys() != known:
            differing = ", ".join(sorted(values.keys() ^ known))
            raise CodecError(f"{arguments[0]} has other fields here than there: {differing}", path=path)
        obj = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(obj, name, value)  # also where the class is frozen
        return obj


def _inverse(axes: Sequence[int]) -> list[int]:
    return sorted(range(len(axes)), key=lambda axis: axes[axis])


def _find_class(name: str, path: str) -> type:
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise CodecError(f"the class {name} cannot be found here: {error}", path=path) from error
    if not isinstance(found, type):
        raise CodecError(f"{name} is not a class", path=path)
    return found
