"""The process (or, when debugging, the thread) that hosts one ``Worker``.

Ray starts it, but nothing in here costs a Ray call: calls, channel metadata and the device lock go over the
hub's socket. This module imports neither torch nor the user's code until the environment (thread counts,
visible devices, core pinning) is set.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import inspect
import io
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_core.board import events as ev
from rlinf_core.callstats import DeviceMemory
from rlinf_core.channel import Clock, Endpoint, Sections, Writer
from rlinf_core.errors import Cancelled, ChannelPoisoned, RLinfError, describe
from rlinf_core.hub.client import HubClient
from rlinf_core.hub.messages import (
    Acquire,
    Call,
    CallResult,
    CallTimes,
    ChannelArg,
    Goodbye,
    Hello,
    Log,
    Offloaded,
    ReleaseDevices,
)
from rlinf_core.links import SOCKET, LinkLoader
from rlinf_core.payload import PayloadFetcher, PayloadServer, PayloadStore
from rlinf_core.peers import HubDirectory, Peer, peer_secret
from rlinf_core.reader import Reader
from rlinf_core.resume import WORKERS_LOCK, hold
from rlinf_core.types import ParallelInfo
from rlinf_core.worker import Worker


@dataclass(frozen=True)
class HostSpec:
    """All that a rank's process needs to start. Plain picklable data."""

    group: str
    rank: int
    world_size: int
    worker: tuple[str, str]
    """Module and qualified name of the worker class."""
    cfg: Any
    seed: int
    run_dir: str
    hub: tuple[str, int]
    secret: bytes
    address: str
    """Address of the rank's own node, where it serves what it puts."""
    threads: int = 1
    cores: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    sys_path: tuple[str, ...] = ()
    code: bytes = b""
    """Zip of the recipe's folder, for nodes that do not have it."""
    uses_devices: bool = False
    shares: bool = False
    """Others use its devices too."""
    swapped: bool = False
    """It is offloaded for them."""
    slots: int | None = None
    link: str = SOCKET
    link_bytes: int = 0
    """How payloads reach consumers of the same machine, and the most memory for that (0: the link's own default)."""
    device_bytes: int = 0
    """Memory that a CPU slot stands for (0: not said)."""
    in_process: bool = False
    """Debug mode: a thread of the driver, which leaves the process's environment alone."""

    @property
    def member(self) -> str:
        return f"{self.group}[{self.rank}]"


