"""Micro-batches through megatron's schedules (1F1B where there are several stages), and results to all stages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from rlinf_core.types import Batch, LossFn
from rlinf_engines.trainers.megatron.layout import Layout

Outputs = dict[str, Tensor]


@dataclass(slots=True)
class Sums:
    """What micro-batches add up to; ``bad`` is the (value, place in the list) of a loss that is not finite."""

    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    bad: tuple[float, int] | None = None


class Pipeline:
    """The ranks of a replica running micro-batches together.

    ``stage`` runs this rank's stage on a micro-batch (``model.packed_forward``); ``outputs`` makes what the loss reads
    of the last stage's result. All ranks of the replica are given the same micro-batches.
    """

    def __init__(
        self, model: Any, layout: Layout, stage: Callable[[Batch], Tensor], outputs: Callable[[Tensor, Batch], Outputs]
    ) -> None:
        self._model, self._layout, self._stage, self._outputs = model, layout, stage, outputs

    def forward(self, batches: Sequence[Batch]) -> list[Outputs]:
        """The outputs of each micro-batch, without gradients, on every rank of the replica."""

        def step(batch_iterator: Any, model: Any) -> tuple[Tensor, Any]:
            batch = next(batch_iterator)
            result = self._stage(batch)
            return result, lambda last, non_loss_data: self._outputs(last, batch)

        with torch.no_grad():
            found = self._run(step, batches, forward_only=True, collect_non_loss_data=True)
        return self._outputs_to_all(found)

    def backward(self, batches: Sequence[Batch], loss_fn: LossFn) -> Sums:
        """Forward and backward of each micro-batch; the sums are the same on every rank of the replica.

        A loss that is not finite goes backward as zero and is reported in ``bad``: an error on the last stage alone
        would leave the others waiting.
        """
        sums = Sums()
        done = 0

        def step(batch_iterator: Any, model: Any) -> tuple[Tensor, Any]:
            batch = next(batch_iterator)
            result = self._stage(batch)
            return result, lambda last: loss_of(last, batch)

        def loss_of(last: Tensor, batch: Batch) -> tuple[Tensor, Tensor, None]:
            nonlocal done
            loss, counted, metrics = loss_fn(self._outputs(last, batch), batch)
            value = float(loss.detach())
            if not math.isfinite(value):
                sums.bad = sums.bad or (value, done)
            sums.loss += value
            sums.count += float(counted)
            for name, more in metrics.items():
                sums.metrics[name] = sums.metrics.get(name, 0.0) + float(more)
            done += 1
            # Every micro-batch goes backward, one without a gradient of its own (all masked) too: earlier stages wait
            # for what comes back. The sum makes a tensor that is no view, which the schedule may free.
            goes = loss.requires_grad and math.isfinite(value)
            return (loss * 1.0 if goes else last.sum() * 0.0), torch.zeros((), dtype=torch.int), None

        self._run(step, batches, forward_only=False)
        return self._from_last(sums)

    def _run(self, step: Any, batches: Sequence[Batch], **options: Any) -> list[Any]:
        if not batches:
            return []
        run = get_forward_backward_func()
        with warnings.catch_warnings():
            # megatron's own layers leave the group out in places; it is the one that they then take.
            warnings.filterwarnings("ignore", "Warning: tp_group is None", DeprecationWarning)
            # Shapes are agreed on per micro-batch (variable_seq_lengths), so the two sizes are not read.
            found: list[Any] = run(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=1,
                micro_batch_size=1,
                **options,
            )
        return found

    def _from_last(self, value: Any) -> Any:
        """``value`` of the last stage, on every stage."""
        if self._layout.pp == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._last_rank(), group=self._layout.pipeline)
        return box[0]

    def _outputs_to_all(self, found: list[Outputs]) -> list[Outputs]:
        """The last stage's outputs on every stage: their names and shapes first, then the numbers, format by format."""
        if self._layout.pp == 1:
            return found
        kinds = self._from_last([[(name, x.dtype, tuple(x.shape)) for name, x in out.items()] for out in found])
        received: list[Outputs] = [{} for _ in kinds]
        for dtype in sorted({kind for out in kinds for _, kind, _ in out}, key=str):
            places = [(i, name, size) for i, out in enumerate(kinds) for name, kind, size in out if kind == dtype]
            total = sum(math.prod(size) for _, _, size in places)
            device = next(self._model.parameters()).device
            flat = torch.empty(total, dtype=dtype, device=device)
            if self._layout.last:
                flat = torch.cat([found[i][name].reshape(-1) for i, name, _ in places])
            dist.broadcast(flat, src=self._last_rank(), group=self._layout.pipeline)
            parts = flat.split([math.prod(size) for _, _, size in places])
            for (i, name, size), part in zip(places, parts, strict=True):
                received[i][name] = part.view(size)
        return received

    def _last_rank(self) -> int:
        return self._layout.rank_of(self._layout.pp - 1, self._layout.part)
