"""The codec: what goes in comes out, nothing large is copied, nothing else is accepted."""

from __future__ import annotations

import json
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_comm import CodecError, decode, encode
from rlinf_core.types import Prompt, SamplingParams, Trajectory


def round_trip(obj: object) -> Any:
    skeleton, buffers = encode(obj)
    return decode(skeleton, [bytearray(buffer) for buffer in buffers])


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
HASHABLE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
OBJECTS = st.recursive(
    SCALARS | st.binary(max_size=8) | st.frozensets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down (1, 1.0 and True are different things to send)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    return bool(a == b)


@given(OBJECTS)
@settings(max_examples=150, deadline=None)
def test_nested_objects_come_back_with_their_types(obj: object) -> None:
    assert same(round_trip(obj), obj)


def test_floats_that_json_has_no_word_for() -> None:
    back = round_trip([math.inf, -math.inf, math.nan, -0.0])
    assert back[0] == math.inf
    assert back[1] == -math.inf
    assert math.isnan(back[2])
    assert math.copysign(1.0, back[3]) == -1.0


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "int8", "uint16", "bool", "complex64", "<U3", "S2", "M8[s]"]
)
def test_arrays_keep_dtype_shape_and_strides(dtype: str) -> None:
    base = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for array in (
        base,
        np.asfortranarray(base),
        base.transpose(1, 0, 2),
        base[0, 0, 0:0],
        base[0, 0, 0].reshape(()),
    ):
        back = round_trip(array)
        assert back.dtype == array.dtype
        assert back.strides == array.strides or array.size == 0
        np.testing.assert_array_equal(back, array)


def test_array_with_gaps_is_packed_in_the_same_axis_order() -> None:
    array = np.arange(24).reshape(4, 6).T[::2, ::-1]
    skeleton, buffers = encode(array)
    assert sum(buffer.nbytes for buffer in buffers) == array.nbytes
    back = decode(skeleton, buffers)
    np.testing.assert_array_equal(back, array)
    assert back.flags.f_contiguous


def test_numpy_scalars_stay_scalars() -> None:
    back = round_trip(np.float32(1.5))
    assert isinstance(back, np.float32)
    assert back == np.float32(1.5)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_keep_dtype_shape_and_strides(dtype: torch.dtype) -> None:
    base = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for tensor in (base, base.permute(2, 0, 1), base.mT, base[:, :0], base[1, 2, 3]):
        back = round_trip(tensor)
        assert back.dtype == tensor.dtype
        assert back.stride() == tensor.stride() or tensor.numel() == 0
        assert torch.equal(back, tensor)


def test_expanded_and_sliced_tensors_send_no_more_than_their_elements() -> None:
    for tensor in (torch.zeros(1, 5).expand(3, 5), torch.arange(12.0).reshape(3, 4)[:, 1:2]):
        skeleton, buffers = encode(tensor)
        assert buffers[0].nbytes == tensor.numel() * 4
        assert torch.equal(decode(skeleton, [bytearray(buffers[0])]), tensor)


def test_parameters_and_leaves_keep_requires_grad() -> None:
    back = round_trip({"w": torch.nn.Parameter(torch.ones(2)), "x": torch.ones(2, requires_grad=True)})
    assert type(back["w"]) is torch.nn.Parameter
    assert back["w"].requires_grad
    assert type(back["x"]) is torch.Tensor
    assert back["x"].requires_grad


def test_large_things_are_never_copied() -> None:
    array, tensor, blob = np.zeros(1000), torch.zeros(1000), b"x" * 1000
    skeleton, buffers = encode([array, tensor, blob])
    assert len(skeleton) < 200
    array[3], tensor[3] = 7.0, 8.0
    assert np.frombuffer(buffers[0])[3] == 7.0
    assert np.frombuffer(buffers[1], dtype=np.float32)[3] == 8.0
    assert buffers[2].obj is blob
    inbox = [bytearray(buffer) for buffer in buffers]
    back_array, back_tensor, _ = decode(skeleton, inbox)
    inbox[0][:8] = np.float64(5.0).tobytes()
    inbox[1][:4] = np.float32(6.0).tobytes()
    assert back_array[0] == 5.0
    assert back_tensor[0] == 6.0


