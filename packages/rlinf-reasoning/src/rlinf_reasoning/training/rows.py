"""Samples as rows."""

from __future__ import annotations

from rlinf_core.types import Sample
from rlinf_reasoning.batch import Row


def row_of(sample: Sample) -> Row:
    """The row of a sample, with its behaviour log-probs."""
    return Row(sample.id, sample.prompt_ids, sample.response_ids, behaviour_logprobs=sample.logprobs)
