"""One flow over two Ray nodes of this machine, which have addresses of their own: items, collectives, a lost node."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import toy_nodes as toys
import toy_workers
from driving import drive, our_workers
from ray.cluster_utils import Cluster

from rlinf_core.cli.doctor import ask_nodes
from rlinf_core.cluster import SLOT
from rlinf_core.errors import WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.slow]
OTHER_ADDRESS = "127.0.0.2"
NODE: dict[str, Any] = {"num_cpus": 2, "num_gpus": 0, "resources": {SLOT + "0": 1.0}, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        found.add_node(node_ip_address=OTHER_ADDRESS, **NODE)
        ray.init(address=found.address, log_to_driver=False)
        assert len({node["NodeManagerAddress"] for node in ray.nodes()}) == 2
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def run(program: Any, cfg: Any, tmp_path: Path, **options: Any) -> Any:
    return drive(program, cfg, tmp_path, debug=False, devices=2, **options)


@pytest.mark.parametrize(("plan", "portion"), [("temporal", None), ("spatial", 2)])
def test_values_are_right_over_two_nodes(cluster: Cluster, tmp_path: Path, plan: str, portion: int | None) -> None:
    cfg = {"num_steps": 2, "prompts": 5, "group_size": 4}
    kept = run(toy_workers.program, cfg, tmp_path, plan=plan, portion=portion)
    assert [m["total"] for m in kept.metrics] == toy_workers.expected(2, 5, 4)
    assert not psutil.wait_procs(our_workers(tmp_path), timeout=10)[1]


def test_items_cross_between_the_nodes_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    kept = run(toys.boxes_program, {"num_steps": 2, "items": 12}, tmp_path, plan="spatial", portion=3)
    assert [(m["good"], m["from_other"]) for m in kept.metrics] == [(12, 12)] * 2


def test_ranks_of_two_nodes_compute_together(cluster: Cluster, tmp_path: Path) -> None:
    kept = run(toys.sum_program, {}, tmp_path, plan="temporal")
    assert [(m["total"], m["nodes"]) for m in kept.metrics] == [(3.0, 2.0)] * 2


def test_the_doctor_asks_every_node(cluster: Cluster) -> None:
    found = ask_nodes(cluster.address, platform.node)
    assert len(found) == 2 and set(found.values()) == {platform.node()}
    assert {name.partition(" ")[0] for name in found} == {node["NodeManagerAddress"] for node in ray.nodes()}


def test_the_loss_of_a_node_is_named_within_seconds(cluster: Cluster, tmp_path: Path) -> None:
    """Last in this file: the node does not come back."""
    (other,) = [node for node in cluster.worker_nodes if node.node_ip_address == OTHER_ADDRESS]
    lost_at = []

    def lose() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*-0"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        lost_at.append(time.monotonic())
        cluster.remove_node(other, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(WorkerError, match=r"(first|second)\[0\] died while working in wait of train/0"):
        run(toys.waiting_program, {"folder": str(tmp_path)}, tmp_path, plan="spatial")
    thread.join(60)
    assert time.monotonic() - lost_at[0] < 30
    assert len({path.read_text() for path in tmp_path.glob("*-0")}) == 2
