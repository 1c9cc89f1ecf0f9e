"""Devices of a run: a local Ray, a Ray cluster, or (debugging) this process alone.

Without accelerators a *device* is a CPU slot. On a machine without Ray there are two of them, or as many as
``cluster.virtual_devices`` says; on a Ray cluster a node offers slots through the custom resources ``rlinf_slot_0``,
``rlinf_slot_1``, …. A run reserves its devices in a placement group that carries the run's name, so that two runs never
share a device unknowingly and the one that comes second can say who holds what it lacks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf_core.accelerators import accelerator_here
from rlinf_core.errors import PlacementError, RLinfError
from rlinf_core.placement import ClusterInfo, DeviceInfo, NodeInfo

SLOT = "rlinf_slot_"
GROUP_PREFIX = "rlinf:"
PROBE_TIMEOUT_S = 10.0
RESERVE_TIMEOUT_S = 10.0
DEFAULT_SLOTS = 2
GPU_CLAIM_TIMEOUT_S = 120.0


class _GpuHolder:
    """Holds the GPUs of one node for the run; its ranks get them by UUID (by index where the driver tells none)."""

    def names(self) -> list[str]:
        import ray

        held = [str(i) for i in ray.get_gpu_ids()]
        try:
            query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
            listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return held
        uuids = dict(line.split(", ", 1) for line in listed.splitlines() if ", " in line)
        return [uuids.get(index, index) for index in held]


@dataclass
class Cluster:
    """A connection to devices. ``close`` gives everything back; use it as a context manager."""

    info: ClusterInfo
    node_address: str
    """Address that other nodes reach this driver at."""
    run_name: str
    debug: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    """Node id to node address."""
    owns_ray: bool = True
    _group: Any = None
    _bundle_of_node: dict[str, int] = field(default_factory=dict)
    _gpu_names: dict[int, str] = field(default_factory=dict)
    _gpu_holders: list[Any] = field(default_factory=list)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cores_of(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Cores that CPU slots are pinned to: an even share of the node's cores while slots ≤ cores, else none."""
        mine = [d for d in self.info.devices if d.id in devices and d.kind == "cpu"]
        if not mine:
            return ()
        slots = sum(1 for d in self.info.devices if d.node == mine[0].node)
        cores = (
            sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        )
        share = len(cores) // slots
        if share == 0:
            return ()
        return tuple(c for d in mine for c in cores[d.local_id * share : (d.local_id + 1) * share])

    def reserve(self, devices: tuple[int, ...]) -> None:
        """Reserve devices for this run. ``PlacementError`` names the runs that hold what is missing."""
        if self.debug:
            return
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        chosen = [d for d in self.info.devices if d.id in devices]
        bundles: list[dict[str, float]] = []
        for node in sorted({d.node for d in chosen}) or [next(iter(self.nodes))]:
            on_node = [d for d in chosen if d.node == node]
            bundle = {SLOT + str(d.local_id): 1.0 for d in on_node if d.kind == "cpu"}
            gpus = sum(1 for d in on_node if d.kind != "cpu")
            if gpus:
                bundle["GPU"] = float(gpus)
            bundle[f"node:{self.nodes[node]}"] = 0.001
            self._bundle_of_node[node] = len(bundles)
            bundles.append(bundle)
        group = placement_group(bundles, strategy="PACK", name=GROUP_PREFIX + self.run_name)
        if not group.wait(RESERVE_TIMEOUT_S):
            holders = _holders(ray, group, set().union(*(set(b) for b in bundles)))
            remove_placement_group(group)
            raise PlacementError(
                f"cannot reserve {len(chosen)} device(s) within {RESERVE_TIMEOUT_S:g} s: "
                + (f"they are held by {holders}" if holders else "the cluster does not offer them any more")
            )
        self._group = group
        self._claim_gpus(ray, chosen)

    def _claim_gpus(self, ray: Any, chosen: list[DeviceInfo]) -> None:
        """Ask Ray which GPUs the reservation got: another run may hold the first ones of the node."""
        holder = ray.remote(_GpuHolder)
        for node in self._bundle_of_node:
            wanted = [d for d in chosen if d.node == node and d.kind == "gpu"]
            if not wanted:
                continue
            actor = holder.options(
                num_cpus=0, num_gpus=len(wanted), scheduling_strategy=self.strategy_for(node), max_restarts=0
            ).remote()
            names = ray.get(actor.names.remote(), timeout=GPU_CLAIM_TIMEOUT_S)
            self._gpu_holders.append(actor)
            self._gpu_names.update({d.id: name for d, name in zip(wanted, names, strict=True)})

    def visible_gpus(self, devices: tuple[int, ...]) -> str:
        """``CUDA_VISIBLE_DEVICES`` for a rank on these devices; empty hides all GPUs from a CPU stage."""
        return ",".join(self._gpu_names[d] for d in devices if d in self._gpu_names)

    def strategy_for(self, node: str) -> Any:
        """Ray scheduling strategy that puts an actor on ``node`` inside this run's reservation."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        bundle = self._bundle_of_node.get(node)
        if self._group is None or bundle is None:
            return NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def close(self) -> None:
        """Give devices back and end a Ray that this run started."""
        if self.debug:
            return
        import ray

        if self.owns_ray:
            if ray.is_initialized():
                with _quiet():
                    ray.shutdown()
        elif self._group is not None:
            from ray.util.placement_group import remove_placement_group

            for holder in self._gpu_holders:
                ray.kill(holder)

            remove_placement_group(self._group)


def _holders(ray: Any, own: Any, wanted: set[str]) -> str:
    from ray.util.placement_group import placement_group_table

    found = []
    for entry in placement_group_table().values():
        name = entry["name"]
        if (
            not name.startswith(GROUP_PREFIX)
            or entry["state"] != "CREATED"
            or entry["placement_group_id"] == own.id.hex()
        ):
            continue
        held = sorted(r for b in entry["bundles"].values() for r in b if r in wanted and not r.startswith("node:"))
        if held:
            found.append(f"run {name.removeprefix(GROUP_PREFIX)!r} ({', '.join(held)})")
    return "; ".join(found)


def connect(settings: Any, run_name: str) -> Cluster:
    """Connect according to the ``cluster`` config node (``address``, ``virtual_devices``, ``debug``).

    Raises ``PlacementError`` when no device is to be had and ``RLinfError`` when Ray cannot be reached.
    """
    virtual = slots_here(settings)
    if settings.debug:
        slots = ClusterInfo.virtual(max(1, virtual))
        return Cluster(slots, "127.0.0.1", run_name, debug=True, nodes={"local": "127.0.0.1"})
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if settings.address or os.environ.get("RAY_ADDRESS"):
        use_token()
    import ray

    address = settings.address or os.environ.get("RAY_ADDRESS") or None
    namespace = f"rlinf-{run_name}"
    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    owns = not ray.is_initialized()  # in a notebook that has connected already, that connection is used
    try:
        if not owns:
            pass
        elif address is None:
            _start_local(ray, virtual, common)
        else:
            _probe(address)
            ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        where = "start a local Ray" if address is None else f"reach the Ray cluster at {address!r} (cluster.address)"
        raise RLinfError(f"cannot {where}: {str(error).strip().splitlines()[0]}") from error
    alive = [n for n in ray.nodes() if n["Alive"]]
    nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in alive}
    devices: list[DeviceInfo] = []
    for node in sorted(alive, key=lambda n: (n["NodeManagerAddress"], n["NodeID"])):
        devices += _devices_of(node, first_id=len(devices))
    if not devices:
        if owns:
            ray.shutdown()
        if address is None:
            raise PlacementError(
                "Ray found no accelerator on this machine; cluster.virtual_devices=2 gives two CPU slots instead"
            )
        raise PlacementError(
            "the Ray cluster offers no devices: give a node CPU slots with "
            f'`ray start … --resources=\'{{"{SLOT}0": 1, "{SLOT}1": 1}}\'`, or start it where there are GPUs'
        )
    labels = tuple(NodeInfo(n["NodeID"], tuple((n.get("Labels") or {}).values())) for n in alive)
    own = ray.get_runtime_context().get_node_id()
    return Cluster(
        ClusterInfo(tuple(devices), labels), nodes.get(own, "127.0.0.1"), run_name, nodes=nodes, owns_ray=owns
    )


AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
TOKEN = Path("~/.ray/auth_token")


def use_token() -> None:
    """Show the cluster's token when there is one on this machine (``rlinf head`` asks for it).

    ``RAY_AUTH_MODE`` decides where it is set. Ray reads the environment once, when it is imported: where that has
    happened, what this process believes and what it would tell its children would differ, and nothing is done.
    """
    if "ray" in sys.modules:
        return
    known = os.environ.get(AUTH_TOKEN) or Path(os.environ.get(AUTH_TOKEN_PATH) or TOKEN).expanduser().is_file()
    if known:
        os.environ.setdefault(AUTH_MODE, "token")


def _probe(address: str) -> None:
    """Ray itself tries for minutes to reach a cluster that is not there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S).close()


