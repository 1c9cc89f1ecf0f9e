"""The driver's engine: starts the hub and the worker processes, dispatches calls, collects results, ends everything.

The program never sees it; ``rlinf_core.live`` turns steps and group calls into its methods.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import secrets
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf_core.board import events as ev
from rlinf_core.channel import Clock, Endpoint, Sections, Writer
from rlinf_core.cluster import Cluster
from rlinf_core.devicelock import DeviceLock
from rlinf_core.errors import (
    Cancelled,
    ChannelError,
    ConfigError,
    PlanError,
    RLinfError,
    WaitTimeout,
    WorkerError,
    describe,
)
from rlinf_core.flow import GroupSpec
from rlinf_core.host import HostSpec
from rlinf_core.hub.client import HubClient
from rlinf_core.hub.messages import (
    DRIVER,
    Call,
    CallResult,
    Cancel,
    ChannelArg,
    Died,
    Failure,
    Feeding,
    Goodbye,
    Hello,
    Log,
)
from rlinf_core.hub.server import HubServer
from rlinf_core.launch import make_launcher
from rlinf_core.links import SOCKET, LinkLoader
from rlinf_core.payload import PayloadFetcher, PayloadServer, PayloadStore
from rlinf_core.plan import FlatPlan
from rlinf_core.resume import MEETING
from rlinf_core.types import ParallelInfo

Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and named arguments of a call on one member."""
DEAD_EVERY_S = 2.0
FEED_CHUNK = 64
LAST_WORDS_S = 2.0
STOP_GRACE_S = 5.0
"""How long ranks may take to end before they are killed."""
TEARDOWN_GRACE_S = 60.0
"""The same after a run that went well: engines take themselves apart, which a busy machine is slow at."""
CAUSE_WAIT_S = 3.0
"""How long to wait for Ray's word on why a process died."""


@dataclass
class CallState:
    """One call on all ranks of a group."""

    group: str
    task: str
    step: str
    members: tuple[str, ...]
    results: dict[str, CallResult] = field(default_factory=dict)

    then: Callable[[], None] | None = None
    """Called on the control thread when all ranks are done."""

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.members)

    def values(self) -> list[Any]:
        """What the ranks returned. ``WorkerError`` when one failed, or returned what cannot be read here."""
        found = []
        for member in self.members:
            result = self.results[member]
            name = f"{member}.{self.task}()"
            if not result.ok:
                raise WorkerError(
                    f"{name} failed: {result.error}",
                    member=member,
                    traceback_text=result.traceback_text,
                    bad_input=result.bad_input,
                )
            try:
                found.append(pickle.loads(result.value))
            except Exception as error:  # a class that is only importable in the worker, say
                raise WorkerError(
                    f"what {name} returned cannot be read by the driver: {describe(error)}", member=member
                ) from error
        return found


CODE_LIMIT_BYTES = 50 << 20


