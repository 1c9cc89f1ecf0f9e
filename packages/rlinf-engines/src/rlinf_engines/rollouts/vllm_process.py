"""A vLLM engine in a child process: what it dies of costs a restart, not the run.

Run as a module it is the child: ``python -m rlinf_engines.rollouts.vllm_process SOCKET PARENT``. Parent and child talk
over a pair of sockets; weights go through shared memory. The kernel kills the child when its parent ends, however it
ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_core.types import Generated, GenerateRequest, SamplingParams
from rlinf_engines.rollouts.vllm_engine import EngineDied, EngineRaised, EngineSpec, LocalEngine

if TYPE_CHECKING:
    import torch

    from rlinf_engines.rollouts.held_weights import HeldWeights

MODULE = "rlinf_engines.rollouts.vllm_process"
PR_SET_PDEATHSIG = 1
# An engine that compiles takes minutes to start; one that has died is noticed at once all the same.
START_TIMEOUT_S = 1800.0
CLOSE_TIMEOUT_S = 5.0
BEAT_S = 0.5
TAIL_LINES = 15


class EngineProcess:
    """An engine behind a pipe; the same calls as ``LocalEngine``.

    The child goes on stepping while we are busy elsewhere, so ``step`` waits for news: a finished response, or a sign
    of life at least every ``BEAT_S``. None for ``stall_timeout_s`` is taken for death.
    """

    def __init__(self, spec: EngineSpec, version: int = 0) -> None:
        self._stall_s = spec.stall_timeout_s
        self._news: deque[list[Generated]] = deque()
        self._closed = False
        self._log = tempfile.TemporaryFile(prefix="rlinf-engine-")  # noqa: SIM115 (open as long as the child)
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **spec.environment, "OMP_NUM_THREADS": str(spec.threads)},
            )
        self._pipe = Connection(ours.detach())
        try:
            self._ask("start", spec, version, deadline_s=START_TIMEOUT_S)
        except EngineDied as error:
            error.log = f"; its log is {self.keep_log()}"
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def submit(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        self._ask("submit", list(requests), sampling)

    def step(self) -> list[Generated]:
        if not self._news:
            self._receive(self._stall_s, "generating", self._stall_s)
        return self._news.popleft() if self._news else []

    def abort(self) -> None:
        self._ask("abort")
        self._news.clear()

    def install(self, version: int, given: Sequence[tuple[str, torch.Tensor]] | None, held: HeldWeights | None) -> None:
        assert held is not None
        self._ask("install_file", version, held.path, held.entries)

    def offload(self) -> None:
        self._ask("offload")

    def onload(self) -> None:
        self._ask("onload")

    def close(self) -> None:
        """End the child, by force if it does not go."""
        if self._closed:
            return
        self._closed = True
        self._pipe.close()  # an idle child goes by itself
        if self._child.poll() is None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(CLOSE_TIMEOUT_S)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def _ask(self, name: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Call the child's engine and wait for the answer; what finishes meanwhile is kept for ``step``."""
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise self._died(name) from error
        limit = deadline_s or self._stall_s
        end = time.monotonic() + limit
        while True:
            answer = self._receive(end - time.monotonic(), name, limit)
            if answer is not None:
                return answer[0]

    def _receive(self, timeout_s: float, doing: str, limit_s: float) -> tuple[Any] | None:
        """Take one message: the answer to a call as a 1-tuple, or None for anything else."""
        try:
            there = self._pipe.poll(max(timeout_s, 0.0))
            message = self._pipe.recv() if there else None
        except (EOFError, OSError) as error:
            raise self._died(doing) from error
        if message is None:
            raise EngineDied(f"no sign of life for {limit_s:g} s while {doing} (rollout.stall_timeout_s)")
        kind, value = message
        if kind == "finished":
            self._news.append(value)
        elif kind == "answer":
            return (value,)
        elif kind == "nonfinite":
            raise NonFiniteError(value)
        elif kind == "refused":
            raise RLinfError(value)
        elif kind == "broken":
            raise EngineRaised(value)
        return None

    def _died(self, doing: str) -> EngineDied:
        try:
            code = self._child.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return EngineDied(f"its process has closed the pipe while {doing}")
        if code < 0:
            with contextlib.suppress(ValueError):
                return EngineDied(f"its process was killed by {signal.Signals(-code).name} while {doing}")
        return EngineDied(f"its process ended with exit code {code} while {doing}")

    def keep_log(self) -> str:
        """Write what the child printed to a file that stays; returns its path, and the end of it."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(0)
        text = self._log.read(size).decode(errors="replace")
        path = Path(tempfile.gettempdir()) / f"rlinf-engine-{os.getpid()}-{self._child.pid}.log"
        path.write_text(text, encoding="utf-8")
        tail = "\n".join(text.splitlines()[-TAIL_LINES:])
        return f"{path}{', which ends with:' if tail else ' (empty)'}\n{tail}".rstrip()


class _Child:
    """The child's side: takes calls between steps, and steps while there is something to do."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._engine: LocalEngine | None = None
        self._owed = 0
        self._asleep = False
        self._said = 0.0

    def run(self) -> None:
        while True:
            busy = self._owed > 0 and not self._asleep
            if self._pipe.poll(0.0 if busy else None):
                self._take(*self._pipe.recv())
            elif busy:
                self._step()

    def _take(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = self._call(name, arguments)
        except EngineDied as error:
            self._say("broken", str(error))
            raise SystemExit(1) from error
        except RLinfError as error:
            self._say("refused", str(error))
            return
        except Exception as error:
            self._say("broken", f"{name} failed: {type(error).__name__}: {error}")
            raise
        self._say("answer", value)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "start":
            return self._start(*arguments)
        assert self._engine is not None
        value = getattr(self._engine, name)(*arguments)
        if name == "submit":
            self._owed += len(arguments[0])
        elif name == "abort":
            self._owed = 0
        elif name in ("offload", "onload"):
            self._asleep = name == "offload"
        return value

    def _start(self, spec: EngineSpec, version: int) -> None:
        from types import SimpleNamespace

        from rlinf_engines.models import load_tokenizer

        tokenizer = load_tokenizer(SimpleNamespace(path=spec.directory))
        self._engine = LocalEngine(spec, tokenizer, version)

    def _step(self) -> None:
        assert self._engine is not None
        try:
            finished = self._engine.step()
        except NonFiniteError as error:
            self._engine.abort()
            self._owed = 0
            self._say("nonfinite", str(error))
            return
        except EngineDied as error:
            self._say("broken", str(error))
            raise SystemExit(1) from error
        self._owed -= len(finished)
        if finished:
            self._say("finished", finished)
        elif time.monotonic() - self._said > BEAT_S:
            self._say("alive", None)

    def _say(self, kind: str, value: Any) -> None:
        self._pipe.send((kind, value))
        self._said = time.monotonic()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends (Linux)."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before
        raise SystemExit(0)


def main(argv: list[str]) -> int:
    die_with(int(argv[1]))
    pipe = Connection(int(argv[0]))
    try:
        _Child(pipe).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed us
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
