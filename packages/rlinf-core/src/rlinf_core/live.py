"""Steps and handles of a running flow: the program's calls become messages, results become metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from rlinf_core.board import events as ev
from rlinf_core.checkpoints import State
from rlinf_core.deals import deal_text
from rlinf_core.errors import AccountError, ChannelError, TraceError, nearest
from rlinf_core.flow import (
    BoundCall,
    ChannelRef,
    Feed,
    Flow,
    GroupSpec,
    Step,
    StepRecord,
    differences,
)
from rlinf_core.graph import FlowGraph, PhaseGraph
from rlinf_core.hub.messages import CallResult, ChannelArg
from rlinf_core.resume import Resumed
from rlinf_core.runtime import CallState, Runtime

ACCOUNT_TIMEOUT_S = 60.0
RATES = {"tokens_per_s": "response/tokens", "env_steps_per_s": "rollout/env_steps"}
"""Metrics of a whole step's rate, and what they count."""


class Handle:
    """A call in flight on all ranks of a group."""

    def __init__(self, runtime: Runtime, state: CallState) -> None:
        self._runtime = runtime
        self._state = state

    @property
    def done(self) -> bool:
        return self._state.done

    def wait(self, timeout: float | None = None) -> list[Any]:
        """What each rank returned. Raises the run's failure, or ``WaitTimeout`` saying who is still at it."""
        s = self._state

        def late() -> str:
            missing = [m for m in s.members if m not in s.results]
            return (
                f"{s.group}.{s.task}() not done by {', '.join(missing)} within {timeout} s:\n{self._runtime.report()}"
            )

        self._runtime.wait(lambda: s.done, timeout, late)
        return s.values()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return asyncio.get_running_loop().run_in_executor(None, self.wait).__await__()

    @property
    def durations(self) -> dict[str, float]:
        """Seconds over ranks: ``min``, ``mean``, ``max`` (of the ranks that are done)."""
        spent = [r.times.end - r.times.start for r in self._state.results.values()]
        if not spent:
            return {}
        return {"min": min(spent), "mean": sum(spent) / len(spent), "max": max(spent)}


