"""Checks of requests that every rollout backend makes. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_core.errors import ConfigError
from rlinf_core.types import GenerateRequest, SamplingParams


def check_requests(
    requests: Sequence[GenerateRequest], sampling: SamplingParams, max_positions: int | None, vocabulary: int
) -> None:
    """Refuse requests that no engine can decode, naming the first one."""
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise ConfigError(f"request {request.id!r} is there twice; ids must differ")
        seen.add(request.id)
        if not request.prompt_ids:
            raise ConfigError(f"request {request.id!r} has an empty prompt; give at least one token")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise ConfigError(f"request {request.id!r} has a token outside the vocabulary of {vocabulary}")
        total = len(request.prompt_ids) + sampling.max_new_tokens
        if max_positions is not None and total > max_positions:
            raise ConfigError(
                f"sampling.max_new_tokens: request {request.id!r} has {len(request.prompt_ids)} prompt tokens and "
                f"may draw {sampling.max_new_tokens}, {total} together; the model takes {max_positions}"
            )