def _code_path(spec: HostSpec) -> list[str]:
    """Where the user's own modules are: their folder if this node has it, else the shipped copy, unpacked."""
    if not spec.code or all(os.path.isdir(p) for p in spec.sys_path):
        return list(spec.sys_path)
    folder = tempfile.mkdtemp(prefix="rlinf-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(spec.code)) as archive:
        archive.extractall(folder)
    return [folder]


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

SPIN_COUNT = "20000"
"""Turns that an idle OpenMP thread of libgomp (torch's) waits awake, about a millisecond. Its own 300,000 keep a core
from the stage whose turn is next for some 17 ms after each parallel region."""


def prepare_process(spec: HostSpec) -> None:
    """Environment first, before anything that reads it is imported."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(spec.threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.update(spec.env)
    if spec.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec.cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what Ctrl-C does


class _Context:
    """The worker's view of its host (``WorkerContext``)."""

    def __init__(self, spec: HostSpec, host: Host) -> None:
        self.cfg = spec.cfg
        self.name = spec.group
        self.rank = spec.rank
        self.world_size = spec.world_size
        self.parallel = ParallelInfo(threads=spec.threads)
        self.seed = spec.seed
        self.run_dir = Path(spec.run_dir)
        self.slots = spec.slots
        self.step = ""
        self.step_index = 0
        self.peer = Peer(spec.member, spec.address, peer_secret(spec.secret), HubDirectory(host.client))
        self._host = host

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._host.enter_device()
        try:
            yield
        finally:
            self._host.exit_device()

    def account(self, kind: str, ids: tuple[str, ...], detail: str) -> None:
        member = self._host.spec.member
        if kind == "drop":
            self._host.client.send(ev.Drop(ids=ids, reason=detail, member=member, step=self.step))
        elif kind == "carry":
            self._host.client.send(ev.Carry(ids=ids, to_step=detail, member=member, step=self.step))
        else:
            self._host.client.send(ev.Trained(ids=ids, member=member, step=self.step))


class Host(Sections):
    """Runs a worker's calls one after the other, in the order they arrive."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.clock = Clock()
        self.worker: Worker | None = None
        self._depth = 0
        self._loaded = False
        self._running = 0
        self._memory = DeviceMemory()
        self._measures = spec.uses_devices and not spec.in_process
        self._base_bytes = self._load_bytes = 0

    # Main loop (engine thread)

    def main(self) -> str:
        """Connect, serve calls until ``stop``; returns why it ended."""
        spec = self.spec
        if not spec.in_process:
            prepare_process(spec)
        sys.path[:0] = [p for p in _code_path(spec) if p not in sys.path]
        store = PayloadStore(LinkLoader(spec.link, spec.link_bytes))
        server = PayloadServer(store, spec.secret, spec.address)
        hello = Hello(spec.member, os.getpid(), spec.address, server.address)
        self.client = HubClient(
            spec.hub,
            spec.secret,
            hello,
            on_release=store.release,
            on_lost=None if spec.in_process else _exit_with_driver,
        )
        self.client.serve_offload = self._serve_offload
        self.client.serve_side_call = self._run_aside
        fetcher = PayloadFetcher(spec.secret, store, spec.member)
        self.endpoint = Endpoint(self.client, store, fetcher, server.address, spec.group, spec.rank, self.clock, self)
        if not spec.in_process:
            sys.stdout = _LineForwarder(self.client, spec.member, "stdout")
            sys.stderr = _LineForwarder(self.client, spec.member, "stderr")
            logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
            logging.getLogger("rlinf").setLevel(logging.INFO)
        try:
            while True:
                call = self.client.next_call()
                if call.kind == "stop":
                    self._run(call, lambda: self.worker.teardown() if self.worker else None)
                    self._say_goodbye()
                    return "stopped"
                self._run(call, partial(self._setup if call.kind == "setup" else self._task, call))
        except Cancelled as error:
            if self.worker is not None:
                self.worker.teardown()
            self._say_goodbye()
            return str(error)
        finally:
            fetcher.close()
            server.close()
            store.close()
            self.client.close()

    def _say_goodbye(self) -> None:
        """Leave in order; the end of a connection without it is a death."""
        with contextlib.suppress(Cancelled):  # the hub may be gone already
            self.client.send(Goodbye(self.spec.member))

    def _setup(self, call: Call) -> None:
        (parallel,), _ = pickle.loads(call.arguments)
        module, qualname = self.spec.worker
        target: Any = importlib.import_module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
        worker = target.__new__(target)
        context = _Context(self.spec, self)
        context.parallel = parallel
        worker._ctx = context
        # Threads of one process must not import torch or transformers for the first time side by side.
        with self._room_for_setup(), _SETUP_LOCK if self.spec.in_process else contextlib.nullcontext():
            worker.__init__()
            self.worker = worker
            if not self.spec.swapped:
                self._base_bytes = self._memory.in_use()
            worker.setup()
            if self.spec.swapped:
                worker.offload()
                self._base_bytes = self._memory.in_use()

    @contextmanager
    def _room_for_setup(self) -> Iterator[None]:
        """What is set up may be as large as what is loaded: a group that shares its devices takes its turn."""
        if not self.spec.shares:
            yield
            return
        self._acquire(again=False)
        self._depth, self._loaded = 1, True  # a section inside ``setup`` is nested in this one, and loads nothing
        try:
            yield
        finally:
            self._loaded = False
            self.exit_device()

    def _task(self, call: Call) -> Any:
        worker = self.worker
        assert worker is not None, "setup precedes tasks"
        context: Any = worker._ctx
        context.step, context.step_index = call.step, call.step_index
        writers: list[Writer] = []
        readers: list[Reader] = []

        def bind(value: Any) -> Any:
            if not isinstance(value, ChannelArg):
                return value
            if value.direction == "in":
                readers.append(reader := Reader(self.endpoint, value))
                return reader
            writer = Writer(self.endpoint, value)
            writers.append(writer)
            return writer

        given, named = pickle.loads(call.arguments)
        args = [bind(a) for a in given]
        kwargs = {k: bind(v) for k, v in named.items()}
        result = getattr(worker, call.task)(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        for reader in readers:
            reader.settle()
        for writer in writers:
            writer.close()
        return result

    def _run_aside(self, call: Call) -> None:
        """A call run in the middle of another one, where that waits for input or is about to enter a section."""
        assert self.worker is not None
        context: Any = self.worker._ctx
        outer = (context.step, context.step_index, self._depth)
        self._depth = 0
        try:
            with self.clock.another_call():
                self._run(call, partial(self._task, call))
        finally:
            context.step, context.step_index, self._depth = outer

    def _run(self, call: Call, body: Callable[[], Any]) -> None:
        self.clock.start()
        switch_before, self.clock.switch_between = self.clock.switch_between, 0.0
        self._running += 1
        aside_before, items_before = self.clock.aside, self.clock.items
        start, began = time.time(), time.perf_counter()
        self._load_bytes = 0
        if self._measures:
            self._memory.restart()
        value = b""
        ok, error, text, secondary, bad_input = True, "", "", False, False
        try:
            value = _pickled(call, body())
            if self._depth:
                raise RLinfError(
                    f"{call.task}() returned inside its device section, so nobody else would get the devices: leave it "
                    "with `with self.on_device(): …`"
                )
        except BaseException as cause:  # whatever ends a task is named: nothing may end this process in silence
            ok, text = False, _trimmed_traceback()
            elsewhere = isinstance(cause, RLinfError) and cause.elsewhere
            bad_input = isinstance(cause, RLinfError) and cause.bad_input
            if elsewhere:
                self.client.await_cancel(CAUSE_WAIT_S)  # the hub is about to say who failed or died
            error = f"the task called sys.exit({cause.code!r})" if isinstance(cause, SystemExit) else describe(cause)
            stopped = isinstance(cause, Cancelled) and self.client.cancelled is not None
            secondary = stopped or (isinstance(cause, ChannelPoisoned) and cause.by_hub)
            secondary = secondary or (elsewhere and self.client.cancelled is not None)
        self._release_devices()
        end = start + (time.perf_counter() - began)
        aside = self.clock.aside - aside_before
        clock, items = self.clock, self.clock.items - items_before
        peak, resident = self._memory_of_call()
        times = CallTimes(
            start,
            end,
            clock.wait,
            clock.lock,
            clock.switch,
            aside,
            items,
            peak,
            resident,
            switch_before,
            clock.releases.puts,
            clock.releases.curve(),
            (self._memory.capacity() or self.spec.device_bytes) if self.spec.uses_devices else 0,
            tuple((channel.rpartition(":")[2], *taken) for channel, taken in clock.taken.items()),
        )
        take_reads = getattr(self.spec.cfg, "take_reads", None)
        reads = tuple(take_reads()) if callable(take_reads) else ()
        self._running -= 1
        self.client.send(
            CallResult(call.call_id, self.spec.member, ok, value, times, error, text, secondary, reads, bad_input)
        )
        self.client.offload_if_wanted()

    def _memory_of_call(self) -> tuple[int, int]:
        """Peak and what loading added; nothing where no device is used or threads share one process."""
        declared = self.worker.memory_bytes() if self.worker is not None and self.spec.uses_devices else None
        if declared is not None:
            return declared, declared
        if not self._measures:
            return 0, 0
        return max(0, self._memory.peak() - self._base_bytes), self._load_bytes

    # Devices: what the hub's lock decides, done by this process. The replica holds them from the outermost entry to the
    # outermost exit, less the waits for input in between, and stays loaded until it is asked to offload. Where nobody
    # else uses them there is nothing to ask.

    def enter_device(self) -> None:
        if not self.spec.uses_devices:
            return
        if self._depth == 0:
            self.client.serve_side_calls()
            if self.spec.shares:
                self._acquire(again=False)
        self._depth += 1
        self.reload()

    def exit_device(self) -> None:
        if not self.spec.uses_devices or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0 and self.spec.shares and self.client.cancelled is None:
            self.client.send(ReleaseDevices(member=self.spec.member))

    def inside(self) -> bool:
        return self._depth > 0

    def yields(self) -> bool:
        return self._depth > 0 and self.spec.shares

    def regain(self) -> None:
        self._acquire(again=True)
        self.reload()

    def reload(self) -> None:
        if self._loaded:
            return
        before = self._memory.in_use() if self._measures else 0
        with self.clock.counting("switch"):
            assert self.worker is not None
            self.worker.onload()
        self._loaded = True
        if self._measures:
            self._load_bytes = max(self._load_bytes, self._memory.in_use() - before)

    def _acquire(self, again: bool) -> None:
        member = self.spec.member
        with self.clock.counting("lock"):
            pending = self.client.request(lambda req: Acquire(req, member, again), "the devices of this group")
            granted = self.client.wait(pending)
        if granted.refused:
            raise RLinfError(f"no devices for {member}: {granted.refused}")

    def _release_devices(self) -> None:
        """Leave whatever section a task that failed was in."""
        if self._depth:
            self._depth = 1
            with contextlib.suppress(Cancelled):  # the hub is gone, and the devices with it
                self.exit_device()

    def _serve_offload(self) -> None:
        if self._loaded:
            with self.clock.counting("switch" if self._running else "switch_between"):
                assert self.worker is not None
                self.worker.offload()
            self._loaded = False
        self.client.send(Offloaded(member=self.spec.member))


_SETUP_LOCK = threading.Lock()
CAUSE_WAIT_S = 3.0
"""How long a task whose peer is gone waits for the hub's word on it before it fails by itself."""


def _pickled(call: Call, value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RLinfError(
            f"{call.task}() returned a {type(value).__name__} that cannot be sent to the driver: {error}"
        ) from error


def _exit_with_driver() -> None:
    """The hub lives in the driver: when it is gone this process has no reason to live."""
    os._exit(1)


def _trimmed_traceback() -> str:
    """Traceback of the current exception without the host's own frames on top."""
    kind, error, tb = sys.exc_info()
    own = __file__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename == own:
        tb = tb.tb_next
    return "".join(traceback.format_exception(kind, error, tb))


class _Bytes(io.RawIOBase):
    """What programs find as ``sys.stdout.buffer``."""

    def __init__(self, text: _LineForwarder) -> None:
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._text.write(raw.decode("utf-8", "replace"))
        return len(raw)


class _LineForwarder(io.TextIOBase):
    """A text stream whose whole lines go to the driver, which prints them with the member's name."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, client: HubClient, member: str, stream: str) -> None:
        self.buffer = _Bytes(self)
        self._client = client
        self._member = member
        self._stream = stream
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            os.write(2, text.encode("utf-8", "replace"))  # the member's log file
            *lines, self._rest = (self._rest + text).split("\n")
            if lines and self._client.cancelled is None:
                with contextlib.suppress(Cancelled):  # the run is ending: a print is no reason to fail
                    self._client.send(Log(self._member, self._stream, "\n".join(lines)))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back but an unfinished line."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 2

    def writable(self) -> bool:
        return True


class ActorHost:
    """The plain Ray actor class. ``main`` runs on the process's main thread for the whole run."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec

    def main(self) -> str:
        spec = self._spec
        with contextlib.suppress(OSError):  # output then stays in Ray's own log files
            logs = Path(spec.run_dir) / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            log = os.open(logs / f"{spec.member}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        hold(Path(spec.run_dir) / WORKERS_LOCK, shared=True)  # until this process ends; see rlinf_core.resume
        return Host(spec).main()
