"""One rank of the data-parallel tests, run as a script: ``data_parallel_rank.py RANK WORLD FOLDER TASK``.

``train`` writes what the rank saw to FOLDER/result<WORLD>_<RANK>.pt; ``leave`` lets rank 1 exit before the first step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlinf_core.types import ParallelInfo
from rlinf_engines.trainers.torch_trainer import TorchTrainer

# The rows of each rank's micro-batches, per step: unequal ones, and a rank that has none.
SPLITS = [[[[0, 1], [2], [3]], [[4, 5]]], [[[0, 1, 2, 3, 4, 5]], []], [[[5], [0, 3]], [[1, 2], [4]]]]
TINY = SimpleNamespace(
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate_size=96,
    max_positions=64,
    characters="0123456789+-*= ",
)
MODEL = SimpleNamespace(path=None, dtype="float64", tiny=TINY)
TRAINER = SimpleNamespace(
    lr=1e-3,
    betas=[0.9, 0.95],
    eps=1e-8,
    weight_decay=0.01,
    grad_clip=0.1,
    warmup_steps=0,
    schedule="constant",
    schedule_steps=0,
    min_lr_ratio=0.0,
)


def forward(model: Any, batch: Any) -> Any:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, batch["ids"][:, 1:].unsqueeze(-1)).squeeze(-1)


def loss(outputs: Any, batch: Any) -> Any:
    mask = batch["mask"][:, 1:].bool()
    return -outputs.where(mask, 0.0).sum(), float(mask.sum()), {}


def batch_of(step: int, rows: list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(2, 17, (6, 12), generator=generator)
    lengths = torch.randint(4, 13, (6,), generator=generator)
    mask = (torch.arange(12) < lengths.unsqueeze(1)).long()
    return {"ids": torch.where(mask.bool(), ids, 0)[rows], "mask": mask[rows]}


def train(trainer: TorchTrainer, place: ParallelInfo, folder: Path) -> None:
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step, ranks in enumerate(SPLITS):
        mine = ranks[place.rank] if place.world_size == 2 else ranks[0] + ranks[1]
        sums = {"loss": 0.0, "count": 0.0}
        for rows in mine:
            total, count, _ = trainer.accumulate(batch_of(step, rows), loss)
            sums = {"loss": sums["loss"] + total, "count": sums["count"] + count}
        if place.world_size == 2:  # with the step's gradients gathered; changes no bit
            trainer.offload()
            trainer.onload()
        sums = trainer.reduce(sums)
        result["norms"].append(trainer.step(sums["count"]).grad_norm)
        result["losses"].append(sums["loss"])
    # Names that only one rank has, and floats whose sum depends on the order.
    result["reduced"] = trainer.reduce({"a": 0.1 * (place.rank + 1), f"only{place.rank}": 1.0})
    trainer.save(folder / f"checkpoint{place.world_size}")
    noise = torch.rand(3)
    trainer.load(folder / f"checkpoint{place.world_size}")
    result["noise"] = (noise, torch.rand(3))
    trainer.export(folder / f"export{place.world_size}")
    result["weights"] = dict(trainer.weights())
    torch.save(result, folder / f"result{place.world_size}_{place.rank}.pt")


def main(rank: int, world: int, folder: Path, task: str) -> None:
    meet = f"file://{folder}/meet" if world > 1 else ""
    place = ParallelInfo(rank=rank, world_size=world, init_method=meet, timeout_s=60.0)
    trainer = TorchTrainer(TRAINER)
    trainer.setup(MODEL, forward, place, seed=0)
    if task == "leave":
        if rank == 1:
            os._exit(7)
        trainer.accumulate(batch_of(0, [0]), loss)
        trainer.step(1.0)
    train(trainer, place, folder)
    trainer.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
