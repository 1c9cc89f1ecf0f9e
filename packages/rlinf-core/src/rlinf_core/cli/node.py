"""``rlinf head`` and ``rlinf worker``: make machines one cluster. A Ray node runs as long as the command does."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlinf_core.cli.main import FAILED, OK, Parser, UsageError
from rlinf_core.cluster import AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH, SLOT, TOKEN
from rlinf_core.errors import RLinfError

HEAD = """Start the first node of a cluster on this machine; it runs until Ctrl-C.

Other machines join with `rlinf worker HOST:PORT`, and a run uses the cluster with cluster.address=HOST:PORT. All nodes
need the same versions of Python, Ray and these packages, and a run directory that all of them see. Who joins or runs
must have the head's token: the file ~/.ray/auth_token, or RAY_AUTH_TOKEN (RAY_AUTH_MODE=disabled lets everyone in)."""
WORKER = """Let this machine join the cluster whose head is at ADDRESS (HOST:PORT); it leaves on Ctrl-C.

It must have the head's token: copy the head's ~/.ray/auth_token to the same place here, or set RAY_AUTH_TOKEN."""
PORT = 6379
START_S = 90.0
"""How long a node may take to come up."""
CONNECT_S = 5.0
STOP_S = 30.0
_PR_SET_PDEATHSIG = 1


def head(argv: list[str]) -> int:
    """Run a head node in the foreground."""
    parser = _parser("rlinf head", HEAD)
    parser.add_argument("--port", type=int, default=PORT, help=f"port that others join at ({PORT})")
    args = parser.parse_args(argv)
    host = args.host or _own_address()
    if not 1 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: give a port from 1 to 65535")
    if _answers(host, args.port, 0.5):
        raise RLinfError(f"port {args.port} of {host} is in use already; stop what is there, or give another --port")
    address = f"{host}:{args.port}"
    _check_token(make=True)
    words = ["--head", f"--port={args.port}", "--include-dashboard=false"]
    join = f"  join from another machine:  rlinf worker {address}   (with this machine's {TOKEN})\n"
    return _node(words, host, args.slots, address, join)


def worker(argv: list[str]) -> int:
    """Run a worker node in the foreground."""
    parser = _parser("rlinf worker", WORKER)
    parser.add_argument("address", metavar="ADDRESS", help="HOST:PORT of the head")
    args = parser.parse_args(argv)
    host, colon, port = args.address.rpartition(":")
    if not (colon and host and port.isdigit() and 1 <= int(port) <= 65535):
        raise UsageError(f"ADDRESS {args.address!r} is not HOST:PORT, such as 10.0.0.1:{PORT}")
    if not _answers(host, int(port), CONNECT_S):
        raise RLinfError(
            f"no head answers at {args.address} within {CONNECT_S:g} s: is `rlinf head` running there, and is the port "
            "open between the machines?"
        )
    _check_token(make=False)
    return _node([f"--address={args.address}"], args.host, args.slots, args.address, "")


def _parser(prog: str, description: str) -> Parser:
    parser = Parser(prog=prog, description=description)
    parser.add_argument("--host", help="this machine's address, as the others reach it (found by itself)")
    parser.add_argument(
        "--slots", type=int, default=0, help="CPU slots to offer as devices; 0: the machine's accelerators alone"
    )
    return parser


def _node(words: list[str], host: str | None, slots: int, address: str, more: str) -> int:
    if slots < 0:
        raise UsageError(f"--slots {slots}: give 0 or more")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block", "--disable-usage-stats"]
    command += [f"--resources={json.dumps({f'{SLOT}{i}': 1 for i in range(slots)})}"]
    if host:
        command.append(f"--node-ip-address={host}")
    with tempfile.TemporaryDirectory(prefix="rlinf-node-") as folder:
        log = Path(folder) / "ray.log"
        environment = {AUTH_MODE: "token", **os.environ}
        with open(log, "wb") as out:
            node = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=_end_with_parent,
            )
        try:
            # Ctrl-C too: a shell's background job is started with it ignored.
            previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                return _watch(node, log, address, slots, more)
            except KeyboardInterrupt:
                print("rlinf: stopping the node", file=sys.stderr, flush=True)
                return OK
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
        finally:
            _stop(node)


def _check_token(*, make: bool) -> None:
    """A cluster lets in who has its token: anyone else on the network could run what he likes on its machines."""
    if os.environ.get(AUTH_MODE, "token").lower() != "token" or os.environ.get(AUTH_TOKEN):
        return
    path = Path(os.environ.get(AUTH_TOKEN_PATH) or TOKEN).expanduser()
    if path.is_file():
        return
    if not make or os.environ.get(AUTH_TOKEN_PATH):
        raise RLinfError(
            f"there is no token at {path}: copy the head's {TOKEN} to it, or set RAY_AUTH_TOKEN to what that file says"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))


def _watch(node: subprocess.Popen[bytes], log: Path, address: str, slots: int, more: str) -> int:
    deadline = time.monotonic() + START_S
    while node.poll() is None and b"Ray runtime started" not in log.read_bytes():
        if time.monotonic() > deadline:
            raise RLinfError(f"the Ray node did not come up within {START_S:g} s; it said:\n{_tail(log)}")
        time.sleep(0.1)
    if node.poll() is None:
        devices = f", {slots} CPU slot(s)" if slots else ""
        print(
            f"node of the cluster {address} is up{devices}\n{more}"
            f"  run on the cluster:         rlinf run RECIPE cluster.address={address}\n"
            "  Ctrl-C ends this node",
            flush=True,
        )
        code = node.wait()
        if code == 0:
            return OK
    print(f"rlinf: error: the Ray node ended with {node.returncode}; it said:\n{_tail(log)}", file=sys.stderr)
    return FAILED


def _stop(node: subprocess.Popen[bytes]) -> None:
    if node.poll() is None:
        node.terminate()
        try:
            node.wait(STOP_S)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """In the child, before it becomes Ray: SIGTERM when we die in whatever way, and no Ctrl-C of the terminal, so that
    we end it in order."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgid(0, 0)


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _answers(host: str, port: int, seconds: float) -> bool:
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except OSError:
        return False
