"""A worker outside a run: channels that are lists, and a record of what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlinf_core.config import Config
from rlinf_core.types import ParallelInfo


class Context:
    """What a host gives a worker, and a record of what the worker does with it."""

    def __init__(self, cfg: Config, run_dir: Path, name: str) -> None:
        self.cfg = cfg
        self.name, self.rank, self.world_size, self.seed = name, 0, 1, 5
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
    """Both ends of a channel. ``when_empty`` gives further portions once those given are read."""

    def __init__(self, *portions: Sequence[Any], when_empty: Callable[[], list[Any]] = list) -> None:
        super().__init__()
        self.portions = portions
        self.when_empty = when_empty
        self.keys: list[Any] = []
        self.weights: list[float] = []
        self.closed = False

    def batches(self, n: int | None = None) -> Iterator[list[Any]]:
        yield from map(list, self.portions)
        while portion := self.when_empty():
            yield portion

    def put_many(self, items: Any, keys: Any = None, weights: Any = None) -> None:
        keys, weights = keys or [None] * len(items), weights or [1.0] * len(items)
        for item, key, weight in zip(items, keys, weights, strict=True):
            self.put(item, key, weight)

    def put(self, item: Any, key: Any = None, weight: float = 1.0) -> None:
        assert not self.closed
        self.append(item)
        self.keys.append(key)
        self.weights.append(weight)

    def close(self) -> None:
        self.closed = True


def worker(cls: type, cfg: Any, run_dir: Path, name: str = "stage") -> Any:
    made = cls()
    made._ctx = Context(cfg if isinstance(cfg, Config) else Config(cfg), run_dir, name)
    return made