def _zip(folders: tuple[str, ...]) -> bytes:
    """The Python files below the recipe's folder, for nodes that lack it. ``ConfigError`` when they are too many."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for folder in folders:
            for path in sorted(Path(folder).rglob("*.py")):
                archive.write(path, path.relative_to(folder))
                if buffer.tell() > CODE_LIMIT_BYTES:
                    raise ConfigError(
                        f"the recipe's folder {folder} has more than {CODE_LIMIT_BYTES >> 20} MiB of Python files to "
                        "ship to other nodes: put the recipe into a folder of its own"
                    )
    return buffer.getvalue()


def _span(group: str, ranks: int) -> str:
    """``group[0]`` or ``group[0-7]``."""
    return f"{group}[0]" if ranks == 1 else f"{group}[0-{ranks - 1}]"


class Runtime:
    """All processes of one run. ``stop`` is safe to call at any time and more than once."""

    def __init__(
        self,
        cluster: Cluster,
        plan: FlatPlan,
        groups: Mapping[str, GroupSpec],
        *,
        seed: int,
        run_dir: Path,
        launch_timeout_s: float,
        stall_timeout_s: float,
        device_bytes: int = 0,
        link: tuple[str, int] = (SOCKET, 0),
        sys_path: tuple[str, ...] = (),
        on_log: Callable[[Log], None] | None = None,
    ) -> None:
        self.cluster = cluster
        self.plan = plan
        self.groups = dict(groups)
        self.seed = seed
        self.run_dir = run_dir
        self.failure: Failure | None = None
        self.reads: set[str] = set()
        self._launch_timeout = launch_timeout_s
        self._device_bytes = device_bytes
        self._link = link
        self._sys_path = sys_path
        self._code = _zip(sys_path) if len(cluster.nodes) > 1 else b""
        self._on_log = on_log
        self._secret = secrets.token_bytes(32)
        self._server = HubServer(cluster.node_address, self._secret, stall_timeout_s)
        self._launcher = make_launcher(cluster)
        self._condition = threading.Condition()
        self._hellos: dict[str, Hello] = {}
        self._dead: dict[str, str] = {}
        self._calls: dict[int, CallState] = {}
        self._accounts: dict[str, ev.StepAccount] = {}
        self._ids = itertools.count()
        self._client: HubClient | None = None
        self._stopped = False
        self._waiting = False
        self._looked = time.monotonic()
        self._server.core.driver_waits = lambda: self._waiting

    # Start

    def members(self, group: str) -> tuple[str, ...]:
        return tuple(f"{group}[{r}]" for r in range(len(self.plan.groups[group].processes)))

    def start(self, progress: Callable[[str], None]) -> None:
        """Start all ranks and wait until each is set up; raises that rank's error otherwise."""
        self._check_debug()
        address = self._server.start()
        store = PayloadStore(LinkLoader(*self._link))
        self._payloads = PayloadServer(store, self._secret, address[0])
        hello = Hello(DRIVER, os.getpid(), address[0], self._payloads.address)
        self._client = HubClient(address, self._secret, hello, on_message=self._on_message, on_release=store.release)
        fetcher = PayloadFetcher(self._secret, store, DRIVER)
        self._endpoint = Endpoint(self._client, store, fetcher, self._payloads.address, DRIVER, 0, Clock(), Sections())
        self._set_lock()
        names = [m for g in self.groups for m in self.members(g)]
        kind = "thread(s)" if self.cluster.debug else "process(es)"
        shown = ", ".join(_span(g, len(self.members(g))) for g in self.groups)
        progress(f"starting {len(names)} worker {kind}: {shown}")
        for group in self.groups.values():
            for rank, devices in enumerate(self.plan.groups[group.name].processes):
                spec, node = self._host_spec(group, rank, devices)
                self._launcher.start(spec, node)
        self._await_hellos(names)
        progress("setting up workers")
        setups = [self._setup(group) for group in self.groups.values()]
        deadline = time.monotonic() + self._launch_timeout
        for state in setups:
            self._await_setup(state, max(0.0, deadline - time.monotonic()))

    def _set_lock(self) -> None:
        replicas = {
            f"{name}[{rank}]": group.replica(rank)
            for name, group in self.plan.groups.items()
            for rank, devices in enumerate(group.processes)
            if devices and self.plan.shares(name)  # the others hold theirs for good and never ask
        }
        names = {replica for replica, _ in replicas.values()}
        lock = DeviceLock({name: spec for name, spec in self.plan.replica_specs().items() if name in names})
        alternating = self.plan.gives_way()
        self._server.call(lambda core: core.set_lock(lock, replicas, alternating))

    def _host_spec(self, group: GroupSpec, rank: int, devices: tuple[int, ...]) -> tuple[HostSpec, str]:
        info = self.cluster.info
        mine = [d for d in info.devices if d.id in devices]
        node = mine[0].node if mine else next(iter(self.cluster.nodes))
        cores = () if self.cluster.debug else self.cluster.cores_of(devices)
        env = {"CUDA_VISIBLE_DEVICES": self.cluster.visible_gpus(devices)}
        spec = HostSpec(
            group=group.name,
            rank=rank,
            world_size=len(self.plan.groups[group.name].processes),
            worker=(group.worker.__module__, group.worker.__qualname__),
            cfg=group.cfg,
            seed=self.seed,
            run_dir=str(self.run_dir),
            hub=self._server.address,
            secret=self._secret,
            address=self.cluster.nodes[node],
            threads=max(1, len(cores)),
            cores=cores,
            env=env,
            sys_path=self._sys_path,
            code=self._code,
            uses_devices=bool(devices),
            shares=self.plan.shares(group.name),
            swapped=bool(devices) and not self.plan.groups[group.name].resident,
            slots=self.plan.groups[group.name].slots,
            device_bytes=self._device_bytes,
            link=self._link[0],
            link_bytes=self._link[1],
            in_process=self.cluster.debug,
        )
        return spec, node

    def _await_hellos(self, names: list[str]) -> None:
        deadline = time.monotonic() + self._launch_timeout
        while True:
            with self._condition:
                missing = [n for n in names if n not in self._hellos]
                if not missing:
                    return
                self._condition.wait(0.2)
            self.check()
            for member, cause in self._launcher.poll_dead().items():
                raise WorkerError(f"{member} could not start: {cause}", member=member)
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"no sign of {', '.join(missing)} within cluster.launch_timeout_s={self._launch_timeout:g} s "
                    "(is the cluster out of CPU or memory?)"
                )

    def _check_debug(self) -> None:
        for group in self.groups.values():
            ranks = len(self.members(group.name))
            if self.cluster.debug and ranks > 1 and group.worker.collective and group.worker.process_group:
                raise PlanError(
                    f"cluster.debug runs everything in one process, in which the {ranks} ranks of group "
                    f"{group.name!r} cannot compute together: set cluster.virtual_devices=1 (or "
                    f"placement.{group.name}=0)"
                )

    def _setup(self, group: GroupSpec) -> CallState:
        members = self.members(group.name)
        collective = group.worker.collective and len(members) > 1
        # A name of this launch's own: in a run that goes on, the file of one that was killed may still lie there, and
        # its ranks' addresses with it.
        meeting = self.run_dir / f"{MEETING}{group.name}-{secrets.token_hex(4)}"
        init_method = f"file://{meeting}" if collective else ""
        if collective and len({self._hellos[m].host for m in members}) > 1:
            init_method = f"tcp://{self._hellos[members[0]].host}:{self._free_port()}"
        arguments = {}
        for rank, member in enumerate(members):
            devices = self.plan.groups[group.name].processes[rank]
            gpu = any(d.kind != "cpu" for d in self.cluster.info.devices if d.id in devices)
            threads = max(1, len(self.cluster.cores_of(devices)))
            size = len(members) if collective else 1
            info = ParallelInfo(
                rank if collective else 0, size, init_method, "cuda" if gpu else "cpu", threads, self._launch_timeout
            )
            arguments[member] = (info,)
        return self._dispatch(group.name, "setup", "setup", "", 0, lambda m: (arguments[m], {}))

    def _free_port(self) -> int:
        import socket

        with socket.create_server((self.cluster.node_address, 0)) as probe:
            return int(probe.getsockname()[1])

    def _await_setup(self, state: CallState, timeout: float) -> None:
        def late() -> str:
            missing = ", ".join(m for m in state.members if m not in state.results)
            limit = f"cluster.launch_timeout_s={self._launch_timeout:g} s"
            return f"{missing} not set up within {limit}:\n{self.report()}"

        self.wait(lambda: state.done, timeout, late)

    def adopt(self, plan: FlatPlan) -> None:
        """From the next step on, another plan with the same processes: its portions and its order of turns."""
        self.plan = plan
        orders = {name: spec.order for name, spec in plan.replica_specs().items()}
        self._server.call(lambda core: core.lock.reorder(orders) if core.lock is not None else None)

    # Steps

    def send(self, *events: Any) -> None:
        assert self._client is not None
        self._client.send(*events)

    def call(
        self,
        group: str,
        task: str,
        step: str,
        index: int,
        arguments: Arguments,
    ) -> CallState:
        """Dispatch a task to all ranks of a group; ``arguments(member)`` gives each rank's."""
        return self._dispatch(group, "task", task, step, index, arguments)

    def call_aside(
        self,
        after: CallState,
        group: str,
        task: str,
        step: str,
        index: int,
        arguments: Arguments,
    ) -> CallState:
        """As ``call``, but dispatched when ``after`` is done, and run at each rank's next safe point instead of after
        the calls that it has before this one."""
        state, calls = self._prepare(group, "aside", task, step, index, arguments)

        def dispatch() -> None:
            with contextlib.suppress(Cancelled):  # the run is being stopped
                self.send(*calls)

        with self._condition:
            if not after.done:
                after.then = dispatch
                return state
        dispatch()
        return state

    def _dispatch(
        self,
        group: str,
        kind: str,
        task: str,
        step: str,
        index: int,
        arguments: Arguments,
    ) -> CallState:
        state, calls = self._prepare(group, kind, task, step, index, arguments)
        self.send(*calls)
        return state

    def _prepare(
        self,
        group: str,
        kind: str,
        task: str,
        step: str,
        index: int,
        arguments: Arguments,
    ) -> tuple[CallState, list[Call]]:
        self.check()
        call_id = next(self._ids)
        state = CallState(group, task, step, self.members(group))
        calls = []
        for member in state.members:
            args, kwargs = arguments(member)
            channels = [a for a in (*args, *kwargs.values()) if isinstance(a, ChannelArg)]
            outputs = tuple(a for a in channels if a.direction == "out")
            inputs = tuple(a.channel for a in channels if a.direction == "in")
            try:
                data = pickle.dumps((args, kwargs), protocol=5)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ChannelError(f"{group}.{task}(): an argument cannot be sent to the workers: {error}") from error
            calls.append(Call(call_id, member, kind, task, step, index, data, outputs, inputs))
        with self._condition:
            self._calls[call_id] = state
        return state, calls

    def feed(
        self,
        channel: str,
        writer: str,
        items: Callable[[], Iterable[Any]],
        key: Callable[[Any], Any] | None,
        weight: Callable[[Any], float] | None = None,
    ) -> None:
        """Put items on a channel from a thread of the driver; a fault in the user's iterable fails the step by name."""
        out = Writer(self._endpoint, ChannelArg(channel, "out", writer))

        self.send(Feeding(1))  # before the thread runs: a program that waits for its feed is no standstill

        def body() -> None:
            try:
                given = items()
                # What is all there goes in few messages; what is made item by item goes as it comes.
                chunk = FEED_CHUNK if isinstance(given, Sequence) else 1
                iterator = iter(given)
                while part := list(itertools.islice(iterator, chunk)):
                    weights = None if weight is None else [weight(item) for item in part]
                    out.put_many(part, [None if key is None else key(item) for item in part], weights)
                out.close()
            except Cancelled:
                return  # the run is being stopped and its cause is known
            except BaseException as error:  # the user's iterable may raise anything
                cause = f"the feed of channel {channel!r} failed: {describe(error)}"
                with contextlib.suppress(Cancelled):
                    self.send(ev.PoisonWriter(channel=channel, writer=writer, cause=cause))
                    self.send(Failure(DRIVER, cause, traceback.format_exc()))
            finally:
                with contextlib.suppress(Cancelled):  # the run has ended meanwhile
                    self.send(Feeding(-1))

        threading.Thread(target=body, name=f"rlinf-feed-{channel}", daemon=True).start()

    def account(self, step: str, timeout: float) -> ev.StepAccount:
        self.send(ev.EndStep(step=step))
        self.wait(lambda: step in self._accounts, timeout, lambda: f"the account of step {step} did not come")
        return self._accounts.pop(step)

    def carried_on(self) -> dict[str, tuple[str, ...]]:
        """Samples that were carried to steps that have not come."""
        found: dict[str, tuple[str, ...]] = self._server.call(lambda core: core.board.carried_on())
        return found

    # Waiting

    def check(self) -> None:
        """Raise the run's failure, if there is one."""
        if self.failure is not None:
            self._raise_failure()
        if self._client is not None and self._client.cancelled is not None and not self._stopped:
            raise RLinfError(f"the run cannot go on: {self._client.cancelled}")

    def wait(self, done: Callable[[], bool], timeout: float | None, late: Callable[[], str]) -> None:
        """Wait until ``done()``; raises the run's failure, or ``WaitTimeout`` with the text of ``late()``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._waiting = True
        try:
            while True:
                with self._condition:
                    if done():
                        break
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if self.failure is None and (remaining is None or remaining > 0):
                        self._condition.wait(1.0 if remaining is None else min(remaining, 1.0))
                self.check()
                if remaining is not None and remaining <= 0:
                    raise WaitTimeout(late())
                self._look_for_dead()
        finally:
            self._waiting = False
        self.check()

    def _look_for_dead(self) -> None:
        """Ask Ray now and then which processes have ended: a fork of one may keep its connection to the hub open."""
        now = time.monotonic()
        if now - self._looked > DEAD_EVERY_S:
            self._looked = now
            for member in self._launcher.poll_dead():
                if member not in self._dead:
                    self._server.declare_dead(member)

    def report(self) -> str:
        return str(self._server.call(lambda core: core.report()))

    def _raise_failure(self) -> None:
        failure = self.failure
        assert failure is not None
        message = failure.message
        if failure.member in self._dead:
            message += ": " + self._launcher.why_dead(failure.member, CAUSE_WAIT_S)
        raise WorkerError(
            message, member=failure.member, traceback_text=failure.traceback_text, bad_input=failure.bad_input
        )

    # Messages of the hub (control thread: no blocking, no user code)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Log):
            if self._on_log is not None:
                try:
                    self._on_log(message)
                except (OSError, ValueError):  # nobody reads our output any more: workers' lines are no reason to fail
                    self._on_log = None
            return
        then: Callable[[], None] | None = None
        with self._condition:
            if isinstance(message, CallResult):
                state = self._calls[message.call_id]
                state.results[message.member] = message
                self.reads.update(message.reads)
                if state.done:
                    del self._calls[message.call_id]
                    then = state.then if self.failure is None else None
            elif isinstance(message, Hello):
                self._hellos[message.member] = message
            elif isinstance(message, Died):
                self._dead[message.member] = message.cause
            elif isinstance(message, Failure):
                self.failure = message
            elif isinstance(message, ev.StepAccount):
                self._accounts[message.step] = message
            self._condition.notify_all()
        if then is not None:
            then()

    # End

    def stop(self, *, orderly: bool) -> None:
        """End all ranks: in order (teardown runs) after success, else told to stop and killed after a grace time.

        What fails in an orderly end is in ``failure`` afterwards.
        """
        if self._stopped:
            return
        self._stopped = True
        client = self._client
        grace = STOP_GRACE_S
        ends: list[CallState] = []
        if client is not None and client.cancelled is None:
            try:
                if orderly and self.failure is None:
                    grace = TEARDOWN_GRACE_S
                    ends = [self._dispatch(g, "stop", "teardown", "", 0, lambda m: ((), {})) for g in self.groups]
                else:
                    client.send(Cancel("the run is being stopped"))
                client.send(Goodbye(DRIVER))
            except RLinfError:
                grace = 0.0  # the hub is gone: nobody can be told
        late = self._launcher.stop(grace)
        with self._condition:  # the last words of ranks that have ended may still be on their way
            self._condition.wait_for(lambda: self.failure is not None or all(e.done for e in ends), LAST_WORDS_S)
        if late and orderly and self.failure is None:
            text = f"{', '.join(late)} did not end within {grace:g} s of the end of the run (teardown hangs?)"
            self.failure = Failure(late[0], text)
        if client is not None:
            client.close()
            self._payloads.close()
        self._server.stop()
