"""One rank of the tests of the embodied update on real trainers: ``embodied_update_rank.py RANK WORLD FOLDER CASES``.

``CASES`` is a JSON list of trainer nodes with a number format; what comes out goes to ``FOLDER/CASE_RANK.pt``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "rlinf-embodied" / "tests" / "toys"))

import learning
import torch

from rlinf_core.config import Config
from rlinf_core.types import ParallelInfo, Trajectory
from rlinf_embodied.training import load_trainer, load_update
from rlinf_engines.conf import DeepSpeedTrainer, TorchTrainer

BACKENDS = {"torch": TorchTrainer, "deepspeed": DeepSpeedTrainer}
STEPS = 3


def config(trainer: dict[str, Any], dtype: str) -> Config:
    """PPO on chunks of two steps with all that a rank might do on its own: scaled rewards, statistics, weights."""
    algorithm = learning.ppo(scale_rewards=True, length_normalised=True, entropy_coef=0.01, value_clip=0.3)
    node = BACKENDS[trainer["name"]](**{"lr": 0.01, "grad_clip": 0.5, "micro_batch_tokens": 20, **trainer})
    cfg = learning.config(algorithm, dtype=dtype, chunk=2, normalise_observations=True)
    return Config({**cfg.to_dict(), "trainer": asdict(node)})


def batch(cfg: Config, step: int) -> list[Trajectory]:
    """Of all ranks, decided by the policy before any training."""
    return learning.rollout(learning.MlpPolicy(cfg.model, learning.CONTINUOUS, 0), seed=step, decisions=8)


def train(cfg: Config, place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """Metrics and weights after three steps; rank 1 has one slot of six, and none in the last step."""
    trainer, policy = load_trainer(cfg, learning.CONTINUOUS, place, seed=0)
    update = load_update(cfg, trainer, policy, seed=3)
    metrics = []
    for step in range(STEPS):
        given = batch(cfg, step)
        alone = place.world_size == 1
        others = 0 if step == STEPS - 1 else 1
        metrics.append(update(given if alone else given[others:] if place.rank == 0 else given[:others], step))
    weights = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.export(folder / "export")
    trainer.close()
    return {"metrics": metrics, "weights": weights, "state": update.state()}


def main(rank: int, world: int, folder: Path, todo: dict[str, Any]) -> None:
    for name, (trainer, dtype) in todo.items():
        meet = f"file://{folder}/meet_{name}" if world > 1 else ""
        place = ParallelInfo(rank=rank, world_size=world, init_method=meet, timeout_s=60.0)
        (folder / name).mkdir(exist_ok=True)
        torch.save(train(config(trainer, dtype), place, folder / name), folder / f"{name}_{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
