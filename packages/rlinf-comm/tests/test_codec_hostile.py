"""Frames that were cut, changed or made to harm: refused with CodecError, nothing executed, nothing huge made."""

from __future__ import annotations

import enum
import sys
import tracemalloc
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_comm import CodecError, decode, encode
from rlinf_comm._codec import format as f
from rlinf_core.types import SamplingParams, Trajectory

HUGE = 2**62


class Level(enum.Enum):
    LOW = 1


class Access(enum.Flag):
    READ = 1


@dataclass
class Open:
    number: int


@dataclass(slots=True)
class Closed:
    number: int


HERE = __name__


@pytest.mark.parametrize(
    ("node", "buffers", "why"),
    [
        ([], [], "unknown kind"),
        ([f.KINDS], [], f"unknown kind {f.KINDS}"),
        ([-1, []], [], "unknown kind -1"),
        ([True, []], [], "unknown kind True"),
        (["list", []], [], "unknown kind 'list'"),
        (msgspec.msgpack.Ext(3, b"x"), [], "unknown kind 'Ext'"),
        ({b"a": 1}, [], "key is not a text"),
        ([f.LIST, 3], [], "no list"),
        ([f.DICT, [1]], [], "malformed"),
        ([f.DICT, [[f.LIST, []], 1]], [], "unhashable"),
        ([f.DEQUE, [], "x"], [], "malformed"),
        ([f.BYTES, 0], [], "buffer 0 is missing"),
        ([f.BYTES, "a"], [], "buffer 'a' is missing"),
        ([f.BYTES, -1], [b"ab"], "buffer -1 is missing"),
        ([f.BYTES, 0, 1], [b"ab"], "malformed"),
        ([f.BYTEARRAY, HUGE], [], "is missing"),
        (1, [b"ab"], "1 buffers came, the skeleton names 0"),
        ([f.LIST, [[f.BYTES, 1], {"a": [f.BYTES, 5]}]], [b"", b""], "at [1]['a']: buffer 5 is missing"),
        ([f.INTEGER, 7], [], "malformed"),
        ([f.TEXT, b"\xff"], [], "malformed"),
        ([f.SIZE, [1.5]], [], "malformed"),
        ([f.MEMORYVIEW, b"abcd", "i", [HUGE, HUGE]], [], "malformed"),
        ([f.MEMORYVIEW, b"abcd", "P", [1]], [], "malformed"),
        # arrays
        ([f.ARRAY, 0, "|O", [1]], [bytes(8)], "dtype |O"),
        ([f.ARRAY, 0, "<f4,|O", [1]], [bytes(16)], "dtype"),
        ([f.ARRAY, 0, [["a"], ["|O"], [0], 8], [1]], [bytes(8)], "dtype |O"),
        ([f.ARRAY, 0, [["a"], ["<f8"], [100], 8], [1]], [bytes(8)], "malformed"),
        ([f.ARRAY, 0, [["a"], ["<f8"], [0], HUGE], [1]], [bytes(8)], "malformed"),
        ([f.ARRAY, 0, ["<f8", [HUGE]], [1]], [bytes(8)], "malformed"),
        ([f.ARRAY, 0, "|T16", [1]], [bytes(16)], "dtype |T16"),
        ([f.ARRAY, 0, "a", [1]], [bytes(16)], "dtype a"),
        ([f.ARRAY, 0, "|V0", [1]], [bytes(16)], "dtype"),
        ([f.ARRAY, 0, "<f8", [2]], [bytes(8)], "malformed"),
        ([f.ARRAY, 0, "<f8", [1]], [bytes(16)], "has 16 bytes, the skeleton says 8"),
        ([f.ARRAY, 0, "<f8", [-1]], [bytes(8)], "skeleton says"),
        ([f.ARRAY, 0, "<f8", [-1, -1]], [bytes(8)], "malformed"),
        ([f.ARRAY, 0, "<f8", [HUGE, HUGE]], [bytes(8)], "malformed"),
        ([f.ARRAY, 0, "<f8", HUGE], [bytes(8)], "malformed"),
        ([f.ARRAY, f.NOTHING, "<f8", [HUGE]], [], "has no buffer"),
        ([f.ARRAY, f.NOTHING, "<f8", [0, HUGE, HUGE]], [], "malformed"),
        ([f.ARRAY, 0, "<f8", [2], 0, [8]], [bytes(8)], "reaches beyond"),
        ([f.ARRAY, 0, "<f8", [1], -8, [8]], [bytes(8)], "reaches beyond"),
        ([f.ARRAY, 0, "<f8", [5], 0, [HUGE]], [bytes(8)], "reaches beyond"),  # 4 * 2**62 is 0 in 64 bits
        ([f.ARRAY, 0, "<f8", [2, 2], 0, [8]], [bytes(8)], "reaches beyond"),
        ([f.ARRAY, 0, "<f8", [1], 0], [bytes(8)], "malformed"),
        ([f.NUMBER, "<f8", bytes(4)], [], "malformed"),
        ([f.NUMBER, "<f8", bytes(80)], [], "malformed"),
        ([f.NUMBER, "|O", bytes(8)], [], "dtype |O"),
        # tensors
        ([f.TENSOR, 0, "save", [1], 0], [bytes(8)], "dtype save"),
        ([f.TENSOR, 0, [1], [1], 0], [bytes(8)], "malformed"),
        ([f.TENSOR, 0, "qint8", [8], 0], [bytes(8)], "dtype qint8"),
        ([f.TENSOR, 0, "float32", [1], 64], [bytes(4)], "unknown flags"),
        ([f.TENSOR, 0, "int64", [1], 1], [bytes(8)], "malformed"),  # integers have no gradient
        ([f.TENSOR, 0, "float32", [3], 0], [bytes(8)], "malformed"),
        ([f.TENSOR, 0, "float32", [2], 0, 0, [-4]], [bytearray(8)], "reaches beyond"),
        ([f.TENSOR, 0, "float32", [2], 0, 4, [-4]], [bytearray(8)], "malformed"),  # torch has no such strides
        ([f.TENSOR, 0, "bfloat16", [2], 0, 0, [1]], [bytearray(8)], "malformed"),
        ([f.TENSOR, f.NOTHING, "float32", [2], 0], [], "has no buffer"),
        ([f.TORCH_DTYPE, "save"], [], "as a dtype"),
        ([f.TORCH_DTYPE, []], [], "malformed"),
        ([f.TORCH_DEVICE, "nowhere:1"], [], "malformed"),
        ([f.BYTES, 0], [torch.empty(1, device="meta")], "not memory of this host"),
        # classes
        ([f.DATACLASS, "os:system", {}], [], "not a class"),
        ([f.DATACLASS, "os:path.join", {}], [], "not a class"),
        ([f.DATACLASS, "fractions:Fraction", {}], [], "not a dataclass"),
        ([f.DATACLASS, "nowhere_at_all:X", {}], [], "import nowhere_at_all"),
        ([f.DATACLASS, "builtins:type.__subclasses__", {}], [], "not a class"),
        ([f.DATACLASS, ["a"], {}], [], "something else than a text"),
        ([f.DATACLASS, "", {}], [], "cannot be found"),
        ([f.DATACLASS, "rlinf_core.types:StepInfo", {"lr": 1.0}], [], "other fields here than there: grad_norm"),
        ([f.DATACLASS, f"{HERE}:Open", [1]], [], "malformed"),
        ([f.DATACLASS, f"{HERE}:Open", {"number": 1}, {"__class__": 1}], [], "cannot have the attributes"),
        ([f.DATACLASS, f"{HERE}:Closed", {"number": 1}, {"more": 1}], [], "cannot have the attributes"),
        ([f.NAMED, "builtins:tuple", [1]], [], "not a namedtuple"),
        ([f.NAMED, "urllib.parse:SplitResult", [1]], [], "has 5 fields here and 1 there"),
        ([f.ENUM, "builtins:int", 3], [], "not an enumeration"),
        ([f.ENUM, f"{HERE}:Level", "HIGH"], [], "no member 'HIGH'"),
        ([f.ENUM, f"{HERE}:Level", 1], [], "no member 1"),
        ([f.ENUM, f"{HERE}:Access", 64], [], "malformed"),
        ([f.ORDERED, [], {"__class__": 1}], [], "cannot have these attributes"),
        ([f.PICKLE, b"", [], []], [], "allow_pickle=True alone"),
    ],
)
def test_frames_that_do_not_fit_are_refused(node: object, buffers: list[Any], why: str) -> None:
    with pytest.raises(CodecError) as caught:
        decode(msgspec.msgpack.encode(node), buffers)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "skeleton",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xdd\x0f\xff\xff\xff" * 200,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x92\x00" * 100_000 + b"\x90",
        b"\xa2\xff\xff",
    ],
    ids=repr,
)
def test_what_is_not_messagepack_is_refused(skeleton: bytes) -> None:
    with pytest.raises(CodecError, match="not MessagePack"):
        decode(skeleton, [])


