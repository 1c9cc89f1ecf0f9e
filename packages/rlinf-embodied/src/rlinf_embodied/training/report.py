"""The metrics of a training step, from sums over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

# Metric of a step: sums of the loss that it is made of, and what they are divided by.
_MEANS = {
    "policy/loss": (("policy",), "tokens"),
    "policy/ratio": (("ratio",), "tokens"),
    "policy/approx_kl": (("approx_kl",), "tokens"),
    "policy/clipped": (("clip_low", "clip_high"), "tokens"),
    "policy/clipped_dual": (("clip_dual",), "tokens"),
    "policy/entropy": (("entropy",), "tokens"),
    "critic/loss": (("value",), "values"),
    "critic/clipped": (("value_clipped",), "values"),
}


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over all minibatches and epochs together; what the loss does not report is left out."""
    return {
        name: sum(sums[part] for part in parts) / max(sums[over], 1.0)
        for name, (parts, over) in _MEANS.items()
        if over in sums and all(part in sums for part in parts)
    }
