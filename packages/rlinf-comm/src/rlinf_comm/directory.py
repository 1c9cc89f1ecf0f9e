"""Where communicators write down how they can be reached, and find each other.

A directory is a small table of bytes that all processes of a run can write and read. It is trusted as little as
the network: who answers at an address must still prove that it knows the secret.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.02


class Directory(Protocol):
    """``lookup`` waits up to ``timeout`` seconds for the key and raises TimeoutError (of Python) when it does not come.
    A key that is published again has the new value."""

    def publish(self, key: str, value: bytes) -> None: ...

    def lookup(self, key: str, timeout: float) -> bytes: ...


class LocalDirectory:
    """Within one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def lookup(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(f"nobody has published {key!r} within {timeout:g} s")
            return self._values[key]


class FileDirectory:
    """A folder that all processes see, one file for each key."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def publish(self, key: str, value: bytes) -> None:
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_bytes(value)
        temporary.replace(path)  # a reader sees all of it or nothing

    def lookup(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"nobody has published {key!r} in {self._folder} within {timeout:g} s") from None
            time.sleep(min(POLL_S, left))

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


class StoreDirectory:
    """A store of torch.distributed (TCPStore, FileStore, HashStore, PrefixStore)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # it takes bytes too, its annotations do not know

    def lookup(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while not self._store.check([key]):  # wait() cannot be interrupted, and blocks other threads on some stores
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nobody has published {key!r} in the store within {timeout:g} s")
            time.sleep(min(POLL_S, left))
        value: bytes = self._store.get(key)
        return value
