"""One process of environments as its parent sees it, and waiting for several at once with a deadline."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_embodied.envs import wire

CHILD = Path(__file__).with_name("child.py")
TAIL_BYTES = 6000


class Lost(Exception):
    """A process gave no answer; the text says why."""


class Process:
    """A child with its sockets. ``start`` is what ``child.make`` reads; its first answer is the ``EnvSpec``.

    Args:
        start: the plugin, its configuration and the environments.
        python: the interpreter; ``None``: this one, with this one's ``sys.path``.
    """

    def __init__(self, start: dict[str, Any], python: str | None) -> None:
        self._work, theirs = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self._errors, errors = os.pipe()
        fds = (theirs.fileno(), lifeline.fileno())
        try:
            self.popen = subprocess.Popen(
                [python or sys.executable, "-P", str(CHILD), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is the parent's to handle; and the kill reaches its children
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            for end in (self._work, self._lifeline):
                end.close()
            os.close(self._errors)
            raise
        finally:
            theirs.close()
            lifeline.close()
            os.close(errors)
        # Tells of the end of the process itself, where the socket would also wait for what it has forked.
        self._exit = os.pidfd_open(self.popen.pid)
        self._work.setblocking(False)
        os.set_blocking(self._errors, False)
        self._tail = b""
        self._inbox = bytearray()
        first = pickle.dumps({"start": start, "sys_path": None if python else sys.path, "more_path": _own_path()})
        self._outbox = memoryview(len(first).to_bytes(8, "little") + first)
        self._ended = False
        self._quiet = False

    def ask(self, command: str, *arguments: Any) -> None:
        """Send a command; ``gather`` brings the answer."""
        self._outbox = memoryview(wire.dumps((command, arguments)))

    # -- for ``gather``: each is called when one of its descriptors has something -------------------------------------

    def watch(self, poll: select.poll) -> list[int]:
        """Register what is to be waited for; the descriptors."""
        poll.register(self._work, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poll.register(self._exit, select.POLLIN)
        if not self._quiet:
            poll.register(self._errors, select.POLLIN)
        return [self._work.fileno(), self._exit, self._errors]

    def push(self) -> None:
        """Send as much of the command as goes without waiting. Raises Lost when the process has closed its end."""
        while self._outbox:
            try:
                sent = self._work.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as error:
                raise Lost(f"its process {self._ending()}") from error
            self._outbox = self._outbox[sent:]

    def pull(self) -> Any:
        """The answer if it is whole, else ``None``. Raises Lost when the process has ended."""
        self._quiet = not self._read_errors()
        while True:
            try:
                data = self._work.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError as error:
                raise Lost(f"its process {self._ending()}") from error
            if not data:
                raise Lost(f"its process {self._ending()}")
            self._inbox += data
            if len(data) < 1 << 16:
                break
        if len(self._inbox) >= wire.HEADER:
            end = wire.HEADER + wire.length_of(bytes(self._inbox[: wire.HEADER]))
            if len(self._inbox) >= end:
                message = pickle.loads(memoryview(self._inbox)[wire.HEADER : end])
                self._inbox = bytearray()
                return message
        if select.select([self._exit], [], [], 0)[0] and not select.select([self._work], [], [], 0)[0]:
            raise Lost(f"its process {self._ending()}")
        return None

    def _read_errors(self) -> bool:
        """Take what it has written; whether more may come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._errors, 1 << 16):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
            return False
        return True

    def _ending(self) -> str:
        """Kill it if it still lives, and say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(1.0)  # it has closed its end, and is about to be gone by itself
        self.kill()
        code = self.popen.returncode
        if code is not None and code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-(code or 0)).name}"
        except ValueError:
            return f"was killed by signal {-(code or 0)}"

    # -- its end -----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the process and its process group, and reap it. May be called twice."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._read_errors()
        self._close()

    def end(self, timeout_s: float) -> None:
        """Let it close its simulators and go, within ``timeout_s``; then kill what is left."""
        if not self._ended:
            with contextlib.suppress(OSError):
                self._work.shutdown(socket.SHUT_RDWR)
            deadline = time.monotonic() + timeout_s
            poll = select.poll()
            poll.register(self._exit, select.POLLIN)
            poll.register(self._errors, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0:
                found = {fd for fd, _ in poll.poll(left * 1000)}
                if self._exit in found:
                    break
                if self._errors in found and not self._read_errors():
                    poll.unregister(self._errors)
        self.kill()

    def _close(self) -> None:
        self._work.close()
        self._lifeline.close()
        os.close(self._errors)
        os.close(self._exit)

    def last_lines(self, count: int = 15) -> str:
        """The end of what it wrote to its standard output and error."""
        lines = self._tail.decode(errors="replace").rstrip().splitlines()
        return "\n".join(line[:300] for line in lines[-count:])


def _own_path() -> list[str]:
    """Folders of ``sys.path`` that belong to no installation: where this project and a user's own modules lie."""
    installed = tuple({os.path.realpath(prefix) + os.sep for prefix in (sys.prefix, sys.base_prefix)})
    return [entry for entry in sys.path if entry and not (os.path.realpath(entry) + os.sep).startswith(installed)]


def gather(processes: Sequence[Process], timeout_s: float, key: str) -> list[Any]:
    """The answers of ``processes``, in order, to what each was asked; a ``Lost`` for one that gave none.

    A process that does not answer within ``timeout_s`` (the config key ``key``) is killed, and so is one that has
    closed its end.
    """
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s

    def attend(place: int) -> None:
        try:
            processes[place].push()
            if (message := processes[place].pull()) is not None:
                answers[place] = message
        except Lost as lost:
            processes[place].kill()
            answers[place] = lost

    for place in range(len(processes)):
        attend(place)
    while len(answers) < len(processes):
        poll = select.poll()
        owners: dict[int, int] = {}
        for place, process in enumerate(processes):
            if place not in answers:
                owners |= dict.fromkeys(process.watch(poll), place)
        left = deadline - time.monotonic()
        found = poll.poll(max(0.0, left) * 1000)
        for place in sorted({owners[fd] for fd, _ in found}):
            attend(place)
        if not found and left <= 0:
            for place, process in enumerate(processes):
                if place not in answers:
                    process.kill()
                    answers[place] = Lost(f"its process did not answer within {timeout_s:g} s ({key}) and was killed")
    return [answers[place] for place in range(len(processes))]
