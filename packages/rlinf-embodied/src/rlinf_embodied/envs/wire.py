"""How a process of environments and its parent talk: pickles with their length in front, over a stream socket.

Arrays travel as type, shape and bytes, because the two may have versions of numpy that do not read each other's.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import socket
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")
HEADER = _LENGTH.size


def _array(kind: str, shape: tuple[int, ...], data: Any) -> NDArray[Any]:
    return np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape)


def _number(value: Any) -> Any:
    return value


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype.kind in "biuf":
            flat = np.ascontiguousarray(value)
            return _array, (value.dtype.str, value.shape, bytearray(flat.tobytes()))
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return _number, (value.item(),)
        return NotImplemented


def dumps(message: Any) -> bytes:
    """``message`` with its length in front."""
    stream = io.BytesIO()
    stream.write(_LENGTH.pack(0))
    _Pickler(stream, protocol=5).dump(message)
    stream.seek(0)
    stream.write(_LENGTH.pack(len(stream.getbuffer()) - HEADER))
    return stream.getvalue()


def length_of(header: bytes) -> int:
    """The length that the first ``HEADER`` bytes say."""
    number: int = _LENGTH.unpack(header)[0]
    return number


def receive(connection: socket.socket) -> Any:
    """The next message of a blocking socket. Raises EOFError when the other end is closed."""
    return pickle.loads(_exactly(connection, length_of(bytes(_exactly(connection, HEADER)))))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while count:
        got = connection.recv_into(view[-count:])
        if not got:
            raise EOFError("the other end is closed")
        count -= got
    return data
