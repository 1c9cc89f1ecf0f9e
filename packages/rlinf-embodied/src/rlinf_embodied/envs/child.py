"""A process of environments: makes them, steps them, answers its parent. Started by path, in any interpreter.

It needs numpy, rlinf_core and rlinf_embodied, and of third parties only what the plugin imports.

It must end with its parent even while a simulator keeps the interpreter to itself. Hence the operating system does it:
the lifeline, a socket to the parent, is in asynchronous mode, and the signal of the peer's end (SIGIO, which terminates
by default) goes to the process group, so that it reaches what a simulator has started as well.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from typing import Any


def end_with_parent(lifeline: socket.socket) -> None:
    """Terminate this process group when the other end of ``lifeline`` is closed, whatever the process is doing."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    descriptor = lifeline.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before the flag was set: no signal will come
        os._exit(0)


def make(start: dict[str, Any]) -> Any:
    """The environments that the parent asks for, by the plugin's entry point as the parent knows it."""
    from rlinf_core.config.node import Config
    from rlinf_core.registry import Entry, Registry

    entries = None if start["entry"] is None else [Entry(*start["entry"])]
    plugin = Registry("rlinf.envs", entries).load(start["name"])
    envs = plugin(Config(start["cfg"], start["path"]), start["indices"], start["seed"])
    if start["episodes"] is not None:
        envs.episodes[:] = start["episodes"]
    return envs


def answer(envs: Any, command: str, arguments: tuple[Any, ...]) -> Any:
    if command == "reset":
        positions, seeds = arguments
        return envs.reset(positions, seeds=seeds)
    return getattr(envs, command)(*arguments)


def fault(error: BaseException) -> tuple[str, str, str]:
    """(class of a fault that the user can act on, else empty; its text; the traceback)."""
    from rlinf_core.errors import RLinfError, describe

    kind = type(error).__name__ if isinstance(error, RLinfError) else ""
    return kind, str(error) if kind else describe(error), traceback.format_exc()


def main(work_fd: int, lifeline_fd: int) -> None:
    for fd in (work_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    lifeline = socket.socket(fileno=lifeline_fd)
    end_with_parent(lifeline)
    os.dup2(2, 1)
    connection = socket.socket(fileno=work_fd)
    with connection.makefile("rb") as stream:
        first = pickle.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    if first["sys_path"] is not None:
        sys.path[:] = first["sys_path"]
    sys.path += [entry for entry in first["more_path"] if entry not in sys.path]
    from rlinf_embodied.envs import wire

    own = os.getpid()
    envs: Any = None
    try:
        command, arguments = "start", ()
        while True:
            try:
                if command == "start":
                    envs = make(first["start"])
                    result: Any = envs.spec
                else:
                    result = answer(envs, command, arguments)
                reply = ("ok", result, list(getattr(envs, "episodes", ())), getattr(envs, "restarts", 0))
            except Exception as error:
                reply = ("fault", fault(error), [], 0)
            if os.getpid() != own:  # a simulator has forked, and the fork came back: the answer is not its to give
                os._exit(0)
            connection.sendall(wire.dumps(reply))
            command, arguments = wire.receive(connection)
    except (EOFError, ConnectionError):
        pass  # the parent wants no more
    finally:
        if envs is not None:
            envs.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
