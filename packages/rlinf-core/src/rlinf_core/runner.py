"""One run from a composed configuration to an exit: trace, plan, cluster, workers, program, and the way out."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rlinf_core.checkpoints import Checkpoints, State, sizes_of
from rlinf_core.config import Config, load_program
from rlinf_core.config.compose import PLUGIN_SECTIONS
from rlinf_core.errors import ConfigError, PlanError, RLinfError, TraceError, describe
from rlinf_core.flow import Flow, GroupSpec, trace
from rlinf_core.graph import FlowGraph
from rlinf_core.hub.messages import CallResult, Log
from rlinf_core.lastwords import leave
from rlinf_core.links import said_at_start
from rlinf_core.live import LiveFlow, LiveStep, resumed_of
from rlinf_core.placement import ClusterInfo
from rlinf_core.plan import SCHEDULED, FlatPlan, Plan, flatten, make_plan
from rlinf_core.progress import Progress, format_record
from rlinf_core.registry import Registry
from rlinf_core.replan import Replanner, Replanning
from rlinf_core.resume import APPENDED, Resumed, find, lock_run, take_over
from rlinf_core.rundir import RunDirectory
from rlinf_core.runtime import CallState, Runtime

Observer = Callable[[CallState, list[CallResult]], None]
TRAIN = "train"
"""The phase whose steps count as training steps (the default of ``flow.steps``)."""
_HIDDEN = ("time/", "wait/", "device/", "train/", "tokens_per_s", "env_steps_per_s")


class RunListener:
    """Writes what the flow does into the run directory and onto the progress line."""

    def __init__(
        self,
        directory: RunDirectory,
        progress: Progress,
        observe: Observer | None = None,
        resumed: State | None = None,
    ) -> None:
        self._directory = directory
        self._observe = observe
        self._progress = progress
        self._phase = ""
        self._trained_steps = resumed.steps_done if resumed else 0
        self.replanning: Replanning | None = None
        self.summary: dict[str, Any] = dict(resumed.records) if resumed else {}
        self.latest: dict[str, float] = dict(resumed.latest) if resumed else {}
        """The last value of each metric."""

    def step_begins(self, step: LiveStep) -> None:
        if step.phase != self._phase:
            self._phase = step.phase
            # A phase of one step that comes again and again (save, evaluate) has no total to speak of.
            alone = step.phase != TRAIN and step.total == step.index + 1
            self._progress.phase(step.phase, 0 if alone else step.total)

    def step_done(self, step: LiveStep, dropped: Mapping[str, str]) -> None:
        if step.phase == TRAIN:
            self._trained_steps += 1
        else:
            step.metrics["train/steps"] = float(self._trained_steps)
        self.latest.update(step.metrics)
        self._directory.log(step.index, step.phase, step.metrics)
        self._progress.step(step.index + 1, step.metrics)
        reasons: dict[str, int] = {}
        for reason in dropped.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        for reason, count in reasons.items():
            self._progress.note(f"{step.full_name}: {count} sample(s) dropped: {reason}")
        if self.replanning is not None:
            self.replanning.step_done(step.phase, step.index, step.work, step.metrics["time/step_s"])
            self.summary["plan_changes"] = self.replanning.changes

    def spans(self, state: CallState, results: list[CallResult]) -> None:
        if self._observe is not None:
            self._observe(state, results)
        for rank, result in enumerate(results):
            t = result.times
            parts = {"step": state.step, "work_s": t.work, "wait_s": t.wait, "lock_s": t.lock, "switch_s": t.switch}
            self._directory.trace.add(state.task, state.group, rank, t.start, max(t.start, t.end), parts)

    def record(self, name: str, metrics: Mapping[str, float]) -> None:
        if not isinstance(metrics, Mapping) or not all(isinstance(v, int | float) for v in metrics.values()):
            raise TraceError(
                f"flow.record({name!r}, …) takes numbers by name, such as a step's metrics, not {metrics!r}"
            )
        self.summary[name] = dict(metrics)
        self.latest.update((key, float(value)) for key, value in metrics.items())
        shown = {key: float(value) for key, value in metrics.items() if not key.startswith(_HIDDEN)}
        self._progress.note(f"{name}: {format_record(shown)}")

    def closing_words(self) -> None:
        """What was recorded first and last under the same name of a metric, side by side."""
        records = [r for r in self.summary.values() if isinstance(r, dict)]
        names = dict.fromkeys(n for r in records for n in r if not n.startswith(_HIDDEN))
        for name in names:
            found = [r[name] for r in records if name in r]
            if name == "accuracy" and len(found) > 1:
                self._progress.note(f"{name}: {found[0]:.1%} -> {found[-1]:.1%}")

    def log(self, message: Log) -> None:
        for line in message.text.splitlines():
            if line.strip():
                self._progress.note(f"[{message.member}] {line}")


def prepare(
    cfg: Config, run_dir: Path, resumed: Resumed | None = None
) -> tuple[Callable[[Any, Any], Any], FlowGraph, dict[str, GroupSpec]]:
    """The program, its traced graph and its groups."""
    program = load_program(cfg.program)
    deals = cfg.channels.deals.to_dict()
    call = partial(_call_program, program)
    graph, groups = trace(call, cfg, seed=cfg.seed, run_dir=run_dir, deals=deals, resumed=resumed_of(resumed))
    return program, graph, groups


def _call_program(program: Callable[[Any, Any], Any], flow: Flow, cfg: Config) -> None:
    try:
        program(flow, cfg)
    except SystemExit as error:
        raise RLinfError(
            f"the program called sys.exit({error.code!r}): return instead, or raise what is wrong"
        ) from error


def _check_plugins(cfg: Config) -> None:
    """What the plugins need is looked for before Ray is started, also for a configuration composed elsewhere."""
    for section, group in PLUGIN_SECTIONS.items():
        if section in cfg and "name" in cfg[section]:
            Registry(group).load(cfg[section].name)


def plan_for(
    cfg: Config, graph: FlowGraph, groups: Mapping[str, GroupSpec], cluster: ClusterInfo
) -> tuple[Plan, FlatPlan]:
    """The validated plan and its flat view."""
    placement = {name: cfg.placement[name] for name in cfg.placement}
    most = {name: limit for name, group in groups.items() if (limit := group.worker.most_ranks(group.cfg)) is not None}
    plan = make_plan(cfg.plan, graph, cluster, portion=cfg.portion, placement=placement, most_ranks=most)
    flat = flatten(plan, graph, cluster)
    for name, group in groups.items():
        if problem := group.worker.check_ranks(group.cfg, len(flat.groups[name].processes)):
            raise PlanError(f"group {name!r}: {problem}")
    return plan, flat


def _planned(cfg: Config, recipe: str) -> tuple[Config, Replanner | None]:
    """``plan=auto`` or ``hybrid``: let the scheduler plugin profile and plan; the configuration with the plan it found,
    and what may change that plan while it runs (plugins need not give it)."""
    schedule = Registry("rlinf.schedulers").load(cfg.scheduler)
    place = RunDirectory.create(cfg.run_dir, f"{recipe}-{cfg.plan}", loggers=[])
    with place:
        try:
            found = schedule(cfg, recipe, place.path)
        except SystemExit as error:
            raise RLinfError(f"the scheduler {cfg.scheduler!r} called sys.exit({error.code!r})") from error
        except ConfigError:
            with contextlib.suppress(OSError):
                place.path.rmdir()  # refused before anything was written
            raise
    path, replanner = found if isinstance(found, tuple) else (found, None)
    chosen = Config({**cfg.to_dict(), "plan": str(path)})
    chosen.add_reads(cfg.reads)
    return chosen, replanner


def run(cfg: Config, recipe: str, observe: Observer | None = None, *, quiet: bool = False) -> int:
    """Run a recipe to its end; returns the exit code. Raises ``RLinfError`` with the first real cause.

    ``observe(call, results)`` is told of every call that has ended on all ranks (for profiles). ``quiet``: nothing is
    shown and nothing is drawn; a failure is raised as ever.
    """
    from rlinf_core.cluster import connect, local_info

    previous = _on_sigterm()
    # Python itself prints warnings that no handler takes.
    silence = logging.NullHandler()
    if quiet:
        logging.getLogger("rlinf").addHandler(silence)
    try:
        choice = find(cfg.resume, Path(cfg.run_dir).expanduser() / recipe, cfg.to_dict(), cfg.num_steps)
        resumed = choice.resumed
        if choice.finished is not None:
            Progress(io.StringIO() if quiet else sys.stderr).note(choice.notes[-1])
            return 0
        replanner: Replanner | None = None
        if cfg.plan in SCHEDULED:
            cfg, replanner = _planned(cfg, recipe)
        _check_plugins(cfg)
        program, graph, groups = prepare(cfg, Path(cfg.run_dir) / recipe, resumed)
        if not cfg.cluster.address and not os.environ.get("RAY_ADDRESS"):
            here = local_info(cfg.cluster)
            if here is not None:
                plan_for(cfg, graph, groups, here)  # faults of the plan show before Ray is started
        link = said_at_start(cfg.channels.link, cfg.channels.link_bytes)
        directory = _directory(cfg, recipe, resumed)
        with directory:
            progress = Progress(io.StringIO() if quiet else sys.stderr)
            listener = RunListener(directory, progress, observe, resumed.state if resumed else None)
            for note in choice.notes:
                progress.note(note)
            directory.write_config(cfg.to_dict())
            progress.note(f"run directory: {directory.path}")
            if not cfg.cluster.debug:
                progress.note(link)
            progress.note("starting Ray" if not cfg.cluster.debug else "debug: all workers are threads of this process")
            with (
                contextlib.nullcontext() if quiet else _last_words(cfg, directory, progress),
                contextlib.ExitStack() as ending,
                connect(cfg.cluster, f"{recipe}/{directory.path.name}") as cluster,
            ):
                _on_sigterm()  # Ray has installed its own, which prints a native stack
                plan, flat = plan_for(cfg, graph, groups, cluster.info)
                directory.write_plan(plan.to_yaml())
                progress.note(plan.describe())
                devices = sorted({d for g in flat.groups.values() for p in g.processes for d in p})
                cluster.reserve(tuple(devices))
                runtime = Runtime(
                    cluster,
                    flat,
                    groups,
                    seed=cfg.seed,
                    run_dir=directory.path,
                    launch_timeout_s=cfg.cluster.launch_timeout_s,
                    stall_timeout_s=cfg.cluster.stall_timeout_s,
                    device_bytes=cfg.cluster.virtual_device_bytes or 0,
                    link=(cfg.channels.link, cfg.channels.link_bytes),
                    sys_path=_user_path(cfg.program),
                    on_log=listener.log,
                )
                if replanner is not None:
                    listener.replanning = Replanning(
                        replanner,
                        TRAIN,
                        graph,
                        cluster.info,
                        plan,
                        flat,
                        partial(_adopt, runtime, directory, listener),
                        progress.note,
                    )
                _drive(cfg, runtime, graph, groups, program, directory, listener, progress, resumed, ending)
            if not quiet:
                _plot(directory, progress)
        return 0
    finally:
        logging.getLogger("rlinf").removeHandler(silence)
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def _directory(cfg: Config, recipe: str, resumed: Resumed | None) -> RunDirectory:
    """A new run directory, or the one that goes on; held by this process until it ends."""
    if resumed is None or resumed.run is None:
        directory = RunDirectory.create(cfg.run_dir, recipe, loggers=list(cfg.loggers))
        directory.lock = lock_run(directory.path)
        return directory
    lock = lock_run(resumed.run)
    try:
        take_over(resumed.run, resumed.state)
        directory = RunDirectory(resumed.run, loggers=list(cfg.loggers), resumed_steps=resumed.state.steps_done)
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise
    directory.lock = lock
    return directory


@contextlib.contextmanager
def _saving(
    checkpoints: Checkpoints,
    directory: RunDirectory,
    listener: RunListener,
    progress: Progress,
    steps_done: int,
    state: Callable[[], State],
) -> Iterator[Path]:
    """A checkpoint with what the run has come to beside the flow's own state."""

    def whole() -> State:
        return replace(
            state(),
            sizes=sizes_of(directory, APPENDED),
            latest=listener.latest,
            records={k: v for k, v in listener.summary.items() if isinstance(v, dict)},
        )

    with checkpoints.saving(steps_done, whole) as path:
        yield path
    if (why := checkpoints.no_best(listener.latest)) is not None:
        progress.note(why)


