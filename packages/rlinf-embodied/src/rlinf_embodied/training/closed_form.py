"""The loss of a micro-batch on a CPU with its gradients in closed form.

A minibatch of a few hundred decisions takes the time of its calls, not of its numbers: autograd goes through some
eighty small operations for what is thirty here, of numpy. The formulas, and what is reported, are those of
``rlinf_algos`` (``ppo_clip_loss``, ``value_loss``, ``entropy_loss``), which carry on wherever this does not apply.

Shape legend: b decisions, U units per decision (``levels``), V values per decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_algos.catalogue import DAPO, PPO, VALUE
from rlinf_algos.masking import EXP_LIMIT

FORMATS = (torch.float32, torch.float64)

Array = NDArray[Any]


class ClosedForm:
    """PPO's clipped loss with aggregation=token_mean, the critic's loss and the entropy bonus.

    Args:
        options: of the policy loss.
        critic: options of the critic's loss, ``None`` without a critic.
        entropy: weight of the entropy bonus.
        value: weight of the critic's loss.
    """

    def __init__(self, options: Any, critic: Any, entropy: float, value: float) -> None:
        self.options = options
        self.critic = critic
        self.entropy = entropy
        self.value = value

    @staticmethod
    def applies(policy: Any, options: Any, critic: Any) -> bool:
        """Whether these are the losses that are known here, and no plugin's."""
        return (policy is PPO or policy is DAPO) and options.aggregation == "token_mean" and critic in (None, VALUE)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, values: Tensor | None, batch: Mapping[str, Any]
    ) -> tuple[Tensor, float, dict[str, float]] | None:
        """(loss sum, count, sums to report); ``None`` where the general way is to be gone: not on a CPU, or ratios that
        are extreme (they go on as a line there) or no numbers.

        ``logprobs`` and ``entropy`` are [b, U], ``values`` [b, V]; ``batch`` is what ``UpdateLoss`` reads.
        """
        if not logprobs.is_cpu or logprobs.dtype not in FORMATS:
            return None
        mask = batch["mask"].numpy()
        count = int(np.count_nonzero(mask))
        kept = None if count == mask.size else mask
        with np.errstate(all="ignore"):
            found = self._policy(logprobs, batch, kept)
            if found is None:
                return None
            loss, gradient, noted = found
            noted["tokens"] = float(count)
            bonus = _masked(_array(entropy), kept)
            noted["entropy"] = float(bonus.sum())
            total = loss - self.entropy * noted["entropy"]
            inputs, gradients = [logprobs], [gradient]
            if self.entropy:
                inputs.append(entropy)
                gradients.append(_masked(np.full_like(bonus, -self.entropy), kept))
            if values is not None:
                value_mask = batch.get("value_mask")
                if value_mask is not None:
                    kept = None if bool(value_mask.all()) else value_mask.numpy()
                loss, gradient, more = self._values(_array(values), batch, kept)
                weight = self.value * batch["value_share"]
                noted |= more
                total += weight * loss
                inputs.append(values)
                gradients.append(weight * gradient)
        return _Known.apply(total, gradients, *inputs), float(count), noted

    def _policy(
        self, logprobs: Tensor, batch: Mapping[str, Any], kept: Array | None
    ) -> tuple[float, Array, dict[str, float]] | None:
        """(loss sum, gradients of log-probs, sums) of max(-r A, -clip(r) A), r = pi / pi_old."""
        low, high, dual = 1 - self.options.clip_low, 1 + self.options.clip_high, self.options.dual_clip
        new = _array(logprobs)
        log_ratio = _masked(new - _array(batch["old_logprobs"], new), kept)
        if not np.abs(log_ratio).max(initial=0.0) <= EXP_LIMIT:
            return None
        advantages = _masked(_array(batch["advantages"], new), kept)
        ratio = np.exp(log_ratio)
        worse = advantages < 0
        below, above = (ratio < low) & worse, (ratio > high) & (advantages > 0)
        out = below | above
        gradient = -advantages * ratio
        loss = np.where(out, -advantages * np.minimum(np.maximum(ratio, low), high), gradient)
        # Masked ones have a ratio of 1.
        idle = 0 if kept is None else kept.size - int(np.count_nonzero(kept))
        noted = {
            "clip_low": float(np.count_nonzero(below)),
            "clip_high": float(np.count_nonzero(above)),
            "ratio": float(ratio.sum()) - idle,
            "approx_kl": float((ratio - 1 - log_ratio).sum()),
        }
        if dual is not None:
            beyond = (ratio > dual) & worse
            loss = np.where(beyond, -advantages * dual, loss)
            out |= beyond
            noted["clip_dual"] = float(np.count_nonzero(beyond))
        gradient[out] = 0.0
        if (weights := batch.get("weights")) is not None:
            factors = _masked(_array(weights, new), kept)
            loss, gradient = loss * factors, gradient * factors
        noted["policy"] = float(loss.sum())
        return noted["policy"], gradient, noted

    def _values(
        self, values: Array, batch: Mapping[str, Any], kept: Array | None
    ) -> tuple[float, Array, dict[str, float]]:
        """(loss sum, gradients of values, sums) of the critic."""
        target = _array(batch["returns"], values)
        error = _masked(values - target, kept)
        loss, gradient = self._element(error)
        noted = {
            "values": float(error.size if kept is None else np.count_nonzero(kept)),
            "value_error": float(np.square(error).sum()),
        }
        if (clip := self.critic.clip) is not None:
            old = _array(batch["old_values"], values)
            move = _masked(values - old, kept)
            bounded = _masked(old + np.minimum(np.maximum(move, -clip), clip) - target, kept)
            other, _ = self._element(bounded)
            # Within the bounds the two differ by rounding alone.
            out = (other > loss) & (np.abs(move) > clip)
            loss = np.where(out, other, loss)
            gradient = np.where(out, 0.0, gradient)
            noted["value_clipped"] = float(np.count_nonzero(out))
        noted["value"] = float(loss.sum())
        return noted["value"], gradient, noted

    def _element(self, error: Array) -> tuple[Array, Array]:
        """The critic's loss of each error, and its derivative."""
        if self.critic.kind == "square":
            return 0.5 * error * error, error
        # Huber's: a square up to delta, then a line.
        inner = np.minimum(np.maximum(error, -self.critic.huber_delta), self.critic.huber_delta)
        return inner * (error - 0.5 * inner), inner


def _array(tensor: Tensor, like: Array | None = None) -> Array:
    """The numbers of a tensor, in the format of ``like``."""
    found = tensor.detach().numpy()
    return found if like is None or found.dtype == like.dtype else found.astype(like.dtype)


def _masked(values: Array, kept: Array | None) -> Array:
    """``values`` with zeros where ``kept`` is false; all are kept if it is ``None``."""
    return values if kept is None else np.where(kept, values, np.zeros((), values.dtype))


class _Known(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: float, gradients: list[Array], *inputs: Tensor) -> Tensor:
        """``gradients`` are those of ``inputs``, of the same shapes."""
        ctx.gradients = gradients
        return torch.tensor(value, dtype=inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, None, *(upstream[0] * torch.from_numpy(gradient) for gradient in ctx.gradients)