@pytest.mark.parametrize("buffer", [memoryview(b"abcd")[::2], "text", None, [1]], ids=repr)
def test_buffers_of_the_wrong_kind_are_refused(buffer: Any) -> None:
    with pytest.raises(CodecError, match="a buffer is"):
        decode(msgspec.msgpack.encode([f.BYTES, 0]), [buffer])


def test_nesting_that_unpacks_but_is_too_deep_to_read() -> None:
    node: Any = 1
    for _ in range(450):
        node = [f.LIST, [node]]
    with pytest.raises(CodecError):
        decode(msgspec.msgpack.encode(node), [])


def test_a_skeleton_cannot_make_this_process_import() -> None:
    module = "this"  # of the standard library; it prints when it is imported
    assert module not in sys.modules
    with pytest.raises(CodecError, match="import this in this process first"):
        decode(msgspec.msgpack.encode([f.DATACLASS, "this:X", {}]), [])
    assert module not in sys.modules


def test_modules_that_load_on_access_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("lazy_module")
    asked: list[str] = []
    module.__getattr__ = asked.append  # type: ignore[method-assign, assignment]
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    with pytest.raises(CodecError, match="there is no 'Thing'"):
        decode(msgspec.msgpack.encode([f.DATACLASS, "lazy_module:Thing", {}]), [])
    assert asked == []


