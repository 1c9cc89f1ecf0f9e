"""The program's view: ``Flow``, its steps, groups and handles, and the trace that reads the graph from the calls.

A program is an ordinary function ``program(flow, cfg)``. It runs twice: once with a ``TraceFlow``, where nothing is
started, every phase makes one step and all handles are inert, and then with the live flow, whose steps must make the
same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rlinf_core.deals import deal_text, read_deal
from rlinf_core.errors import TraceError, nearest
from rlinf_core.graph import CallSpec, FlowGraph, PhaseGraph, StageSpec
from rlinf_core.worker import TaskSpec, Worker, task_names, task_spec

Feed = Iterable[Any] | Callable[[], Iterable[Any]]


class Inert:
    """Stands for a result while the flow is traced; it can be passed on, not read."""

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        what = object.__getattribute__(self, "_what")
        raise TraceError(
            f"{what} is read while the flow is traced: nothing has run yet. Hand it to step.report() or flow.record(), "
            "or read it in a worker; what a step does must not depend on results"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _refuse
    __contains__ = __call__ = __lt__ = __gt__ = __le__ = __ge__ = __add__ = __sub__ = __format__ = _refuse

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_what')}, not run yet>"


@dataclass(frozen=True)
class ChannelRef:
    """A channel of one step, as the program passes it to group calls."""

    name: str
    step: str

    @property
    def full_name(self) -> str:
        return f"{self.step}:{self.name}"


@dataclass(frozen=True)
class GroupSpec:
    """A declared worker group."""

    name: str
    worker: type[Worker]
    cfg: Any
    barrier: str = "item"

    def stage(self) -> StageSpec:
        w = self.worker
        return StageSpec(self.name, None if w.device else w.ranks, w.device, w.collective, self.barrier)


@dataclass(frozen=True)
class BoundCall:
    """One group call with its channels told apart from its plain arguments."""

    group: str
    task: TaskSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def channels(self, direction: str) -> tuple[ChannelRef, ...]:
        return tuple(
            value
            for name, value in self.named()
            if isinstance(value, ChannelRef) and self.task.directions.get(name) == direction
        )

    def named(self) -> Iterator[tuple[str, Any]]:
        yield from zip(self.task.parameters, self.args, strict=False)
        yield from self.kwargs.items()

    def spec(self) -> CallSpec:
        return CallSpec(
            self.group,
            self.task.name,
            tuple(c.name for c in self.channels("in")),
            tuple(c.name for c in self.channels("out")),
            self.task.ends,
        )


class Group:
    """A worker group; its tasks are its methods. A call returns a handle at once."""

    def __init__(self, flow: Flow, spec: GroupSpec) -> None:
        self._flow = flow
        self._spec = spec

    @property
    def name(self) -> str:
        return self._spec.name

    def __getattr__(self, task: str) -> Callable[..., Any]:
        if task.startswith("_"):
            raise AttributeError(task)
        signature = task_spec(self._spec.worker, task)

        def call(*args: Any, **kwargs: Any) -> Any:
            step = self._flow._current(f"{self.name}.{task}()")
            bound = _bind(self._spec, signature, args, kwargs, step)
            return step._call(bound)

        call.__name__ = task
        return call

    def publish_weights(self, *, to: Group) -> Any:
        """Send this group's weights to every rank of another group, as the next policy version."""
        step = self._flow._current(f"{self.name}.publish_weights()")
        for group, method in ((self, "weights"), (to, "install_weights")):
            if getattr(group._spec.worker, method) is getattr(Worker, method):
                raise TraceError(
                    f"{group._spec.worker.__name__} (group {group.name!r}) must define {method}() for publish_weights"
                )
        return step._publish(self._spec, to._spec)


def _bind(spec: GroupSpec, task: TaskSpec, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step) -> BoundCall:
    label = f"{spec.name}.{task.name}()"
    if len(args) > len(task.parameters):
        raise TraceError(
            f"{label} takes {len(task.parameters)} argument(s) ({', '.join(task.parameters)}), got {len(args)}"
        )
    bound = BoundCall(spec.name, task, args, kwargs)
    seen: set[str] = set()
    for name, value in bound.named():
        if name not in task.parameters:
            raise TraceError(f"{label} has no parameter {name!r}{nearest(name, task.parameters)}")
        if name in seen:
            raise TraceError(f"{label} got parameter {name!r} twice")
        seen.add(name)
        direction = task.directions.get(name)
        if isinstance(value, ChannelRef):
            if direction is None:
                raise TraceError(f"{label}: parameter {name!r} got a channel but is not annotated In[...] or Out[...]")
            if value.step != step.full_name:
                raise TraceError(
                    f"{label}: channel {value.name!r} belongs to step {value.step}, this is step {step.full_name}"
                )
        elif direction is not None:
            raise TraceError(f"{label}: parameter {name!r} is a channel ({direction}), got a {type(value).__name__}")
        elif isinstance(value, Inert):
            value._refuse()
    missing = [p for p in task.directions if p not in seen]
    if missing:
        raise TraceError(f"{label}: channel parameter(s) {', '.join(missing)} not given")
    return bound


