"""Two stages that feed each other, as a profile sees them: who owns the items, and how many rounds they make.

What moves between them is often not the items of the step but blocks of them (the observations of a sub-batch of
environments). The weight of a block says how many items it is; where weights say nothing (all are 1) what moves
are the items themselves or, in a cycle that nothing feeds, one block of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_sched.graph import SchedError

if TYPE_CHECKING:
    from rlinf_core.graph import CallSpec, FlowGraph, PhaseGraph

Taken = tuple[int, float]
"""What a rank took from a channel: how many items, and their weight."""


@dataclass(frozen=True)
class Loop:
    """Two stages that feed each other. ``head``: the one that is fed from outside or, when neither is, the one that
    ends the cycle and begins it with what it owns; ``other`` answers it. ``fed``: a feed or another stage feeds it.

    ``outside``: the channels that feed the head; ``between``: those that one of the two writes and the other reads.
    """

    head: str
    other: str
    ends: str
    fed: bool
    outside: frozenset[str] = frozenset()
    between: frozenset[str] = frozenset()

    def turns(self, taken: Mapping[str, Sequence[Taken]]) -> list[Taken]:
        """By rank: blocks that it took from the other stage, and the items that they were. Empty where weights do not
        say."""
        found = summed(taken, self.between)
        return found if sum(weight for _, weight in found) > sum(count for count, _ in found) else []


def summed(taken: Mapping[str, Sequence[Taken]], channels: Iterable[str]) -> list[Taken]:
    """By rank: what was taken from several channels together."""
    columns = [taken[channel] for channel in sorted(channels) if channel in taken]
    return [(sum(n for n, _ in row), sum(w for _, w in row)) for row in zip(*columns, strict=True)]


def block_size(turns: Sequence[Taken]) -> int:
    """Items of a block, of those whole numbers around the mean the one that gives the number of blocks best."""
    blocks, items = sum(n for n, _ in turns), sum(w for _, w in turns)
    mean = items / max(blocks, 1)
    return max(1, min((int(mean), int(mean) + 1), key=lambda size: abs(items / max(size, 1) - blocks)))


def loops(graph: FlowGraph, phase_name: str) -> list[Loop]:
    """The cycles of the flow. Raises SchedError for one of more than two stages."""
    phase = graph.phases[phase_name]
    found: list[Loop] = []
    seen: set[str] = set()
    for name in graph.order():
        mates = [b for b in graph.downstream(name) if b != name and name in graph.downstream(b)]
        if not mates or name in seen:
            continue
        seen |= {name, *mates}
        if len(mates) > 1:
            raise SchedError(
                f"{', '.join(sorted([name, *mates]))} feed each other: a cycle of two stages can be planned, not of "
                f"{len(mates) + 1}; join two of them into one stage"
            )
        pair = (name, mates[0])
        calls = [call for call in phase.calls if call.group in pair]
        ends = next((call.group for call in calls if call.ends), pair[0])
        fed = {call.group: channels for call in calls if (channels := _from_outside(call, phase, pair))}
        head = next(iter(fed), ends)
        other = pair[1] if head == pair[0] else pair[0]
        read = {channel for call in calls for channel in call.inputs}
        inside = read - {channel for channels in fed.values() for channel in channels}
        found.append(Loop(head, other, ends, bool(fed), frozenset(fed.get(head, ())), frozenset(inside)))
    return found


def _from_outside(call: CallSpec, phase: PhaseGraph, pair: tuple[str, str]) -> list[str]:
    """The channels that a feed or a stage outside the cycle writes."""
    return [
        channel
        for channel in call.inputs
        if channel in phase.feeds or {phase.calls[i].group for i in phase.writers(channel)} - set(pair)
    ]
