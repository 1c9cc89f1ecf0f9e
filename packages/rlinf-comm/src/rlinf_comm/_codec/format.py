"""What a skeleton consists of, for the writer and the reader alike.

A skeleton is one MessagePack value. ``None``, bool, int of 64 bits, float, str and short bytes stand for themselves;
a map is a dict whose keys are str; everything else is an array whose first element is one of the kinds below.
"""

from __future__ import annotations

from rlinf_core.errors import RLinfError

SCALARS = frozenset((type(None), bool, int, float, str))
"""Types whose values are their own node."""

MAX_DEPTH = 150
"""Containers within containers. Writer and reader recurse, and share the stack with their caller."""

INLINE = 256
"""Bytes of at most this length stand in the skeleton: a buffer of its own costs a transport more than the copy."""

ALIGN = 16
"""A shared region on a device starts at a multiple of this in its storage, so that every dtype can be viewed in it."""

# [kind, [node, ...]]
LIST, TUPLE, SET, FROZENSET, SIZE = range(5)
DICT = 5  # [kind, [key, value, key, value, ...]]: keys other than str
ORDERED = 6  # [kind, [key, value, ...], attributes or None]
DEQUE = 7  # [kind, [node, ...], maxlen]
BYTES = 8  # [kind, buffer]
BYTEARRAY = 9  # [kind, buffer, or bytes]
MEMORYVIEW = 10  # [kind, buffer, or bytes, format, shape]
INTEGER = 11  # [kind, little-endian bytes, signed]: more than 64 bits
TEXT = 12  # [kind, bytes]: str with lone surrogates
COMPLEX = 13  # [kind, real, imaginary]
NUMBER = 14  # [kind, dtype, bytes]: a numpy scalar
NUMPY_TEXT = 15  # [kind, str or bytes]: numpy.str_ and numpy.bytes_
NUMPY_DTYPE = 16  # [kind, dtype]
ARRAY = 17  # [kind, buffer, dtype, shape] and, unless C-contiguous, [.., offset, strides] in bytes
TENSOR = 18  # [kind, buffer, dtype, shape, flags] and, unless contiguous, [.., offset, strides] in bytes
TORCH_DTYPE = 19  # [kind, name]
TORCH_DEVICE = 20  # [kind, text]
NAMED = 21  # [kind, class, [node, ...]]
DATACLASS = 22  # [kind, class, {field: node}] and, where there are any, [.., {other attribute: node}]
ENUM = 23  # [kind, class, name], or the number of a flag
PICKLE = 24  # [kind, buffer or bytes, [buffer, ...], [node of a tensor or array inside, ...]]
KINDS = 25

NOTHING = -1
"""Instead of a buffer's number: no elements, no buffer."""

REQUIRES_GRAD, PARAMETER = 1, 2


class CodecError(RLinfError):
    """An object cannot be sent, or a frame does not describe one. ``path`` says where in the object."""

    def __init__(self, message: str, *, path: str = "") -> None:
        self.message = message
        self.path = path
        super().__init__(self._text())

    def _text(self) -> str:
        path = self.path if len(self.path) <= 200 else f"{self.path[:120]}...{self.path[-60:]}"
        return f"at {path or 'the top'}: {self.message}"

    def under(self, step: str) -> None:
        """Put one more step in front of the path, on the way up."""
        self.path = step + self.path
        self.args = (self._text(),)

    def __reduce__(self) -> tuple[object, ...]:
        return (_codec_error, (self.message, self.path))


def _codec_error(message: str, path: str) -> CodecError:
    return CodecError(message, path=path)


class Unknown(CodecError):
    """There is no node for this object; pickle may have a way."""


def index_of(key: object) -> str:
    """How a path names the value under ``key``."""
    try:
        text = repr(key)
    except Exception as error:  # its class's own code, or an integer of thousands of digits
        text = f"<{type(key).__name__}: {type(error).__name__}>"
    return f"[{text}]" if len(text) <= 60 else f"[{text[:40]}...{text[-15:]}]"