class Step:
    """One step of a phase. Its channels, calls and reports belong to it; ``join`` ends it."""

    def __init__(self, flow: Flow, phase: str, index: int, total: int) -> None:
        self._flow = flow
        self.phase = phase
        self.index = index
        self.total = total

    @property
    def full_name(self) -> str:
        return f"{self.phase}/{self.index}"

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.total - 1

    def channels(self, *names: str) -> Any:
        """Open channels of this step; returns one reference, or a list in the order of the names."""
        if not names:
            raise TraceError("step.channels() needs at least one name")
        refs = [self.channel(name) for name in names]
        return refs[0] if len(refs) == 1 else refs

    def channel(self, name: str, *, deal: str | Mapping[str, str] = "shared") -> ChannelRef:
        """Open one channel of this step and say how its items get to the ranks of a reading group.

        ``"shared"``: each item to the rank that asks first; it keeps all ranks busy, and which rank gets what depends
        on timing. ``"round_robin"``: the i-th item to rank i mod n. ``"weight"``: to the rank to which least weight was
        put so far, by the ``weight`` of ``put`` (round robin when all are 1). The last two are fixed when an item (for
        ``barrier="group"`` a whole group) comes; a rank then reads its own share, and its end is the end of that. Not
        for collective groups, which are dealt whole portions, nor for ``barrier="batch"``. A mapping names the reading
        groups it is for: ``{"reward": "weight"}``. The key ``channels.deals`` of the configuration comes before it.
        """
        if not isinstance(name, str) or not name or not name.replace("_", "a").isalnum():
            raise TraceError(f"channel name {name!r}: letters, digits and underscores only")
        try:
            dealt = read_deal(deal)
        except ValueError as error:
            raise TraceError(f"step.channel({name!r}, deal=...): {error}") from error
        if name in self._flow.deals:
            dealt = dict(self._flow.deals[name])
        return self._open(name, dealt)

    def feed(
        self,
        channel: ChannelRef,
        items: Feed,
        *,
        key: Callable[[Any], Any] | None = None,
        weight: Callable[[Any], float] | None = None,
    ) -> None:
        """Put items on a channel from the driver, in the background. ``items`` is an iterable or makes one.

        ``key`` and ``weight`` say of an item what ``Out.put`` takes (no key and weight 1 without them).
        """
        if not isinstance(channel, ChannelRef):
            raise TraceError(f"step.feed() takes a channel of this step, got a {type(channel).__name__}")
        self._feed(channel, items, key, weight)

    def report(self, handle: Any, reduce: str = "mean") -> None:
        """Merge the metrics (a dict of numbers) that a call returns into the step's; ranks by ``mean`` or ``sum``."""
        if reduce not in ("mean", "sum"):
            raise TraceError(f"step.report(reduce=...) is 'mean' or 'sum', got {reduce!r}")
        self._report(handle, reduce)

    def join(self) -> Any:
        """Wait for the step; raises the first real cause of a failure. Returns the step's metrics."""
        raise AssertionError("implemented by the traced and the live step")

    def _open(self, name: str, deal: Mapping[str, str]) -> ChannelRef:
        raise AssertionError("implemented by the traced and the live step")

    def _feed(
        self,
        channel: ChannelRef,
        items: Feed,
        key: Callable[[Any], Any] | None,
        weight: Callable[[Any], float] | None,
    ) -> None:
        raise AssertionError("implemented by the traced and the live step")

    def _report(self, handle: Any, reduce: str) -> None:
        raise AssertionError("implemented by the traced and the live step")

    def _call(self, call: BoundCall) -> Any:
        raise AssertionError("implemented by the traced and the live step")

    def _publish(self, source: GroupSpec, target: GroupSpec) -> Any:
        raise AssertionError("implemented by the traced and the live step")


