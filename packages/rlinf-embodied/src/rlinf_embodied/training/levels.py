"""What is one thing to learn: a token, an action (one environment step) or a chunk (one decision).

Rewards and values, and with them advantages, are those of actions or of chunks; log-probs, and with them the ratio that
is clipped, are those of tokens, actions or chunks. An advantage goes to all that it consists of; it is never cut up, so
log-probs are as fine as advantages or finer (RLinf-VLA, arXiv 2510.06710, section on granularity).

Shape legend: N decisions, C steps per decision, D log-probs per step, U units per decision (C D tokens, C actions or 1
chunk).
"""

from __future__ import annotations

from torch import Tensor

LEVELS = ("token", "action", "chunk")
"""From fine to coarse."""


def join(values: Tensor, steps: Tensor | None, level: str) -> Tensor:
    """Sums of log-probs (or entropies) [N, C, D] over each unit: [N, U].

    ``steps`` [N, C] bool are the steps that were made, read for chunks of several: a chunk's log-prob is that of those
    alone, for the rest of it was never done.
    """
    n, c, d = values.shape
    if level == "token":
        return values.reshape(n, c * d)
    actions = values.reshape(n, c) if d == 1 else values.sum(-1)
    if level == "action" or c == 1:
        return actions
    assert steps is not None
    return actions.masked_fill(~steps, 0.0).sum(-1, keepdim=True)


def mask_of(steps: Tensor, tokens: int, level: str) -> Tensor:
    """Which units count [N, U], of steps [N, C] that were made."""
    if level == "chunk":
        return steps.any(-1, keepdim=True)
    return steps.repeat_interleave(tokens, -1) if level == "token" and tokens > 1 else steps


def spread(values: Tensor, chunk: int, tokens: int, level: str) -> Tensor:
    """Advantages [N, C] of actions or [N, 1] of chunks (or of whole episodes), on each unit of ``level``: [N, U]."""
    n, given = values.shape
    if given not in (1, chunk):
        raise AssertionError(f"advantages have {given} numbers for a chunk of {chunk}")
    if level == "chunk":
        if given != 1:
            raise AssertionError("advantages of actions cannot be those of chunks")
        return values
    actions = values if given == chunk else values.expand(n, chunk)
    return actions.repeat_interleave(tokens, -1) if level == "token" and tokens > 1 else actions
