"""Entropy bonus and controllers. Controllers are pure: a state goes in, the next one comes out, and a checkpoint can
hold it.

Shape legend: B sequences, T positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.aggregation import LossSum, aggregate
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import masked_sum


def entropy_loss(
    entropy: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token_mean",
    divisor: float | None = None,
    segments: Tensor | None = None,
) -> LossSum:
    """Entropy bonus as a loss: the sum of -H, so that *adding* ``coefficient`` times it raises the entropy.

    ``entropy`` [B, T] with gradients, from ``token_logprobs_and_entropy``. Metric ``entropy``: sum of H over
    ``tokens``.
    """
    _check.floating(entropy=entropy)
    mask = _check.boolean(mask)
    total, count = aggregate(-entropy, mask, aggregation, divisor=divisor, segments=segments)
    return LossSum(total, count, {"tokens": mask.sum(), "entropy": masked_sum(entropy.detach(), mask)})


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """Adaptive entropy coefficient (Skywork-OR1, arXiv 2505.22312).

    Below ``target`` the coefficient grows by ``step`` each update, above it falls by ``step``, between 0 and
    ``maximum``; the bonus is applied only while the entropy is at or below the target (``active``).
    """

    target: float
    step: float = 0.005
    maximum: float = 1.0
    coefficient: float = 0.0
    active: bool = False

    def __post_init__(self) -> None:
        _check.not_negative(target=self.target, coefficient=self.coefficient)
        _check.positive(step=self.step, maximum=self.maximum)

    @property
    def applied(self) -> float:
        """The coefficient to use in the next loss."""
        return self.coefficient if self.active else 0.0

    def update(self, entropy: float) -> EntropyControl:
        """The next state, after a batch whose mean entropy was ``entropy``."""
        if not math.isfinite(entropy):
            raise AlgorithmError(f"entropy must be finite, got {entropy}")
        change = self.step if entropy < self.target else -self.step
        coefficient = min(max(self.coefficient + change, 0.0), self.maximum)
        return replace(self, coefficient=coefficient, active=entropy <= self.target)


@dataclass(frozen=True, slots=True)
class KLControl:
    """Adaptive KL coefficient (Ziegler et al., arXiv 1909.08593).

    coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon.
    """

    coefficient: float
    target: float
    horizon: int = 10_000

    def __post_init__(self) -> None:
        _check.not_negative(coefficient=self.coefficient)
        _check.positive(target=self.target, horizon=self.horizon)

    def update(self, kl: float, samples: int) -> KLControl:
        """The next state, after ``samples`` samples whose mean KL was ``kl``."""
        if not math.isfinite(kl):
            raise AlgorithmError(f"kl must be finite, got {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1 + error * samples / self.horizon))
