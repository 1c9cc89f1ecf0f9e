"""The ranks of a trainer meet where ranks of another one have met before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rlinf_core.errors import RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.trainers.group import RankGroup  # noqa: E402

SCRIPT = Path(__file__).with_name("group_rank.py")


@pytest.mark.timeout(150)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_rank_opens_the_next_group_while_another_is_in_the_last_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs #1?%20"
    folder.mkdir()
    os.mkfifo(folder / "second")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
    assert [path.name for path in folder.iterdir()] == ["second"]  # nothing is left of the meeting places
    assert list(tmp_path.iterdir()) == [folder]


def test_a_second_group_in_one_process_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/other", rank=0, world_size=1)
    try:
        place = ParallelInfo(rank=0, world_size=2, init_method=f"file://{tmp_path}/meet", timeout_s=1.0)
        with pytest.raises(
            RLinfError, match=r"close\(\) the trainer before, put each .* into a worker group of its own"
        ):
            RankGroup(place, torch.device("cpu")).join()
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
