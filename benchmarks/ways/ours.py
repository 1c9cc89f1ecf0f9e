"""``rlinf_comm.Communicator``: any object, in order, keys and limits known to neither end."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from ways.cases import Case
from ways.pair import Pair
from ways.side import Side

NAMES = ("producer", "consumer")


class CommunicatorSide(Side):
    def open(self) -> None:
        folder, secret = self.shared
        mine, self.peer = NAMES if self.producer else NAMES[::-1]
        self.communicator = Communicator(mine, secret, FileDirectory(folder), timeout=60.0)

    def send(self, item: Any) -> None:
        self.communicator.send(item, self.peer)

    def recv(self) -> Any:
        return self.communicator.recv(self.peer)

    def prepare(self, case: Case) -> None:
        """Nothing: neither end is told what will come."""

    def close(self) -> None:
        self.communicator.close()


class Communicators(Pair):
    name = "rlinf_comm.Communicator"
    kind = "ours"
    side = CommunicatorSide

    def shared(self, context: Any, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="comm-"))
        shared = (folder, os.urandom(32))
        return shared, shared
