"""Says so when a step in this process does not end. Standard library only."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

log = logging.getLogger(__name__)


class StallWatch:
    """A thread that logs an error when something between ``begin`` and ``end`` takes longer than ``timeout_s``.

    It cannot end what is stuck in a library of this process; whoever reads the log learns where it is stuck. One line
    for each time that something is stuck.
    """

    def __init__(self, timeout_s: float, what: str, remedy: str) -> None:
        self._timeout_s, self._what, self._remedy = timeout_s, what, remedy
        self._began: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._began = None

    def _watch(self) -> None:
        told: float | None = None
        while not self._over.wait(self._timeout_s / 4):
            began = self._began
            if began is not None and began != told and time.monotonic() - began > self._timeout_s:
                told = began
                log.error(
                    "%s has not ended for %g s (rollout.stall_timeout_s); %s", self._what, self._timeout_s, self._remedy
                )
