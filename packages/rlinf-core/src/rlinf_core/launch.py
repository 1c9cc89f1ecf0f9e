"""Starting, watching and ending the processes of worker groups: Ray actors, or threads when debugging."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlinf_core.cluster import Cluster
from rlinf_core.errors import describe
from rlinf_core.host import ActorHost, Host, HostSpec


class Launcher(Protocol):
    """Starts hosts and says why one died."""

    def start(self, spec: HostSpec, node: str) -> None: ...

    def why_dead(self, member: str, timeout: float) -> str: ...

    def poll_dead(self) -> dict[str, str]: ...

    def stop(self, timeout: float) -> list[str]: ...


def _log_tail(run_dir: str, member: str, lines: int = 15) -> str:
    path = Path(run_dir) / "logs" / f"{member}.log"
    with contextlib.suppress(OSError):
        tail = path.read_text(errors="replace").splitlines()[-lines:]
        if tail:
            return f"\nlast lines of {path}:\n" + "\n".join("  " + line for line in tail)
    return ""


@dataclass
class _Started:
    spec: HostSpec
    actor: Any
    main: Any


class RayLauncher:
    """One Ray actor per rank; Ray supervises the processes, and they die with the driver."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._started: dict[str, _Started] = {}

    def start(self, spec: HostSpec, node: str) -> None:
        import ray

        actor = (
            ray.remote(ActorHost)
            .options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                name=spec.member,
                scheduling_strategy=self._cluster.strategy_for(node),
            )
            .remote(spec)
        )
        self._started[spec.member] = _Started(spec, actor, actor.main.remote())

    def why_dead(self, member: str, timeout: float) -> str:
        """Wait briefly for Ray's word on why a process ended."""
        import ray

        started = self._started.get(member)
        if started is None:
            return "no word on why: it had been told to end"
        try:
            ended = ray.get(started.main, timeout=timeout)
            return f"its process ended: {ended}"
        except ray.exceptions.GetTimeoutError:
            cause = "its connection to the hub broke (Ray still counts it as alive: a fork of it may live on)"
        except ray.exceptions.RayActorError as error:
            if "creation task" in str(error):
                return f"its process could not be set up by Ray:\n{error}"
            cause = "its process ended without a word (kill -9, out of memory, os._exit, or a crash)"
        except ray.exceptions.OutOfMemoryError as error:
            said = re.search(r"Memory on the node.*? was (.*? limit)", str(error))
            cause = (
                f"Ray killed its process because the machine ran out of memory ({said[1] if said else 'no figures'}); "
                "run fewer processes at once (cluster.virtual_devices), lower what a stage holds, or leave the machine "
                "to the run"
            )
        except ray.exceptions.RayTaskError as error:
            cause = f"its process failed outside any task:\n{error}"
        except ray.exceptions.RayError as error:
            cause = f"Ray says of its process: {type(error).__name__}: {error}"
        return cause + _log_tail(started.spec.run_dir, member)

    def poll_dead(self) -> dict[str, str]:
        """Members whose main has ended, with the cause (used while they have not yet said hello)."""
        import ray

        if not self._started:
            return {}
        done, _ = ray.wait([s.main for s in self._started.values()], num_returns=len(self._started), timeout=0)
        return {m: self.why_dead(m, 1.0) for m, s in self._started.items() if s.main in done}

    def stop(self, timeout: float) -> list[str]:
        """End all processes: those that have been asked to stop get ``timeout`` seconds, then they are killed.

        Returns the members that had to be killed.
        """
        import ray

        late: list[str] = []
        mains = [s.main for s in self._started.values()]
        if mains and timeout > 0:
            _, running = ray.wait(mains, num_returns=len(mains), timeout=timeout)
            late = [m for m, s in self._started.items() if s.main in running]
        for started in self._started.values():
            ray.kill(started.actor, no_restart=True)
        self._started.clear()
        return late


class ThreadLauncher:
    """All workers as threads of this process, for a debugger. No isolation, no Ray."""

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._ends: dict[str, str] = {}

    def start(self, spec: HostSpec, node: str) -> None:
        def body() -> None:
            try:
                self._ends[spec.member] = Host(spec).main()
            except BaseException as error:  # said by poll_dead; a thread's own traceback would reach nobody
                self._ends[spec.member] = f"its thread ended with {describe(error)}"

        thread = threading.Thread(target=body, name=f"rlinf-{spec.member}", daemon=True)
        self._threads[spec.member] = thread
        thread.start()

    def why_dead(self, member: str, timeout: float) -> str:
        thread = self._threads.get(member)
        if thread is not None:
            thread.join(timeout)
        return self._ends.get(member, "its thread ended")

    def poll_dead(self) -> dict[str, str]:
        return {m: self.why_dead(m, 0.0) for m, t in self._threads.items() if not t.is_alive()}

    def stop(self, timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [m for m, thread in self._threads.items() if thread.is_alive()]
        self._threads.clear()
        return late


def make_launcher(cluster: Cluster) -> Launcher:
    return ThreadLauncher() if cluster.debug else RayLauncher(cluster)
