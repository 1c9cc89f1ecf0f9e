"""Losses on pairs of responses. Shape legend: N pairs, T positions."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos import _check
from rlinf_algos.aggregation import LossSum
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import zero_masked


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Direct preference optimisation: L = -log sigmoid(beta (h_chosen - h_rejected)), h = sum_t (log pi - log
    pi_ref).

    Rafailov et al., arXiv 2305.18290, equation 7; with ``label_smoothing`` = s the conservative form
    -(1 - s) log sigmoid(z) - s log sigmoid(-z). Log-probs are summed, not averaged, over a response's tokens.

    Args:
        chosen_logprobs, ref_chosen_logprobs, chosen_mask: [N, T].
        rejected_logprobs, ref_rejected_logprobs, rejected_mask: [N, T'] (another length is fine).
        beta: strength of the pull to the reference, above 0.
        label_smoothing: share of pairs taken to be labelled wrongly, in [0, 0.5).

    Returns:
        LossSum with the number of pairs as count. A pair in which either mask is all false is left out. Metrics are
        sums over
        pairs: ``sequences``, ``accuracy``, ``margin``.
    """
    _check.positive(beta=beta)
    _check.number(label_smoothing=label_smoothing)
    if not 0.0 <= label_smoothing < 0.5:
        raise AlgorithmError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    chosen, has_chosen = _log_ratio("chosen", chosen_logprobs, ref_chosen_logprobs, chosen_mask)
    rejected, has_rejected = _log_ratio("rejected", rejected_logprobs, ref_rejected_logprobs, rejected_mask)
    if chosen.shape != rejected.shape:
        raise AlgorithmError(f"{chosen.shape[0]} chosen but {rejected.shape[0]} rejected responses")
    use = has_chosen & has_rejected
    z = torch.where(use, beta * (chosen - rejected), 0.0)
    log_sigmoid = torch.nn.functional.logsigmoid
    loss = -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
    pairs = use.sum()
    metrics = {"sequences": pairs, "accuracy": (use & (z > 0)).sum(), "margin": z.detach().sum()}
    return LossSum(torch.where(use, loss, 0.0).sum(), float(pairs), metrics)


def _log_ratio(name: str, logprobs: Tensor, ref: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    _check.floating(**{f"{name}_logprobs": logprobs, f"ref_{name}_logprobs": ref})
    _check.ndim(2, "[N, T]", **{f"{name}_logprobs": logprobs})
    _check.same_shape(**{f"{name}_logprobs": logprobs, f"ref_{name}_logprobs": ref, f"{name}_mask": mask})
    mask = _check.boolean(mask, f"{name}_mask")
    ratio = zero_masked(logprobs, mask) - zero_masked(ref.detach(), mask)
    return ratio.sum(1), mask.any(1)
