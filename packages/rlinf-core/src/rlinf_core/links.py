"""Faster ways for a channel's payloads between processes of one machine (entry-point group ``rlinf.links``).

Without any, an item stays in its producer's memory and is fetched over a socket. A link keeps it where consumers of the
same machine reach it themselves; who cannot reach it still fetches it over the socket. An entry is called with the most
bytes that it may take (0: its own default) and returns a ``Link``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from rlinf_core.errors import PluginError, describe
from rlinf_core.registry import Registry

SOCKET = "socket"
"""No link: everything over sockets."""
AUTO = "auto"
"""The first link that is installed and works in this process."""


class Link(Protocol):
    """Both ends of a link in one process. Thread-safe."""

    def put(self, buffers: Sequence[memoryview], holders: int) -> tuple[Any, bytes] | None:
        """Copy ``buffers``; returns what ``release`` and ``read`` take, and the ticket that consumers open them with.
        ``None``: there is no room. ``holders``: how many consumers will open it, each once and with its own number;
        0: that is not known."""

    def read(self, slot: Any) -> list[memoryview]:
        """What was put, for a consumer that fetches it over the socket."""

    def release(self, slot: Any) -> None:
        """No consumer will open it any more; who has it open keeps it."""

    def open(self, ticket: bytes, holder: int) -> list[memoryview] | None:
        """The buffers as views, kept while any of them is in use; ``holder`` is this consumer's own number among those
        that may open the ticket, or negative: then as private copies. ``None``: not to be reached from here."""

    def close(self) -> None:
        """Give memory back that is not in use."""


def wrong_name(name: str) -> str:
    """What is wrong with a value of ``channels.link``; empty when nothing is."""
    if name in (AUTO, SOCKET):
        return ""
    try:
        Registry("rlinf.links").entry(name)
    except PluginError as error:
        return str(error)
    return ""


class LinkLoader:
    """Makes the process's link when it is first needed, so that a process with small items only never loads it."""

    def __init__(self, name: str, limit_bytes: int = 0) -> None:
        self._name = name
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._looked = name == SOCKET

    def get(self) -> Link | None:
        """The link; ``None`` when there is none to be had (said once, when one was asked for by name)."""
        if not self._looked:
            with self._lock:
                if not self._looked:
                    self._link = self._load()
                    self._looked = True
        return self._link

    def _load(self) -> Link | None:
        registry = Registry("rlinf.links")
        names = registry.names() if self._name == AUTO else [self._name]
        for name in names:
            try:
                make = registry.load(name)
                link: Link = make(self._limit)
            except Exception as error:  # a plugin's fault: the socket works without it
                level = logging.DEBUG if self._name == AUTO else logging.WARNING
                logging.getLogger("rlinf").log(level, "link %r cannot be used: %s", name, describe(error))
                continue
            return link
        return None

    def close(self) -> None:
        with self._lock:
            self._looked = True
            if self._link is not None:
                self._link.close()
