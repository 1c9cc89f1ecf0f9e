"""Which GPUs a run gets, with GPUs that Ray only counts: none is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from rlinf_core.cluster import connect

pytestmark = pytest.mark.ray
SETTINGS = SimpleNamespace(address=None, virtual_devices=0, debug=False)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()


def test_two_runs_never_get_the_same_gpu() -> None:
    with connect(SETTINGS, "first") as first, connect(SETTINGS, "second") as second:
        assert [d.kind for d in first.info.devices] == ["gpu"] * 4
        first.reserve((0, 1))
        second.reserve((0, 1))
        mine = first.visible_gpus((0, 1)).split(",")
        theirs = second.visible_gpus((0, 1)).split(",")
        assert len({*mine, *theirs}) == 4
        assert first.visible_gpus((1,)) == mine[1]
        assert first.visible_gpus(()) == "", "a CPU stage sees no GPU"
