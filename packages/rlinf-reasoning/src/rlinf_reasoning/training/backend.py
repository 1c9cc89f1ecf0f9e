"""Trainer backends as the updates use them: loading one, and rows in place of packed batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_core.config import Config
from rlinf_core.registry import Registry
from rlinf_core.types import LossFn, ParallelInfo, Trainer
from rlinf_reasoning.batch import Row, TokenHead, collate, micro_batches, per_row


def load_trainer(cfg: Any, parallel: ParallelInfo, seed: int, *, role: str = "policy", settings: Any = None) -> Trainer:
    """The trainer backend that ``cfg.trainer.name`` names, set up with the model ``cfg.model``.

    ``settings`` are keys of ``cfg.trainer`` with other values. A policy gets the head at the sampling temperature.
    """
    node = cfg.trainer if settings is None else Config({**cfg.trainer.to_dict(), **settings.to_dict()})
    trainer: Trainer = Registry("rlinf.trainers").load(cfg.trainer.name)(node)
    head = TokenHead(cfg.sampling.temperature) if role == "policy" else None
    trainer.setup(cfg.model, head, parallel, seed=seed, role=role)
    return trainer


def accumulate(trainer: Trainer, rows: Sequence[Row], loss_fn: LossFn) -> dict[str, float]:
    """Forward and backward of this replica's rows, in micro-batches.

    Returns ``loss``, ``count`` and metric sums over all replicas. Collective.
    """
    parts = micro_batches(rows, trainer.micro_batch_tokens, trainer.most)
    loss, count, metrics = trainer.accumulate([collate(part) for part in parts], loss_fn)
    return trainer.reduce({"loss": loss, "count": count, **metrics})


def forward_rows(trainer: Trainer, rows: Sequence[Row], name: str) -> dict[str, list[float]]:
    """The output ``name`` of this replica's rows without gradients, by row id; ``Row.places`` numbers each.
    Collective."""
    parts = micro_batches(rows, trainer.micro_batch_tokens, trainer.most)
    outputs = trainer.forward([collate(part) for part in parts])
    return {
        row.id: values
        for part, output in zip(parts, outputs, strict=True)
        for row, values in zip(part, per_row(output[name].cpu(), part), strict=True)
    }


def add_up(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """Add each of ``more`` to ``sums``."""
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
