"""TensorBoard events, written without tensorflow or torch."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from rlinf_core.loggers import axis


class TensorBoardLogger:
    """One scalar per metric under ``phase/name`` in an ``events.out.tfevents`` file of the run directory.

    Records are written where ``log`` is called, not by tensorboard's writer thread: a full disk is then this
    call's error, and not a traceback of another thread.
    """

    requires = ("tensorboard",)

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._writer = RecordWriter(open(run_dir / name, "wb"))  # noqa: SIM115 - closed by close()
        self._write(file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()

    def log(self, step: int, phase: str, metrics: dict[str, float]) -> None:
        values = [self._summary.Value(tag=f"{phase}/{name}", simple_value=value) for name, value in metrics.items()]
        self._write(step=axis(step, metrics), summary=self._summary(value=values))

    def resumed(self, steps_done: int) -> None:
        """Let TensorBoard forget what an interrupted run wrote of later training steps."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=steps_done, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        self._writer.close()
