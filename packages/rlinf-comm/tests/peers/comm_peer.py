"""The other process in the communicator's tests: ``python comm_peer.py ROLE FOLDER NAME [ARGUMENTS]``.

It says what it has come to on its standard output, a line each; a test waits for such a line.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import zlib
from typing import Any

import numpy as np

from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.errors import CommError

SECRET = b"a secret of the tests"


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())  # in one piece: a forked child says something too


def make(folder: str, name: str, **options: Any) -> Communicator:
    return Communicator(name, SECRET, FileDirectory(folder), **{"timeout": 60.0, **options})


def item(number: int, nbytes: int) -> Any:
    """A message whose content is checked by ``check``."""
    if nbytes < 8:
        return number
    return np.full(nbytes // 8, number, np.int64)


def echo(comm: Communicator, to: str) -> None:
    """Send back whatever comes, until the other end is gone."""
    say("ready")
    while True:
        message = comm.recv_message(to)
        comm.send(message.obj, to, meta=message.meta)


def produce(comm: Communicator, to: str, count: str, nbytes: str) -> None:
    say("ready")
    for number in range(int(count)):
        comm.send(item(number, int(nbytes)), to)
    comm.flush(to)
    say("sent")
    comm.close()


def produce_many(comm: Communicator, folder: str, names: str, to: str, count: str) -> None:
    """Several communicators, one thread each, as many producers."""
    say("ready")

    def run(name: str) -> None:
        with make(folder, name) as own:
            for number in range(int(count)):
                for receiver in to.split(","):
                    own.send((name, number), receiver)
            for receiver in to.split(","):
                own.flush(receiver)

    threads = [threading.Thread(target=run, args=(name,)) for name in names.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("sent")
    comm.close()


def hold(comm: Communicator, source: str, count: str) -> None:
    """Receive and keep what was received."""
    held = [comm.recv(source) for _ in range(int(count))]
    say("holding", len(held), sum(int(a[0]) for a in held))
    sys.stdin.read()


def sleep(comm: Communicator, *names: str) -> None:
    """Connect to each of them, and then do nothing."""
    for name in names:
        comm.send("hello", name)
    say("ready")
    sys.stdin.read()


def fork(comm: Communicator, to: str) -> None:
    comm.send("hello", to)
    child = os.fork()
    if not child:
        try:
            comm.send("from the child", to)
        except Exception as error:
            say("child:", type(error).__name__, error)
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        say("sockets in the child:", sum(link.startswith("socket:") for link in links))
        sys.stdin.read()
        os._exit(0)
    say("forked", child)
    sys.stdin.read()


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def half_frame(comm: Communicator, to: str) -> None:
    """Stop in the middle of a message: its head goes, and a part of its body."""
    comm.send("hello", to)
    peer = comm._endpoint.peer(to)
    assert peer.conn is not None
    peer.conn.stream.write([b"\x17\xc3\x01\x00" + bytes(8) + (1000).to_bytes(4, "little") + bytes(12), b"x" * 10])
    say("half")
    sys.stdin.read()


def knock(comm: Communicator, to: str) -> None:
    """Connect to the listener and do not go on with the handshake."""
    record = comm._endpoint._lookup(comm._endpoint.peer(to), 1e18)
    sock = socket.create_connection((record.host, record.port))
    sock.recv(36)
    say("knocked")
    sys.stdin.read()


def few_files(comm: Communicator, to: str) -> None:
    """Use up all file descriptors, on demand."""
    comm.send("hello", to)
    say("ready")
    kept = []
    for line in sys.stdin:
        if line.strip() == "use up":
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, 20000))
            try:
                while True:
                    kept.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                say("used up")
        elif line.strip() == "free":
            while kept:
                os.close(kept.pop())
            say("freed")
        elif line.startswith("dial"):
            try:
                comm.send("dialed", line.split()[1])
                say("dialed")
            except CommError as error:
                say(type(error).__name__, error)
        else:
            comm.send(line.strip(), to)


def checksum(values: list[Any]) -> int:
    return zlib.crc32(repr(values).encode())


def main() -> None:
    role, folder, name, *arguments = sys.argv[1:]
    comm = make(folder, name)
    if role == "produce_many":
        arguments.insert(0, folder)
    globals()[role](comm, *arguments)


if __name__ == "__main__":
    main()
