"""Channels that are lists, and what a host gives a worker, so that a worker runs without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlinf_core.config import Config
from rlinf_core.types import ParallelInfo


class Context:
    """What a host gives a worker, and a record of what the worker does with it."""

    def __init__(self, cfg: Config, run_dir: Path, rank: int, ranks: int) -> None:
        self.cfg = cfg
        self.name, self.rank, self.world_size, self.seed = "stage", rank, ranks, 5
        self.parallel = ParallelInfo()
        self.slots: int | None = None
        self.step, self.step_index = "train/0", 0
        self.run_dir = run_dir
        self.accounted: list[tuple[str, tuple[str, ...], str]] = []

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def account(self, kind: str, ids: tuple[str, ...], detail: str) -> None:
        self.accounted.append((kind, ids, detail))


class Items(list[Any]):
    """Both ends of a channel; ``portion`` is what the plan says."""

    def __init__(self, items: Sequence[Any] = (), portion: int | None = None) -> None:
        super().__init__()
        self.items = list(items)
        self.portion = portion
        self.closed = False

    def batches(self, n: int | None = None) -> Iterator[list[Any]]:
        if self.items:
            yield list(self.items)

    def put_many(self, items: Any) -> None:
        self.extend(items)

    def put(self, item: Any, key: Any = None, weight: float = 1.0) -> None:
        self.append(item)

    def close(self) -> None:
        self.closed = True


class Answers(Items):
    """A policy: the answer to the last question under a key."""

    def __init__(self, observations: Items, answer: Callable[[Any], Any], portion: int | None = None) -> None:
        super().__init__(portion=portion)
        self.observations = observations
        self.answer = answer

    def get(self, key: Any = None) -> Any:
        return self.answer(next(asked for asked in reversed(self.observations) if asked.place == key))


def worker(cls: type, cfg: dict[str, Any], run_dir: Path, rank: int = 0, ranks: int = 1) -> Any:
    made = cls()
    made._ctx = Context(Config(cfg), run_dir, rank, ranks)
    return made
