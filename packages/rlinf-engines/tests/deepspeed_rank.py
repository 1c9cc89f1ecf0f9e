"""One rank of the DeepSpeed tests: ``deepspeed_rank.py RANK WORLD FOLDER CASES``.

``CASES`` is a JSON list; each case opens a group of its own. What comes out goes to ``FOLDER/NAME_WORLD_RANK.pt``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import trainer_cases as cases

from rlinf_core.errors import RLinfError
from rlinf_core.types import ParallelInfo
from rlinf_engines.trainers.deepspeed_trainer import DeepSpeedTrainer

KEYS = {
    "zero_stage": 2,
    "offload_optimizer": False,
    "offload_parameters": False,
    "bucket_elements": 50_000_000,
    "persistence_elements": 1000,
}
# Which rows each micro-batch of each rank has: unequal numbers of rows and of micro-batches; or none on one rank.
PARTS = {
    "uneven": [[[0], [1, 2, 3], [6]], [[4, 5, 7]]],
    "idle": [[[0, 1, 2, 3], [4, 5, 6, 7]], []],
}


def make(case: dict[str, Any], place: ParallelInfo, seed: int = 0) -> DeepSpeedTrainer:
    if place.world_size > 1:  # a meeting point serves one group only
        place = replace(place, init_method=f"{place.init_method}_{seed}")
    model = cases.model_config(case.get("family", "qwen2"), case.get("dtype", "float32"))
    trainer = DeepSpeedTrainer(cases.trainer_config("deepspeed", **{**KEYS, **case.get("keys", {})}))
    role = case.get("role", "policy")
    trainer.setup(model, cases.head if role == "policy" else None, place, seed=seed, role=role)
    return trainer


def parts_of(case: dict[str, Any], place: ParallelInfo) -> list[list[int]]:
    return PARTS[case.get("parts", "uneven")][place.rank] if place.world_size == 2 else [[0, 1, 2], [3, 4, 5, 6, 7]]


def train(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """Two steps and what they give."""
    trainer = make(case, place)
    numbers = cases.train(trainer, parts_of(case, place), role=case.get("role", "policy"))
    size = sum(s.nbytes() for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in state(trainer)}.values())
    trainer.close()
    return {"numbers": vars(numbers), "bytes": size}


def state(trainer: DeepSpeedTrainer) -> list[torch.Tensor]:
    return [t for averages in trainer.optimizer.state.values() for t in averages.values() if t.dim()]


def resume(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """Three steps with a checkpoint after the first; then those after the checkpoint again from it, by a trainer that
    began elsewhere; then from the checkpoint at ``case["from"]``."""

    def go_on(trainer: DeepSpeedTrainer) -> tuple[list[Any], torch.Tensor, dict[str, torch.Tensor]]:
        found: list[Any] = []
        for step in (1, 2):
            batches = [cases.collate([cases.make_rows(step=step)[i] for i in part]) for part in parts_of(case, place)]
            total, count, _ = trainer.accumulate(batches, cases.policy_loss)
            trainer.offload()
            trainer.onload()
            sums = trainer.reduce({"loss": total, "count": count})
            info = trainer.step(sums["count"])
            found += [sums["loss"], info.grad_norm]
        return found, torch.rand(3), {name: tensor.clone() for name, tensor in trainer.weights()}

    trainer = make(case, place)
    cases.train(trainer, parts_of(case, place), steps=1)
    path = folder / f"{case['name']}_{place.world_size}"
    trainer.save(path)
    straight = go_on(trainer)
    trainer.close()
    trainer = make(case, place, seed=5)
    trainer.load(path)
    again = go_on(trainer)
    elsewhere = None
    if case.get("from"):
        trainer.load(Path(case["from"]))
        elsewhere = go_on(trainer)
    trainer.export(folder / f"{case['name']}_{place.world_size}_export")
    trainer.close()
    return {"straight": straight, "again": again, "elsewhere": elsewhere}


def failing(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """What every rank is told when one rank's gradient is bad, and that the trainer is as it was then."""
    trainer = make(case, place)
    batch = cases.collate(cases.make_rows()[:2])

    def bad(outputs: Any, batch: Any) -> Any:
        value = outputs["logprobs"].sum()
        # The root's slope at zero is infinite while its value is not.
        return (value * 0.0).abs().sqrt() if place.rank == 1 else value, 1.0, {}

    told = ""
    try:
        trainer.accumulate([batch], bad)
        trainer.step(1.0)
    except RLinfError as error:
        told = f"{type(error).__name__}: {error}"
    numbers = cases.train(trainer, parts_of(case, place))
    trainer.close()
    return {"told": told, "numbers": vars(numbers)}


def leave(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    trainer = make(case, place)
    if place.rank == 1:
        os._exit(7)
    trainer.accumulate([cases.collate(cases.make_rows()[:2])], cases.policy_loss)
    trainer.step(1.0)
    return {}


TASKS = {"train": train, "resume": resume, "failing": failing, "leave": leave}


def main(rank: int, world: int, folder: Path, todo: list[dict[str, Any]]) -> None:
    for case in todo:
        meet = f"file://{folder}/meet_{case['name']}" if world > 1 else ""
        device = case.get("device", "cpu")
        place = ParallelInfo(rank=rank, world_size=world, init_method=meet, device=device, timeout_s=60.0)
        result = TASKS[case["task"]](case, place, folder)
        torch.save(result, folder / f"{case['name']}_{world}_{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
