"""A frozen reference policy, and the KL to it as a part of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf_algos import kl_penalty
from rlinf_core.config import Config
from rlinf_core.registry import Registry
from rlinf_core.types import ParallelInfo, Sample, Trainer
from rlinf_reasoning.batch import Row, TokenHead
from rlinf_reasoning.training.backend import forward_rows
from rlinf_reasoning.training.rows import row_of

BACKEND = "torch"


class Reference:
    """A frozen policy: a trainer backend ``torch`` that every rank holds whole, whatever trains the policy.

    ``path`` is a Hugging Face directory. It has the memory of one model beside the trainer's and is offloaded while it
    is not used.
    """

    def __init__(self, cfg: Any, path: Path, parallel: ParallelInfo, seed: int) -> None:
        model = Config({**cfg.model.to_dict(), "path": str(path)})
        settings = Config({**cfg.trainer.to_dict(), "name": BACKEND, "sharding": "ddp"})
        self._backend: Trainer = Registry("rlinf.trainers").load(BACKEND)(settings)
        alone = replace(parallel, rank=0, world_size=1, init_method="")
        self._backend.setup(model, TokenHead(cfg.sampling.temperature), alone, seed=seed)
        self._backend.offload()

    def add_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the reference's log-probs of their response tokens. Not collective."""
        self._backend.onload()
        found = forward_rows(self._backend, rows, "logprobs")
        self._backend.offload()
        return [replace(row, ref_logprobs=found[row.id]) for row in rows]

    def close(self) -> None:
        self._backend.close()


def kl_of(rows: Sequence[Row], logprobs: dict[str, list[float]], kind: str) -> dict[str, list[float]]:
    """The KL estimate of each response token of rows that have ``ref_logprobs``, by row id."""
    found = {}
    for row in rows:
        mine = torch.tensor([logprobs[row.id]], dtype=torch.float64)
        theirs = torch.tensor([list(row.ref_logprobs)], dtype=torch.float64)
        found[row.id] = kl_penalty(mine, theirs, kind)[0].tolist()
    return found


def add_kl(trainer: Trainer, reference: Reference, samples: Sequence[Sample], kind: str) -> None:
    """Set ``info["kl"]`` of each sample: the KL estimate per response token, of the policy as it is now to the
    reference. For a critic, whose returns count it. Collective."""
    rows = [row_of(sample) for sample in trainer.share(samples)]
    found = kl_of(reference.add_logprobs(rows), forward_rows(trainer, rows, "logprobs"), kind)
    for sample in samples:
        sample.info["kl"] = found[sample.id]
