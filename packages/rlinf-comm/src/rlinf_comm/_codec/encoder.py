"""The walk from an object to nodes and buffers."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm._codec import classes, dtypes, memory
from rlinf_comm._codec import format as f
from rlinf_comm._codec.format import CodecError, Unknown

if TYPE_CHECKING:
    import torch

Handler = Callable[["Encoder", Any, int], Any]

ADVICE = "; with allow_pickle=True, for peers that are trusted, it would be pickled"


class TooDeep(CodecError):
    """Collects the containers on the way out, which tells a cycle from depth."""

    def __init__(self) -> None:
        super().__init__(f"nested deeper than {f.MAX_DEPTH} levels")
        self.steps: list[tuple[int, str]] = []

    def explained(self) -> CodecError:
        seen: set[int] = set()
        path = ""
        for identity, step in reversed(self.steps):
            if identity in seen:
                return CodecError("the object contains itself", path=path)
            seen.add(identity)
            path += step
        return CodecError(self.message, path=self.path)


class Encoder:
    """One use, one object. ``careful``: scalars are looked at, too (done when MessagePack refused one)."""

    def __init__(self, *, allow_pickle: bool, devices: bool, careful: bool) -> None:
        self.allow_pickle = allow_pickle
        self.devices = devices
        self.careful = careful
        self.buffers: list[memoryview | torch.Tensor] = []
        self.entries: list[memory.Entry] = []

    def finish(self) -> list[memoryview | torch.Tensor]:
        if self.entries:
            memory.place(self.entries, self.buffers)
        return self.buffers

    def walk(self, obj: Any, depth: int) -> Any:
        cls = type(obj)
        if cls in f.SCALARS:
            return self.scalar(obj) if self.careful else obj
        if depth > f.MAX_DEPTH:
            raise TooDeep
        handler = HANDLERS.get(cls)
        return handler(self, obj, depth) if handler is not None else self.other(obj, cls, depth)

    def scalar(self, obj: Any) -> Any:
        if type(obj) is int and not -(2**63) <= obj < 2**64:
            return [f.INTEGER, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)]
        if type(obj) is str:
            try:
                obj.encode()
            except UnicodeEncodeError:
                return [f.TEXT, obj.encode("utf-8", "surrogatepass")]
        return obj

    def nodes(self, obj: Iterable[Any], depth: int) -> list[Any]:
        values = list(obj)
        if not self.careful and f.SCALARS.issuperset(map(type, values)):
            return values
        out: list[Any] = []
        append, walk, depth = out.append, self.walk, depth + 1
        try:
            for value in values:
                append(walk(value, depth))
        except CodecError as error:
            mark(error, obj, f"[{len(out)}]")
            raise
        return out

    def dict_(self, obj: dict[Any, Any], depth: int) -> Any:
        walk, below, key = self.walk, depth + 1, None
        if _only_texts(obj) and not self.careful:
            out: dict[str, Any] = {}
            try:
                for key, value in obj.items():
                    out[key] = value if type(value) in f.SCALARS else walk(value, below)
            except CodecError as error:
                mark(error, obj, f.index_of(key))
                raise
            return out
        return [f.DICT, self.pairs(obj, depth)]

    def pairs(self, obj: dict[Any, Any], depth: int) -> list[Any]:
        out: list[Any] = []
        below, key = depth + 1, None
        try:
            for key, value in obj.items():
                out.append(self.walk(key, below))
                out.append(self.walk(value, below))
        except CodecError as error:
            mark(error, obj, f.index_of(key))
            raise
        return out

    def ordered(self, obj: OrderedDict[Any, Any], depth: int) -> Any:
        attributes = self.walk(vars(obj), depth) if vars(obj) else None
        return [f.ORDERED, self.pairs(obj, depth), attributes]

    def blob(self, data: memoryview) -> bytes | int:
        """Bytes for the skeleton, or the number of a buffer."""
        if data.nbytes <= f.INLINE:
            return bytes(data)
        self.buffers.append(data)
        return len(self.buffers) - 1

    def bytes_(self, obj: bytes, depth: int) -> Any:
        if len(obj) <= f.INLINE:
            return obj
        self.buffers.append(memoryview(obj))
        return [f.BYTES, len(self.buffers) - 1]

    def memoryview_(self, obj: memoryview, depth: int) -> Any:
        if not obj.c_contiguous or obj.format.startswith("O"):
            raise CodecError("a memoryview with gaps cannot be sent: make bytes of it first")
        flat = obj.cast("B") if obj.nbytes else memory.EMPTY
        return [f.MEMORYVIEW, self.blob(flat), obj.format, obj.shape]

    def array(self, obj: np.ndarray[Any, Any], depth: int) -> Any:
        try:
            spec = dtypes.numpy_spec(obj.dtype)
        except Unknown as error:
            return self.pickled(obj, error)
        node = [f.ARRAY, f.NOTHING, spec, obj.shape]
        self.entries.append(memory.Entry(node, obj, obj.flags.c_contiguous, False))
        return node

    def tensor(self, obj: torch.Tensor, depth: int) -> Any:
        torch = sys.modules["torch"]
        name = _names.get(obj.dtype)
        if name is None or obj.layout is not torch.strided:
            kind = f"dtype {obj.dtype}" if name is None else f"layout {obj.layout}"
            return self.pickled(obj, Unknown(f"only plain strided tensors can be sent, not one with {kind}"))
        try:
            shape = obj.shape
        except RuntimeError:  # a nested tensor, of one number of dimensions and several sizes
            return self.pickled(obj, Unknown("a nested tensor cannot be sent: send its parts"))
        where = "cpu"
        if not obj.is_cpu:
            where = str(obj.device)
            if not self.devices:
                raise CodecError(f"the tensor is on {where}: move it to the CPU first")
        flags = 0 if type(obj) is torch.Tensor else f.PARAMETER
        if obj.requires_grad:
            if not obj.is_leaf:
                raise CodecError("the tensor is part of an autograd graph: detach it first")
            flags |= f.REQUIRES_GRAD
        if obj.is_neg() or (name in _COMPLEX and obj.is_conj()):
            obj = obj.detach().resolve_conj().resolve_neg()
        node = [f.TENSOR, f.NOTHING, name, shape, flags]
        self.entries.append(memory.Entry(node, obj, obj.is_contiguous(), True, where))
        return node

    def number(self, obj: np.generic) -> Any:
        cls = type(obj)
        if cls in (np.str_, np.bytes_):
            return [f.NUMPY_TEXT, str(obj) if cls is np.str_ else bytes(obj)]  # type: ignore[call-overload]
        spec = dtypes.numpy_spec(obj.dtype)
        if obj.dtype.type is not cls:
            return self.pickled(obj, _no_subclass(cls))
        return [f.NUMBER, spec, obj.tobytes()]

    def other(self, obj: Any, cls: type, depth: int) -> Any:
        if _torch is None and "torch" in sys.modules:
            _know_torch()
            return self.walk(obj, depth)
        try:
            if isinstance(obj, np.generic):
                return self.number(obj)
            if isinstance(obj, enum.Enum):
                return [f.ENUM, *classes.enum_node(obj)]
            if isinstance(obj, np.dtype):
                return [f.NUMPY_DTYPE, dtypes.numpy_spec(obj)]
            if classes.is_namedtuple(cls):
                return self.named(obj, classes.plan_of(cls), depth)
            if classes.is_plain_dataclass(cls):
                return self.dataclass(obj, classes.plan_of(cls), depth)
        except Unknown as error:
            return self.pickled(obj, error)
        return self.pickled(obj, _no_subclass(cls))

    def named(self, obj: Any, plan: classes.Plan, depth: int) -> Any:
        if plan.open and getattr(obj, "__dict__", None):
            raise CodecError(f"the namedtuple {plan.name} has attributes beside its fields")
        out: list[Any] = []
        try:
            for value in tuple.__iter__(obj):
                out.append(self.walk(value, depth + 1))
        except CodecError as error:
            mark(error, obj, f".{plan.fields[len(out)]}")
            raise
        return [f.NAMED, plan.name, out]

    def dataclass(self, obj: Any, plan: classes.Plan, depth: int) -> Any:
        fields: dict[str, Any] = {}
        name, below = "", depth + 1
        try:
            for name in plan.fields:
                try:
                    value = getattr(obj, name)
                except AttributeError:
                    raise CodecError(f"the field is not set, in an object of {plan.name}") from None
                fields[name] = value if type(value) in f.SCALARS and not self.careful else self.walk(value, below)
            if not plan.open or obj.__dict__.keys() <= plan.known:
                return [f.DATACLASS, plan.name, fields]
            more: dict[str, Any] = {}
            for name in obj.__dict__.keys() - plan.known:
                more[name] = self.walk(obj.__dict__[name], below)
        except CodecError as error:
            mark(error, obj, f".{name}")
            raise
        return [f.DATACLASS, plan.name, fields, more]

    def pickled(self, obj: object, why: CodecError) -> Any:
        if not self.allow_pickle:
            raise CodecError(why.message + ADVICE)
        from rlinf_comm._codec import pickled

        return pickled.encode(self, obj)


def mark(error: CodecError, container: object, step: str) -> None:
    error.under(step)
    if isinstance(error, TooDeep):
        error.steps.append((id(container), step))


def _only_texts(obj: dict[Any, Any]) -> bool:
    return _TEXT.issuperset(map(type, obj))


def _no_subclass(cls: type) -> Unknown:
    base = next((base for base in cls.__mro__[1:] if base in HANDLERS or base in f.SCALARS), None)
    more = f" (it would come back as {base.__qualname__})" if base is not None else ""
    return Unknown(f"an object of type {cls.__module__}.{cls.__qualname__} cannot be sent{more}")


_TEXT = frozenset((str,))
_COMPLEX = frozenset(("complex32", "complex64", "complex128"))
_names: dict[torch.dtype, str] = {}
_torch: Any = None
HANDLERS: dict[type, Handler] = {
    dict: Encoder.dict_,
    list: lambda e, obj, depth: [f.LIST, e.nodes(obj, depth)],
    tuple: lambda e, obj, depth: [f.TUPLE, e.nodes(obj, depth)],
    set: lambda e, obj, depth: [f.SET, e.nodes(obj, depth)],
    frozenset: lambda e, obj, depth: [f.FROZENSET, e.nodes(obj, depth)],
    OrderedDict: Encoder.ordered,
    deque: lambda e, obj, depth: [f.DEQUE, e.nodes(obj, depth), obj.maxlen],
    bytes: Encoder.bytes_,
    bytearray: lambda e, obj, depth: [f.BYTEARRAY, e.blob(memoryview(obj))],
    memoryview: Encoder.memoryview_,
    complex: lambda e, obj, depth: [f.COMPLEX, obj.real, obj.imag],
    np.ndarray: Encoder.array,
}


def _know_torch() -> None:
    """Add torch's types, once it is loaded: nothing of it can be met before."""
    global _torch
    import torch

    _names.update(dtypes.torch_names())
    HANDLERS[torch.Size] = lambda e, obj, depth: [f.SIZE, list(obj)]
    HANDLERS[torch.dtype] = lambda e, obj, depth: [f.TORCH_DTYPE, str(obj).removeprefix("torch.")]
    HANDLERS[torch.device] = lambda e, obj, depth: [f.TORCH_DEVICE, str(obj)]
    HANDLERS[torch.Tensor] = HANDLERS[torch.nn.Parameter] = Encoder.tensor
    _torch = torch  # last: another thread that sees it finds everything in place
