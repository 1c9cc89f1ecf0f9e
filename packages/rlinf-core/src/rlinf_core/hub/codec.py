"""Messages as bytes. What comes once an item travels as a plain tuple ``(tag, *fields)``, the rest as it is, pickled.

The tuples are made from the fields of the dataclasses and their annotations: an annotation that names a hot class (or
a tuple of it) is a tuple on the wire too. A tuple pickles and unpickles several times faster than a frozen dataclass.
Both sides are the same program, so a tag that is not known or a wrong number of fields is a fault, which is named.
"""

from __future__ import annotations

import dataclasses
import pickle
import types
import typing
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from rlinf_core.board import events as ev
from rlinf_core.errors import RLinfError
from rlinf_core.hub import messages as ms
from rlinf_core.hub.wire import LENGTH
from rlinf_core.payload import Descriptor

Coder = Callable[[Any], Any]


class MessageError(RLinfError):
    """Bytes that are no message of this program."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How one hot class travels: its values in order, and what some of them are turned into and back from."""

    kind: type
    tag: int
    names: tuple[str, ...]
    values: Callable[[Any], Any]
    special: tuple[tuple[int, Coder, Coder], ...]

    def encode(self, message: Any) -> tuple[Any, ...]:
        """``(tag, *fields)``."""
        if len(self.names) == 1:
            fields = [self.values(message)]
        else:
            fields = [*self.values(message)]
        for index, encode, _ in self.special:
            fields[index] = encode(fields[index])
        return (self.tag, *fields)

    def decode(self, data: tuple[Any, ...]) -> Any:
        if len(data) != len(self.names) + 1:
            got, want = len(data) - 1, ", ".join(self.names)
            raise MessageError(f"{self.kind.__name__} came with {got} fields, not {len(self.names)} ({want})")
        if not self.special:
            return self.kind(*data[1:])
        fields = [*data[1:]]
        for index, _, decode in self.special:
            fields[index] = decode(fields[index])
        return self.kind(*fields)


_FORMS: list[_Form] = []
_BY_CLASS: dict[type, _Form] = {}


def to_tuple(message: Any) -> Any:
    """The wire form of a message; what is not hot is its own."""
    form = _BY_CLASS.get(type(message))
    return message if form is None else form.encode(message)


def from_tuple(data: Any) -> Any:
    """Inverse of ``to_tuple``. Raises ``MessageError`` for a tuple that no message has."""
    if type(data) is not tuple:
        return data
    tag = data[0] if data else None
    if type(tag) is not int or not 0 <= tag < len(_FORMS):
        raise MessageError(f"no message has the tag {tag!r} (known: 0 to {len(_FORMS) - 1})")
    return _FORMS[tag].decode(data)


def pack(message: Any) -> bytes:
    """One frame."""
    body = pickle.dumps(to_tuple(message), protocol=5)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray | memoryview) -> Any:
    """The message in the body of a frame; only for a peer that has proved itself."""
    return from_tuple(pickle.loads(body))


def _hot(kind: Any, **hints: Any) -> None:
    """Register a class; ``hints`` say what a field holds on the wire where its annotation leaves that open."""
    found = typing.get_type_hints(kind) | hints
    fields = dataclasses.fields(kind)
    special = []
    for index, field in enumerate(fields):
        coders = _any_coders() if field.default is ev.ANY else _coders(found[field.name])
        if coders is not None:
            special.append((index, *coders))
    names = tuple(field.name for field in fields)
    form = _Form(kind, len(_FORMS), names, attrgetter(*names), tuple(special))
    _FORMS.append(form)
    _BY_CLASS[kind] = form


def _any_coders() -> tuple[Coder, Coder]:
    """A key or ``ANY``: a marker that costs nothing and is no key."""
    return (lambda key: None if key is ev.ANY else (key,)), (lambda data: ev.ANY if data is None else data[0])


def _coders(hint: Any) -> tuple[Coder, Coder] | None:
    """How values with this annotation are turned into tuples and back; ``None``: they stay as they are."""
    if hint in _BY_CLASS:
        return to_tuple, from_tuple
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and all(kind in _BY_CLASS for kind in inner):
        return to_tuple, from_tuple
    if typing.get_origin(hint) is tuple and inner and (coders := _coders(inner[0])) is not None:
        assert set(inner[1:]) <= {..., inner[0]}, f"{hint} mixes types"
        encode, decode = coders
        return (lambda values: tuple([encode(v) for v in values])), (lambda data: tuple([decode(d) for d in data]))
    return None


_EVENTS = (ev.Put, ev.Get, ev.JoinReader, ev.Fetched, ev.Return, ev.CancelRequest, ev.CloseWriter, ev.Trained, ev.Drop)
_ANSWERS = (ev.PutDone, ev.PutRefused, ev.Deliver, ev.DeliverJoined, ev.End, ev.Poisoned, ev.Empty, ev.CancelDone)
_DEVICES = (ms.Acquire, ms.Granted, ms.ReleaseDevices, ms.Offloaded)
_OTHERS = (ms.Accepted, ms.Blocked, ms.Release, ms.Log)
# Those within others come first.
_hot(Descriptor)
_hot(ev.Item, descriptor=Descriptor)  # opaque for the board, not for those who travel with it
for _kind in (*_EVENTS, *_ANSWERS, *_DEVICES, *_OTHERS):
    _hot(_kind)
_hot(ms.AtSafePoint, event=ev.Get | ev.JoinReader)
