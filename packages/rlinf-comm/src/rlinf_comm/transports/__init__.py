"""The ways in which the buffers of a message move; one file each behind ``base.Transport``.

They are found through the entry points ``rlinf.transports``, so that another package can bring one. One that is broken
is reported (``unusable``, a line in the log) and passed over.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import PluginError, describe, nearest
from rlinf_core.registry import Registry

if TYPE_CHECKING:
    from rlinf_comm.selection import Other

GROUP = "rlinf.transports"
BUILT_IN = {
    "inproc": "rlinf_comm.transports.inproc:InprocTransport",
    "shm": "rlinf_comm.transports.shm:ShmTransport",
    "tcp": "rlinf_comm.transports.tcp:TcpTransport",
    "gloo": "rlinf_comm.transports.gloo:GlooTransport",
    "nccl": "rlinf_comm.transports.nccl:NcclTransport",
    "cuda_ipc": "rlinf_comm.transports.cuda_ipc:CudaIpcTransport",
}
log = logging.getLogger("rlinf.comm")


@cache
def load(name: str) -> Any:
    """The class of a transport. Raises PluginError when it is not installed, cannot be imported, or is no Transport."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    found = Registry(GROUP).load(name)
    if wrong := _wrong(found):
        raise PluginError(f"not a Transport: {wrong}")
    return found


def _wrong(found: Any) -> str:
    """Why an object is no usable class of transports; empty when it is one."""
    from rlinf_comm.transports.base import Transport

    if not isinstance(found, type) or not issubclass(found, Transport):
        shown = found.__qualname__ if isinstance(found, type) else type(found).__qualname__
        return f"{shown} is no subclass of rlinf_comm.transports.base.Transport"
    if inspect.isabstract(found):
        return f"{found.__qualname__} does not define {' and '.join(sorted(found.__abstractmethods__))}"
    return ""


def sources() -> dict[str, str]:
    """The installed transports that are not built in -> the distribution that brings each, with its version."""
    registry = Registry(GROUP)
    found = {}
    for name in registry.names():
        if name not in BUILT_IN:
            try:
                found[name] = registry.entry(name).source
            except PluginError as error:  # claimed twice, which the text says
                found[name] = str(error)
    return found


@cache
def _usable(pid: int) -> dict[str, str]:
    found = {}
    brought = sources()
    for name in [*BUILT_IN, *brought]:
        try:
            found[name] = str(load(name).unavailable())
        except Exception as error:  # a plugin's fault: the others work without it
            found[name] = str(error) if isinstance(error, PluginError) else describe(error)
            log.warning("transport %s is not used: %s", _titled(name, brought), found[name])
    return found


def _titled(name: str, brought: dict[str, str]) -> str:
    return f"{name} ({brought[name]})" if name in brought else name


def unusable() -> dict[str, str]:
    """The installed transports that do not work in this process -> why."""
    return {name: why for name, why in _usable(os.getpid()).items() if why}


def usable() -> frozenset[str]:
    """Names of the transports that work in this process."""
    return frozenset(name for name, why in _usable(os.getpid()).items() if not why)


def wrong_names(names: Iterable[str]) -> str:
    """What is wrong with ``names`` as a choice of transports: unknown, or installed and broken; empty when nothing is.

    A built-in one that cannot work in this process may be named.
    """
    brought = sorted(set(names) - set(BUILT_IN))
    known = _usable(os.getpid()) if brought else {}
    for name in brought:
        if name not in known:
            return f"there is no transport {name!r}{nearest(name, known)}; installed: {', '.join(sorted(known))}"
        if known[name]:
            return f"transport {name!r} cannot be used: {known[name]}"
    return ""


def others() -> tuple[Other, ...]:
    """The transports that are not built in and work in this process, for the selection."""
    return _others(os.getpid())


@cache
def _others(pid: int) -> tuple[Other, ...]:
    from rlinf_comm.selection import Other

    found = []
    for name in sorted(usable() - set(BUILT_IN)) if sources() else ():
        kind = load(name)
        found.append(Other(name, bool(kind.prefer), kind.suits))
    return tuple(found)


def forget() -> None:
    """Look for installed transports anew (for tests)."""
    for kept in (load, _usable, _others):
        kept.cache_clear()
