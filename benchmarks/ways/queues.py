"""``multiprocessing``'s queues, for reference: no keys, no weights, no account, no end."""

from __future__ import annotations

import contextlib
from typing import Any

from ways.pair import Pair
from ways.side import Side


class QueueSide(Side):
    def open(self) -> None:
        self.out, self.inbox = self.shared if self.producer else self.shared[::-1]

    def send(self, item: Any) -> None:
        self.out.put(item)

    def recv(self) -> Any:
        return self.inbox.get()


class Queue(Pair):
    name = "multiprocessing.Queue"
    kind = "reference"
    side = QueueSide

    def shared(self, context: Any, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        queues = (context.Queue(8), context.Queue(8))
        for queue in queues:
            stack.callback(queue.close)
        return queues, queues


class SimpleQueue(Pair):
    name = "multiprocessing.SimpleQueue"
    kind = "reference"
    side = QueueSide

    def shared(self, context: Any, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        queues = (context.SimpleQueue(), context.SimpleQueue())
        for queue in queues:
            stack.callback(queue.close)
        return queues, queues