class Flow:
    """What a program gets. ``seed`` and ``run_dir`` are the run's."""

    resumed_steps: int = 0
    """Training steps that were done when the checkpoint was made that this run goes on from; 0 in a fresh run."""
    resumed_path: str = ""
    """The folder of that checkpoint."""

    def __init__(
        self,
        seed: int,
        run_dir: Path,
        deals: Mapping[str, Any] | None = None,
        resumed: tuple[int, str] = (0, ""),
    ) -> None:
        """``deals``: by channel, how its items are dealt, whatever the program says (``channels.deals``)."""
        self.seed = seed
        self.run_dir = run_dir
        self.resumed_steps, self.resumed_path = resumed
        self.deals: dict[str, dict[str, str]] = {}
        for channel, deal in (deals or {}).items():
            try:
                self.deals[channel] = read_deal(deal)
            except ValueError as error:
                raise TraceError(f"channels.deals.{channel}: {error}") from error
        self.groups: dict[str, GroupSpec] = {}
        self._stack: list[Step] = []

    def group(self, name: str, worker: type[Worker], cfg: Any = None, *, barrier: str | None = None) -> Group:
        """Declare a worker group. Nothing is started; the plan decides where its ranks run.

        ``barrier`` replaces the class's, for a stage whose options decide what must be complete before it may work.
        """
        if not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise TraceError(f"group {name!r}: {worker!r} is not a subclass of Worker")
        if not name.isidentifier() or name == "driver":
            raise TraceError(f"group name {name!r}: use an identifier other than 'driver'")
        if name in self.groups:
            raise TraceError(f"group {name!r} is declared twice")
        if not task_names(worker):
            raise TraceError(f"group {name!r}: {worker.__name__} has no method marked with @task")
        spec = GroupSpec(name, worker, cfg, worker.barrier if barrier is None else barrier)
        self._declare(spec)
        self.groups[name] = spec
        return Group(self, spec)

    def steps(self, count: int, name: str = "train", *, start: int = 0, max_staleness: int = 0) -> Iterator[Step]:
        """Steps ``start`` … count-1 of a phase. Phases may follow one another or nest between a step's join and its
        end. A run that goes on gives ``start=flow.resumed_steps``.

        With ``max_staleness=k``, ``step.join()`` returns when the step k before is done: at most k+1 steps are open, so
        what a step computes uses weights at most k updates old. Published weights are then installed between samples.
        """
        if not name.isidentifier():
            raise TraceError(f"phase name {name!r} is not an identifier")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise TraceError(f"flow.steps({count!r}): the number of steps must be a whole number >= 0")
        if isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0:
            raise TraceError(f"flow.steps(max_staleness={max_staleness!r}): a whole number >= 0")
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise TraceError(f"flow.steps(start={start!r}): a whole number >= 0")
        return self._steps(count, name, start, max_staleness)

    def checkpoint(self, steps_done: int) -> AbstractContextManager[str]:
        """``with flow.checkpoint(n) as path:`` a checkpoint after ``n`` training steps: make and join the step in which
        workers save below ``path`` inside the block. When it ends well the checkpoint is whole and gets its name, and
        older ones are pruned (``checkpoint.keep_last``, ``checkpoint.keep_best``)."""
        if isinstance(steps_done, bool) or not isinstance(steps_done, int) or steps_done < 0:
            raise TraceError(f"flow.checkpoint({steps_done!r}): the number of steps done, a whole number >= 0")
        return self._checkpoint(steps_done)

    def every(self, step: Step, interval: int) -> bool:
        """True every ``interval`` steps (after steps interval-1, 2·interval-1, …; never for 0) and while tracing."""
        return interval > 0 and (step.index + 1) % interval == 0

    def record(self, name: str, metrics: Any) -> None:
        """Show a phase's metrics to the user and keep them in the run's summary under ``name``."""
        raise AssertionError("implemented by the traced and the live flow")

    def _steps(self, count: int, name: str, start: int, max_staleness: int) -> Iterator[Step]:
        raise AssertionError("implemented by the traced and the live flow")

    def _checkpoint(self, steps_done: int) -> AbstractContextManager[str]:
        raise AssertionError("implemented by the traced and the live flow")

    def _declare(self, spec: GroupSpec) -> None:
        """Check a declaration against the trace (live flow)."""

    def _current(self, what: str) -> Step:
        if not self._stack:
            raise TraceError(f"{what} is called outside a step: use `for step in flow.steps(n):`")
        return self._stack[-1]


class TraceStep(Step):
    """Records channels, feeds and calls."""

    def __init__(self, flow: Flow, phase: str, total: int) -> None:
        super().__init__(flow, phase, 0, total)
        self.record = StepRecord(phase)

    def _open(self, name: str, deal: Mapping[str, str]) -> ChannelRef:
        self.record.open(name, deal)
        return ChannelRef(name, self.full_name)

    def _feed(
        self,
        channel: ChannelRef,
        items: Feed,
        key: Callable[[Any], Any] | None,
        weight: Callable[[Any], float] | None,
    ) -> None:
        self.record.feeds.append(channel.name)

    def _report(self, handle: Any, reduce: str) -> None:
        if not isinstance(handle, Inert):
            raise TraceError(f"step.report() takes what a group call returned, got a {type(handle).__name__}")

    def _call(self, call: BoundCall) -> Any:
        self.record.calls.append(call.spec())
        return Inert(f"the result of {call.group}.{call.task.name}()")

    def _publish(self, source: GroupSpec, target: GroupSpec) -> Any:
        self.record.weights.append((source.name, target.name))
        return Inert(f"the result of {source.name}.publish_weights()")

    def join(self) -> Any:
        return Inert(f"the metrics of step {self.full_name}")


