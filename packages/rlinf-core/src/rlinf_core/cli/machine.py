"""Facts about the machine, read without importing ray or torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

GIB = 2**30
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "TORCH_NUM_THREADS",
    "VLLM_CPU_OMP_THREADS_BIND",
)
STALE_LOCK_S = 600.0


@dataclass(frozen=True, slots=True)
class Raylet:
    """One of Ray's node processes; ``used_by`` says by whom, in words, and is empty when it is left over."""

    pid: int
    used_by: str = ""


@dataclass(frozen=True)
class Machine:
    """What ``inspect_machine`` found. Sizes in bytes; limits are None where there is none."""

    python: str = ""
    executable: str = ""
    system: str = ""
    cores: int = 1
    cores_total: int = 1
    cpu_quota: float | None = None
    load: float = 0.0
    memory_total: int = 0
    memory_available: int = 0
    memory_limit: int | None = None
    swap_used: int = 0
    shm_total: int = 0
    shm_free: int = 0
    open_files: int = 0
    open_files_hard: int = 0
    disk_free: Mapping[str, int] = field(default_factory=dict)
    disk_nearly_full: frozenset[str] = frozenset()
    thread_variables: Mapping[str, str] = field(default_factory=dict)
    stale_locks: tuple[str, ...] = ()
    allocator: str = ""
    gpus: tuple[str, ...] = ()
    gpu_note: str = ""
    ray_address: str = ""
    ray_address_from: str = ""
    raylets: tuple[Raylet, ...] = ()


def inspect_machine() -> Machine:
    """Read everything once."""
    import psutil

    memory = psutil.virtual_memory()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = {path: shutil.disk_usage(path) for path in dict.fromkeys((str(Path.cwd()), tempfile.gettempdir()))}
    gpus, note = find_gpus()
    address, origin = find_ray()
    return Machine(
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cores_total=os.cpu_count() or 1,
        cpu_quota=cgroup_cpus(),
        load=os.getloadavg()[0],
        memory_total=memory.total,
        memory_available=memory.available,
        memory_limit=cgroup_memory(memory.total),
        swap_used=psutil.swap_memory().used,
        shm_total=shm.total if shm else 0,
        shm_free=shm.free if shm else 0,
        open_files=soft,
        open_files_hard=hard if hard != resource.RLIM_INFINITY else 2**31,
        disk_free={path: usage.free for path, usage in places.items()},
        disk_nearly_full=frozenset(path for path, usage in places.items() if usage.free < 0.05 * usage.total),
        thread_variables={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        stale_locks=tuple(stale_locks()),
        allocator=bad_allocator(os.environ),
        gpus=gpus,
        gpu_note=note,
        ray_address=address,
        ray_address_from=origin,
        raylets=tuple(find_raylets()),
    )


def find_raylets() -> Iterator[Raylet]:
    """The raylets of this machine, each with who uses it.

    That is the program that started it with ``ray.init``, while that lives; else the cluster that it belongs to, while
    that answers (``ray start`` ends at once).
    """
    import psutil

    for process in psutil.process_iter(["name"]):
        if process.info["name"] != "raylet":
            continue
        try:
            words = process.cmdline()
            driver = _driver_of(process, words)
        except psutil.NoSuchProcess:
            continue  # it has ended just now
        except psutil.AccessDenied:
            yield Raylet(process.pid, "of another user")
            continue
        address = _option(words, "gcs-address")
        if driver:
            yield Raylet(process.pid, f"in use by process {driver}")
        elif address and answers(address):
            yield Raylet(process.pid, f"in use by the cluster at {address}")
        else:
            yield Raylet(process.pid)


def _option(words: Sequence[str], name: str) -> str:
    begin = f"--{name}="
    return next((word.removeprefix(begin) for word in words if word.startswith(begin)), "")


def _driver_of(raylet: psutil.Process, words: Sequence[str]) -> int:
    """The process that started the raylet and its session, 0 when that is gone: Ray writes its id at the end of the
    session's name, and a process whose parent ended has another one."""
    began = _option(words, "session-name").rpartition("_")[2]
    parent = raylet.ppid()
    return parent if began == str(parent) else 0


def answers(address: str) -> bool:
    """Whether something takes connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _cgroup_files(*names: str) -> list[Path]:
    """Where a control file of this process's cgroup may be: version 2 (own group, then root), then version 1."""
    found = []
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            group = line.split(":", 2)[2].strip("/")
            found += [Path("/sys/fs/cgroup") / group / name for name in names]
    except (OSError, IndexError):
        pass  # not Linux, or no cgroups
    return [*found, *(Path("/sys/fs/cgroup") / name for name in names)]


def cgroup_cpus() -> float | None:
    """Cores that the container may use, None without a limit."""
    for path in _cgroup_files("cpu.max"):
        if path.is_file():
            quota, _, period = path.read_text().strip().partition(" ")
            if quota != "max" and float(period or 100_000) > 0:
                return float(quota) / float(period or 100_000)
    quota_file, period_file = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota_file.is_file() and period_file.is_file():
        microseconds = int(quota_file.read_text())
        return microseconds / int(period_file.read_text()) if microseconds > 0 else None
    return None


def cgroup_memory(total: int) -> int | None:
    """Bytes that the container may use, None without a limit below ``total``."""
    for path in [*_cgroup_files("memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]:
        if path.is_file():
            text = path.read_text().strip()
            if text.isdigit() and int(text) < total:
                return int(text)
    return None


def stale_locks() -> list[str]:
    """Lock files of torch's extension builds (they lock by existing) that are older than ten minutes."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    found = []
    for lock in root.glob("**/lock") if root.is_dir() else ():
        try:
            if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
                found.append(str(lock))
        except OSError:
            continue  # it was released just now
    return found


def bad_allocator(environment: Mapping[str, str]) -> str:
    """``NAME=value`` of an allocator setting that breaks sharing memory between processes, or an empty string."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower():
            return f"{name}={environment[name]}"
    return ""


def find_gpus() -> tuple[tuple[str, ...], str]:
    """(one line per NVIDIA device, why there are none if that is known)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), ""
    query = "--query-gpu=index,name,uuid,memory.total,memory.used"
    try:
        done = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f" (nvidia-smi failed: {error})"
    if done.returncode:
        return (), f" (nvidia-smi: {(done.stdout + done.stderr).strip().splitlines()[0]})"
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip()), ""


def find_ray() -> tuple[str, str]:
    """(address, how it was found) of a Ray cluster that a run here would join; it must accept a connection."""
    candidates = [(os.environ.get("RAY_ADDRESS", ""), "RAY_ADDRESS")]
    note = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        candidates.append((note.read_text().strip(), str(note)))
    except OSError:
        pass  # no cluster was ever started on this machine
    for address, origin in candidates:
        if answers(address):
            return address, origin
    return "", ""
