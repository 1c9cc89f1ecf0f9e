"""Adaptive communication of RLinf: how an object gets from one worker to another, and weights from trainer to rollout.

Importing this is cheap; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_comm.codec import CodecError, decode, encode
    from rlinf_comm.communicator import Communicator, Message
    from rlinf_comm.directory import FileDirectory, LocalDirectory, StoreDirectory
    from rlinf_comm.errors import CommError, CommTimeout, PeerLost, RemoteError
    from rlinf_comm.work import Work
    from rlinf_comm.workers import communicator_of

_HOME = {
    **dict.fromkeys(("CodecError", "decode", "encode"), "codec"),
    **dict.fromkeys(("Communicator", "Message"), "communicator"),
    **dict.fromkeys(("FileDirectory", "LocalDirectory", "StoreDirectory"), "directory"),
    **dict.fromkeys(("CommError", "CommTimeout", "PeerLost", "RemoteError"), "errors"),
    "Work": "work",
    "communicator_of": "workers",
}

__all__ = [
    "CodecError",
    "CommError",
    "CommTimeout",
    "Communicator",
    "FileDirectory",
    "LocalDirectory",
    "Message",
    "PeerLost",
    "RemoteError",
    "StoreDirectory",
    "Work",
    "communicator_of",
    "decode",
    "encode",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'rlinf_comm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlinf_comm.{home}"), name)


def __dir__() -> list[str]:
    return __all__