class LiveStep(Step):
    """A step that runs. Its channels are opened with all readers and writers that the trace found."""

    def __init__(
        self,
        flow: LiveFlow,
        phase: str,
        index: int,
        total: int,
        traced: PhaseGraph,
        open_steps: deque[LiveStep],
        staleness: int,
    ) -> None:
        super().__init__(flow, phase, index, total)
        self._open_steps = open_steps
        self._staleness = staleness
        self._live = flow
        self._runtime = flow.runtime
        self._traced = traced
        self._record = StepRecord(phase)
        self._handles: list[Handle] = []
        self._reports: list[tuple[Handle, str]] = []
        self._begin = time.time()
        self._joined = False
        self.metrics: dict[str, float] = {}
        self.work: dict[str, float] = {}
        """Seconds of own work by group: its tasks added up, each by its slowest rank."""

    def _open(self, name: str, deal: Mapping[str, str]) -> ChannelRef:
        self._record.open(name, deal)
        if name not in self._traced.channels:
            raise TraceError(
                f"step {self.full_name} opens channel {name!r}, which it did not when traced"
                f"{nearest(name, self._traced.channels)}"
            )
        traced = {group: way for channel, group, way in self._traced.deals if channel == name}
        if traced != dict(deal):
            raise TraceError(
                f"step {self.full_name} opens channel {name!r} dealt {deal_text(deal)}, which was {deal_text(traced)} "
                "when traced"
            )
        ref = ChannelRef(name, self.full_name)
        plan, phase = self._runtime.plan, self.phase
        spill = plan.spills(phase, name)
        events: list[Any] = [
            ev.OpenChannel(ref.full_name, self.full_name, self._live.max_items, self._live.max_bytes, spill)
        ]
        for group in self._reading(name):
            stage = self._live.groups[group].stage()
            ranks = len(plan.groups[group].processes)
            portion = plan.portion_for(phase, name, group)
            barrier = cast(ev.Barrier, stage.barrier)
            # A replica that computes together adds its portions up: their order must not depend on timing.
            ordered = stage.collective and barrier == "group"
            eager = name in self._live.cyclic[phase]
            way = cast(ev.Deal, self._traced.deal(name, group))
            events.append(
                ev.AddReader(ref.full_name, group, ranks, stage.collective, barrier, portion, ordered, eager, way)
            )
        for index in self._traced.writers(name):
            for member in self._runtime.members(self._traced.calls[index].group):
                events.append(ev.AddWriter(ref.full_name, f"{member}#{index}"))
        for index, feed in enumerate(self._traced.feeds):
            if feed == name:
                events.append(ev.AddWriter(ref.full_name, f"driver#feed{index}"))
        self._runtime.send(*events, ev.SealWriters(ref.full_name))
        return ref

    def _reading(self, name: str) -> dict[str, None]:
        """The groups that read a channel of this step."""
        return {self._traced.calls[r].group: None for r in self._traced.readers(name)}

    def _feed(
        self,
        channel: ChannelRef,
        items: Feed,
        key: Callable[[Any], Any] | None,
        weight: Callable[[Any], float] | None,
    ) -> None:
        index = len(self._record.feeds)
        self._record.feeds.append(channel.name)
        self._expect("feeds", index)
        make: Callable[[], Iterable[Any]] = items if callable(items) else lambda: items
        self._runtime.feed(channel.full_name, f"driver#feed{index}", make, key, weight)

    def _report(self, handle: Any, reduce: str) -> None:
        if not isinstance(handle, Handle):
            raise TraceError(f"step.report() takes what a group call returned, got a {type(handle).__name__}")
        self._reports.append((handle, reduce))

    def _call(self, call: BoundCall) -> Handle:
        index = len(self._record.calls)
        self._record.calls.append(call.spec())
        self._expect("calls", index)

        def argument(name: str, value: Any, member: str) -> Any:
            if not isinstance(value, ChannelRef):
                return value
            direction = call.task.directions[name]
            if direction == "out":
                sole = len(self._reading(value.name)) == 1
                return ChannelArg(value.full_name, direction, f"{member}#{index}", sole=sole)
            portion = self._runtime.plan.portion_for(self.phase, value.name, call.group)
            alone = len(self._runtime.members(call.group)) == 1 and not self._runtime.plan.shares(call.group)
            single = self._live.groups[call.group].stage().barrier == "item"
            sole = alone and single and value.name not in self._live.cyclic[self.phase]
            return ChannelArg(value.full_name, direction, portion=portion, sole=sole)

        def arguments(member: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
            named = zip(call.task.parameters, call.args, strict=False)
            return (
                tuple(argument(n, v, member) for n, v in named),
                {n: argument(n, v, member) for n, v in call.kwargs.items()},
            )

        return self._track(self._runtime.call(call.group, call.task.name, self.full_name, self.index, arguments))

    def _publish(self, source: GroupSpec, target: GroupSpec) -> Handle:
        index = len(self._record.weights)
        self._record.weights.append((source.name, target.name))
        self._expect("weights", index)
        self._live.version += 1
        version, channel = self._live.version, f"{self.full_name}:weights{index}"
        receivers = self._runtime.members(target.name)
        writers = {m: f"{m}#weights{index}" for m in self._runtime.members(source.name)}
        self._runtime.send(
            ev.OpenChannel(channel, self.full_name, 0, 0, True),
            ev.AddReader(channel, target.name, len(receivers)),
            *(ev.AddWriter(channel, w) for w in writers.values()),
            ev.SealWriters(channel),
        )
        sent = self._runtime.call(
            source.name,
            "publish_weights",
            self.full_name,
            self.index,
            lambda m: ((ChannelArg(channel, "out", writers[m], sole=True), version, len(receivers)), {}),
        )
        self._track(sent)
        receive = (target.name, "receive_weights", self.full_name, self.index)
        if self._staleness:
            # The target may be at work on a later step by then: it takes the weights between two samples.
            return self._track(self._runtime.call_aside(sent, *receive, lambda m: ((ChannelArg(channel, "in"),), {})))
        return self._track(self._runtime.call(*receive, lambda m: ((ChannelArg(channel, "in"),), {})))

    def _track(self, state: CallState) -> Handle:
        handle = Handle(self._runtime, state)
        self._handles.append(handle)
        return handle

    def _expect(self, what: str, index: int) -> None:
        """Refuse a call that the trace does not have at this place, before it is dispatched."""
        traced, now = getattr(self._traced, what), getattr(self._record.graph(), what)
        if index >= len(traced) or traced[index] != now[index]:
            part = PhaseGraph(self.phase, **{what: now})
            difference = differences(PhaseGraph(self.phase, **{what: traced[: index + 1]}), part)
            raise TraceError(f"step {self.full_name} differs from the traced one: {difference}")

    def join(self) -> dict[str, float]:
        """Wait until the step ``max_staleness`` before this one is done (this one itself when it is 0).

        Returns the metrics of the step that was waited for; empty while there is none yet.
        """
        if not self._joined:
            self._joined = True
            difference = differences(self._traced, self._record.graph())
            if difference:
                raise TraceError(f"step {self.full_name} differs from the traced one: {difference}")
            self._open_steps.append(self)
        metrics = self.metrics
        while len(self._open_steps) > self._staleness:
            metrics = self._open_steps.popleft()._finish()
        return metrics

    def _finish(self) -> dict[str, float]:
        for handle in self._handles:
            handle.wait()
        account = self._runtime.account(self.full_name, ACCOUNT_TIMEOUT_S)
        self._check_account(account)
        self._runtime.send(ev.CloseStep(self.full_name))
        end = time.time()
        self.metrics = {**self._merge_reports(), **self._timings(end)}
        for rate, count in RATES.items():
            if count in self.metrics:
                self.metrics[rate] = self.metrics[count] / self.metrics["time/step_s"]
        if account.dropped:
            self.metrics["samples/dropped"] = float(len(account.dropped))
        self._live.listener.step_done(self, account.dropped)
        return self.metrics

    def _check_account(self, account: ev.StepAccount) -> None:
        if account.lost:
            shown = [f"  {sample}: last with {holder}" for sample, holder in list(account.lost.items())[:10]]
            more = len(account.lost) - len(shown)
            raise AccountError(
                f"step {self.full_name}: {len(account.lost)} sample(s) were neither trained on nor dropped by name "
                "(self.trained(...) or self.drop(..., reason)):\n"
                + "\n".join(shown)
                + (f"\n  and {more} more" if more else "")
            )
        if account.unread:
            whose = {channel: f" ({text})" for channel, text in account.untaken.items() if text}
            rows = ", ".join(f"{n} on channel {c!r}{whose.get(c, '')}" for c, n in account.unread.items())
            raise ChannelError(f"step {self.full_name}: items were put that nobody took: {rows}")

    def _merge_reports(self) -> dict[str, float]:
        merged: dict[str, float] = {}
        for handle, reduce in self._reports:
            values = [v for v in handle.wait() if v]
            for value in values:
                if not isinstance(value, dict):
                    task = f"{handle._state.group}.{handle._state.task}()"
                    raise TraceError(f"{task} is reported but returned a {type(value).__name__}, not a dict of numbers")
            for name in dict.fromkeys(n for v in values for n in v):
                numbers = [_number(handle._state, name, v[name]) for v in values if name in v]
                merged[name] = sum(numbers) / (len(numbers) if reduce == "mean" else 1)
        return merged

    def _timings(self, end: float) -> dict[str, float]:
        """Seconds of each task's own work (slowest rank), of waiting, and what no task accounts for."""
        timings: dict[str, float] = {}
        covered: list[tuple[float, float]] = []
        groups: dict[str, set[str]] = {}
        for handle in self._handles:
            groups.setdefault(handle._state.task, set()).add(handle._state.group)
        busy = 0.0
        for handle in self._handles:
            state = handle._state
            results = list(state.results.values())
            self.work[state.group] = self.work.get(state.group, 0.0) + max(r.times.work for r in results)
            name = state.task if len(groups[state.task]) == 1 else f"{state.group}.{state.task}"
            rows = [(f"time/{name}_s", max(r.times.work for r in results))]
            rows += [(name, max(_seconds(r, parts) for r in results)) for name, parts in _WAITS.items()]
            for name, spent in rows:
                timings[name] = timings.get(name, 0.0) + spent
            covered += [(r.times.start, r.times.end) for r in results]
            processes = self._runtime.plan.groups[state.group].processes
            busy += sum(r.times.work * len(d) for r, d in zip(results, processes, strict=True))
            self._live.listener.spans(state, results)
        step = end - self._begin
        devices = {d for g in self._runtime.plan.groups.values() for p in g.processes for d in p}
        timings["time/step_s"] = step
        if not self._staleness:  # else the step also waits for earlier ones, which is not the framework's time
            timings["time/framework_s"] = max(0.0, step - _union(covered))
        if devices and step > 0:
            timings["device/use"] = min(1.0, busy / (len(devices) * step))
        return timings


def _number(state: CallState, name: Any, value: Any) -> float:
    if isinstance(name, str) and not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass  # said below
    kinds = f"{type(name).__name__} {name!r}: {type(value).__name__}"
    raise TraceError(f"{state.group}.{state.task}() is reported, so it returns numbers by name; it returned {kinds}")


_WAITS = {"wait/items_s": ("wait",), "wait/devices_s": ("lock",), "time/switch_s": ("switch", "switch_before")}


def _seconds(result: CallResult, parts: tuple[str, ...]) -> float:
    return float(sum(getattr(result.times, part) for part in parts))


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Listener(Protocol):
    """Who is told what the flow does (progress line, loggers, trace)."""

    def step_begins(self, step: LiveStep) -> None: ...

    def step_done(self, step: LiveStep, dropped: Mapping[str, str]) -> None: ...

    def spans(self, state: CallState, results: list[CallResult]) -> None: ...

    def record(self, name: str, metrics: Mapping[str, float]) -> None: ...


Saving = Callable[[int, Callable[[], State]], AbstractContextManager[Path]]
"""(steps done, what the driver goes on from, asked when all is saved) -> the folder to save into."""


def resumed_of(resumed: Resumed | None) -> tuple[int, str]:
    """What a program is told: (steps done, path of the checkpoint)."""
    return (resumed.state.steps_done, str(resumed.checkpoint)) if resumed else (0, "")


class LiveFlow(Flow):
    """The flow on running workers. ``listener`` is told of finished steps, spans and records."""

    def __init__(
        self,
        runtime: Runtime,
        graph: FlowGraph,
        groups: dict[str, GroupSpec],
        *,
        seed: int,
        run_dir: Path,
        max_items: int,
        max_bytes: int,
        listener: Listener,
        deals: Mapping[str, Any] | None = None,
        saving: Saving | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """``saving(steps_done, state)`` makes a checkpoint, ``resumed`` is what the run goes on from."""
        super().__init__(seed, run_dir, deals, resumed_of(resumed))
        self.runtime = runtime
        self.max_items = max_items
        self.max_bytes = max_bytes
        # A run that goes on publishes what it has loaded once more, as the version that it had.
        self.version = max(0, resumed.state.version - 1) if resumed else 0
        self._saving = saving
        self._graph = graph
        self.cyclic = {name: phase.cyclic() for name, phase in graph.phases.items()}
        self._traced_groups = groups
        self.listener = listener
        self._next_index: dict[str, int] = dict(resumed.state.next_index) if resumed else {}
        """By phase, the index of the step after the last one that has begun."""
        self._left: list[str] = []
        self._open: deque[LiveStep] = deque()
        self._open_steps: dict[str, deque[LiveStep]] = {}
        """By phase, the steps that were joined and are not done."""

    def _declare(self, spec: GroupSpec) -> None:
        traced = self._traced_groups.get(spec.name)
        if traced is None or traced.worker is not spec.worker or traced.barrier != spec.barrier:
            raise TraceError(f"group {spec.name!r} is declared differently from the traced program")

    def _checkpoint(self, steps_done: int) -> AbstractContextManager[str]:
        if self._saving is None:
            return nullcontext("")
        return self._saved(steps_done, self._saving)

    @contextmanager
    def _saved(self, steps_done: int, saving: Saving) -> Iterator[str]:
        # What is saved counts steps that were joined and are still open (``max_staleness``): their metrics belong to
        # what lies before the checkpoint, or a run that goes on from it would lack them.
        for open_steps in self._open_steps.values():
            while open_steps:
                open_steps.popleft()._finish()
        with saving(steps_done, partial(self._state, steps_done)) as path:
            yield str(path)

    def _state(self, steps_done: int) -> State:
        return State(steps_done, self.version, dict(self._next_index))

    def _steps(self, count: int, name: str, start: int, max_staleness: int) -> Iterator[Step]:
        traced = self._graph.phases.get(name)
        if traced is None:
            raise TraceError(
                f"phase {name!r} was not run when the program was traced{nearest(name, self._graph.phases)}; "
                "what a program does must not depend on results"
            )
        first = max(0, self._next_index.get(name, 0) - start)
        open_steps = self._open_steps[name] = deque[LiveStep]()
        for index in range(start, count):
            self._next_index[name] = first + index + 1
            step = LiveStep(self, name, first + index, first + count, traced, open_steps, max_staleness)
            self.listener.step_begins(step)
            self._stack.append(step)
            try:
                yield step
            except GeneratorExit:  # the program left the loop: what is open is looked at in finish()
                if not step._joined:
                    self._left.append(step.full_name)
                self._open.extend(open_steps)
                open_steps.clear()
                raise
            finally:
                self._stack.pop()
            step.join()
        while open_steps:
            open_steps.popleft()._finish()

    def finish(self) -> None:
        """After the program: steps that are still open end, and what was left behind is an error."""
        if self._left:
            raise TraceError(
                f"the program left step {self._left[0]} before its join(): join a step, then leave the loop"
            )
        while self._open:
            self._open.popleft()._finish()
        self._check_carried()

    def _check_carried(self) -> None:
        """At the end of the program: samples carried to a step that never came are lost (``AccountError``)."""
        lost = {step: ids for step, ids in self.runtime.carried_on().items() if ids}
        if lost:
            rows = [f"  to {step}: {', '.join(ids[:10])}{' …' if len(ids) > 10 else ''}" for step, ids in lost.items()]
            raise AccountError("samples were carried to steps that never came:\n" + "\n".join(rows))

    def record(self, name: str, metrics: Any) -> None:
        self.listener.record(name, metrics)
