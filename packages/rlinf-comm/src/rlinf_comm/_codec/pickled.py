"""The way for what has no node: one pickle, protocol 5, buffers out of band, tensors and arrays beside it."""

from __future__ import annotations

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm._codec import format as f
from rlinf_comm._codec.classes import ELSEWHERE
from rlinf_comm._codec.format import CodecError

if TYPE_CHECKING:
    from rlinf_comm._codec.decoder import Decoder
    from rlinf_comm._codec.encoder import Encoder


class _Pickler(pickle.Pickler):
    """Leaves plain tensors and arrays to the codec, which copies neither (torch's own pickling copies)."""

    def __init__(self, file: io.BytesIO, encoder: Encoder, nodes: list[Any], outside: list[int]) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._outside)
        self.encoder = encoder
        self.nodes = nodes
        self.numbers = outside
        self.known: dict[int, int] = {}
        self.alive: list[object] = []
        torch = sys.modules.get("torch")
        self.tensors: tuple[type, ...] = () if torch is None else (torch.Tensor, torch.nn.Parameter)

    def _outside(self, buffer: pickle.PickleBuffer) -> None:
        self.encoder.buffers.append(buffer.raw())
        self.numbers.append(len(self.encoder.buffers) - 1)

    def persistent_id(self, obj: Any) -> int | None:
        cls = type(obj)
        if cls is np.ndarray:
            if obj.dtype.kind not in "biufcSUMm":
                return None
        elif cls not in self.tensors or obj.layout is not sys.modules["torch"].strided or obj.is_quantized:
            return None
        number = self.known.get(id(obj))
        if number is None:
            number = self.known[id(obj)] = len(self.nodes)
            self.alive.append(obj)  # made while pickling, perhaps: its id must stay its own
            self.nodes.append(self.encoder.walk(obj, 0))
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: list[memoryview], inside: list[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self.inside = inside

    def persistent_load(self, number: Any) -> Any:
        return self.inside[number]


def encode(encoder: Encoder, obj: object) -> list[Any]:
    nodes: list[Any] = []
    outside: list[int] = []
    file = io.BytesIO()
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    try:
        _Pickler(file, encoder, nodes, outside).dump(obj)
    except CodecError as error:
        raise CodecError(f"inside an object of type {kind}: {error.message}", path=error.path) from error
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise CodecError(f"an object of type {kind} cannot be pickled: {error}") from error
    return [f.PICKLE, encoder.blob(file.getbuffer()), outside, nodes]


def decode(decoder: Decoder, arguments: list[Any]) -> Any:
    data, outside, nodes = arguments
    buffers = [decoder.take(number) for number in outside]
    inside = [decoder.walk(node) for node in nodes]
    try:
        return _Unpickler(io.BytesIO(decoder.blob(data)), buffers, inside).load()
    except Exception as error:  # what the pickle calls may raise anything
        hint = f"; {ELSEWHERE}" if isinstance(error, AttributeError) and "__main__" in str(error) else ""
        raise CodecError(f"the pickled part cannot be read: {type(error).__name__}: {error}{hint}") from error
