"""Sockets that a forked child must not keep open.

The end of a connection is how the other end learns that this process has died; a child that was forked meanwhile and
holds a copy of the socket would hide it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable

_lock = threading.Lock()
"""Held while a descriptor is made and written down, and during a fork: no child gets one that is not written down."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_epolls: set[select.epoll] = set()
_descriptors: set[int] = set()
_callbacks: weakref.WeakSet[Forked] = weakref.WeakSet()


class Forked:
    """What has to know that it is now in a child. ``forked`` may take no lock."""

    forked: bool = False


def make(function: Callable[[], socket.socket]) -> socket.socket:
    """The socket that ``function`` makes without waiting, closed in children from now on."""
    with _lock:
        sock = function()
        _sockets.add(sock)
    return sock


def make_pipe() -> tuple[socket.socket, socket.socket]:
    """Two ends of a pipe that does not block."""
    with _lock:
        ends = socket.socketpair()
        _sockets.update(ends)
    for end in ends:
        end.setblocking(False)
    return ends


def make_epoll() -> select.epoll:
    """Its descriptor is of the parent's sockets too: the child closes it."""
    with _lock:
        epoll = select.epoll()
        _epolls.add(epoll)
    return epoll


def make_descriptor(function: Callable[[], int]) -> int:
    with _lock:
        fd = function()
        _descriptors.add(fd)
    return fd


def close_descriptor(fd: int) -> None:
    with _lock:
        _descriptors.discard(fd)
        os.close(fd)


def close_epoll(epoll: select.epoll) -> None:
    with _lock:
        _epolls.discard(epoll)
        epoll.close()


def watch(owner: Forked) -> None:
    """Set ``owner.forked`` in children."""
    _callbacks.add(owner)


def _in_child() -> None:
    for sock in list(_sockets):
        sock.close()
    for epoll in _epolls:
        epoll.close()
    _epolls.clear()
    for fd in _descriptors:
        try:
            os.close(fd)
        except OSError:
            pass  # closed before the fork
    _descriptors.clear()
    for owner in list(_callbacks):
        owner.forked = True
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
