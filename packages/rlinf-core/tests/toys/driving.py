"""Runs a toy program on a runtime and keeps what it logged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from rlinf_core.cluster import connect
from rlinf_core.flow import trace
from rlinf_core.live import LiveFlow
from rlinf_core.plan import flatten, make_plan
from rlinf_core.runtime import Runtime


def our_workers(folder: Path) -> list[psutil.Process]:
    """Worker processes of runs in ``folder`` (their log files are open there)."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or []).startswith("ray::"):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if any(str(folder) in f.path for f in process.open_files()):
                    found.append(process)
    return found


class Kept:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.dropped: list[dict[str, str]] = []
        self.logs: list[str] = []

    def step_begins(self, step: Any) -> None:
        pass

    def step_done(self, step: Any, dropped: Any) -> None:
        self.metrics.append(step.metrics)
        self.dropped.append(dict(dropped))

    def spans(self, state: Any, results: Any) -> None:
        pass

    def record(self, name: str, metrics: Any) -> None:
        pass

    def log(self, message: Any) -> None:
        self.logs.append(f"{message.member}: {message.text}")


def drive(
    program: Callable[..., Any],
    cfg: Any,
    run_dir: Path,
    *,
    plan: str = "temporal",
    devices: int = 2,
    portion: int | None = None,
    debug: bool = True,
    stall_timeout_s: float = 60.0,
    max_items: int = 1000,
    max_bytes: int = 1 << 30,
    kept: Kept | None = None,
    deals: dict[str, Any] | None = None,
    saving: Any = None,
) -> Kept:
    kept = kept or Kept()
    graph, groups = trace(program, cfg, seed=0, run_dir=run_dir, deals=deals)
    settings = SimpleNamespace(address=None, virtual_devices=devices, debug=debug)
    with connect(settings, f"test/{run_dir.name}") as cluster:
        made = flatten(make_plan(plan, graph, cluster.info, portion=portion), graph, cluster.info)
        cluster.reserve(tuple(d for g in made.groups.values() for p in g.processes for d in p))
        runtime = Runtime(
            cluster,
            made,
            groups,
            seed=0,
            run_dir=run_dir,
            launch_timeout_s=60.0,
            stall_timeout_s=stall_timeout_s,
            sys_path=(str(Path(__file__).parent),),
            on_log=kept.log,
        )
        finished = False
        try:
            runtime.start(lambda text: None)
            flow = LiveFlow(
                runtime,
                graph,
                groups,
                seed=0,
                run_dir=run_dir,
                max_items=max_items,
                max_bytes=max_bytes,
                listener=kept,
                deals=deals,
                saving=saving,
            )
            program(flow, cfg)
            flow.finish()
            finished = True
        finally:
            runtime.stop(orderly=finished)
        if runtime.failure is not None:
            runtime.check()
    return kept
