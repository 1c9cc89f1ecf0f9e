"""One rank of the data-parallel tests: ``data_parallel_rank.py RANK WORLD FOLDER CASES``.

``CASES`` is a JSON list; each case opens a group of its own. What comes out goes to ``FOLDER/NAME_WORLD_RANK.pt``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import trainer_cases as cases

from rlinf_core.errors import RLinfError
from rlinf_core.types import ParallelInfo
from rlinf_engines.trainers.torch_trainer import TorchTrainer

# Which rows each micro-batch of each rank has: unequal numbers of rows and of micro-batches.
PARTS = [[[0], [1, 2, 3], [6]], [[4, 5, 7]]]


def make(case: dict[str, Any], place: ParallelInfo, seed: int = 0) -> TorchTrainer:
    """A trainer; those of one case meet in the same place, one after the other."""
    family, dtype = case.get("family", "qwen2"), case.get("dtype", "float32")
    model = cases.model_config(family, dtype, **case.get("sizes", {}))
    trainer = TorchTrainer(cases.trainer_config(**case.get("keys", {})))
    role = case.get("role", "policy")
    trainer.setup(model, cases.head if role == "policy" else None, place, seed=seed, role=role)
    return trainer


def parts_of(place: ParallelInfo) -> list[list[int]]:
    return PARTS[place.rank] if place.world_size == 2 else [[0, 1, 2], [3, 4, 5, 6, 7]]


def train(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """Two steps and what they give."""
    trainer = make(case, place)
    numbers = cases.train(trainer, parts_of(place), role=case.get("role", "policy"))
    result = {"numbers": vars(numbers), "most": trainer.most(3 + place.rank), "shared": trainer.share([place.rank])}
    # Names that only one rank has, and floats whose sum depends on the order.
    result["reduced"] = trainer.reduce({"a": 0.1 * (place.rank + 1), f"only{place.rank}": 1.0})
    result["bytes"] = sum(t.untyped_storage().nbytes() for t in trainer._device_tensors())
    trainer.close()
    return result


def resume(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """Three steps with a checkpoint after the first; then those after the checkpoint again from it, by a trainer that
    began elsewhere; then, where there is one, from the checkpoint at ``case["from"]``."""
    role = case.get("role", "policy")

    def go_on(trainer: TorchTrainer) -> tuple[list[Any], torch.Tensor]:
        rows = parts_of(place)
        found: list[Any] = []
        for step in (1, 2):
            batches = [cases.collate([cases.make_rows(step=step)[i] for i in part]) for part in rows]
            total, count, _ = trainer.accumulate(batches, cases.LOSSES[role])
            sums = trainer.reduce({"loss": total, "count": count})
            found += [sums["loss"], trainer.step(sums["count"])]
        return found, torch.rand(3)

    def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in trainer.weights()}

    trainer = make(case, place)
    cases.train(trainer, parts_of(place), steps=1, role=role)
    path = folder / f"{case['name']}_{place.world_size}"
    trainer.save(path)
    trainer.offload()
    trainer.onload()
    straight = go_on(trainer), weights(trainer)
    trainer.close()
    trainer = make(case, place, seed=5)
    trainer.load(path)
    again = go_on(trainer), weights(trainer)
    elsewhere = None
    if case.get("from"):
        trainer.load(Path(case["from"]))
        elsewhere = go_on(trainer), weights(trainer)
    trainer.export(folder / f"{case['name']}_{place.world_size}_export")
    trainer.close()
    return {"straight": straight, "again": again, "elsewhere": elsewhere}


def failing(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """What every rank is told when one rank's part is bad."""
    trainer = make(case, place)
    told = {}
    batch = cases.collate(cases.make_rows()[:2])

    def bad(outputs: Any, batch: Any) -> Any:
        value = outputs["logprobs"].sum()
        # The root's slope at zero is infinite while its value is not.
        return (value * 0.0).abs().sqrt() if place.rank == 1 else value, 1.0, {}

    calls = {
        "gradient": lambda: (trainer.accumulate([batch], bad), trainer.step(1.0)),
        "checkpoint": lambda: trainer.load(folder / "nowhere" if place.rank == 0 else Path(case["from"])),
        "save": lambda: trainer.save(Path("/dev/null/x")),
    }
    for name, call in calls.items():
        try:
            call()
        except RLinfError as error:
            told[name] = f"{type(error).__name__}: {error}"
        except OSError as error:
            told[name] = f"{type(error).__name__}: {error}"
    numbers = cases.train(trainer, parts_of(place))
    trainer.close()
    return {"told": told, "numbers": vars(numbers)}


def large(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """The norm of a gradient of many equal elements, and what it is."""
    trainer = make(case, place)
    parameters = list(trainer.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1 if case["keys"]["sharding"] == "fsdp2" else 0.05)
    elements = sum(parameter.numel() for parameter in parameters)
    norm = trainer.step(1.0).grad_norm
    trainer.close()
    return {"norm": norm, "exact": math.sqrt(elements) * float(torch.tensor(0.1)), "elements": elements}


def leave(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """What rank 0 is told when rank 1 dies."""
    trainer = make(case, place)
    if place.rank == 1:
        os._exit(7)
    try:
        trainer.accumulate([cases.collate(cases.make_rows()[:2])], cases.policy_loss)
        trainer.step(1.0)
    except RLinfError as error:
        return {"told": str(error), "elsewhere": error.elsewhere}
    return {"told": "nothing"}


TASKS = {"train": train, "resume": resume, "failing": failing, "large": large, "leave": leave}


def main(rank: int, world: int, folder: Path, todo: list[dict[str, Any]]) -> None:
    for case in todo:
        meet = f"file://{folder}/meet_{case['name']}" if world > 1 else ""
        place = ParallelInfo(rank=rank, world_size=world, init_method=meet, timeout_s=60.0)
        result = TASKS[case["task"]](case, place, folder)
        torch.save(result, folder / f"{case['name']}_{world}_{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
