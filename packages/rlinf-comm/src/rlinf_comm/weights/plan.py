"""From two layouts to what each rank sends to which: a pure function, the same on every rank.

Every element of every target comes exactly once. Elements that several sources hold come from the one that has least to
send so far; what several targets need alike is one move with several landings, so that it can be written once for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlinf_comm.weights.boxes import Box, Shape, intersect, offset_in, pieces, show, subtract, volume
from rlinf_comm.weights.errors import MismatchError
from rlinf_comm.weights.layout import ITEM_BYTES, Layout, Part

BUCKET_BYTES = 128 << 20
ALIGN = 64
"""Pieces begin at multiples of this many bytes of their bucket."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Formats that are converted into each other. Integers, booleans, complex and 8-bit formats (which have scales beside
them) go as they are or not at all."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a move ends: a place of a target rank, from an element on, with strides."""

    rank: int
    place: str
    offset: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one parameter (the target's name of it). It lies in its bucket from byte ``start`` on, row by row."""

    parameter: str
    box: Box
    place: str
    offset: int
    strides: Shape
    wire: str
    start: int
    nbytes: int
    landings: tuple[Landing, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What ``source`` sends at once to all of ``targets``. ``index`` counts the buckets of its source."""

    source: int
    index: int
    targets: tuple[int, ...]
    nbytes: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class TransferPlan:
    """Buckets by source, each in the order in which they are sent."""

    source: str
    target: str
    bucket_bytes: int
    buckets: tuple[tuple[Bucket, ...], ...]

    @cached_property
    def fingerprint(self) -> str:
        """Equal on both sides when they mean the same transfer."""
        text = f"{self.source} {self.target} {self.bucket_bytes}"
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def for_target(self, rank: int) -> Mapping[int, tuple[Bucket, ...]]:
        """Source -> the buckets that come from it to ``rank``; sources that send it nothing are left out."""
        found = {s: tuple(b for b in mine if rank in b.targets) for s, mine in enumerate(self.buckets)}
        return {source: mine for source, mine in found.items() if mine}

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each source sends, each bucket counted once for each of its targets."""
        return tuple(sum(b.nbytes * len(b.targets) for b in mine) for mine in self.buckets)


def plan(
    source: Layout, target: Layout, bucket_bytes: int = BUCKET_BYTES, *, without: Collection[str] = ()
) -> TransferPlan:
    """The moves that fill every place of ``target`` from ``source``.

    ``without``: parameters of the source that the target does without (a value head, say). Raises ``MismatchError``
    naming the parameter when shapes differ, a dtype cannot be converted, or one side lacks what the other has.
    """
    if bucket_bytes < ALIGN:
        raise MismatchError(f"buckets of {bucket_bytes} bytes: {ALIGN} are the least")
    needs = _check(source, target, set(without))
    loads = [0] * len(source.ranks)
    packers = [_Packer(rank, bucket_bytes) for rank in range(len(source.ranks))]
    for name, owner in needs.items():
        wire = wire_dtype(name, source.parameters[owner].dtype, target.parameters[name].dtype)
        held = _by_box(source.holders[owner])
        for box, landings in _wanted(target, name).items():
            for part, rank, place in _dealt(box, held, loads, ITEM_BYTES[wire] * len(landings)):
                _place(packers[rank], name, part, place, wire, box, landings, bucket_bytes)
    buckets = tuple(packer.finish() for packer in packers)
    return TransferPlan(source.fingerprint, target.fingerprint, bucket_bytes, buckets)


def wire_dtype(name: str, source: str, target: str) -> str:
    """The format in which a parameter is sent: the smaller of the two. Raises ``MismatchError``."""
    if source == target:
        return source
    if source not in FLOATS or target not in FLOATS:
        raise MismatchError(f"{name!r} is {source} at the source and {target} at the target: it cannot be converted")
    return source if ITEM_BYTES[source] < ITEM_BYTES[target] else target


def _check(source: Layout, target: Layout, without: set[str]) -> dict[str, str]:
    """Parameter of the target -> that of the source which it comes from."""
    for name in without:
        if name in target.parameters or name in target.aliases:
            raise MismatchError(f"{name!r} is to be left out, but the target has it")
    needs: dict[str, str] = {}
    for name, spec in target.parameters.items():
        owner: str | None = source.owner(name)
        if owner not in source.parameters:
            # The same tied group may go by another of its names there.
            twins = [alias for alias, mine in target.aliases.items() if mine == name]
            owner = next((source.owner(a) for a in twins if source.owner(a) in source.parameters), None)
        if owner is None:
            raise MismatchError(f"the source has no parameter {name!r}, which the target needs")
        if source.parameters[owner].shape != spec.shape:
            raise MismatchError(
                f"{name!r} has shape {source.parameters[owner].shape} at the source and {spec.shape} at the target"
            )
        needs[name] = owner
    for alias, name in target.aliases.items():
        theirs = source.owner(alias)
        if theirs in source.parameters and theirs != needs[name] and theirs not in without:
            raise MismatchError(f"{alias!r} is tied to {name!r} at the target, but not at the source")
    used = set(needs.values())
    for name in source.parameters:
        if name not in used and name not in without:
            raise MismatchError(f"the target has no parameter {name!r}, which the source sends (leave it out by name?)")
    return needs


def _by_box(entries: Sequence[tuple[int, Part]]) -> dict[Box, dict[int, Part]]:
    """Box -> rank -> where that rank has it."""
    found: dict[Box, dict[int, Part]] = {}
    for rank, part in entries:
        found.setdefault(part.box, {}).setdefault(rank, part)
    return dict(sorted(found.items()))


def _wanted(target: Layout, name: str) -> dict[Box, list[tuple[int, Part]]]:
    """Box -> (rank, part) of all that need exactly it."""
    found: dict[Box, list[tuple[int, Part]]] = {}
    for rank, part in target.holders[name]:
        found.setdefault(part.box, []).append((rank, part))
    return found


def _dealt(
    box: Box, held: Mapping[Box, Mapping[int, Part]], loads: list[int], item_bytes: int
) -> Iterator[tuple[Box, int, Part]]:
    """Disjoint parts of ``box`` that make it up, each with the rank that sends it; adds to ``loads``."""
    left = [box]
    candidates = [(have, by_rank) for have, by_rank in held.items() if intersect(box, have) is not None]
    # Where boxes of several ranks overlap in part, those whose holders have least to do come first.
    candidates.sort(key=lambda c: min(loads[rank] for rank in c[1]))
    for have, by_rank in candidates:
        rest: list[Box] = []
        for open_box in left:
            common = intersect(open_box, have)
            if common is None:
                rest.append(open_box)
                continue
            rank = min(by_rank, key=lambda r: (loads[r], r))
            loads[rank] += volume(common) * item_bytes
            yield common, rank, by_rank[rank]
            rest.extend(subtract(open_box, have))
        left = rest
        if not left:
            return
    if left:
        raise AssertionError(f"{show(left[0])} of a layout that was checked has no holder")


def _place(
    packer: _Packer,
    name: str,
    part: Box,
    place: Part,
    wire: str,
    box: Box,
    landings: Sequence[tuple[int, Part]],
    bucket_bytes: int,
) -> None:
    """Cut a part to the size of a bucket and hand the pieces to the packer."""
    for piece in pieces(part, bucket_bytes // ITEM_BYTES[wire]):
        offset = place.offset + offset_in(place.box, piece, place.strides)
        ends = tuple(
            Landing(rank, p.place, p.offset + offset_in(box, piece, p.strides), p.strides) for rank, p in landings
        )
        packer.add(name, piece, place.place, offset, place.strides, wire, ends)


class _Packer:
    """Fills the buckets of one source: one open bucket for each set of targets."""

    def __init__(self, source: int, bucket_bytes: int) -> None:
        self._source = source
        self._limit = bucket_bytes
        self._open: dict[tuple[int, ...], list[Move]] = {}
        self._fill: dict[tuple[int, ...], int] = {}
        self._done: list[Bucket] = []

    def add(
        self, name: str, box: Box, place: str, offset: int, strides: Shape, wire: str, landings: tuple[Landing, ...]
    ) -> None:
        targets = tuple(sorted({landing.rank for landing in landings}))
        nbytes = volume(box) * ITEM_BYTES[wire]
        start = -(-self._fill.get(targets, 0) // ALIGN) * ALIGN
        if start + nbytes > self._limit:
            self._close(targets)
            start = 0
        move = Move(name, box, place, offset, strides, wire, start, nbytes, landings)
        self._open.setdefault(targets, []).append(move)
        self._fill[targets] = start + nbytes

    def finish(self) -> tuple[Bucket, ...]:
        for targets in list(self._open):
            self._close(targets)
        return tuple(self._done)

    def _close(self, targets: tuple[int, ...]) -> None:
        moves = self._open.pop(targets, [])
        size = self._fill.pop(targets, 0)
        if moves:
            self._done.append(Bucket(self._source, len(self._done), targets, size, tuple(moves)))
