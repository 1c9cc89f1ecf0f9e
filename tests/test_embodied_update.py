"""The embodied update on the real trainer backends: two ranks of each against one of torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import embodied_update_rank as script

from rlinf_core.errors import NonFiniteError
from rlinf_core.types import ParallelInfo
from rlinf_embodied.training import load_trainer, load_update

DEADLINE_S = 150.0
CASES: dict[str, tuple[dict[str, Any], str, float]] = {
    "ddp": ({"name": "torch"}, "float64", 1e-9),
    "fsdp2": ({"name": "torch", "sharding": "fsdp2"}, "float64", 1e-9),
}
if importlib.util.find_spec("deepspeed") is not None:
    CASES |= {
        "zero0": ({"name": "deepspeed", "zero_stage": 0}, "float32", 1e-3),
        "zero2": ({"name": "deepspeed", "zero_stage": 2}, "float32", 1e-3),
        "zero3": ({"name": "deepspeed", "zero_stage": 3}, "float32", 1e-3),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes make of all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    todo = json.dumps({name: case[:2] for name, case in CASES.items()})
    processes = [
        subprocess.Popen(
            [sys.executable, script.__file__, str(rank), "2", str(folder), todo],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(processes):
            (folder / f"err{rank}").write_text(process.communicate(timeout=DEADLINE_S)[1])
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_of_every_backend_learn_what_one_does(name: str, ranks: Path, tmp_path: Path) -> None:
    _, dtype, limit = CASES[name]
    assert (ranks / f"{name}_1.pt").exists(), (ranks / "err0").read_text() + (ranks / "err1").read_text()
    alone = script.train(script.config({"name": "torch"}, dtype), ParallelInfo(), tmp_path)
    found = [torch.load(ranks / f"{name}_{rank}.pt", weights_only=False) for rank in range(2)]
    assert found[0]["metrics"] == found[1]["metrics"]
    assert found[0]["state"] == found[1]["state"]
    for one, two in zip(alone["metrics"], found[0]["metrics"], strict=True):
        assert two == pytest.approx(one, rel=limit, abs=limit)
    assert found[0]["weights"].keys() == alone["weights"].keys()
    for key, value in alone["weights"].items():
        torch.testing.assert_close(found[0]["weights"][key], value, rtol=limit, atol=limit)
    exported = torch.load(ranks / name / "export" / "weights.pt", weights_only=True)
    torch.testing.assert_close(exported, found[0]["weights"], rtol=0, atol=0)


def test_a_loss_that_is_no_number_names_slots() -> None:
    cfg = script.config({"name": "torch"}, "float32")
    trainer, policy = load_trainer(cfg, script.learning.CONTINUOUS, ParallelInfo(), seed=0)
    update = load_update(cfg, trainer, policy, seed=0)
    given = script.batch(cfg, 0)
    with torch.no_grad():
        policy.actor[0].weight[0, 0] = torch.nan  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError, match=r"loss sum is .* in the micro-batch of 0"):
        update(given, 0)
    trainer.close()
