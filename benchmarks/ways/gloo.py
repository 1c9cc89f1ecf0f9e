"""gloo: tensors whose shapes the receiver knows in advance, several under way at once. The eight are sent as one."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ways.cases import Case
from ways.pair import Pair
from ways.side import Side

UNDER_WAY = 4


class GlooSide(Side):
    def open(self) -> None:
        rank = 0 if self.producer else 1
        store = dist.FileStore(self.shared, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
        self.peer = 1 - rank
        self.sent: deque[Any] = deque()

    def prepare(self, case: Case) -> None:
        self.case = case
        self.buffers = [case.blank() for _ in range(UNDER_WAY)]
        self.turn = 0

    def send(self, item: Any) -> None:
        if len(self.sent) >= UNDER_WAY:
            self.sent.popleft().wait()
        self.sent.append(dist.isend(self.case.flat(item), self.peer))

    def flush(self) -> None:
        while self.sent:
            self.sent.popleft().wait()

    def recv(self) -> Any:
        dist.recv(self.buffers[0], self.peer)
        return self.case.whole(self.buffers[0])

    def take_all(self, case: Case, count: int) -> Any:
        """Receives are posted ahead, into buffers that are used in turn."""
        posted: deque[tuple[Any, torch.Tensor]] = deque()
        item, asked = None, 0
        for _ in range(count):
            while asked < count and len(posted) < UNDER_WAY:
                into = self.buffers[asked % UNDER_WAY]
                posted.append((dist.irecv(into, self.peer), into))
                asked += 1
            work, into = posted.popleft()
            work.wait()
            item = case.whole(into)
            case.touch(item)
        return item

    def close(self) -> None:
        dist.destroy_process_group()


class Gloo(Pair):
    name = "gloo send/recv"
    side = GlooSide

    def shared(self, context: Any, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gloo-"))
        path = str(Path(folder) / "store")
        return path, path
