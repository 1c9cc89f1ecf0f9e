"""The walk from nodes and buffers to an object. Believes nothing that a skeleton says."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm._codec import classes, dtypes, memory
from rlinf_comm._codec import format as f
from rlinf_comm._codec.format import CodecError

if TYPE_CHECKING:
    import torch

Handler = Callable[["Decoder", list[Any]], Any]

MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RuntimeError,
    MemoryError,
)
"""What reading a node that does not make sense may raise (RecursionError is a RuntimeError)."""

_LEAVES = f.SCALARS | {bytes}


class Decoder:
    def __init__(self, buffers: list[memoryview | torch.Tensor], *, allow_pickle: bool) -> None:
        self.buffers = buffers
        self.allow_pickle = allow_pickle
        self.used = bytearray(len(buffers))
        self.writable: dict[int, memoryview] = {}

    def walk(self, node: Any) -> Any:
        cls = type(node)
        if cls in _LEAVES:
            return node
        if cls is dict:
            return self.texts(node)
        if cls is not list or not node or type(node[0]) is not int or not 0 <= node[0] < f.KINDS:
            raise CodecError(f"the skeleton has an unknown kind {node[0] if cls is list and node else cls.__name__!r}")
        try:
            return HANDLERS[node[0]](self, node)
        except CodecError:
            raise
        except MALFORMED as error:
            raise CodecError(f"the skeleton is malformed: {type(error).__name__}: {error}") from error

    def texts(self, node: dict[Any, Any]) -> dict[Any, Any]:
        """In place; the values alone can be anything but scalars."""
        key = None
        try:
            for key, value in node.items():
                if type(key) is not str:
                    raise CodecError("the skeleton has a map whose key is not a text")
                if type(value) not in _LEAVES:
                    node[key] = self.walk(value)
        except CodecError as error:
            error.under(f.index_of(key))
            raise
        return node

    def items(self, nodes: Any) -> list[Any]:
        """In place as well."""
        if type(nodes) is not list:
            raise CodecError("the skeleton has no list where one belongs")
        if f.SCALARS.issuperset(map(type, nodes)):
            return nodes
        position = 0
        try:
            for position, node in enumerate(nodes):
                if type(node) not in _LEAVES:
                    nodes[position] = self.walk(node)
        except CodecError as error:
            error.under(f"[{position}]")
            raise
        return nodes

    def pairs(self, nodes: Any) -> list[tuple[Any, Any]]:
        values = self.items(nodes)
        return list(zip(values[::2], values[1::2], strict=True))

    def at(self, number: Any) -> memoryview | torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self.buffers):
            raise CodecError(f"buffer {number!r} is missing")
        self.used[number] = 1
        return self.buffers[number]

    def take(self, number: Any) -> memoryview:
        buffer = self.at(number)
        if not isinstance(buffer, memoryview):
            raise CodecError(f"buffer {number} is a tensor on {buffer.device}, not memory of this host")
        return buffer

    def blob(self, data: Any) -> bytes | memoryview:
        return data if type(data) is bytes else self.take(data)

    def bytes_(self, node: list[Any]) -> bytes:
        (_, number) = node
        buffer = self.take(number)
        whole = buffer.obj
        # The transport has read into a bytes object already, or this is the sender's own.
        return whole if type(whole) is bytes and len(whole) == buffer.nbytes else bytes(buffer)

    def memoryview_(self, node: list[Any]) -> memoryview:
        _, data, form, shape = node
        flat = memoryview(self.blob(data))
        if not flat.nbytes:
            return flat.cast("B").cast(form) if form != "B" else flat
        return flat.cast(form, tuple(shape)) if form != "B" or len(shape) != 1 else flat

    def number(self, node: list[Any]) -> Any:
        _, spec, data = node
        (value,) = np.frombuffer(data, dtypes.numpy_dtype(spec))
        return value

    def numpy_text(self, node: list[Any]) -> Any:
        _, value = node
        return np.str_(value) if type(value) is str else np.bytes_(bytes(memoryview(value)))

    def integer(self, node: list[Any]) -> int:
        _, data = node
        return int.from_bytes(memoryview(data), "little", signed=True)

    def array(self, node: list[Any]) -> np.ndarray[Any, Any]:
        _, number, spec, shape, *lies = node
        dtype = dtypes.numpy_dtype(spec)
        return _nothing(shape, dtype) if number == f.NOTHING else _elements(self.take(number), dtype, shape, lies)

    def own(self, number: int, buffer: memoryview) -> memoryview:
        """A writable copy: torch has no read-only tensors. One for all views of the buffer."""
        if number not in self.writable:
            self.writable[number] = memoryview(bytearray(buffer))
        return self.writable[number]

    def tensor(self, node: list[Any]) -> Any:
        _, number, name, shape, flags, *lies = node
        known = _dtypes.get(name) or _known_dtype(name)
        if known is None:
            raise CodecError(f"the skeleton asks for a tensor of dtype {name}")
        dtype, counted, stand_in = known
        if number == f.NOTHING:
            tensor = _torch.from_numpy(_nothing(shape, counted))
        else:
            buffer = self.at(number)
            if type(buffer) is memoryview:
                if buffer.readonly:
                    buffer = self.own(number, buffer)
                tensor = _torch.from_numpy(_elements(buffer, counted, shape, lies))
            else:
                tensor, stand_in = self.on_device(number, dtype, shape, lies), None
        if stand_in is not None:
            tensor = tensor.view(dtype)
        if not flags:
            return tensor
        if type(flags) is not int or flags > f.REQUIRES_GRAD | f.PARAMETER:
            raise CodecError(f"the skeleton has unknown flags {flags!r}")
        if flags & f.PARAMETER:
            return _torch.nn.Parameter(tensor, requires_grad=bool(flags & f.REQUIRES_GRAD))
        return tensor.requires_grad_()

    def on_device(self, number: int, dtype: torch.dtype, shape: Any, lies: list[Any]) -> torch.Tensor:
        buffer = self.buffers[number]
        assert not isinstance(buffer, memoryview)  # the caller looked
        nbytes = buffer.nbytes
        if not lies:
            if not all(type(n) is int and n >= 0 for n in shape) or prod(shape) * dtype.itemsize != nbytes:
                raise CodecError(f"buffer {number} has {nbytes} bytes, the skeleton says shape {shape} of {dtype}")
            whole = buffer.detach()
            return (whole if whole.dtype == dtype else whole.reshape(-1).view(dtype)).reshape(shape)
        offset, strides = lies
        if not memory.reach(shape, offset, strides, dtype.itemsize, nbytes):
            raise CodecError(f"a view of buffer {number} reaches beyond its {nbytes} bytes")
        width = dtype.itemsize
        if offset % width or any(stride % width for stride in strides):
            raise CodecError(f"a view of buffer {number} does not lie on whole elements")
        flat = buffer.detach().reshape(-1).view(_torch.uint8)
        whole = flat[: nbytes // width * width].view(dtype)
        steps = [stride // width for stride in strides]
        return whole.as_strided(shape, steps, whole.storage_offset() + offset // width)

    def named(self, node: list[Any]) -> Any:
        _, name, nodes = node
        cls = classes.find(name, load=self.allow_pickle)
        if not classes.is_namedtuple(cls):
            raise CodecError(f"{name} is not a namedtuple")
        plan = classes.plan_of(cls)
        values = self.items(nodes)
        if len(values) != len(plan.fields):
            raise CodecError(f"{name} has {len(plan.fields)} fields here and {len(values)} there")
        return tuple.__new__(cls, values)

    def dataclass(self, node: list[Any]) -> Any:
        _, name, nodes, *more = node
        cls = classes.find(name, load=self.allow_pickle)
        if not classes.is_plain_dataclass(cls):
            raise CodecError(f"{name} is not a dataclass")
        plan = classes.plan_of(cls)
        if nodes.keys() != plan.known:
            differing = ", ".join(sorted(map(str, nodes.keys() ^ plan.known)))
            raise CodecError(f"{name} has other fields here than there: {differing}")
        values = self.fields(nodes)
        obj: Any = object.__new__(cls)
        for field in plan.fields:
            object.__setattr__(obj, field, values[field])  # also where the class is frozen
        if more:
            (attributes,) = more
            if not plan.open or any(key.startswith("__") for key in attributes):
                raise CodecError(f"an object of {name} cannot have the attributes {', '.join(attributes)}")
            obj.__dict__.update(self.fields(attributes))
        return obj

    def fields(self, nodes: dict[str, Any]) -> dict[str, Any]:
        name = ""
        try:
            for name, node in nodes.items():
                if type(node) not in _LEAVES:
                    nodes[name] = self.walk(node)
        except CodecError as error:
            error.under(f".{name}")
            raise
        return nodes

    def ordered(self, node: list[Any]) -> OrderedDict[Any, Any]:
        _, pairs, attributes = node
        out = OrderedDict(self.pairs(pairs))
        if attributes is not None:
            if any(type(key) is not str or key.startswith("__") for key in attributes):
                raise CodecError("an OrderedDict cannot have these attributes")
            out.__dict__.update(self.texts(attributes))
        return out

    def enum(self, node: list[Any]) -> Any:
        _, name, member = node
        return classes.enum_member(classes.find(name, load=self.allow_pickle), member, name)

    def size(self, node: list[Any]) -> Any:
        import torch

        return torch.Size(node[1])

    def torch_dtype(self, node: list[Any]) -> Any:
        import torch

        _, name = node
        found = vars(torch).get(name)
        if not isinstance(found, torch.dtype):
            raise CodecError(f"the skeleton names {name!r} as a dtype of torch")
        return found

    def torch_device(self, node: list[Any]) -> Any:
        import torch

        return torch.device(node[1])

    def pickle(self, node: list[Any]) -> Any:
        if not self.allow_pickle:
            raise CodecError("a pickled part came, which is read with allow_pickle=True alone")
        from rlinf_comm._codec import pickled

        return pickled.decode(self, node[1:])


def _nothing(shape: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if 0 not in shape:
        raise CodecError(f"a tensor or array of shape {shape} has no buffer")
    return np.empty(shape, dtype)


def _elements(buffer: memoryview, dtype: np.dtype[Any], shape: Any, lies: list[Any]) -> np.ndarray[Any, Any]:
    """An array over ``buffer``. ``lies``: nothing, or offset and strides in bytes."""
    if not lies:
        # numpy refuses what is negative, too large to count, or larger than the buffer; one -1 it works out.
        array = np.ndarray(shape, dtype, buffer)
        if array.nbytes != buffer.nbytes or -1 in shape:
            raise CodecError(f"a buffer has {buffer.nbytes} bytes, the skeleton says {array.nbytes}")
        return array
    offset, strides = lies
    if not memory.reach(shape, offset, strides, dtype.itemsize, buffer.nbytes):
        raise CodecError(f"a view of a buffer reaches beyond its {buffer.nbytes} bytes")
    return np.ndarray(shape, dtype, buffer, offset, strides)


_torch: Any = None
_dtypes: dict[str, tuple[torch.dtype, np.dtype[Any], torch.dtype | None]] = {}


def _known_dtype(name: object) -> tuple[torch.dtype, np.dtype[Any], torch.dtype | None] | None:
    """Looks again when torch has only just been loaded."""
    global _torch
    import torch

    _torch = torch
    _dtypes.update(dtypes.torch_dtypes())
    return _dtypes.get(name) if isinstance(name, str) else None


HANDLERS: list[Handler] = [
    lambda d, node: d.items(node[1]),
    lambda d, node: tuple(d.items(node[1])),
    lambda d, node: set(d.items(node[1])),
    lambda d, node: frozenset(d.items(node[1])),
    Decoder.size,
    lambda d, node: dict(d.pairs(node[1])),
    Decoder.ordered,
    lambda d, node: deque(d.items(node[1]), node[2]),
    Decoder.bytes_,
    lambda d, node: bytearray(d.blob(node[1])),
    Decoder.memoryview_,
    Decoder.integer,
    lambda d, node: bytes(memoryview(node[1])).decode("utf-8", "surrogatepass"),
    lambda d, node: complex(node[1], node[2]),
    Decoder.number,
    Decoder.numpy_text,
    lambda d, node: dtypes.numpy_dtype(node[1]),
    Decoder.array,
    Decoder.tensor,
    Decoder.torch_dtype,
    Decoder.torch_device,
    Decoder.named,
    Decoder.dataclass,
    Decoder.enum,
    Decoder.pickle,
]
assert len(HANDLERS) == f.KINDS
