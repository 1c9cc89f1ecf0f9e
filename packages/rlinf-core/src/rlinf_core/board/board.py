"""The board: all channels and accounts of the open steps. Events in, instructions out; no I/O, no time.

Guarantees, each checked against a model in the tests: every request gets exactly one answer; nothing is
lost or doubled; items of one key come in order; no end before all writers have closed and everything is
drained; credit is exceeded only by a lone item in an empty channel and while a reader waits for more than
the limit lets in (see ``Channel.starving``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlinf_core.board import events as ev
from rlinf_core.board.account import Accounts
from rlinf_core.board.channel import Channel
from rlinf_core.board.dealing import cannot_deal
from rlinf_core.board.deaths import Deaths
from rlinf_core.board.events import Event, Instruction, Req
from rlinf_core.board.join import Matcher
from rlinf_core.board.ledger import Ledger
from rlinf_core.board.moving import StepState
from rlinf_core.board.requests import Requests
from rlinf_core.errors import ChannelError, nearest


class Board(Requests, Accounts, Deaths):
    """The state machine behind every channel of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.OpenChannel: self._open_channel,
            ev.AddReader: self._add_reader,
            ev.AddWriter: self._add_writer,
            ev.SealWriters: self._seal,
            ev.Put: self._put,
            ev.CloseWriter: self._close_writer,
            ev.PoisonWriter: self._poison_writer,
            ev.Get: self._get,
            ev.JoinReader: self._join,
            ev.CancelRequest: self._cancel,
            ev.Fetched: self._fetched,
            ev.Return: self._return,
            ev.Drop: self._drop,
            ev.Trained: self._trained,
            ev.Carry: self._carry,
            ev.MemberDied: self._member_died,
            ev.FailStep: self._fail_step,
            ev.EndStep: self._end_step,
            ev.CloseStep: self._close_step,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Apply one event; returns what to send, in order. ``ChannelError`` for set-up that cannot be right
        (a channel opened twice, a reader after the first item, a writer after the seal)."""
        self._out = []
        self._handlers[type(event)](event)
        for member, descriptors in self._freed.items():
            if member not in self._dead:
                self._out.append(ev.Released(member, tuple(descriptors)))
        self._freed.clear()
        return self._out

    # ------------------------------------------------------------ for the hub and for messages

    def explain(self, channel: str) -> str:
        """Who holds up the channel, as one line; for waits that reach their deadline."""
        found = self._channels.get(channel)
        return found.explain() if found is not None else f"channel {channel} is not open"

    def explain_request(self, req: Req) -> str:
        """What a waiting request waits for, as one line."""
        home = self._asked.get(req)
        if home is None:
            return "the request is not waiting"
        if isinstance(home, Matcher):
            return f"join of {self.explain(home.a)} | {self.explain(home.b)}"
        return home.explain()

    def ready(self, channel: str, group: str, rank: int) -> bool:
        """Whether the rank of a reading group has queued input on the channel."""
        found = self._channels.get(channel)
        reader = found.readers.get(group) if found is not None else None
        if reader is None:
            return False
        return (reader.matcher.queue if reader.matcher is not None else reader.queue).ready(rank)

    def stats(self, channel: str) -> dict[str, int]:
        """Items and bytes that take credit now, the peak, and how many items went beyond the limits."""
        found = self._channels[channel]
        return {
            "items": found.items_in,
            "bytes": found.bytes_in,
            "peak_items": found.peak_items,
            "beyond": found.beyond,
            "pending": len(found.pending),
        }

    def steps(self) -> tuple[str, ...]:
        """Names of the open steps."""
        return tuple(self._steps)

    def carried_on(self) -> dict[str, tuple[str, ...]]:
        """Ids carried to steps that have not been opened yet (at the end of a run: carried to nowhere)."""
        return {step: tuple(ledger.account({}, {}).lost) for step, ledger in self._carried.items()}

    # ------------------------------------------------------------ set-up

    def _open_channel(self, event: ev.OpenChannel) -> None:
        if event.name in self._channels:
            raise ChannelError(f"channel {event.name} is open already")
        if event.step not in self._steps:
            carried = self._carried.pop(event.step) if event.step in self._carried else Ledger(event.step)
            self._steps[event.step] = StepState(carried)
        channel = Channel(event)
        step = self._steps[event.step]
        channel.poison = step.failed
        step.channels[event.name] = channel
        self._channels[event.name] = channel

    def _known(self, name: str) -> Channel:
        if name not in self._channels:
            raise ChannelError(f"channel {name} is not open{nearest(name, self._channels)}")
        return self._channels[name]

    def _add_reader(self, event: ev.AddReader) -> None:
        channel = self._known(event.channel)
        if event.group in channel.readers:
            raise ChannelError(f"group {event.group!r} reads channel {channel.name} already")
        if event.ranks < 1:
            raise ChannelError(f"group {event.group!r} reads channel {channel.name} with {event.ranks} ranks")
        if channel.records or channel.pending:
            raise ChannelError(
                f"group {event.group!r} was added as a reader of channel {channel.name} after the first put"
            )
        wrong = cannot_deal(event.deal, event.collective, event.barrier)
        if wrong:
            raise ChannelError(f"channel {channel.name}, group {event.group!r}: {wrong}")
        channel.add_reader(event, self._steps[channel.step].ledger.order)
        self._steps[channel.step].reach.clear()

    def _add_writer(self, event: ev.AddWriter) -> None:
        channel = self._known(event.channel)
        if channel.sealed:
            raise ChannelError(f"writer {event.writer} came after the seal of channel {channel.name}")
        if event.writer in channel.writers:
            raise ChannelError(f"writer {event.writer} of channel {channel.name} is registered already")
        channel.writers[event.writer] = True
        self._steps[channel.step].reach.clear()

    def _seal(self, event: ev.SealWriters) -> None:
        channel = self._known(event.channel)
        channel.sealed = True
        self._pump(channel)


def describe_lost(lost: Mapping[str, str], limit: int = 10) -> str:
    """``id (last holder), ...`` for a message, longest lists cut."""
    shown = [f"{sample} (last with {holder})" for sample, holder in list(lost.items())[:limit]]
    more = f" and {len(lost) - limit} more" if len(lost) > limit else ""
    return ", ".join(shown) + more
