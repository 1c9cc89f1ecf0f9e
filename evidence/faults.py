"""Faults of communication, one after the other: what is lost, doubled and left behind, who is named, and how soon.

Each fault has two processes of its own, which exchange numbered messages with a checksum. What a fault may cost is what
had not been sent when the sender died; everything else is to arrive once, in order.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _common as common
import numpy as np

SECRET = b"evidence"
SIZES = (4, 65_536, 1_000_000)


@dataclass
class Row:
    """What one fault did."""

    fault: str
    sent: int = 0
    arrived: int = 0
    wrong: int = 0
    says: str = ""
    seconds: float | None = None
    note: str = ""
    left: dict[str, int] = field(default_factory=dict)


def parcel(number: int, size: int) -> dict[str, Any]:
    data = np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)
    return {"number": number, "crc": zlib.crc32(data), "data": data}


def right(message: dict[str, Any], number: int) -> bool:
    return message["number"] == number and zlib.crc32(message["data"]) == message["crc"]


def end(name: str, folder: str, **options: Any) -> Any:
    from rlinf_comm import Communicator, FileDirectory

    return Communicator(name, SECRET, FileDirectory(folder), **{"timeout": 60.0, **options})


# ------------------------------------------------------------------ the other process


def other(what: str, folder: str) -> None:
    comm = end("there", folder)
    if what == "produce":
        for number in range(10**9):
            comm.send(parcel(number, SIZES[number % 3]), "here")
            print(number + 1, flush=True)
    elif what == "hold":
        kept = [comm.recv("here") for _ in range(20)]
        print("holding", len(kept), flush=True)
        sys.stdin.readline()
    else:
        count = int(what)
        for number in range(count):
            comm.send(parcel(number, SIZES[number % 3]), "here")
        comm.flush("here")
        print(count, flush=True)
        sys.stdin.readline()
        comm.close()


@contextmanager
def peer(what: str, folder: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--out", folder, "--other", what]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def lines(process: subprocess.Popen[str]) -> list[str]:
    """Collects what the process prints, in a thread, until it ends."""
    found: list[str] = []
    out = process.stdout

    def read() -> None:
        for line in out or ():
            found.append(line.strip())

    threading.Thread(target=read, daemon=True).start()
    return found


# ------------------------------------------------------------------ what is there


def here() -> dict[str, int]:
    """Of this process and machine: what a fault could leave behind."""
    pid = os.getpid()
    children = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout.split()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "/dev/shm": len(os.listdir("/dev/shm")),
        "processes": len(children) - 1,  # ps itself
    }


# ------------------------------------------------------------------ the faults


def sender_killed(row: Row, folder: str) -> None:
    comm = end("here", folder)
    with peer("produce", folder) as process:
        said = lines(process)
        while row.arrived < 60:
            row.wrong += not right(comm.recv("there"), row.arrived)
            row.arrived += 1
        process.send_signal(signal.SIGKILL)
        began = time.perf_counter()
        process.wait()
        try:
            while True:
                row.wrong += not right(comm.recv("there"), row.arrived)
                row.arrived += 1
        except Exception as error:
            row.says, row.seconds = f"{type(error).__name__}: {error}", time.perf_counter() - began
        row.sent = int(said[-1])
        if row.arrived > row.sent:  # it died between sending one and saying so
            row.sent = row.arrived
    comm.close()


def receiver_killed(row: Row, folder: str) -> None:
    comm = end("here", folder)
    with peer("hold", folder) as process:
        for number in range(20):
            comm.send(parcel(number, 1_000_000), "there")
        assert process.stdout is not None
        row.sent = row.arrived = int(process.stdout.readline().split()[1])
        process.send_signal(signal.SIGKILL)
        began = time.perf_counter()
        try:
            while True:
                comm.send(parcel(0, 4), "there")
        except Exception as error:
            row.says, row.seconds = f"{type(error).__name__}: {error}", time.perf_counter() - began
    deadline = time.monotonic() + 5
    while (taken := comm._endpoint.arena.stats().lingering) and time.monotonic() < deadline:
        time.sleep(0.05)
    row.note = f"{taken} of the 20 slots that it held are still taken"
    comm.close()


def never_there(row: Row, folder: str) -> None:
    comm = end("here", folder)
    began = time.perf_counter()
    try:
        comm.send(1, "nobody", timeout=2.0)
    except Exception as error:
        row.says, row.seconds = f"{type(error).__name__}: {error}", time.perf_counter() - began
    comm.close()


def stopped(row: Row, folder: str, seconds: float) -> None:
    comm = end("here", folder)
    with peer("produce", folder) as process:
        said = lines(process)
        longest = 0.0
        until = None
        while until is None or time.monotonic() < until:
            began = time.monotonic()
            row.wrong += not right(comm.recv("there"), row.arrived)
            longest = max(longest, time.monotonic() - began)
            row.arrived += 1
            if row.arrived == 30:
                process.send_signal(signal.SIGSTOP)
                threading.Timer(seconds, lambda: process.send_signal(signal.SIGCONT)).start()
                until = time.monotonic() + seconds + 2
        row.note = f"longest wait {longest:.0f} s, then it went on"
        row.sent = row.arrived
        del said[:]
    comm.close()


def exhausted_memory(row: Row, folder: str) -> None:
    comm = end("here", folder, shm_limit_bytes=1_500_000)
    _to_myself(row, comm, folder, "there", 40)
    comm.close()


def _to_myself(row: Row, comm: Any, folder: str, name: str, count: int) -> None:
    """Send to another process that sends nothing back but a count; it takes everything before it answers."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); import faults\n"
        "comm = faults.end('there', sys.argv[1])\n"
        f"kept = [comm.recv('here') for _ in range({count})]\n"
        "comm.send(sum(faults.right(m, i) for i, m in enumerate(kept)), 'here')\n"
        "comm.flush('here')\n"
        "sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, folder, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    for number in range(count):
        comm.send(parcel(number, 1_000_000), name)
    row.sent, row.arrived = count, int(comm.recv(name))
    stats = comm.stats()[name]
    row.note = f"{stats.fallbacks} messages went another way: {dict(stats.transports)}"
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def exhausted_files(row: Row, folder: str) -> None:
    comm = end("here", folder)
    with peer("1", folder):
        row.wrong += not right(comm.recv("there"), 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
        try:
            end("another", folder)
        except Exception as error:
            row.says = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        again = end("another", folder)
        again.close()
        row.sent = row.arrived = 1
        row.note = "the connection goes on, and a new one works afterwards"
    comm.close()


def unsendable(row: Row, folder: str) -> None:
    comm = end("here", folder)
    with peer("2", folder):
        said = []
        try:
            comm.send({"good": 1, "bad": [threading.Lock()]}, "there")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        for number in range(2):
            row.wrong += not right(comm.recv("there"), number)
            row.arrived += 1
        row.sent, row.says = 2, said[0] if said else ""
    comm.close()


def stranger(row: Row, folder: str) -> None:
    comm = end("here", folder)
    with peer("30", folder):
        host, port = comm._endpoint._record.host, comm._endpoint._record.port
        began = time.perf_counter()
        for _ in range(50):
            with socket.create_connection((host, port)) as sock:
                sock.settimeout(20)
                try:
                    sock.sendall(b"x" * 4096)
                    while sock.recv(4096):
                        pass
                except OSError:
                    pass  # refused
        row.seconds = time.perf_counter() - began
        for number in range(30):
            row.wrong += not right(comm.recv("there"), number)
            row.arrived += 1
        row.sent, row.note = 30, "50 strangers with 4 KiB of garbage each, all turned away; seconds for all of them"
    comm.close()


def fault_table(stop_s: float) -> list[tuple[str, Callable[[Row, str], None]]]:
    return [
        ("sender: kill -9 while it sends", sender_killed),
        ("receiver: kill -9 while it holds 20 MB", receiver_killed),
        ("a peer that never appears", never_there),
        (f"sender: SIGSTOP for {stop_s:g} s", lambda row, folder: stopped(row, folder, stop_s)),
        ("shared memory exhausted (1.5 MB allowed)", exhausted_memory),
        ("file descriptors exhausted", exhausted_files),
        ("an object that cannot be pickled", unsendable),
        ("strangers without the secret", stranger),
    ]


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--other", {"default": "", "help": "used by the experiment itself"}),
        ("--stop", {"type": float, "default": 30.0, "help": "seconds of the SIGSTOP"}),
    )
    if args.other:
        other(args.other, str(args.out))
        return
    rows = []
    for name, fault in fault_table(args.stop):
        row = Row(name)
        with tempfile.TemporaryDirectory(prefix="rlinf-faults-") as folder:
            # One run before it, so that what a first use loads (modules, caches) is not counted as left behind.
            end("warm", folder).close()
            before = here()
            fault(row, folder)
            deadline = time.monotonic() + 10
            while (now := here()) != before and time.monotonic() < deadline:
                time.sleep(0.1)
            row.left = {key: now[key] - before[key] for key in before if now[key] > before[key]}
        rows.append(row)
        print(row)
    cells = [
        (
            row.fault,
            f"{row.arrived} of {row.sent}" if row.sent else "",
            row.sent - row.arrived,
            row.wrong,
            ", ".join(f"{count} {what}" for what, count in row.left.items()) or "nothing",
            "" if row.seconds is None else f"{row.seconds:.2f}",
            "; ".join(part for part in (row.says.splitlines()[0] if row.says else "", row.note) if part),
        )
        for row in rows
    ]
    header = ("fault", "arrived", "lost", "wrong or doubled", "left behind", "seconds until it is said", "what is said")
    text = (
        "*Left behind*: open files and threads of the process that goes on, names in /dev/shm and child processes, "
        "against before. What a killed sender had not sent cannot arrive: what its `send` had returned for counts.\n\n"
        + common.table(header, cells)
    )
    common.write(args.out, "Faults of communication", text, [vars(row) for row in rows])


if __name__ == "__main__":
    main()
