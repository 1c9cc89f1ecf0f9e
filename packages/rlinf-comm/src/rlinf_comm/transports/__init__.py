"""The ways in which the buffers of a message move; one file each behind ``base.Transport``.

They are found through the entry points ``rlinf.transports``, so that another package can bring one.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

from rlinf_core.errors import PluginError
from rlinf_core.registry import Registry

_BUILT_IN = {
    "inproc": "rlinf_comm.transports.inproc:InprocTransport",
    "shm": "rlinf_comm.transports.shm:ShmTransport",
    "tcp": "rlinf_comm.transports.tcp:TcpTransport",
    "gloo": "rlinf_comm.transports.gloo:GlooTransport",
    "nccl": "rlinf_comm.transports.nccl:NcclTransport",
    "cuda_ipc": "rlinf_comm.transports.cuda_ipc:CudaIpcTransport",
}


@cache
def load(name: str) -> Any:
    """The class of a transport. Raises PluginError when it is not installed or cannot be imported."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    return Registry("rlinf.transports").load(name)


@cache
def _usable(pid: int) -> dict[str, str]:
    found = {}
    for name in [*_BUILT_IN, *(n for n in Registry("rlinf.transports").names() if n not in _BUILT_IN)]:
        try:
            found[name] = load(name).unavailable()
        except PluginError as error:
            found[name] = str(error)
    return found


def unusable() -> dict[str, str]:
    """The installed transports that do not work in this process -> why."""
    return {name: why for name, why in _usable(os.getpid()).items() if why}


def usable() -> frozenset[str]:
    """Names of the transports that work in this process."""
    return frozenset(name for name, why in _usable(os.getpid()).items() if not why)
