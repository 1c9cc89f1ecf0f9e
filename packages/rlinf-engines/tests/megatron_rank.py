"""One rank of the Megatron tests, run as a script: ``megatron_rank.py RANK WORLD FOLDER TASK:ARGUMENT,... ...``.

Tasks run one after another in the same process; each writes what the rank saw to FOLDER/TASK_<RANK>.pt. Arguments begin
with a layout, written TPxPP, with ``s`` for sequence parallel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer_cases as cases

from rlinf_core.errors import NonFiniteError
from rlinf_core.types import Batch, ParallelInfo, VocabShard
from rlinf_engines.trainers.megatron.trainer import MegatronTrainer

PARTS = [[0, 1, 2], [3, 4], [5, 6, 7]]
OTHER_PARTS = [[7, 0], [1, 6, 2, 5], [3], [4]]


class Ranks:
    """Sets trainers up one after another, each with a rendezvous of its own."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self._count = 0

    def trainer(self, layout: str, model: Any, role: str = "policy", head: Any = cases.head, **keys: Any) -> Any:
        sequence_parallel = layout.endswith("s")
        tp, pp = (int(number) for number in layout.rstrip("s").split("x"))
        self._count += 1
        meet = f"file://{self.folder}/meet{self._count}" if self.world > 1 else ""
        place = ParallelInfo(rank=self.rank, world_size=self.world, init_method=meet, timeout_s=120.0)
        cfg = cases.trainer_config("megatron", tp=tp, pp=pp, sequence_parallel=sequence_parallel, **keys)
        trainer = MegatronTrainer(cfg)
        trainer.setup(model, head if role == "policy" else None, place, seed=0, role=role)
        return trainer


def own_parts(trainer: Any, parts: list[list[int]]) -> list[list[int]]:
    """The micro-batches of this rank's replica."""
    return [part for i, part in enumerate(parts) if i % trainer.replicas == trainer.replica]


def whole_logits(logits: torch.Tensor, batch: Batch, shard: VocabShard) -> dict[str, torch.Tensor]:
    """A head that gives log-probs and, without gradients, the logits [M, V] of the whole vocabulary."""
    outputs = cases.head(logits, batch, shard)
    if shard.group is None:
        return {**outputs, "logits": logits.detach()}
    parts: list[Any] = [None] * dist.get_world_size(shard.group)
    dist.all_gather_object(parts, logits.detach(), group=shard.group)
    return {**outputs, "logits": torch.cat(parts, dim=1)}


def steps(ranks: Ranks, wanted: list[str]) -> dict[str, Any]:
    """Two optimizer steps for each "LAYOUT FAMILY ROLE"; roles differ in how the rows are cut into micro-batches."""
    found: dict[str, Any] = {}
    for case in wanted:
        layout, family, role = case.split()
        parts, recompute = (PARTS, False) if role == "policy" else (OTHER_PARTS, True)
        model = cases.model_config(family, layers=3)
        trainer = ranks.trainer(layout, model, role, activation_checkpointing=recompute)
        found[case] = cases.train(trainer, own_parts(trainer, parts), role=role)
        trainer.close()
    return found


def logits(ranks: Ranks, wanted: list[str]) -> dict[str, Any]:
    """Logits and gradients of one micro-batch for each "LAYOUT FAMILY"."""
    found: dict[str, Any] = {}
    for case in wanted:
        layout, family = case.split()
        trainer = ranks.trainer(layout, cases.model_config(family, layers=3), head=whole_logits)
        batch = cases.collate(cases.make_rows())
        outputs = trainer.forward([batch])[0]
        trainer.accumulate([batch], cases.policy_loss)
        found[case] = (outputs["logits"], trainer.gradients())
        trainer.close()
    return found


def state(ranks: Ranks, layouts: list[str]) -> dict[str, Any]:
    """Save after a step in the first layout; go on in the same and, from the file, in each of the others."""
    found: dict[str, Any] = {}
    model = cases.model_config("qwen2", layers=3)
    checkpoint = ranks.folder / "checkpoint"
    for layout in layouts:
        trainer = ranks.trainer(layout, model)
        first = layout == layouts[0]
        if first:
            cases.train(trainer, own_parts(trainer, PARTS), steps=1)
            trainer.offload()
            trainer.onload()
            trainer.save(checkpoint)
            trainer.export(ranks.folder / "export")
            noise = torch.rand(3)
            trainer.load(checkpoint)
            found["noise"] = bool(torch.equal(noise, torch.rand(3)))
            trainer.offload()
            trainer.onload()
        else:
            trainer.load(checkpoint)
        found[layout] = cases.train(trainer, own_parts(trainer, PARTS), steps=1)
        found[f"{layout} steps"] = trainer.steps_done
        trainer.close()
    return found


def shared(ranks: Ranks, layouts: list[str]) -> dict[str, Any]:
    """What the ranks of a replica tell each other, and which losses and gradients are refused."""
    found: dict[str, Any] = {}
    for layout in layouts:
        trainer = ranks.trainer(layout, cases.model_config("llama", layers=3))
        found[layout] = {
            "replica": (trainer.replica, trainer.replicas),
            "share": trainer.share([f"row{ranks.rank}"]),
            "most": trainer.most(ranks.rank + 1),
            "reduce": trainer.reduce({"a": float(trainer.replica + 1)}),
            "loss": refused(lambda: trainer.accumulate(batches(), infinite_loss)),  # noqa: B023
            "gradient": refused(lambda: spoiled_step(trainer)),  # noqa: B023
            # Both were refused as a whole: what comes next is as if they had not been.
            "after": cases.train(trainer, own_parts(trainer, PARTS)),
        }
        trainer.close()
    return found


def batches() -> list[dict[str, Any]]:
    return cases.split(cases.make_rows(), [3, 3])


def infinite_loss(outputs: dict[str, torch.Tensor], batch: Batch) -> Any:
    total, count, metrics = cases.policy_loss(outputs, batch)
    return (total / 0.0 if "p3/0" in batch["ids"] else total), count, metrics


def spoiled_step(trainer: Any) -> None:
    """A step in which one parameter of the last layer has a gradient that is no number."""
    trainer.accumulate(batches(), cases.policy_loss)
    for name, total in trainer._parameters.named_gradients():
        if name == "model.layers.2.mlp.down_proj.weight":
            total.view(-1)[0] = float("nan")
    trainer.step(1.0)


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except NonFiniteError as error:
        return str(error)
    return ""


def leave(ranks: Ranks, layouts: list[str]) -> dict[str, Any]:
    """Rank 1 exits before the first micro-batch."""
    trainer = ranks.trainer(layouts[0], cases.model_config("llama"))
    if ranks.rank == 1:
        os._exit(7)
    trainer.accumulate(batches(), cases.policy_loss)
    return {}


def path(ranks: Ranks, layouts: list[str]) -> dict[str, Any]:
    """One step on the model in the directory that comes after the layout."""
    layout, directory = layouts
    trainer = ranks.trainer(layout, cases.model_config(path=directory))
    numbers = cases.train(trainer, own_parts(trainer, PARTS), steps=1)
    trainer.close()
    return {"numbers": numbers}


TASKS = {"steps": steps, "logits": logits, "state": state, "shared": shared, "leave": leave, "path": path}


def main(rank: int, world: int, folder: Path, tasks: list[str]) -> None:
    ranks = Ranks(rank, world, folder)
    for task in tasks:
        name, _, arguments = task.partition(":")
        torch.save(TASKS[name](ranks, arguments.split(",")), folder / f"{name}_{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
