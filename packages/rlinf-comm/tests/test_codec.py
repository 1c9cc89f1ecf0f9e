"""The codec: what goes in comes out, nothing large is copied, nothing else is accepted."""

from __future__ import annotations

import enum
import math
import pickle
from collections import OrderedDict, deque
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_comm import CodecError, decode, encode
from rlinf_comm._codec.dtypes import torch_names
from rlinf_core.types import Prompt, SamplingParams, Trajectory


def round_trip(obj: object) -> Any:
    skeleton, buffers = encode(obj)
    return decode(skeleton, [bytearray(buffer) for buffer in buffers])


TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # lone surrogates among them
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
HASHABLE = st.recursive(SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
OBJECTS = st.recursive(
    SCALARS | TEXTS | st.binary(max_size=400) | st.frozensets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down (1, 1.0 and True are different things to send)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    return bool(a == b)


@given(OBJECTS)
@settings(max_examples=150, deadline=None)
def test_nested_objects_come_back_with_their_types(obj: object) -> None:
    assert same(round_trip(obj), obj)


def test_floats_that_are_no_numbers() -> None:
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


@pytest.mark.parametrize(
    "value",
    [
        *(np.float32(1.5), np.float64(2.5), np.bool_(True), np.uint8(7), np.complex64(1j), np.longdouble(1) / 3),
        *(np.datetime64("2026-01-01"), np.timedelta64(3, "s"), np.str_("é"), np.bytes_(b"a"), np.str_(""), np.bytes_()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_scalars_stay_scalars(value: np.generic) -> None:
    back = round_trip(value)
    assert type(back) is type(value)
    assert back == value
    assert back.dtype == value.dtype


STRUCTURES = [
    np.dtype([("a", "<i4"), ("b", "<f8", (2,))]),
    np.dtype([("a", "<i2"), ("b", ">f4")], align=True),
    np.dtype([("outer", [("inner", "S3")])]),
    np.dtype({"names": ["x", "y"], "formats": ["u1", "<u2"], "offsets": [4, 0], "itemsize": 16}),
    np.dtype("V5"),
]


@pytest.mark.parametrize("dtype", STRUCTURES, ids=str)
def test_structured_arrays_and_their_elements(dtype: np.dtype[Any]) -> None:
    array = np.arange(3 * dtype.itemsize, dtype=np.uint8).view(dtype)
    back = round_trip([array, array[1], dtype])
    assert back[0].dtype == back[2] == dtype
    assert back[0].tobytes() == array.tobytes()
    assert type(back[1]) is np.void
    assert back[1].tobytes() == array[1].tobytes()


TORCH_DTYPES = sorted(torch_names(), key=str)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_keep_dtype_shape_and_strides(dtype: torch.dtype) -> None:
    bytes_ = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    base = bytes_.view(dtype).view(2, 3, 4)
    for tensor in (base, base.permute(2, 0, 1), base.mT, base[:, :0], base[1, 2, 3], base[:, 1:, ::2]):
        back = round_trip(tensor)
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert raw(back) == raw(tensor)
        if tensor.numel() > 1 and tensor.shape != (2, 2, 2):
            assert back.stride() == tensor.stride()


def raw(tensor: torch.Tensor) -> list[int]:
    """The elements as numbers: torch can neither compare nor copy some of its types."""
    stand_in = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.dtype.itemsize)
    counted = tensor.view(stand_in) if stand_in else torch.view_as_real(tensor).view(torch.int64)
    values: list[int] = counted.contiguous().view(-1).tolist()
    return values


def test_every_dtype_of_torch_is_sent_or_refused_by_name() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    refused = {str(dtype) for dtype in every - set(TORCH_DTYPES)}
    assert refused == {"torch.qint8", "torch.quint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"} | {
        f"torch.bits{n}" for n in ("8", "16", "1x8", "2x4", "4x2")
    }


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, negative = round_trip([tensor.conj(), tensor.conj().imag])
    assert not conjugate.is_conj() and not negative.is_neg()
    assert torch.equal(conjugate, tensor.conj().resolve_conj())
    assert negative.tolist() == [-2.0, 4.0]


def test_parameters_and_leaves_keep_requires_grad() -> None:
    back = round_trip({"w": torch.nn.Parameter(torch.ones(2)), "x": torch.ones(2, requires_grad=True)})
    assert type(back["w"]) is torch.nn.Parameter
    assert back["w"].requires_grad
    assert type(back["x"]) is torch.Tensor
    assert back["x"].requires_grad


def test_dataclasses_frozen_and_slotted() -> None:
    trajectory = Trajectory("e0", {"reward": np.ones(3)}, {"n": (1, None)})
    back = round_trip([Prompt("p", "1+1=", "2", fields={"level": 3}), SamplingParams(8, seed=5), trajectory])
    assert back[0] == Prompt("p", "1+1=", "2", fields={"level": 3})
    assert back[1] == SamplingParams(8, seed=5)
    assert back[2].info == {"n": (1, None)}
    np.testing.assert_array_equal(back[2].arrays["reward"], np.ones(3))


@dataclass
class Open:
    number: int

    def __post_init__(self) -> None:
        self.twice = torch.full((2,), 2.0 * self.number)

    @cached_property
    def thrice(self) -> int:
        return 3 * self.number


@dataclass
class Table(dict):  # type: ignore[type-arg]
    name: str = "x"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Color(enum.StrEnum):
    RED = "red"


def test_attributes_beside_the_fields_come_along() -> None:
    sent = Open(3)
    assert sent.thrice == 9  # kept in the object from now on
    back = round_trip(sent)
    assert (back.number, back.twice.tolist(), vars(back)["thrice"]) == (3, [6.0, 6.0], 9)
    unset = Open.__new__(Open)
    with pytest.raises(CodecError, match=r"at \.number: the field is not set"):
        encode(unset)


def test_namedtuples_enumerations_and_torch_values() -> None:
    from urllib.parse import SplitResult, urlsplit

    sent = [urlsplit("tcp://host:1/path"), HTTPStatus.OK, Color.RED, Access.READ | Access.WRITE, Access.READ]
    sent += [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), memoryview(b"abc"), memoryview(bytes(1000))]
    back = round_trip(sent)
    assert back == sent
    assert type(back[0]) is SplitResult
    assert back[1] is HTTPStatus.OK and back[2] is Color.RED and back[3] is Access.READ | Access.WRITE
    assert [type(value) for value in back] == [type(value) for value in sent]


def test_memoryviews_keep_their_format() -> None:
    matrix = memoryview(np.arange(600, dtype=np.int16).reshape(20, 30))
    back = round_trip([matrix, memoryview(b""), memoryview(np.zeros((0, 3), np.float32))])
    assert (back[0].format, back[0].shape, back[0].tolist()) == ("h", (20, 30), matrix.tolist())
    assert [view.nbytes for view in back[1:]] == [0, 0]
    with pytest.raises(CodecError, match="memoryview with gaps"):
        encode(memoryview(b"abcdef")[::2])


def test_a_state_dict_keeps_its_order_and_metadata() -> None:
    state = torch.nn.Linear(2, 1).state_dict()
    back = round_trip(state)
    assert type(back) is OrderedDict
    assert list(back) == ["weight", "bias"]
    assert back._metadata == state._metadata  # type: ignore[attr-defined]
    assert torch.equal(back["weight"], state["weight"])


class Text(str):
    pass


class Vector(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("obj", "where", "why"),
    [
        ({"a": [1, Fraction(1, 2)]}, "['a'][1]", "Fraction"),
        (Trajectory("e", {"x": np.array([None])}), ".arrays['x']", "dtype object"),
        ({1: (0, np.array(["a"], dtype=np.dtypes.StringDType()))}, "[1][1]", "StringDType"),
        ([torch.ones(1, requires_grad=True) * 2], "[0]", "detach"),
        ([torch.eye(2).to_sparse()], "[0]", "torch.sparse_coo"),
        ({2**100_000: Fraction(1, 2)}, "[<int: ValueError>]", "Fraction"),
        (deque([Text("a")]), "[0]", "come back as str"),
        ([torch.ones(1).as_subclass(Vector)], "[0]", "come back as Tensor"),
        (np.ma.masked_array([1.0]), "the top", "come back as ndarray"),
        (Table(), "the top", "come back as dict"),
        (lambda: None, "the top", "function"),
        ({"x" * 100: object()}, f"['{'x' * 39}...{'x' * 14}']", "object"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(obj: object, where: str, why: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode(obj)
    assert f"at {where}: " in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_quantised_tensors_are_refused_by_name() -> None:
    with pytest.raises(CodecError, match=r"torch\.qint8"):
        encode(torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    with pytest.raises(CodecError, match="a nested tensor cannot be sent"):
        encode([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])])


def test_a_class_that_the_reader_could_not_find_is_refused() -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(CodecError, match="defined in a function"):
        encode(Local(1))


def test_cycles_are_refused_and_repeats_are_not() -> None:
    inner: list[Any] = [1]
    assert round_trip([inner, inner]) == [[1], [1]]
    inner.append(inner)
    with pytest.raises(CodecError, match="contains itself"):
        encode(inner)


def test_depth_has_a_limit_that_is_named() -> None:
    deep: Any = {}
    for _ in range(1000):
        deep = {"a": [deep]}
    with pytest.raises(CodecError, match=r"at \['a'\]\[0\]\['a'\].*nested deeper than 150 levels"):
        encode(deep)
    fine: Any = 1
    for _ in range(150):
        fine = (fine,)
    assert round_trip(fine) == fine


def test_the_error_pickles() -> None:
    error = pickle.loads(pickle.dumps(CodecError("no", path="[0]")))
    assert (str(error), error.path) == ("at [0]: no", "[0]")
