"""The composed configuration as the program and the workers see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlinf_core.errors import ConfigError, nearest

RESERVED = frozenset({"keys", "values", "items", "reads", "take_reads", "add_reads", "unread", "to_dict"})
"""Names of ``Config``'s own methods; a schema field may not have one of them."""


class MissingKeyError(ConfigError, AttributeError, KeyError):
    """A key that the configuration does not have was read (a misspelt attribute, mostly)."""

    bad_input = False  # a fault of the program, whose traceback says where

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class Config:
    """Read-only attribute and ``[]`` access over plain data; nested mappings are ``Config`` again.

    Leaves have the types of the recipe's schema; lists are given out as copies. Every dotted path that is read is
    recorded in ``reads`` (absolute from the root, shared by all nodes of one tree). A pickled node travels without
    its reads: a worker sends them home with ``take_reads`` and the driver merges them with ``add_reads``. Two
    configs are equal when their data is. An unknown key is refused with the nearest one.
    """

    __slots__ = ("_data", "_path", "_reads")

    _data: dict[str, Any]
    _path: str
    _reads: set[str]

    def __init__(self, data: Mapping[str, Any], path: str = "", *, _reads: set[str] | None = None) -> None:
        object.__setattr__(self, "_data", _plain(data))
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_reads", set() if _reads is None else _reads)

    def _child(self, data: dict[str, Any], path: str) -> Config:
        node = Config.__new__(Config)
        object.__setattr__(node, "_data", data)
        object.__setattr__(node, "_path", path)
        object.__setattr__(node, "_reads", self._reads)
        return node

    def _absolute(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def __getitem__(self, key: str) -> Any:
        if key not in self._data:
            where = f"in {self._path!r}" if self._path else "at the top level"
            known = ", ".join(map(str, self._data)) or "(no keys)"
            hint = nearest(str(key), map(str, self._data))
            raise MissingKeyError(f"no configuration key {key!r} {where}{hint}; keys there: {known}")
        path = self._absolute(str(key))
        self._reads.add(path)
        return self._wrap(self._data[key], path)

    def _wrap(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return self._child(value, path)
        if isinstance(value, list):
            return [self._wrap(item, f"{path}.{i}") for i, item in enumerate(value)]
        return value

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):  # protocols (copy, pickle, arrays) probe for these
            raise AttributeError(key)
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise ConfigError(
            f"the configuration is read-only: {self._absolute(key)} is set with an override ({self._absolute(key)}=…)"
        )

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    def __delattr__(self, key: str) -> None:
        raise ConfigError(f"the configuration is read-only: {self._absolute(key)} cannot be deleted")

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._data)

    def __bool__(self) -> bool:
        return True

    def keys(self) -> list[str]:
        """The keys of this node, in order (counts as reading the node itself, not its values)."""
        if self._path:
            self._reads.add(self._path)
        return list(self._data)

    def values(self) -> list[Any]:
        """The values of this node, in order."""
        return [self[key] for key in self._data]

    def items(self) -> list[tuple[str, Any]]:
        """The (key, value) pairs of this node, in order."""
        return [(key, self[key]) for key in self._data]

    def to_dict(self) -> dict[str, Any]:
        """A deep plain copy of the data below this node.

        It counts as reading all of that, except at the root: the whole is copied to be shown or written down,
        which is no use of a key.
        """
        if self._path:
            self._reads.add(self._path)
            self._reads.update(path for path, _ in leaves(self._data, self._path))
        return _plain(self._data)

    @property
    def reads(self) -> frozenset[str]:
        """The absolute dotted paths that were read so far in the whole tree."""
        return frozenset(self._reads)

    def take_reads(self) -> set[str]:
        """A copy of the paths that were read so far; they stay recorded here as well."""
        return set(self._reads)

    def add_reads(self, paths: Iterable[str]) -> None:
        """Record paths that were read elsewhere (by a worker that got a pickled node)."""
        self._reads.update(paths)

    def unread(self) -> list[str]:
        """The dotted paths of values below this node that nobody has read (a list or an empty mapping is a value)."""
        return [path for path, _ in leaves(self._data, self._path) if path not in self._reads]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Config):
            return self._data == other._data
        if isinstance(other, dict):
            return self._data == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Config({self._data!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self._data, self._path))


def _restore(data: dict[str, Any], path: str) -> Config:
    return Config(data, path)


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return _plain(value._data)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything in ``data`` that is not a mapping with keys."""
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value
