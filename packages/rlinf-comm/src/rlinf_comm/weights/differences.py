"""What makes two layouts of the same ranks different, in words: for who has described them twice and not alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlinf_comm.weights.boxes import show
from rlinf_comm.weights.layout import Layout, Part, RankLayout, Spec


def first_difference(told: Layout, own: Layout, told_by: str, own_by: str) -> str:
    """The first thing in which the two differ, with the values of both; ``told_by`` and ``own_by`` say whose they are.
    Empty when they are equal."""
    return next(_differences(told, own, told_by, own_by), "")


def _differences(told: Layout, own: Layout, told_by: str, own_by: str) -> Iterator[str]:
    def both(theirs: object, mine: object) -> str:
        return f"{theirs} in {told_by}, {mine} in {own_by}"

    yield from _specs("parameter", told.parameters, own.parameters, told_by, own_by)
    for alias in {**told.aliases, **own.aliases}:
        theirs, mine = told.aliases.get(alias), own.aliases.get(alias)
        if theirs != mine:
            tied = [f"tied to {owner!r}" if owner else "not tied" for owner in (theirs, mine)]
            yield f"{alias!r} is {both(*tied)}"
    if len(told.ranks) != len(own.ranks):
        yield f"there are {both(f'{len(told.ranks)} ranks', f'{len(own.ranks)}')}"
    for rank, (theirs_held, mine_held) in enumerate(zip(told.ranks, own.ranks, strict=False)):
        if theirs_held == mine_held:
            continue
        for name in told.parameters:
            first, second = _parts(theirs_held, name), _parts(mine_held, name)
            for what in (_boxes, _lies):
                if what(first) != what(second):
                    yield f"of parameter {name!r} rank {rank} has {both(what(first), what(second))}"
        yield from _specs(f"rank {rank}: place", theirs_held.places, mine_held.places, told_by, own_by)
    if told.data != own.data:  # equal but for the order in which things are named, which the plan follows
        yield f"names and parts come in another order in {told_by} than in {own_by}"


def _specs(what: str, told: Mapping[str, Spec], own: Mapping[str, Spec], told_by: str, own_by: str) -> Iterator[str]:
    for name in {**told, **own}:
        if name not in own:
            yield f"{what} {name!r} is in {told_by} alone"
        elif name not in told:
            yield f"{what} {name!r} is in {own_by} alone"
        elif told[name] != own[name]:
            theirs, mine = (f"{spec.dtype} of shape {spec.shape}" for spec in (told[name], own[name]))
            yield f"{what} {name!r} is {theirs} in {told_by}, {mine} in {own_by}"


def _parts(held: RankLayout, name: str) -> list[Part]:
    return [part for part in held.parts if part.parameter == name]


def _boxes(parts: list[Part]) -> str:
    return " and ".join(show(part.box) for part in parts) or "nothing"


def _lies(parts: list[Part]) -> str:
    """Where they lie in the rank's memory."""
    return " and ".join(f"{show(p.box)} in {p.place!r} from element {p.offset} on (steps {p.strides})" for p in parts)