def _adopt(runtime: Runtime, directory: RunDirectory, listener: RunListener, plan: Plan, flat: FlatPlan) -> None:
    assert listener.replanning is not None
    runtime.adopt(flat)
    directory.write_plan(plan.to_yaml(), f"plan-{listener.replanning.changes}.yaml")


def _drive(
    cfg: Config,
    runtime: Runtime,
    graph: FlowGraph,
    groups: dict[str, GroupSpec],
    program: Callable[[Any, Any], Any],
    directory: RunDirectory,
    listener: RunListener,
    progress: Progress,
    resumed: Resumed | None,
    ending: contextlib.ExitStack,
) -> None:
    """Run the program from the start of its workers to their end. ``ending`` is closed when Ray is gone."""
    checkpoints = Checkpoints(directory.path, keep_last=cfg.checkpoint.keep_last, keep_best=cfg.checkpoint.keep_best)
    began = time.monotonic()
    finished = False
    try:
        runtime.start(progress.note)
        flow = LiveFlow(
            runtime,
            graph,
            groups,
            seed=cfg.seed,
            run_dir=directory.path,
            max_items=cfg.channels.max_items,
            max_bytes=cfg.channels.max_bytes,
            listener=listener,
            deals=cfg.channels.deals.to_dict(),
            saving=partial(_saving, checkpoints, directory, listener, progress),
            resumed=resumed,
        )
        _call_program(program, flow, cfg)
        flow.finish()
        finished = True
    except BaseException as error:
        listener.summary["error"] = describe(error)
        if not cfg.cluster.debug:
            # Ray prints a page there about every worker that is in the middle of something when it is ended.
            ending.enter_context(contextlib.redirect_stdout(io.StringIO()))
        raise
    finally:
        progress.close()
        runtime.stop(orderly=finished)
        cfg.add_reads(runtime.reads)
        listener.summary["finished"] = finished
        listener.summary["seconds"] = time.monotonic() - began
        try:
            directory.write_trace(f"trace-from-{resumed.state.steps_done}.json" if resumed else "trace.json")
            directory.write_summary(listener.summary)
        except RLinfError:
            if finished:
                raise  # otherwise the run's own failure is what the user must see
    if runtime.failure is not None:
        runtime.check()
    listener.closing_words()