@dataclass
class StepRecord:
    """The calls of one step; equal records are equal flows."""

    phase: str
    channels: list[str] = field(default_factory=list)
    feeds: list[str] = field(default_factory=list)
    calls: list[CallSpec] = field(default_factory=list)
    weights: list[tuple[str, str]] = field(default_factory=list)
    deals: list[tuple[str, str, str]] = field(default_factory=list)

    def open(self, name: str, deal: Mapping[str, str]) -> None:
        if name in self.channels:
            raise TraceError(f"phase {self.phase!r}: channel {name!r} is opened twice in one step")
        self.channels.append(name)
        self.deals.extend((name, group, way) for group, way in deal.items())

    def graph(self) -> PhaseGraph:
        return PhaseGraph(
            self.phase,
            tuple(self.channels),
            tuple(self.feeds),
            tuple(self.calls),
            tuple(self.weights),
            tuple(self.deals),
        )


def differences(traced: PhaseGraph, now: PhaseGraph) -> str:
    """First difference between two recordings of a phase, in words; empty when they are equal."""
    for what in ("channels", "deals", "feeds", "calls", "weights"):
        a, b = getattr(traced, what), getattr(now, what)
        for i in range(max(len(a), len(b))):
            old, new = (x[i] if i < len(x) else None for x in (a, b))
            if old != new:
                return f"{what[:-1]} {i + 1} was {_words(old)} when traced and is {_words(new)} now"
    return ""


def _words(entry: Any) -> str:
    if entry is None:
        return "not there"
    if isinstance(entry, CallSpec):
        return f"{entry.group}.{entry.task}({', '.join((*entry.inputs, *entry.outputs))})"
    if isinstance(entry, tuple) and len(entry) == 3:
        return f"channel {entry[0]!r} dealt {deal_text({entry[1]: entry[2]})}"
    if isinstance(entry, tuple):
        return f"weights {entry[0]} -> {entry[1]}"
    return repr(entry)


class TraceFlow(Flow):
    """Runs the program once, without processes, and keeps what it would do."""

    def __init__(
        self,
        seed: int,
        run_dir: Path,
        deals: Mapping[str, Any] | None = None,
        resumed: tuple[int, str] = (0, ""),
    ) -> None:
        super().__init__(seed, run_dir, deals, resumed)
        self._phases: dict[str, PhaseGraph] = {}

    def _checkpoint(self, steps_done: int) -> AbstractContextManager[str]:
        return nullcontext("")

    def _steps(self, count: int, name: str, start: int, max_staleness: int) -> Iterator[Step]:
        step = TraceStep(self, name, count)
        self._stack.append(step)
        try:
            yield step
        finally:
            self._stack.pop()
        graph = step.record.graph()
        known = self._phases.setdefault(name, graph)
        difference = differences(known, graph)
        if difference:
            raise TraceError(f"phase {name!r} is run at two places of the program that differ: {difference}")

    def every(self, step: Step, interval: int) -> bool:
        return interval > 0

    def record(self, name: str, metrics: Any) -> None:
        pass

    def graph(self) -> FlowGraph:
        return FlowGraph({n: s.stage() for n, s in self.groups.items()}, dict(self._phases))


def trace(
    program: Callable[[Any, Any], Any],
    cfg: Any,
    *,
    seed: int,
    run_dir: Path,
    deals: Mapping[str, Any] | None = None,
    resumed: tuple[int, str] = (0, ""),
) -> tuple[FlowGraph, dict[str, GroupSpec]]:
    """Run ``program`` in trace mode; returns its validated graph and the declared groups.

    ``deals``: how the items of channels are dealt, by channel, whatever the program says (``channels.deals``).
    ``resumed``: (steps done, path of the checkpoint) when the run goes on from one.
    """
    flow = TraceFlow(seed, run_dir, deals, resumed)
    program(flow, cfg)
    graph = flow.graph()
    if not graph.phases:
        raise TraceError("the program makes no step: nothing to run")
    known = {channel: None for phase in graph.phases.values() for channel in phase.channels}
    for channel in flow.deals:
        if channel not in known:
            raise TraceError(f"channels.deals.{channel}: no step opens such a channel{nearest(channel, known)}")
    graph.validate()
    return graph, flow.groups
