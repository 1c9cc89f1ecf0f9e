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

from rlinf_core.errors import ConfigError, MissingExtraError, PluginError, describe
from rlinf_core.registry import KNOWN, Registry, install_command

SOCKET = "socket"
"""No link: everything over sockets."""
AUTO = "auto"
"""The first link that is installed and works in this process, shared memory before others."""
PREFERRED = "shm"
METHODS = ("put", "read", "release", "open", "close")
"""What a plugin must have to be a ``Link``."""


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

    def open(self, ticket: bytes, holder: int, private: bool) -> list[memoryview] | None:
        """The buffers as writable views, kept while any of them is in use; ``holder`` is this consumer's own number
        among those that may open the ticket, or negative: then as copies. ``private``: there are other consumers, and
        nobody may see what this one writes. ``None``: not to be reached from here."""

    def close(self) -> None:
        """Give memory back that is not in use."""


def wrong_name(name: str) -> str:
    """What is wrong with a value of ``channels.link``; empty when nothing is. Imports no plugin."""
    if name in (AUTO, SOCKET):
        return ""
    registry = Registry("rlinf.links")
    try:
        registry.entry(name)
    except MissingExtraError as error:
        return str(error)
    except PluginError as error:
        return str(error) if name in registry.names() else registry.unknown(name, built_in=(AUTO, SOCKET))
    return ""


def said_at_start(name: str, limit_bytes: int = 0) -> str:
    """A line for the user: how items will go between workers of one machine, judged from what this process can load.

    ``name``: see ``LinkLoader``. Raises ConfigError when the plugin of that name is no link.
    """
    begin = "items between workers of one machine: "
    if name == SOCKET:
        return f"{begin}sockets (channels.link=socket)"
    loader = LinkLoader(name, limit_bytes, say=logging.DEBUG)
    loader.get()
    loader.close()
    if loader.used:
        known = KNOWN["rlinf.links"].get(loader.used)
        source = known.distribution if known else Registry("rlinf.links").entry(loader.used).source
        return f"{begin}{_shown(loader.used)} ({source})"
    registry = Registry("rlinf.links")
    if name == AUTO and PREFERRED not in registry.names():
        known = KNOWN["rlinf.links"][PREFERRED]
        return f"{begin}sockets; {known.distribution} brings shared memory: {install_command(known.requirement)}"
    return f"{begin}sockets; {loader.refused or 'no link is installed'}"


def _shown(name: str) -> str:
    return "shared memory" if name == PREFERRED else f"link {name!r}"


class _Telling:
    """A link that says it once when it has no room."""

    def __init__(self, link: Link, name: str, limit_bytes: int) -> None:
        self.link = link
        self.read = link.read
        self.release = link.release
        self.open = link.open
        self.close = link.close
        self._name = name
        self._limit = limit_bytes
        self._told = False

    def put(self, buffers: Sequence[memoryview], holders: int) -> tuple[Any, bytes] | None:
        placed = self.link.put(buffers, holders)
        if placed is None and not self._told:
            self._told = True
            limit = f"{self._limit}" if self._limit else "0, the default"
            logging.getLogger("rlinf").warning(
                "no room in %s (channels.link_bytes=%s): items go over sockets", _shown(self._name), limit
            )
        return placed


class LinkLoader:
    """Makes the process's link when it is first needed, so that a process with small items only never loads it.

    ``name``: of a plugin, ``SOCKET`` for none, or ``AUTO``: shared memory, else the first other by name that can be
    used. ``say``: the level at which it is logged that a plugin asked for by name cannot be used.
    """

    def __init__(self, name: str, limit_bytes: int = 0, *, say: int = logging.WARNING) -> None:
        self._name = name
        self._limit = limit_bytes
        self._say = logging.DEBUG if name == AUTO else say
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._looked = name == SOCKET
        self.used = ""
        """Name of the link that was taken."""
        self.refused = ""
        """Why the last one that was tried cannot be used."""

    def get(self) -> Link | None:
        """The link; ``None`` when there is none to be had (said once, when one was asked for by name).

        Raises ConfigError when the plugin asked for by name makes what is no link.
        """
        if not self._looked:
            with self._lock:
                if not self._looked:
                    self._link = self._load()
                    self._looked = True
        return self._link

    def _load(self) -> Link | None:
        registry = Registry("rlinf.links")
        names = [self._name]
        if self._name == AUTO:
            names = sorted(registry.names(), key=lambda name: (name != PREFERRED, name))
        for name in names:
            try:
                link: Link = registry.load(name)(self._limit)
                lacking = [method for method in METHODS if not callable(getattr(link, method, None))]
                if lacking and "close" not in lacking:
                    link.close()
            except Exception as error:  # a plugin's fault: the socket works without it
                self._refuse(f"link {name!r} cannot be used: {describe(error)}")
                continue
            if lacking:
                entry = registry.entry(name)
                why = f"{entry.value} of {entry.source} is no link: it has no method {', '.join(lacking)}"
                if self._name != AUTO:
                    raise ConfigError(f"channels.link={name}: {why}")
                self._refuse(f"link {name!r} cannot be used: {why}")
                continue
            self.used = name
            return _Telling(link, name, self._limit)
        return None

    def _refuse(self, why: str) -> None:
        self.refused = why
        logging.getLogger("rlinf").log(self._say, "%s", why)

    def close(self) -> None:
        with self._lock:
            self._looked = True
            if self._link is not None:
                self._link.close()