SAMPLE = {
    "tied": (torch.arange(12.0).view(3, 4), torch.arange(5)),
    "list": [1, -1.5, "é", None, True, b"abc", b"x" * 300, bytearray(3), 2**80, 1j, "\ud800"],
    3: deque([np.arange(6).reshape(2, 3)[:, ::-1], np.zeros(2, [("a", "<i4"), ("b", "S3")])], 5),
    "classes": [SamplingParams(4, seed=1), Trajectory("e", {"r": np.ones(2)}), Open(3), Level.LOW, Access.READ],
    "more": OrderedDict(a=torch.Size([1]), b={1, 2}, c=np.float32(2), d=torch.int8, e=memoryview(bytes(300))),
}
SAMPLE["tied"] += (SAMPLE["tied"][0][1:],)  # type: ignore[index, operator]
SKELETON, BUFFERS = encode(SAMPLE)
RECEIVED = [bytes(buffer) for buffer in BUFFERS if isinstance(buffer, memoryview)]
LIMIT = 4 << 20


def read(skeleton: bytes, buffers: list[Any]) -> None:
    """Whatever comes out, or CodecError; anything else fails the test. So do large allocations."""
    tracemalloc.start()
    try:
        decode(skeleton, buffers)
    except CodecError:
        pass  # the other allowed outcome
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < LIMIT


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_bytes_are_read_or_refused(data: st.DataObject) -> None:
    skeleton = bytearray(SKELETON)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(skeleton) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "insert", "repeat"]))
        if action == "set":
            skeleton[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del skeleton[at : at + data.draw(st.integers(1, 8))]
        elif action == "insert":
            skeleton[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            skeleton[at:at] = skeleton[at : at + data.draw(st.integers(1, 40))]
        if not skeleton:
            break
    read(bytes(skeleton), RECEIVED)


SMALL = st.integers(-3, 40) | st.sampled_from([HUGE, -HUGE, 2**31, 2**63]) | st.none() | st.booleans()
NAMES = ["float32", "<f8", "|O", "bfloat16", f"{HERE}:Open", "os:system", "number", "a", "LOW", "int8", "B"]
NODES = st.recursive(
    SMALL | st.sampled_from(NAMES) | st.binary(max_size=9) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
        | st.tuples(st.integers(0, f.KINDS - 1), st.lists(inner, max_size=6)).map(lambda pair: [pair[0], *pair[1]])
    ),
    max_leaves=15,
)


@given(NODES, st.lists(st.binary(max_size=40), max_size=3))
@settings(max_examples=400, deadline=None)
def test_invented_nodes_are_read_or_refused(node: object, buffers: list[bytes]) -> None:
    read(msgspec.msgpack.encode(node), buffers)


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        found += _paths(value, (*path, key))
    return found


PATHS = [path for path in _paths(msgspec.msgpack.decode(SKELETON)) if path]


@given(st.lists(st.tuples(st.sampled_from(PATHS), NODES), min_size=1, max_size=3), st.integers(0, len(RECEIVED)))
@settings(max_examples=400, deadline=None)
def test_changed_nodes_are_read_or_refused(changes: list[tuple[tuple[Any, ...], Any]], kept: int) -> None:
    root = msgspec.msgpack.decode(SKELETON)
    for path, replacement in changes:
        try:
            at = root
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = replacement
        except (LookupError, TypeError):
            continue  # an earlier change has taken this place away
    read(msgspec.msgpack.encode(root), RECEIVED[:kept] if kept else RECEIVED)


def test_the_unchanged_sample_is_read() -> None:
    assert decode(SKELETON, RECEIVED)["classes"][2].number == 3
