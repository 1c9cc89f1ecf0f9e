"""allow_pickle: what has no form of its own travels as one pickle, its memory beside it."""

from __future__ import annotations

import pickle
import sys
import threading
from dataclasses import make_dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_comm import CodecError, decode, encode


class Holder:
    """Has no form in the codec."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Blob(bytearray):
    """Offers its memory out of band, as protocol 5 provides for."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Blob._back, (pickle.PickleBuffer(self),)

    @staticmethod
    def _back(data: Any) -> Blob:
        return Blob(data)


class Stubborn:
    def __reduce__(self) -> Any:
        raise OSError("not today")


class Trap:
    """Runs something when it is unpickled."""

    ran = False

    @staticmethod
    def spring() -> str:
        Trap.ran = True
        return "ran"

    def __reduce__(self) -> Any:
        return Trap.spring, ()


def round_trip(obj: object) -> tuple[Any, bytes, list[bytearray]]:
    skeleton, buffers = encode(obj, allow_pickle=True)
    received = [bytearray(buffer) for buffer in buffers]
    return decode(skeleton, received, allow_pickle=True), skeleton, received


def test_memory_inside_is_not_in_the_pickle() -> None:
    tensor, array = torch.arange(5000.0), np.arange(5000)
    sent = {"h": Holder(t=tensor, a=array, again=[tensor], part=tensor[10:20], blob=Blob(b"z" * 3000)), "x": 1}
    back, skeleton, received = round_trip(sent)
    pickles = [box for box in received if len(box) not in (20_000, 40_000, 3000)]
    assert sum(map(len, pickles)) + len(skeleton) < 1000
    holder = back["h"]
    assert holder.again[0] is holder.t
    assert type(holder.blob) is Blob and holder.blob == b"z" * 3000
    np.testing.assert_array_equal(holder.a, array)
    holder.part[0] = -5.0
    assert holder.t[10] == -5.0
    assert back["x"] == 1


def test_small_pickles_stand_in_the_skeleton() -> None:
    back, _, received = round_trip([Fraction(1, 3), np.array([None, "a"], dtype=object), torch.eye(2).to_sparse()])
    assert back[0] == Fraction(1, 3)
    assert back[1].tolist() == [None, "a"]
    assert back[2].is_sparse and torch.equal(back[2].to_dense(), torch.eye(2))
    assert all(len(box) <= 400 for box in received)


def test_subclasses_come_back_as_themselves() -> None:
    masked = np.ma.masked_array([1.0, 2.0], mask=[0, 1])
    back, _, _ = round_trip([masked])
    assert type(back[0]) is np.ma.MaskedArray
    assert back[0].mask.tolist() == [False, True]


def test_both_ends_have_to_allow_it() -> None:
    with pytest.raises(CodecError, match=r"at \['a'\]: .*Fraction cannot be sent; with allow_pickle=True"):
        encode({"a": Fraction(1, 3)})
    skeleton, buffers = encode([Trap()], allow_pickle=True)
    with pytest.raises(CodecError, match=r"at \[0\]: a pickled part came"):
        decode(skeleton, buffers)
    assert not Trap.ran
    assert decode(skeleton, buffers, allow_pickle=True) == ["ran"]
    assert Trap.ran


@pytest.mark.parametrize("obj", [threading.Lock(), lambda: None, Stubborn(), Holder(x=[threading.Lock()])])
def test_what_cannot_be_pickled_is_named_with_place_and_type(obj: object) -> None:
    with pytest.raises(CodecError) as caught:
        encode({"deep": [0, obj]}, allow_pickle=True)
    assert "at ['deep'][1]: " in str(caught.value)
    assert type(obj).__qualname__ in str(caught.value)


def test_tensors_that_may_not_go_are_refused_inside_a_pickle_too() -> None:
    with pytest.raises(CodecError, match=r"inside an object of type .*Holder: the tensor is on meta"):
        encode(Holder(t=torch.empty(1, device="meta")), allow_pickle=True)
    with pytest.raises(CodecError, match="detach it first"):
        encode([Holder(t=torch.ones(1, requires_grad=True) * 2)], allow_pickle=True)


def test_a_pickle_that_does_not_fit_is_a_codec_error() -> None:
    skeleton, buffers = encode([Holder(a=np.arange(3), blob=Blob(b"z" * 3000), text="t" * 500)], allow_pickle=True)
    received = [bytes(buffer) for buffer in buffers]
    for number, whole in enumerate(received):
        cut = [*received[:number], whole[:-1], *received[number + 1 :]]
        if len(whole) == 3000:  # the object's own bytes: any length is one
            assert len(decode(skeleton, cut, allow_pickle=True)[0].blob) == 2999
        else:
            with pytest.raises(CodecError):
                decode(skeleton, cut, allow_pickle=True)


def test_a_long_list_of_things_to_pickle_inside_a_pickle() -> None:
    parts = [Holder(t=torch.full((100,), float(n))) for n in range(50)]
    back, _, received = round_trip(Holder(parts=parts))
    assert [float(part.t[0]) for part in back.parts] == [float(n) for n in range(50)]
    assert len(received) == 51


@pytest.mark.parametrize("form", ["dataclass", "pickle"])
def test_a_class_of_the_other_script_is_to_be_defined_where_both_import_it(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = sys.modules["__main__"]
    made: type[Any] = make_dataclass("OfTheScript", ["x"]) if form == "dataclass" else type("OfTheScript", (), {})
    made.__module__ = "__main__"
    monkeypatch.setattr(script, "OfTheScript", made, raising=False)
    skeleton, buffers = encode(made(1) if form == "dataclass" else made(), allow_pickle=True)
    monkeypatch.delattr(script, "OfTheScript")
    with pytest.raises(CodecError, match="OfTheScript.*; define it in a module that both ends import"):
        decode(skeleton, buffers, allow_pickle=True)
