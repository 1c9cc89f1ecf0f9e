"""How attention on a CPU lays packed tokens side by side: buckets of sequences, or small trees of shared prompts.

Shape legend: N tokens, T places of all sequences, b rows of one bucket, L tokens of the longest of them, P = sum of
b * L over buckets (see ``attention.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# What one more bucket costs, in padded (query, key) pairs of one head that could be computed in the same time.
BUCKET_COST = 4096
# The most tokens of a tree. In a larger one too many (query, key) pairs are masked.
LARGEST_TREE = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """How packed tokens become buckets.

    ``buckets``: (b, L) of each. ``places`` int64 [P]: the token in each slot of the buckets (any, in slots of padding);
    ``slots`` int64 [N]: the slot of each token, of a shared one the first sequence's. Both ``None`` where tokens lie as
    they should. ``first`` int64 [N], where tokens are shared: the first place of each in the sequences. ``mask``, of
    trees: bool [b, 1, L, L], which tokens each sees.
    """

    buckets: list[tuple[int, int]]
    places: Tensor | None
    slots: Tensor | None
    first: Tensor | None = None
    mask: Tensor | None = None


_PLANS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_TREES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plan_of(cu_seqlens: Tensor, shared: Tensor | None) -> Plan:
    """The plan of these sequences, made once for all layers of all passes over a batch."""
    plan = _PLANS.get(cu_seqlens)
    if plan is None:
        plan = _PLANS[cu_seqlens] = make_plan(cu_seqlens, shared)
    return plan


def trees_of(cu_seqlens: Tensor, shared: Tensor) -> Plan | None:
    """The trees of these sequences, made once, or ``None``."""
    if cu_seqlens not in _TREES:
        _TREES[cu_seqlens] = make_trees(cu_seqlens, shared)
    trees: Plan | None = _TREES[cu_seqlens]
    return trees


def make_plan(cu_seqlens: Tensor, shared: Tensor | None = None) -> Plan:
    """Buckets of sequences of similar lengths, longest first.

    A sequence joins the bucket of the next longer ones unless the padding that it brings (in query-key pairs) costs
    more than a bucket of its own. ``shared``: see ``packed_attention``.
    """
    plan = _plan_of_lengths(cu_seqlens)
    if shared is None:
        return plan
    total = int(cu_seqlens[-1])
    if len(shared) != total:
        raise ValueError(f"{len(shared)} shared tokens for sequences of {total}")
    number = int(shared.max()) + 1
    place = torch.arange(total, device=shared.device)
    first = place.new_full((number,), total).scatter_reduce_(0, shared, place, "amin")
    if plan.places is None or plan.slots is None:
        return Plan(plan.buckets, shared, first, first)
    return Plan(plan.buckets, shared[plan.places], plan.slots[first], first)


def make_trees(cu_seqlens: Tensor, shared: Tensor) -> Plan | None:
    """The sequences that begin with the same token as one row, each of its tokens once, seeing what is before it in its
    sequences; ``None`` where a row would have more than ``LARGEST_TREE`` tokens.

    Short responses cost attention more in the number of sequences than in their length.
    """
    token_of = shared.tolist()
    sequences = [token_of[start:end] for start, end in pairwise(cu_seqlens.tolist())]
    trees: dict[int, list[list[int]]] = {}
    for sequence in sequences:
        trees.setdefault(sequence[0], []).append(sequence)
    rows = [list(dict.fromkeys(chain.from_iterable(tree))) for tree in trees.values()]
    length = max(map(len, rows))
    if length > LARGEST_TREE:
        return None
    # Padding sees itself: of nothing, attention would make NaN.
    mask = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)
    places = torch.empty(len(rows), length, dtype=torch.int64)
    slots = torch.empty(sum(map(len, rows)), dtype=torch.int64)
    for number, (row, tree) in enumerate(zip(rows, trees.values(), strict=True)):
        tokens = torch.tensor(row)
        places[number] = tokens[-1]
        places[number, : len(row)] = tokens
        slots[tokens] = number * length + torch.arange(len(row))
        column = {token: i for i, token in enumerate(row)}
        for sequence in tree:
            seen = torch.tensor([column[token] for token in sequence])
            mask[number, seen[:, None], seen] |= torch.ones(len(seen), len(seen), dtype=torch.bool).tril()
    device = shared.device
    return Plan(
        [(len(rows), length)],
        places.flatten().to(device),
        slots.to(device),
        mask=mask.unsqueeze(1).to(device),
    )


def _plan_of_lengths(cu_seqlens: Tensor) -> Plan:
    starts = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"cu_seqlens must rise from each sequence to the next, got {starts}")
    if min(lengths) == max(lengths):
        return Plan([(len(lengths), lengths[0])], None, None)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    waste = 0
    for i in order:
        more = lengths[buckets[-1][0]] ** 2 - lengths[i] ** 2 if buckets else 0
        if not buckets or waste + more > BUCKET_COST:
            buckets.append([])
            waste = more = 0
        buckets[-1].append(i)
        waste += more
    begin, own = torch.tensor(starts[:-1]), torch.tensor(lengths)
    places, real = [], []
    for bucket in buckets:
        chosen = torch.tensor(bucket)
        column = torch.arange(lengths[bucket[0]])
        last = own[chosen, None] - 1
        # A slot of padding holds the last token of its sequence: a number that is there, and that nobody reads.
        places.append((begin[chosen, None] + torch.minimum(column, last)).reshape(-1))
        real.append((column <= last).reshape(-1))
    flat, used = torch.cat(places), torch.cat(real).nonzero().squeeze(1)
    slots = torch.empty(starts[-1], dtype=torch.int64)
    slots[flat[used]] = used
    device = cu_seqlens.device
    return Plan([(len(b), lengths[b[0]]) for b in buckets], flat.to(device), slots.to(device))
