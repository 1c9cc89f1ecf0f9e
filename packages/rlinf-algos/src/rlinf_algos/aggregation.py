"""From a loss per token to a sum and a count.

A mean of means depends on how a batch was cut; a sum and a count do not. Gradients of the sum are accumulated over
micro-batches and ranks, counts are added up, and the division happens once.

Shape legend: B sequences, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import sequence_sums, zero_masked

Aggregation = Literal["token_mean", "sequence_mean_of_token_means", "sequence_mean_of_token_sums", "constant"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
# Metrics that say over what the others are sums.
COUNTS = ("tokens", "sequences")


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss as a sum and its count, with metrics that are sums too.

    ``sum`` is a scalar tensor to call ``backward`` on; ``count`` is what the sum over *all* micro-batches and ranks
    is divided by, once. ``metrics`` are detached scalar sums; those named in ``metrics`` are over
    ``metrics["tokens"]`` tokens (or ``metrics["sequences"]``, where the algorithm works on sequences). Unpacks as
    ``loss_sum, count, metrics``.
    """

    sum: Tensor
    count: float
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[object]:
        return iter((self.sum, self.count, self.metrics))

    def __add__(self, other: LossSum) -> LossSum:
        """The loss of two micro-batches (or ranks) together: sums, counts and metrics add."""
        if not isinstance(other, LossSum):
            return NotImplemented
        names = dict.fromkeys((*self.metrics, *other.metrics))
        zero = torch.zeros(())
        metrics = {name: self.metrics.get(name, zero) + other.metrics.get(name, zero) for name in names}
        return LossSum(self.sum + other.sum, self.count + other.count, metrics)

    def __radd__(self, other: object) -> LossSum:
        """So that ``sum(parts)`` works, which begins at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def plus(self, other: LossSum, coefficient: float = 1.0) -> LossSum:
        """Add another term *of the same tokens* (KL, entropy): the sums add, the count stays."""
        if other.count != self.count:
            raise AlgorithmError(
                f"terms of one loss must have one count, got {self.count:g} and {other.count:g}:"
                " use the same mask and aggregation for each"
            )
        return LossSum(self.sum + coefficient * other.sum, self.count, {**self.metrics, **other.metrics})

    def over(self, count: float | Tensor) -> Tensor:
        """sum / ``count``: this part of a loss whose count over all micro-batches and ranks is ``count``.

        Zero, with zero gradient, when ``count`` is 0: nothing is left to train on.
        """
        n = float(count)
        if not (math.isfinite(n) and n >= 0):
            raise AlgorithmError(f"count must be a finite number of at least 0, got {n}")
        if n == 0 and self.count:
            raise AlgorithmError(f"count is 0, but this part alone counts {self.count:g}: it must be the whole count")
        return self.sum / n if n else self.sum * 0.0

    def mean(self) -> Tensor:
        """sum / count; zero (with zero gradient) when there is nothing to train on."""
        return self.sum / self.count if self.count else self.sum

    def metric_means(self) -> dict[str, float]:
        """Every metric divided by ``tokens`` (where there is none, by ``sequences``), as floats; the two themselves as
        they are."""
        unit = next((name for name in COUNTS if name in self.metrics), None)
        whole = max(float(self.metrics[unit]), 1.0) if unit else 1.0
        return {k: float(v) if k in COUNTS else float(v) / whole for k, v in self.metrics.items()}


def aggregate(
    losses: Tensor,
    mask: Tensor,
    mode: str = "token_mean",
    *,
    divisor: float | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Aggregate a loss per token into (sum, count).

    ============================== ======================================= ==========================
    mode                           sum                                     count
    ============================== ======================================= ==========================
    ``token_mean``                 sum over tokens                         tokens (DAPO)
    ``sequence_mean_of_token_means``  sum over sequences of the token mean sequences (GRPO)
    ``sequence_mean_of_token_sums``   sum over sequences of the token sum  sequences
    ``constant``                   sum over tokens / ``divisor``           sequences (Dr.GRPO)
    ============================== ======================================= ==========================

    A sequence without a true position is not counted: filtered sequences and padding rows change nothing.

    Args:
        losses: [B, T].
        mask: [B, T] bool or integer; false positions touch neither value nor gradient, also when NaN or infinite.
        mode: see above.
        divisor: for ``constant`` alone: a fixed number such as the response limit, never a property of the batch.
        segments: [B, T] integers when rows hold several packed sequences.

    Returns:
        (scalar sum in float32 or float64, count). Zero and zero when nothing is true.
    """
    _check.choice("mode", mode, AGGREGATIONS)
    _check.floating(losses=losses)
    _check.ndim(2, "[B, T]", losses=losses)
    _check.same_shape(losses=losses, mask=mask)
    check_divisor(mode, divisor)
    mask = _check.boolean(mask)
    _check.integral(segments=segments)
    _check.same_shape(mask=mask, segments=segments)
    if mode == "token_mean":
        return zero_masked(losses, mask).sum(), float(mask.sum())
    sums, counts, _ = sequence_sums(losses, mask, segments)
    sequences = float((counts > 0).sum())
    if mode == "sequence_mean_of_token_means":
        return (sums / counts.clamp(min=1)).sum(), sequences
    if mode == "constant":
        assert divisor is not None
        return sums.sum() / divisor, sequences
    return sums.sum(), sequences


def check_divisor(mode: str, divisor: float | None) -> None:
    """Refuse ``constant`` without its divisor, and a divisor that would be ignored."""
    if mode == "constant":
        if divisor is None:
            raise AlgorithmError("aggregation 'constant' needs divisor, e.g. the response limit")
        _check.positive(divisor=divisor)
    elif divisor is not None:
        raise AlgorithmError(f"divisor is read by aggregation 'constant' alone, not by {mode!r}")
