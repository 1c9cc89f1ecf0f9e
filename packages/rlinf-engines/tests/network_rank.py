"""One rank of the tests of networks that are no causal LM: ``network_rank.py RANK WORLD FOLDER CASES``.

``CASES`` is a JSON list; each case opens a group of its own. What comes out goes to ``FOLDER/NAME_RANK.pt``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import network_cases as nets
import torch
import trainer_cases as cases

from rlinf_core.errors import RLinfError
from rlinf_core.types import ParallelInfo

DEEPSPEED = {
    "offload_optimizer": False,
    "offload_parameters": False,
    "bucket_elements": 50_000_000,
    "persistence_elements": 20,
}
# Which rows each micro-batch of each rank has: unequal numbers of both; and none on one rank.
PARTS = {"uneven": [[[0], [1, 2, 3], [6]], [[4, 5, 7]]], "idle": [[[0, 1, 2, 3], [4, 5, 6, 7]], []]}


def config(name: str, **keys: Any) -> Any:
    """A ``trainer`` config node of a backend."""
    return cases.trainer_config(name, **({**DEEPSPEED, **keys} if name == "deepspeed" else keys))


def make(name: str, place: ParallelInfo, kind: str = "mlp", dtype: str = "float32", **keys: Any) -> Any:
    """A trainer that is set up."""
    if name == "deepspeed":
        from rlinf_engines.trainers.deepspeed_trainer import DeepSpeedTrainer as Trainer
    else:
        from rlinf_engines.trainers.torch_trainer import TorchTrainer as Trainer
    trainer = Trainer(config(name, **keys))
    trainer.setup(nets.spec(kind, dtype), None, place, seed=0)
    return trainer


def run(case: dict[str, Any], place: ParallelInfo, folder: Path) -> dict[str, Any]:
    """Three steps and what they give, a bad gradient on one rank, a checkpoint and what comes after it, twice."""
    trainer = make(case["trainer"], place, case["kind"], case["dtype"], **case["keys"])
    parts = PARTS[case["parts"]][place.rank]
    result: dict[str, Any] = {"found": vars(nets.train(trainer, case["kind"], parts, case["dtype"])), "told": ""}
    result["gathered"] = trainer.gather({"rank": place.rank})
    path = folder / case["name"]
    trainer.save(path)
    trainer.export(folder / f"{case['name']}_export")

    def bad(outputs: Any, batch: Any) -> Any:
        value = outputs["out"].sum()
        # The root's slope at zero is infinite while its value is not.
        return (value * 0.0).abs().sqrt() if place.rank == 1 else value, 1.0, {}

    def go_on() -> tuple[Any, dict[str, torch.Tensor]]:
        batches = [nets.make_batch(case["kind"], case["dtype"], part, 7) for part in parts]
        total, count, _ = trainer.accumulate(batches, nets.loss)
        trainer.offload()
        trainer.onload()
        if case["kind"] == "mlp":
            trainer.update_buffers(nets.observe)
        sums = trainer.reduce({"loss": total, "count": count})
        return (sums, trainer.step(sums["count"])), nets.weights(trainer)

    try:
        trainer.accumulate([nets.make_batch(case["kind"], case["dtype"], [0])], bad)
        trainer.step(1.0)
    except RLinfError as error:
        result["told"] = f"{type(error).__name__}: {error}"
    result["straight"] = go_on()
    trainer.load(path)
    result["again"] = go_on()
    if case["from"]:
        trainer.load(Path(case["from"]))
        result["elsewhere"] = go_on()
    trainer.close()
    return result


def main(rank: int, world: int, folder: Path, todo: list[dict[str, Any]]) -> None:
    place = ParallelInfo(rank=rank, world_size=world, timeout_s=60.0)
    for case in todo:
        meet = replace(place, init_method=f"file://{folder}/meet_{case['name']}" if world > 1 else "")
        torch.save(run(case, meet, folder), folder / f"{case['name']}_{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
