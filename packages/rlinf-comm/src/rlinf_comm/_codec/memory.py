"""From tensors and arrays to buffers: what is sent as it lies in memory, what is packed, and what is sent once.

A *region* is the memory from the first to the last byte of an object, or of several whose memory overlaps. A region
that is not larger than its objects together is sent as it lies, once, and its objects become views of it again; strides
come back as they were. Otherwise (a column of a large matrix) each object is packed by itself, axes in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm._codec.format import ALIGN

if TYPE_CHECKING:
    import torch

EMPTY = memoryview(b"")


class Region:
    """Memory by address, kept alive with what owns it; ``numpy.asarray`` makes an array of it."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.owner = owner


def view_of(address: int, nbytes: int, owner: object) -> memoryview:
    return np.asarray(Region(address, nbytes, owner)).data


class Entry:
    """A tensor or array on its way: its node waits for the number of its buffer and, perhaps, offset and strides."""

    __slots__ = ("low", "nbytes", "node", "obj", "plain", "tensor", "where")

    def __init__(self, node: list[Any], obj: Any, plain: bool, tensor: bool, where: str = "cpu") -> None:
        self.node = node
        self.obj = obj
        self.plain = plain  # contiguous: shape alone says how it lies
        self.tensor = tensor
        self.where = where
        self.nbytes: int = obj.nbytes
        # The address of an array is slow to find, and not always needed.
        self.low: int = obj.data_ptr() if tensor else 0

    def packed(self) -> Entry:
        """The same elements without gaps, axes in the same order."""
        axes = _axis_order(self.obj.strides if not self.tensor else self.obj.stride())
        back = _inverse(axes)
        if not self.tensor:
            dense = np.ascontiguousarray(self.obj.transpose(axes)).transpose(back)
            return Entry(self.node, dense, dense.flags.c_contiguous, False)
        whole = _countable(self.obj.detach())
        tight = whole.permute(axes).contiguous().permute(back).view(self.obj.dtype)
        return Entry(self.node, tight, tight.is_contiguous(), True, self.where)

    def address(self) -> int:
        """Of the first element, which is not the lowest where a stride is negative."""
        return self.low if self.tensor else self.obj.__array_interface__["data"][0]

    def span(self) -> tuple[int, int]:
        """First address and the one after the last."""
        address = self.address()
        if self.plain:
            return address, address + self.nbytes
        low = high = 0
        for size, stride in zip(self.obj.shape, self.strides(), strict=True):
            reach = (size - 1) * stride
            if reach < 0:
                low += reach
            else:
                high += reach
        return address + low, address + high + self.obj.itemsize

    def strides(self) -> list[int]:
        if not self.tensor:
            return list(self.obj.strides)
        width = self.obj.itemsize
        return [stride * width for stride in self.obj.stride()]


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one of a type that can be copied (torch cannot copy its 4-bit types, among others)."""
    import torch

    stand_in = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize)
    return tensor if stand_in is None else tensor.view(stand_in)


def _axis_order(strides: Sequence[int]) -> list[int]:
    """Axes from the slowest to the fastest, so that a dense array of any order is contiguous along them."""
    return sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))


def _inverse(axes: Sequence[int]) -> list[int]:
    return sorted(range(len(axes)), key=lambda axis: axes[axis])


def place(entries: list[Entry], buffers: list[Any]) -> None:
    """Append the buffers of all ``entries`` and complete their nodes."""
    if _apart(entries):
        for entry in entries:
            _whole(entry, buffers)
        return
    spans: list[tuple[str, int, int, int]] = []
    for number, entry in enumerate(entries):
        if entry.nbytes:
            # On meta everything lies at address 0 and nothing is shared.
            where = entry.where if entry.where != "meta" else f"meta {number}"
            spans.append((where, *entry.span(), number))
    spans.sort()
    start = 0
    groups = []
    while start < len(spans):
        where, low, high, _ = spans[start]
        stop = start + 1
        while stop < len(spans) and spans[stop][0] == where and spans[stop][1] < high:
            high = max(high, spans[stop][2])
            stop += 1
        groups.append((sorted(span[3] for span in spans[start:stop]), low, high))
        start = stop
    for numbers, low, high in sorted(groups):  # in the order of the walk, so that equal objects make equal frames
        _together([entries[number] for number in numbers], low, high, buffers)


def _apart(entries: list[Entry]) -> bool:
    """Whether it is plain to see that all lie contiguously and share nothing: the usual case, found cheaply."""
    if len(entries) == 1:
        return entries[0].plain
    spans, arrays = [], False
    for entry in entries:
        if not entry.plain or entry.where != "cpu":
            return False
        if entry.tensor:
            if entry.nbytes:
                spans.append((entry.low, entry.nbytes))
        elif entry.obj.base is not None:
            return False
        else:  # it owns its memory, which only views of it and tensors can share
            arrays = True
    if arrays:
        return not spans
    spans.sort()
    end = 0
    for low, nbytes in spans:
        if low < end:
            return False
        end = low + nbytes
    return True


def _together(members: list[Entry], low: int, high: int, buffers: list[Any]) -> None:
    """Entries whose memory overlaps, or a single one."""
    if len(members) == 1 and members[0].plain:
        _whole(members[0], buffers)
    elif high - low <= sum(member.nbytes for member in members):
        _region(members, low, high, buffers)
    else:
        for member in members:
            single = member if member.plain else member.packed()
            if single.plain:
                _whole(single, buffers)
            else:
                _region([single], *single.span(), buffers)


def _whole(entry: Entry, buffers: list[Any]) -> None:
    if entry.nbytes == 0:
        return
    entry.node[1] = len(buffers)
    if not entry.tensor:
        buffers.append(_bytes_of(entry.obj))
    elif entry.where == "cpu":
        buffers.append(view_of(entry.low, entry.nbytes, entry.obj))
    else:
        buffers.append(entry.obj.detach())


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    # What the buffer protocol refuses (datetimes, structures, single elements) is viewed as bytes first.
    if array.ndim and array.dtype.kind in "biufc" and array.dtype.isnative and array.dtype.char != "g":
        return array.data.cast("B")
    return array.reshape(-1).view(np.uint8).data


def _region(members: list[Entry], low: int, high: int, buffers: list[Any]) -> None:
    """One buffer for all members, with offset and strides of each."""
    number = len(buffers)
    first = members[0]
    if first.where == "cpu":
        buffers.append(view_of(low, high - low, [member.obj for member in members]))
    else:
        import torch

        storage = first.obj.untyped_storage()
        low -= (low - storage.data_ptr()) % ALIGN
        flat = torch.empty(0, dtype=torch.uint8, device=first.obj.device)
        buffers.append(flat.set_(storage, low - storage.data_ptr(), (high - low,), (1,)))
    for member in members:
        member.node[1] = number
        member.node += [member.address() - low, member.strides()]


def reach(shape: Sequence[int], offset: int, strides: Sequence[int], itemsize: int, nbytes: int) -> bool:
    """Whether all elements lie within ``nbytes``. In Python's integers, which do not overflow."""
    if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in shape):
        return False
    if type(offset) is not int or not all(type(stride) is int for stride in strides):
        return False
    if prod(shape) == 0:
        return True
    ends = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    low = offset + sum(end for end in ends if end < 0)
    high = offset + sum(end for end in ends if end > 0) + itemsize
    return low >= 0 and high <= nbytes