@contextlib.contextmanager
def _last_words(cfg: Config, directory: RunDirectory, progress: Progress) -> Iterator[None]:
    """Say what a run that is interrupted or fails has left, before the cause is said."""
    try:
        yield
    except BaseException as error:
        saves = "checkpoint.every" in cfg.reads
        bad_input = getattr(error, "bad_input", False) is True
        leave(directory.path, progress.note, saves=saves, bad_input=bad_input, every=cfg.checkpoint.every)
        raise


def _plot(directory: RunDirectory, progress: Progress) -> None:
    from rlinf_core.loggers.jsonl import FILE
    from rlinf_core.plots import plot_run

    if not (directory.path / FILE).exists():
        return
    try:
        progress.note(f"plot: {plot_run(directory.path)}")
    except RLinfError as error:  # the run itself went well
        progress.note(f"no plot: {error}")


def _user_path(program: str) -> tuple[str, ...]:
    where = program.rpartition(":")[0]
    return (str(Path(where).resolve().parent),) if where.endswith(".py") else ()


class Terminated(KeyboardInterrupt):
    """SIGTERM: unwinds like Ctrl-C."""


def _on_sigterm() -> Any:
    """Unwind on SIGTERM as on Ctrl-C; returns the previous handler, or ``None`` off the main thread."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Terminated(f"signal {number}")

    try:
        return signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not the main thread (a test or a notebook server): leave signals alone
        return None
