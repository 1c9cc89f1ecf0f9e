"""How a portion is put together from atoms: entries, or whole groups, that are not broken. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from rlinf_core.board.entries import Atom


def pick_weight(atoms: Iterable[Atom], target: float, ended: bool) -> list[Atom] | None:
    """Atoms from the head up to a total weight of ``target``; a heavier head comes alone.

    ``None``: more may come and still fit. ``[]``: nothing is left and nothing will come.
    """
    picked: list[Atom] = []
    total = 0.0
    for atom in atoms:
        weight = sum(entry.weight for entry in atom)
        if picked and total + weight > target:
            return picked
        picked.append(atom)
        total += weight
        if total >= target:
            return picked
    return picked if ended else None


def fair_parts(atoms: Sequence[Atom], parts: int) -> list[list[Atom]]:
    """Dealt so that the heaviest part is light: the heaviest atom first, always to the lightest part (the longest-
    processing-time rule, at most 4/3 of the best). Each part keeps the order of arrival; the heaviest part is first."""
    weights = [sum(entry.weight for entry in atom) for atom in atoms]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0.0, 0, part) for part in range(parts)]
    for index in sorted(range(len(atoms)), key=lambda i: (-weights[i], i)):
        total, count, part = heapq.heappop(lightest)
        dealt[part].append(index)
        heapq.heappush(lightest, (total + weights[index], count + 1, part))
    order = sorted(lightest, key=lambda one: (-one[0], -one[1], one[2]))
    return [[atoms[i] for i in sorted(dealt[part])] for _, _, part in order]


def split_balanced(atoms: Sequence[Atom], ranks: int) -> list[Sequence[Atom]]:
    """Cut into ``ranks`` contiguous runs of about equal weight; none is empty if there are enough atoms."""
    weights = [sum(entry.weight for entry in atom) for atom in atoms]
    left = sum(weights)
    runs: list[Sequence[Atom]] = []
    start = 0
    for rank in range(ranks):
        others = ranks - rank - 1
        if not others:
            runs.append(atoms[start:])
            break
        target = left / (others + 1)
        last = max(start, len(atoms) - others)
        stop, total = start, 0.0
        while stop < len(atoms) and (stop < last or stop == start):
            # Take the next atom while that brings the run nearer to its share.
            if stop > start and total + weights[stop] / 2 > target:
                break
            total += weights[stop]
            stop += 1
        runs.append(atoms[start:stop])
        left -= total
        start = stop
    return runs
