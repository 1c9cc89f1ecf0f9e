"""Two data-parallel ranks over gloo give what one rank gives, however the samples are split."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlinf_core.errors import RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402

SCRIPT = Path(__file__).with_name("data_parallel_rank.py")
DEADLINE_S = 120.0


def start(rank: int, world: int, folder: Path, task: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(rank), str(world), str(folder), task],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, err


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    processes = [start(0, 2, tmp_path, "train"), start(1, 2, tmp_path, "train")]
    spec = importlib.util.spec_from_file_location("data_parallel_rank", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(0, 1, tmp_path, "train")
    for code, err in [finish(process) for process in processes]:
        assert code == 0, err
    expected = torch.load(tmp_path / "result1_0.pt")
    results = [torch.load(tmp_path / f"result2_{rank}.pt") for rank in range(2)]
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-9)
        assert result["norms"] == pytest.approx(expected["norms"], abs=1e-9)
        for name, tensor in expected["weights"].items():
            assert float((tensor - result["weights"][name]).abs().max()) < 1e-9
        assert result["reduced"] == {"a": 0.1 + 0.2, "only0": 1.0, "only1": 1.0}
        # Each rank goes on with its own random numbers after a load.
        assert torch.equal(*result["noise"])
    for name, tensor in results[0]["weights"].items():
        assert torch.equal(tensor, results[1]["weights"][name])
    assert not torch.equal(results[0]["noise"][0], results[1]["noise"][0])
    assert (tmp_path / "export2" / "config.json").is_file()


def test_a_peer_that_leaves_is_an_error(tmp_path: Path) -> None:
    left, leaver = start(0, 2, tmp_path, "leave"), start(1, 2, tmp_path, "leave")
    assert finish(leaver)[0] == 7
    code, err = finish(left)
    assert code != 0
    assert "RLinfError: trainer rank 0 of 2: adding gradients at optimizer step 0 failed" in err


def test_a_peer_that_does_not_come_is_an_error(
    make_model: Any, make_trainer_cfg: Any, forward: Any, tmp_path: Path
) -> None:
    trainer = TorchTrainer(make_trainer_cfg())
    place = ParallelInfo(world_size=2, init_method=f"file://{tmp_path}/meet", timeout_s=1.0)
    with pytest.raises(RLinfError, match="trainer rank 0 of 2: joining the other ranks through file:.* within 1 s"):
        trainer.setup(make_model(), forward, place, seed=0)
    assert not torch.distributed.is_initialized()
