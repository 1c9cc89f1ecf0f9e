"""Prompts that several sequences of a packed micro-batch have in common, computed once.

The responses of a GRPO group follow one prompt. A token's hidden state depends on what is before it only, so the prompt
gives the same states for all of them; and a sequence's last token, of which nothing is predicted, gives states that
nobody reads. Both are left out of everything but attention, which lays the sequences out again. Outputs and gradients
are those of the whole batch, up to floating-point order (with dropout, copies of a prompt draw the same numbers).
Importing this module loads torch, not transformers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from rlinf_core.types import Batch
from rlinf_engines.trainers.attention import packed_inputs

WORTH = 0.95
"""The largest part of its tokens that a micro-batch may be left with: laying sequences out again costs some time."""


def share_prompts(batch: Batch, worth: float = WORTH) -> Batch:
    """The same micro-batch with each distinct prompt once, or ``batch`` itself where that leaves out too little.

    A prompt is what a sequence has up to the first place of which something is predicted. What changes: ``input_ids``
    and ``position_ids`` [N] and ``predict`` [M] speak of the N tokens that are left; ``cu_seqlens`` and ``max_len``
    speak of the T places of all sequences without their unread ends; ``shared`` int64 [T] is new and says which token
    is at each (see ``packed_attention``). To be called where the batch is on the CPU.
    """
    ids, starts = batch["input_ids"].tolist(), batch["cu_seqlens"].tolist()
    predict, segments = batch["predict"].tolist(), batch["segments"].tolist()
    first, last = dict[int, int](), dict[int, int]()
    for place, segment in zip(predict, segments, strict=True):
        first[segment] = min(place, first.get(segment, place))
        last[segment] = max(place, last.get(segment, place))
    prompts: dict[tuple[int, ...], int] = {}
    kept: list[int] = []  # which of the old tokens each new one is
    shared: list[int] = []
    ends = [0]
    moved: list[tuple[int, int, int]] = []  # (where the response began, how far its prompt moved, how far it moved)
    for segment, (start, end) in enumerate(pairwise(starts), start=1):
        middle, stop = first.get(segment, end - 1) + 1, last.get(segment, end - 1) + 1
        at = prompts.setdefault(tuple(ids[start:middle]), len(kept))
        if at == len(kept):
            kept += range(start, middle)
        own = len(kept)
        kept += range(middle, stop)
        shared += [*range(at, at + middle - start), *range(own, len(kept))]
        ends.append(len(shared))
        moved.append((middle, at - start, own - middle))
    if len(kept) > worth * len(ids):
        return batch
    places = []
    for place, segment in zip(predict, segments, strict=True):
        middle, prompt_by, response_by = moved[segment - 1]
        places.append(place + (prompt_by if place < middle else response_by))
    index = torch.tensor(kept, dtype=torch.int64)
    return {
        **batch,
        "input_ids": batch["input_ids"][index],
        "position_ids": batch["position_ids"][index],
        "predict": torch.tensor(places, dtype=torch.int64),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
        "max_len": max(end - start for start, end in pairwise(ends)),
        "shared": torch.tensor(shared, dtype=torch.int64),
    }


def can_share(network: Any) -> bool:
    """Whether a Hugging Face model after ``use_packed_attention`` gives the same logits where a prompt is shared.

    False where layers other than attention look at other tokens (state spaces, convolutions). With the whole model on
    one rank, in float32 or float64; runs two tiny forwards.
    """
    device = next(network.parameters()).device
    size = int(network.config.get_text_config().vocab_size)
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 6, 5]) % size
    places = [3, 4, 5, 10, 11]
    batch = {
        "input_ids": ids,
        "position_ids": torch.tensor([*range(7), *range(6)]),
        "cu_seqlens": torch.tensor([0, 7, 13], dtype=torch.int32),
        "max_len": 7,
        "predict": torch.tensor(places),
        "segments": torch.tensor([1, 1, 1, 2, 2]),
    }
    mode = network.training
    network.eval()
    with torch.no_grad():
        logits = []
        for given in (batch, share_prompts(batch)):
            own = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            logits.append(network(**packed_inputs(own)).logits[0, own["predict"]])
    network.train(mode)
    expected, found = logits
    return float((found - expected).abs().max()) <= 1e-3 * max(float(expected.abs().max()), 1e-6)
