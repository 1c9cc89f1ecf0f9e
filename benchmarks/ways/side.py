"""One of the two processes of a measurement, the same for every contender that moves items between two processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

from ways.cases import CASES, Case


class Side:
    """What a contender does in a process. ``shared``: what its ``Pair`` has made for this end."""

    def __init__(self, producer: bool, shared: Any) -> None:
        self.producer = producer
        self.shared = shared
        self.open()

    def open(self) -> None:
        """Connect."""

    def prepare(self, case: Case) -> None:
        """Before each measurement, at both ends, while nothing is under way."""

    def send(self, item: Any) -> None:
        raise NotImplementedError

    def recv(self) -> Any:
        raise NotImplementedError

    def flush(self) -> None:
        """After the last ``send`` of a measurement."""

    def produce(self, name: str, count: int) -> tuple[float, float]:
        """Send ``count`` items. Returns when the first went (``perf_counter``, one clock for all processes of the
        machine) and the processor seconds of this process."""
        case = CASES[name]
        items, send = case.batch(), self.send
        cpu, began = time.process_time(), time.perf_counter()
        self.send_all(items, count, send)
        self.flush()
        return began, time.process_time() - cpu

    def send_all(self, items: list[Any], count: int, send: Callable[[Any], None]) -> None:
        for item in islice(cycle(items), count):
            send(item)

    def consume(self, name: str, count: int) -> tuple[float, float]:
        """Take ``count`` items. Returns when the last was here and the processor seconds of this process."""
        case = CASES[name]
        cpu = time.process_time()
        last = self.take_all(case, count)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        case.check(last)
        return ended, cpu

    def take_all(self, case: Case, count: int) -> Any:
        touch, recv, item = case.touch, self.recv, None
        for _ in range(count):
            item = None  # what a way lends is given back before the next is asked for
            item = recv()
            touch(item)
        return item

    def ping(self, name: str, count: int) -> list[float]:
        """Seconds of each of ``count`` round trips."""
        item, found = CASES[name].make(), []
        for _ in range(count):
            began = time.perf_counter()
            self.send(item)
            back = self.recv()
            found.append(time.perf_counter() - began)
            del back
        self.flush()
        return found

    def pong(self, name: str, count: int) -> None:
        for _ in range(count):
            item = self.recv()
            self.send(item)
            del item
        self.flush()

    def close(self) -> None:
        """Disconnect."""


def serve(connection: Any, kind: type[Side], producer: bool, shared: Any) -> None:
    """The main function of such a process: calls that come over ``connection``, one after the other."""
    side = kind(producer, shared)
    connection.send((None, "ready"))
    while (call := connection.recv()) is not None:
        name, arguments = call
        if name == "prepare":
            arguments = [CASES[arguments[0]]]
        try:
            connection.send((None, getattr(side, name)(*arguments)))
        except Exception as error:  # told to the measuring process, which raises it
            connection.send((f"{type(error).__name__}: {error}", None))
    side.close()
