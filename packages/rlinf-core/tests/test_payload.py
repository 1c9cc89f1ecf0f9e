"""Payloads: types and values survive, buffers are copied, links refuse strangers and name who is gone."""

from __future__ import annotations

import socket
import threading
from collections import namedtuple
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.errors import ChannelError
from rlinf_core.hub import wire
from rlinf_core.payload import Descriptor, PayloadFetcher, PayloadServer, PayloadStore, decode, encode

SECRET = b"s" * 32
Pair = namedtuple("Pair", "a b")


def roundtrip(item: object) -> object:
    return decode(encode(item))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4)])
def test_tensors_of_every_dtype_and_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = roundtrip({"x": tensor})["x"]  # type: ignore[index]
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_non_contiguous_views_and_gradients() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()[1:]
    assert torch.equal(roundtrip(tensor), tensor)  # type: ignore[arg-type]
    leaf = torch.ones(2, requires_grad=True)
    assert roundtrip(leaf).requires_grad  # type: ignore[attr-defined]
    assert torch.equal(roundtrip(leaf * 2), torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_containers_keep_their_types() -> None:
    item = {"t": (1, [None, b"x"], Pair(1, "b")), "a": np.arange(3), "n": None}
    back = roundtrip(item)
    assert isinstance(back, dict) and isinstance(back["t"], tuple) and isinstance(back["t"][2], Pair)
    assert back["t"] == item["t"] and np.array_equal(back["a"], item["a"]) and back["n"] is None


def test_a_put_tensor_may_change_afterwards_and_a_received_one_is_writable() -> None:
    tensor = torch.zeros(4)
    frame = encode(tensor)
    tensor += 1
    back = decode(frame)
    assert torch.equal(back, torch.zeros(4))
    back += 5
    assert torch.equal(back, torch.full((4,), 5.0))


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(ChannelError, match=r"lock.*cannot be sent|cannot pickle '_thread.lock'"):
        encode(threading.Lock())


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_like)
@settings(max_examples=50, deadline=None)
def test_any_nested_value_comes_back_equal(item: object) -> None:
    assert roundtrip(item) == item


@pytest.fixture
def server() -> Iterator[tuple[PayloadStore, PayloadServer]]:
    store = PayloadStore()
    server = PayloadServer(store, SECRET, "127.0.0.1")
    yield store, server
    server.close()


def put(store: PayloadStore, server: PayloadServer, item: object, member: str = "a[0]") -> Descriptor:
    frame = encode(item)
    key, ticket = store.add(frame)
    return Descriptor(member, server.address, key, sum(map(len, frame)), ticket=ticket)


def test_items_are_fetched_in_the_order_asked_from_several_producers(
    server: tuple[PayloadStore, PayloadServer],
) -> None:
    store, first = server
    other_store = PayloadStore()
    other = PayloadServer(other_store, SECRET, "127.0.0.1")
    asked = [put(store, first, 0), put(other_store, other, 1, "b[0]"), put(store, first, 2)]
    fetcher = PayloadFetcher(SECRET, PayloadStore(), "c[0]")
    assert fetcher.fetch(asked) == [0, 1, 2]
    assert fetcher.fetch([put(store, first, "again")]) == ["again"]
    fetcher.close()
    other.close()


def test_released_payloads_are_gone_and_named(server: tuple[PayloadStore, PayloadServer]) -> None:
    store, first = server
    descriptor = put(store, first, "x")
    store.release([descriptor.key])
    assert len(store) == 0
    fetcher = PayloadFetcher(SECRET, PayloadStore(), "c[0]")
    with pytest.raises(ChannelError, match=r"a\[0\] no longer has 1 of the 1"):
        fetcher.fetch([descriptor])
    assert fetcher.fetch([put(store, first, "y")]) == ["y"]  # the connection is still in step
    fetcher.close()


def test_a_shared_payload_goes_with_its_last_reference() -> None:
    store = PayloadStore()
    key, _ = store.add(encode("x"), references=2)
    store.release([key])
    assert store.get(key) is not None
    store.release([key])
    assert store.get(key) is None


def test_a_producer_that_is_gone_is_named(server: tuple[PayloadStore, PayloadServer]) -> None:
    store, first = server
    descriptor = put(store, first, "x")
    first.close()
    with pytest.raises(ChannelError, match=r"cannot fetch 1 item\(s\) from a\[0\]"):
        PayloadFetcher(SECRET, PayloadStore(), "c[0]", timeout=5.0).fetch([descriptor])


def test_a_stranger_without_the_secret_gets_nothing(server: tuple[PayloadStore, PayloadServer]) -> None:
    _, first = server
    with pytest.raises((OSError, EOFError)):
        wire.connect(first.address, b"wrong" * 8, timeout=5.0)
    with socket.create_connection(first.address, timeout=5.0) as raw:
        nonce = wire.recv_exactly(raw, wire.NONCE_BYTES)
        raw.sendall(bytes(nonce))
        with pytest.raises((EOFError, ConnectionError)):
            wire.recv_exactly(raw, 1)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_stride_go(rows: int, dtype: torch.dtype) -> None:
    table = torch.arange(rows * 40).reshape(rows, 40).to(dtype)
    for view in (table[:, 3], table[:, ::7], table.t(), table[:1, :1].expand(3, 1) if rows else table):
        back = roundtrip(view)
        assert back.dtype == dtype
        assert torch.equal(back, view)


def test_conjugate_and_negative_views_go() -> None:
    table = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(roundtrip(table.conj()), table.conj())
    assert torch.equal(roundtrip(table.conj().imag), table.conj().imag)
