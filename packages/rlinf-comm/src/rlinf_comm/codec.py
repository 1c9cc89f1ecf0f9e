"""``encode(obj) -> (skeleton, buffers)`` and back: the form in which an object moves between two workers.

One walk over nested data. What is large stays where it is: each tensor, array or long bytes object is one buffer beside
the skeleton (MessagePack), and nothing is copied that lies in memory without gaps. Types come back as they went.

**What travels.** None, bool, int of any size, float, complex, str, bytes, bytearray, memoryview (without gaps), dict
with any keys, OrderedDict (with its attributes, as state dicts have), list, tuple, set, frozenset, deque; namedtuples,
dataclasses and enumerations of classes that a module holds; numpy arrays, scalars and dtypes, structured ones too;
torch tensors, parameters, sizes, dtypes and devices. A subclass of any of these (of str, dict, ndarray, Tensor, ...) is
refused: it would come back as its base.

**Memory.** A tensor or array is sent as it lies, with its strides, when the memory from its first to its last byte is
not larger than its elements; else it is packed by one copy, axes in the same order. Tensors and arrays of one object
that overlap in memory are sent once, if their region is not larger than they are together, and share memory again at
the reader: tied weights stay tied, a write through one view shows in the other. Otherwise each goes by itself, and they
no longer share. The rule is for memory alone: a list met twice is sent twice, a cycle is refused. Tensors with a
conjugate or negative bit are resolved (copied) first. A tensor must not be part of an autograd graph; a leaf keeps
``requires_grad``. ``devices=True`` lets tensors that are not on the CPU through: they stand among the buffers
themselves, detached and contiguous, and are refused otherwise.

**Decoded** arrays and tensors are views of the buffers that came. A read-only buffer gives a read-only array; torch has
no read-only tensors, so there the bytes are copied. Dataclasses and namedtuples are filled without running their
``__init__``; attributes beside the fields come along.

**Who may send.** Nothing in a frame is executed. Classes are found in modules that this process has imported already,
and only as dataclass, namedtuple or enumeration; sizes are checked against the buffers that came before anything is
made. There is one exception. With ``allow_pickle=True`` at both ends an object that has no form above is pickled,
tensors and arrays inside it as here, and a frame with such a part can run any code in the reader, as every pickle can
(it may also import the modules of the classes it names). Read with ``allow_pickle=True`` only from a peer that has
proved who it is (``rlinf_comm`` proves the run's secret first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_comm._codec.decoder import Decoder
from rlinf_comm._codec.encoder import Encoder, TooDeep
from rlinf_comm._codec.format import SCALARS, CodecError

if TYPE_CHECKING:
    import torch

__all__ = ["Buffer", "CodecError", "decode", "encode"]

Buffer = "bytes | bytearray | memoryview | torch.Tensor"
"""What ``decode`` takes: contiguous memory of the host, or a tensor that is on a device."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def encode(
    obj: object, *, allow_pickle: bool = False, devices: bool = False
) -> tuple[bytes, list[memoryview | torch.Tensor]]:
    """Split ``obj`` into a skeleton and its buffers. They share its memory: write to it only when they are sent.

    ``allow_pickle``: pickle what has no form of its own. ``devices``: tensors that are not on the CPU are put among
    the buffers. Raises CodecError naming the place of whatever cannot be sent.
    """
    try:
        return _encode(obj, allow_pickle, devices, careful=type(obj) in SCALARS)
    except (OverflowError, UnicodeEncodeError):
        # An integer or a text that MessagePack has no form for, somewhere: look at each.
        return _encode(obj, allow_pickle, devices, careful=True)


def _encode(
    obj: object, allow_pickle: bool, devices: bool, *, careful: bool
) -> tuple[bytes, list[memoryview | torch.Tensor]]:
    encoder = Encoder(allow_pickle=allow_pickle, devices=devices, careful=careful)
    try:
        node = encoder.walk(obj, 0)
        buffers = encoder.finish()
        try:
            return _pack(node), buffers
        except UnicodeEncodeError:
            raise
        except ValueError as error:
            raise CodecError(f"it does not fit into a skeleton: {error}") from error
    except TooDeep as error:
        raise error.explained() from None
    except RecursionError as error:
        raise CodecError("nested too deeply for what is left of this thread's stack") from error


def decode(skeleton: bytes, buffers: Sequence[Any], *, allow_pickle: bool = False) -> Any:
    """Build the object again. ``buffers``: bytes-like objects, and tensors where the sender had ``devices=True``.

    ``allow_pickle``: read a pickled part, which can run code (see above). Raises CodecError when skeleton and buffers
    do not fit each other, when a class is not known here, and for a pickled part without ``allow_pickle``.
    """
    try:
        node = _unpack(skeleton)
    except (ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        raise CodecError(f"the skeleton is not MessagePack: {error}") from error
    decoder = Decoder([_flat(buffer) for buffer in buffers], allow_pickle=allow_pickle)
    obj = decoder.walk(node)
    if 0 in decoder.used:
        raise CodecError(f"{len(buffers)} buffers came, the skeleton names {sum(decoder.used)}")
    return obj


def _flat(buffer: Any) -> Any:
    if type(buffer) is memoryview or isinstance(buffer, (bytes, bytearray)):
        if type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
            return buffer  # as transports give them
        try:
            return memoryview(buffer).cast("B")
        except (TypeError, ValueError) as error:
            raise CodecError(f"a buffer is not contiguous memory: {error}") from error
    if hasattr(buffer, "is_cpu"):
        return buffer
    raise CodecError(f"a buffer is a {type(buffer).__qualname__}, not bytes or a tensor")
