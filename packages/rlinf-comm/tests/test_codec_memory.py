"""The codec and memory: nothing is copied that need not be, and what shared memory shares it again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_comm import CodecError, decode, encode


def inbox(obj: object) -> tuple[Any, list[bytearray]]:
    skeleton, buffers = encode(obj)
    received = [bytearray(buffer) for buffer in buffers]
    return decode(skeleton, received), received


def test_single_gapped_array_is_packed_in_the_same_axis_order() -> None:
    array = np.arange(24).reshape(4, 6).T[::2, ::-1]
    back, received = inbox(array)
    assert sum(map(len, received)) == array.nbytes
    np.testing.assert_array_equal(back, array)
    assert back.flags.f_contiguous


@pytest.mark.parametrize("step", [-1, -2])
def test_negative_strides(step: int) -> None:
    array = np.arange(12).reshape(3, 4)[::step, ::step]
    back, received = inbox(array)
    np.testing.assert_array_equal(back, array)
    assert sum(map(len, received)) == array.nbytes
    if step == -1:
        assert back.strides == array.strides


def test_an_expanded_tensor_is_sent_as_what_it_repeats() -> None:
    row = torch.arange(5.0)
    for tensor in (row.expand(300, 5), row.view(5, 1).expand(5, 300)):
        back, received = inbox(tensor)
        assert [len(buffer) for buffer in received] == [20]
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()


def test_a_column_of_a_matrix_does_not_bring_the_matrix() -> None:
    matrix = torch.arange(1200.0).view(30, 40)
    back, received = inbox(matrix[:, 1:2])
    assert [len(buffer) for buffer in received] == [30 * 4]
    assert torch.equal(back, matrix[:, 1:2])


def test_tied_tensors_are_sent_once_and_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    back, received = inbox({"in": weight, "out": weight, "part": weight.detach()[1], "flat": weight.detach().view(6)})
    assert [len(buffer) for buffer in received] == [24]
    assert type(back["in"]) is type(back["out"]) is torch.nn.Parameter
    with torch.no_grad():
        back["in"][1, 2] = 50.0
    assert back["out"][1, 2] == back["part"][2] == back["flat"][5] == 50.0


def test_views_that_overlap_without_a_whole_share_memory_too() -> None:
    base = torch.arange(10)
    back, received = inbox([base[:7], base[3:], base[1:9:2], base.view(torch.uint8)[8:16]])
    assert [len(buffer) for buffer in received] == [80]
    back[0][5] = -1
    assert back[1].tolist() == [3, 4, -1, 6, 7, 8, 9]
    assert back[2].tolist() == [1, 3, -1, 7]
    assert back[3].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def test_columns_of_one_matrix_are_its_region() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    left, right = matrix[:, :2], matrix[:, 2:]
    back, received = inbox((left, right))
    assert [len(buffer) for buffer in received] == [48]
    assert torch.equal(back[0], left) and torch.equal(back[1], right)


def test_views_that_would_bring_more_than_they_are_go_alone() -> None:
    matrix = torch.arange(400.0).view(20, 20)
    back, received = inbox([matrix[:, 0], matrix[:, 1], matrix[:2]])
    assert [len(buffer) for buffer in received] == [80, 80, 160]
    for mine, theirs in zip(back, [matrix[:, 0], matrix[:, 1], matrix[:2]], strict=True):
        assert torch.equal(mine, theirs)


def test_arrays_and_tensors_of_one_memory() -> None:
    array = np.arange(6, dtype=np.float32)
    back, received = inbox([array, array[::-1], torch.from_numpy(array)[2:], array[1:3].reshape(2, 1)])
    assert [len(buffer) for buffer in received] == [24]
    back[2][0] = 9.0
    assert back[0].tolist() == [0, 1, 9, 3, 4, 5]
    assert back[1].tolist() == [5, 4, 3, 9, 1, 0]
    assert back[3].tolist() == [[1], [9]]


def test_neighbours_do_not_become_one() -> None:
    base = torch.arange(8)
    _, received = inbox([base[:4], base[4:], np.arange(2), np.arange(2)])
    assert [len(buffer) for buffer in received] == [32, 32, 16, 16]


def test_no_elements_no_buffer() -> None:
    sent = [torch.empty(0, 3), np.empty((2, 0), np.int8), torch.empty(0), torch.zeros(4, 4)[:, 4:]]
    back, received = inbox(sent)
    assert received == []
    assert [tuple(x.shape) for x in back] == [(0, 3), (2, 0), (0,), (4, 0)]


def test_large_things_are_never_copied() -> None:
    array, tensor, blob = np.zeros(1000), torch.zeros(1000), b"x" * 1000
    skeleton, buffers = encode([array, tensor, blob])
    assert len(skeleton) < 100
    array[3], tensor[3] = 7.0, 8.0
    sizes = {buffer.nbytes: buffer for buffer in buffers if isinstance(buffer, memoryview)}
    assert np.frombuffer(sizes[8000])[3] == 7.0
    assert np.frombuffer(sizes[4000], dtype=np.float32)[3] == 8.0
    assert sizes[1000].obj is blob
    received = [bytearray(buffer) for buffer in buffers]
    back_array, back_tensor, _ = decode(skeleton, received)
    for box in received:
        box[:8] = np.float64(5.0).tobytes() if len(box) == 8000 else np.float32([6.0, 0.0]).tobytes()
    assert back_array[0] == 5.0
    assert back_tensor[0] == 6.0


def test_long_bytes_that_came_as_bytes_are_not_copied() -> None:
    skeleton, buffers = encode([b"x" * 1000])
    received = bytes(buffers[0])
    assert decode(skeleton, [received])[0] is received


def test_read_only_buffers_do_not_become_writable() -> None:
    base = torch.zeros(4)
    skeleton, buffers = encode([np.zeros(3), base, base[1:]])
    received = [bytes(buffer) for buffer in buffers]
    array, tensor, part = decode(skeleton, received)
    assert not array.flags.writeable
    part[0] = 1.0
    assert tensor.tolist() == [0, 1, 0, 0]
    assert received[1] == bytes(16)


def test_a_buffer_keeps_its_tensor_alive() -> None:
    _, buffers = encode([torch.full((1000,), 7.0)])
    torch.full((1000,), 8.0)
    assert set(np.frombuffer(buffers[0], np.float32)) == {7.0}


def test_device_tensors_stand_among_the_buffers_when_asked_for() -> None:
    # The meta device stands in for an accelerator: the codec touches no element.
    tensor = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.empty(4, device="meta"))
    host = torch.ones(2)
    with pytest.raises(CodecError, match=r"at \['w'\]: the tensor is on meta: move it to the CPU first"):
        encode({"w": tensor})
    skeleton, buffers = encode({"w": tensor, "host": host, "p": weight, "t": tensor.mT}, devices=True)
    devices = [buffer for buffer in buffers if isinstance(buffer, torch.Tensor)]
    assert [(b.device.type, b.is_contiguous(), b.requires_grad) for b in devices] == [("meta", True, False)] * 3
    back = decode(skeleton, buffers)
    assert back["w"].shape == (2, 3) and back["w"].dtype == torch.bfloat16
    assert back["w"].device.type == back["p"].device.type == "meta"
    assert type(back["p"]) is torch.nn.Parameter
    assert torch.equal(back["host"], host)
    with pytest.raises(CodecError, match="skeleton says shape"):
        decode(skeleton, [torch.empty(5, device="meta") if isinstance(b, torch.Tensor) else b for b in buffers])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_tied_tensors_on_a_gpu_are_one_buffer() -> None:
    base = torch.arange(24, device="cuda", dtype=torch.float16).view(4, 6)
    host = torch.ones(3)
    sent = {"a": base, "b": base[1:], "c": base.T, "d": base[:, 1].view(torch.int16), "host": host}
    skeleton, buffers = encode(sent, devices=True)
    assert [buffer.device.type for buffer in buffers if isinstance(buffer, torch.Tensor)] == ["cuda"]
    received = [b.clone() if isinstance(b, torch.Tensor) else bytearray(b) for b in buffers]
    back = decode(skeleton, received)
    back["a"][1, 2] = 70.0
    assert back["b"][0, 2] == back["c"][2, 1] == 70.0
    assert torch.equal(back["d"], base[:, 1].view(torch.int16))
    assert back["c"].stride() == base.T.stride()


def test_an_array_and_a_tensor_of_its_memory() -> None:
    array = np.zeros(6)
    back, received = inbox([array, torch.from_numpy(array)])
    assert [len(buffer) for buffer in received] == [48]
    back[0][1] = 3.0
    assert back[1][1] == 3.0


SLICES = st.builds(slice, st.integers(0, 5), st.integers(3, 9), st.sampled_from([1, 1, 2, 3]))


@given(st.lists(st.tuples(SLICES, SLICES, st.booleans(), st.booleans()), min_size=1, max_size=5), st.randoms())
@settings(max_examples=200, deadline=None)
def test_any_views_of_one_memory_come_back_equal(cuts: list[tuple[slice, slice, bool, bool]], random: Any) -> None:
    base = torch.arange(72, dtype=torch.int32).view(8, 9)
    sent: list[Any] = []
    for rows, columns, turned, as_array in cuts:
        view = base[rows, columns]
        view = view.T if turned else view
        sent.append(view.numpy()[::-1] if as_array else view)
    back, received = inbox(sent)
    assert sum(map(len, received)) <= sum(view.nbytes for view in sent)
    for mine, theirs in zip(back, sent, strict=True):
        assert type(mine) is type(theirs)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    if len(received) == 1 and len(sent) > 1 and all(view.nbytes for view in sent):
        # One buffer for all: what is written through one view is seen through all that have the element.
        victim = random.randrange(len(sent))
        at = (0, 0)
        value = int(sent[victim][at])
        back[victim][at] = -1
        for mine, theirs in zip(back, sent, strict=True):
            np.testing.assert_array_equal(np.asarray(mine) == -1, np.asarray(theirs) == value)