def test_read_only_buffers_do_not_become_writable() -> None:
    skeleton, buffers = encode([np.zeros(2), torch.zeros(2)])
    received = [bytes(buffer) for buffer in buffers]
    array, tensor = decode(skeleton, received)
    assert not array.flags.writeable
    tensor[0] = 1.0
    assert received[1] == bytes(8)


def test_dataclasses_frozen_and_slotted() -> None:
    trajectory = Trajectory("e0", {"reward": np.ones(3)}, {"n": (1, None)})
    back = round_trip([Prompt("p", "1+1=", "2", fields={"level": 3}), SamplingParams(8, seed=5), trajectory])
    assert back[0] == Prompt("p", "1+1=", "2", fields={"level": 3})
    assert back[1] == SamplingParams(8, seed=5)
    assert back[2].info == {"n": (1, None)}
    np.testing.assert_array_equal(back[2].arrays["reward"], np.ones(3))


def test_namedtuple_of_a_module_that_the_reader_can_find() -> None:
    # A test module has no importable name, so one of the standard library's stands in.
    from urllib.parse import SplitResult, urlsplit

    back = round_trip(urlsplit("tcp://host:1/path"))
    assert type(back) is SplitResult
    assert back.hostname == "host"


@pytest.mark.parametrize(
    ("obj", "where", "why"),
    [
        ({"a": [1, Fraction(1, 2)]}, "['a'][1]", "Fraction"),
        (Trajectory("e", {"x": np.array([None])}), ".arrays['x']", "dtype object"),
        ([torch.ones(1, requires_grad=True) * 2], "[0]", "detach"),
        ([torch.eye(2).to_sparse()], "[0]", "strided"),
        (lambda: None, "the top", "function"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(obj: object, where: str, why: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode(obj)
    assert f"at {where}: " in str(caught.value)
    assert why in str(caught.value)


def test_cycles_are_refused_and_repeats_are_not() -> None:
    inner: list[Any] = [1]
    assert round_trip([inner, inner]) == [[1], [1]]
    inner.append(inner)
    with pytest.raises(CodecError, match="contains itself"):
        encode(inner)


@pytest.mark.parametrize(
    ("skeleton", "buffers", "why"),
    [
        (b"\xff", [], "not JSON"),
        (b'["pickle","x"]', [], "unknown kind 'pickle'"),
        (b"[]", [], "unknown kind ''"),
        (b'["bytes",3]', [], "buffer 0 is missing"),
        (b'["bytes",3]', [b"ab"], "has 2 bytes, the skeleton says 3"),
        (b"1", [b"ab"], "1 buffers came, the skeleton names 0"),
        (b'["array","|O",[1],[0]]', [bytes(8)], "dtype object"),
        (b'["tensor","save",[1],[0],false]', [bytes(8)], "dtype save"),
        (b'["array","<f8",[1]]', [bytes(8)], "malformed"),
        (b'["dataclass","os:system",[]]', [], "not a class"),
        (b'["dataclass","fractions:Fraction",[]]', [], "not a dataclass"),
        (b'["named","builtins:tuple",[1]]', [], "not a namedtuple"),
        (b'["dataclass","nowhere_at_all:X",[]]', [], "cannot be found"),
        (
            b'["dataclass","rlinf_core.types:StepInfo",[["lr",1.0]]]',
            [],
            "other fields here than there: grad_norm",
        ),
    ],
)
def test_frames_that_do_not_fit_are_refused(skeleton: bytes, buffers: list[bytes], why: str) -> None:
    with pytest.raises(CodecError) as caught:
        decode(skeleton, buffers)
    assert why in str(caught.value)


def test_skeleton_is_plain_json_and_the_error_pickles() -> None:
    skeleton, _ = encode({"a": (1, None)})
    assert json.loads(skeleton) == ["dict", [["a", ["tuple", [1, None]]]]]
    error = pickle.loads(pickle.dumps(CodecError("no", path="[0]")))
    assert (str(error), error.path) == ("at [0]: no", "[0]")


def test_cuda_tensors_are_refused_by_device() -> None:
    with pytest.raises(CodecError, match="is on meta: move it to the CPU first"):
        encode(torch.empty(2, device="meta"))
