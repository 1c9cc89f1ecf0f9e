"""The limit for shared memory: bare slots of a memfd in each direction, and a socket pair for their numbers."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from typing import Any

import numpy as np
import torch

from ways.cases import Case
from ways.pair import Pair
from ways.side import Side

AREA = 256 << 20
MOST_SLOTS = 64
TOKEN = struct.Struct("<I")


class Lane:
    """One direction: who sends copies into a free slot and says which; who reads says when it is free again."""

    def __init__(self, memory: np.ndarray[Any, Any], tokens: socket.socket) -> None:
        self.memory = memory
        self.tokens = tokens
        self.case: Case | None = None

    def prepare(self, case: Case) -> None:
        self.case = case
        size = -(-case.nbytes // 64) * 64
        slots = min(MOST_SLOTS, AREA // size)
        # Arrays over the slots are made once: this is what the way costs at the least.
        self.slots = [self.memory[n * size : n * size + case.nbytes] for n in range(slots)]
        self.free = list(range(slots))
        self.pending = b""
        self.lent: int | None = None

    def numbers(self) -> list[int]:
        data = self.pending + self.tokens.recv(4096)
        whole = len(data) // 4 * 4
        self.pending = data[whole:]
        return [number for (number,) in TOKEN.iter_unpack(data[:whole])]

    def send(self, item: Any) -> None:
        while not self.free:
            self.free += self.numbers()
        number = self.free.pop()
        slot = self.slots[number]
        if isinstance(item, dict):
            at = 0
            for part in item.values():
                raw = part.numpy().view(np.uint8)
                slot[at : at + raw.nbytes] = raw
                at += raw.nbytes
        else:
            slot[:] = item
        self.tokens.sendall(TOKEN.pack(number))

    def recv(self) -> Any:
        if self.lent is not None:
            self.tokens.sendall(TOKEN.pack(self.lent))
            self.lent = None
        if not self.arrived:
            self.arrived = self.numbers()[::-1]
        self.lent = self.arrived.pop()
        slot = self.slots[self.lent]
        assert self.case is not None
        if not self.case.tensors:
            return slot
        return {f"t{n}": part for n, part in enumerate(torch.from_numpy(slot).view(torch.float32).view(8, -1))}

    arrived: list[int] = []  # noqa: RUF012 - replaced, never changed in place while shared


class RingSide(Side):
    def open(self) -> None:
        pid, files, ends = self.shared
        lanes = []
        for file, end in zip(files, ends, strict=True):
            fd = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
            memory = np.frombuffer(mmap.mmap(fd, AREA), np.uint8)
            os.close(fd)
            lanes.append(Lane(memory, end))
        self.out, self.inbox = lanes if self.producer else lanes[::-1]

    def prepare(self, case: Case) -> None:
        if self.inbox.case is not None and self.inbox.lent is not None:
            self.inbox.lent = None  # both ends start again with all slots free
        for lane in (self.out, self.inbox):
            lane.tokens.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while lane.tokens.recv(4096):
                    pass
            lane.tokens.setblocking(True)
            lane.prepare(case)

    def send(self, item: Any) -> None:
        self.out.send(item)

    def recv(self) -> Any:
        return self.inbox.recv()


class Ring(Pair):
    name = "bare ring (limit)"
    kind = "limit"
    side = RingSide

    def shared(self, context: Any, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        files = [os.memfd_create(f"ring{n}") for n in range(2)]
        for file in files:
            os.ftruncate(file, AREA)
            stack.callback(os.close, file)
        pairs = [socket.socketpair() for _ in files]
        for pair in pairs:
            for end in pair:
                stack.callback(end.close)
        return tuple((os.getpid(), files, [pair[n] for pair in pairs]) for n in range(2))  # type: ignore[return-value]