def _start_local(ray: Any, virtual: int, common: dict[str, Any]) -> None:
    resources = {SLOT + str(i): 1.0 for i in range(virtual)}
    os.environ.setdefault("RAY_worker_niceness", "0")
    with _quiet():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, 1),
            resources=resources,
            include_dashboard=False,
            configure_logging=False,
            object_store_memory=80 * 1024 * 1024,
            **common,
        )


def _devices_of(node: dict[str, Any], first_id: int) -> list[DeviceInfo]:
    resources = node["Resources"]
    gpus = int(resources.get("GPU", 0))
    slots = sorted(int(m.group(1)) for r in resources if (m := re.fullmatch(SLOT + r"(\d+)", r)))
    kind, local_ids = ("gpu", list(range(gpus))) if gpus and not slots else ("cpu", slots)
    node_id = node["NodeID"]
    return [
        DeviceInfo(id=first_id + k, node=node_id, local_id=local, uuid=f"{node_id[:8]}/{kind}{local}", kind=kind)
        for k, local in enumerate(local_ids)
    ]


def slots_here(settings: Any) -> int:
    """How many CPU slots a Ray of our own on this machine has: what is set, else two where there is no accelerator."""
    if settings.virtual_devices is not None:
        return int(settings.virtual_devices)
    return 0 if accelerator_here() else DEFAULT_SLOTS


def local_info(settings: Any) -> ClusterInfo | None:
    """The devices that a run on this machine alone will have, known before Ray is started; ``None`` where that is
    accelerators, which Ray finds."""
    slots = slots_here(settings)
    if settings.debug:
        return ClusterInfo.virtual(max(1, slots))
    return ClusterInfo.virtual(slots) if slots or not accelerator_here() else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Ray's native code prints while it starts or ends, when something can be put in its place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
