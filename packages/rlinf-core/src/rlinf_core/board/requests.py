"""What writers and readers ask of the board: put, close, get, join, cancel, and what they have fetched."""

from __future__ import annotations

import dataclasses

from rlinf_core.board import events as ev
from rlinf_core.board.channel import Channel, PendingPut
from rlinf_core.board.dealing import queue_for
from rlinf_core.board.entries import Fault, Want, entry_of
from rlinf_core.board.join import Matcher
from rlinf_core.board.moving import Moving, StepState


class Requests(Moving):
    """Each request gets exactly one answer."""

    def _put(self, event: ev.Put) -> None:
        channel = self._channels.get(event.channel)
        refusal = self._why_not_put(channel, event)
        if channel is None or refusal is not None:
            self._out.append(ev.PutRefused(event.req, refusal or ""))
            return
        if event.nowait and (channel.pending or not self._has_room(channel, event)):
            self._out.append(ev.PutRefused(event.req, ev.FULL))
            return
        channel.pending.append(PendingPut(event))
        self._asked[event.req] = channel
        self._pump(channel)

    @staticmethod
    def _has_room(channel: Channel, event: ev.Put) -> bool:
        """A single item is let in where a blocked put would be: the reader cannot go on without it."""
        return channel.fits(event.items) or (len(event.items) == 1 and channel.starving())

    def _why_not_put(self, channel: Channel | None, event: ev.Put) -> str | None:
        if channel is None:
            return f"channel {event.channel} is not open"
        if event.writer not in channel.writers:
            return f"writer {event.writer} is not registered on channel {channel.name}"
        if channel.poison is not None:
            return f"poisoned: {channel.poison}"
        if not channel.writers[event.writer]:
            return f"closed: {event.writer} has closed channel {channel.name}"
        return None

    def _close_writer(self, event: ev.CloseWriter) -> None:
        channel = self._channels.get(event.channel)
        if channel is not None and event.writer in channel.writers:
            channel.close(event.writer)
            self._pump(channel)

    def _poison_writer(self, event: ev.PoisonWriter) -> None:
        channel = self._channels.get(event.channel)
        if channel is not None:
            if event.writer in channel.writers:
                channel.close(event.writer)
            self._poison(channel, event.cause)

    def _get(self, event: ev.Get) -> None:
        channel = self._channels.get(event.channel)
        reader = channel.readers.get(event.group) if channel is not None else None
        if channel is None or reader is None:
            why = "is not open" if channel is None else f"is not read by group {event.group!r}"
            self._out.append(ev.Poisoned(event.req, f"channel {event.channel} {why}"))
            return
        if channel.poison is not None:
            self._out.append(ev.Poisoned(event.req, channel.poison))
            return
        if reader.matcher is not None:
            why = f"group {event.group!r} reads channel {channel.name} through join(): not directly as well"
            self._out.append(ev.Poisoned(event.req, why))
            return
        want = Want(event.req, event.rank, event.mode, event.n, event.weight, event.key, event.nowait)
        reader.waiting[event.req] = want
        self._asked[event.req] = channel
        self._pump(channel)
        if event.nowait and reader.waiting.pop(event.req, None) is not None:
            del self._asked[event.req]
            self._out.append(ev.Empty(event.req))

    def _join(self, event: ev.JoinReader) -> None:
        channels = [self._channels.get(name) for name in (event.a, event.b)]
        for name, channel in zip((event.a, event.b), channels, strict=True):
            if channel is None or event.group not in channel.readers:
                why = "is not open" if channel is None else f"is not read by group {event.group!r}"
                self._out.append(ev.Poisoned(event.req, f"channel {name} {why}"))
                return
            if channel.poison is not None:
                self._out.append(ev.Poisoned(event.req, channel.poison))
                return
        left, right = channels
        assert left is not None and right is not None
        step = self._steps[left.step]
        matcher = step.matchers.get((event.group, event.a, event.b))
        wrong: str | None = None
        if event.a == event.b or left.step != right.step:
            wrong = f"join({event.a}, {event.b}) needs two channels of one step"
        elif matcher is None:
            wrong = self._cannot_join(event, left, right)
        elif matcher.by != event.by:
            wrong = f"join({event.a}, {event.b}) by {event.by!r}: the group joins them by {matcher.by!r} already"
        if wrong is not None:
            self._out.append(ev.Poisoned(event.req, wrong))
            return
        if matcher is None:
            matcher = self._new_matcher(event, left, right, step)
            if matcher is None:
                self._out.append(ev.Poisoned(event.req, step.failed or ""))
                return
        matcher.waiting[event.req] = Want(event.req, event.rank, event.mode, event.n, event.weight, nowait=event.nowait)
        self._asked[event.req] = matcher
        self._pump(left, right)
        if event.nowait and matcher.waiting.pop(event.req, None) is not None:
            del self._asked[event.req]
            self._out.append(ev.Empty(event.req))

    def _cannot_join(self, event: ev.JoinReader, left: Channel, right: Channel) -> str | None:
        for channel in (left, right):
            reader = channel.readers[event.group]
            if reader.matcher is not None:
                return f"group {event.group!r} reads channel {channel.name} through another join already"
            if reader.waiting:
                return f"group {event.group!r} waits on channel {channel.name} directly: it cannot also join it"
        first, second = left.readers[event.group].spec.deal, right.readers[event.group].spec.deal
        if second not in (first, "shared"):
            return (
                f"join({left.name}, {right.name}) deals pairs as its first channel does, by {first!r}, and group "
                f"{event.group!r} is dealt {right.name} by {second!r}: give that to the first one, or to both"
            )
        return None

    def _new_matcher(self, event: ev.JoinReader, left: Channel, right: Channel, step: StepState) -> Matcher | None:
        first, second = left.readers[event.group].spec, right.readers[event.group].spec
        spec = dataclasses.replace(first, eager=first.eager or second.eager)
        order = step.ledger.order if spec.ordered and spec.barrier == "group" else None
        queue = queue_for(spec, f"join({left.name}, {right.name})", order)
        matcher = Matcher(left.name, right.name, event.by, queue)
        step.matchers[event.group, left.name, right.name] = matcher
        try:
            for channel in (left, right):
                for item in channel.attach(event.group, matcher):
                    self._discard(item, event.group)
        except Fault as fault:
            self._fail(step, str(fault))
            return None
        return matcher

    def _cancel(self, event: ev.CancelRequest) -> None:
        home = self._asked.pop(event.req, None)
        if home is None:
            return
        admitted = 0
        if isinstance(home, Matcher):
            del home.waiting[event.req]
            touched = [self._channels[home.a], self._channels[home.b]]
        else:
            touched = [home]
            for pending in home.pending:
                if pending.req == event.req:
                    admitted = pending.done
                    home.pending.remove(pending)
                    break
            for reader in home.readers.values():
                reader.waiting.pop(event.req, None)
        self._out.append(ev.CancelDone(event.req, admitted))
        self._pump(*touched)

    def _fetched(self, event: ev.Fetched) -> None:
        for uid in event.uids:
            record = self._records.get(uid)
            if record is not None and event.group not in record.to_hand:
                record.to_fetch.discard(event.group)
                if not record.to_fetch:
                    self._free(record)

    def _return(self, event: ev.Return) -> None:
        back: dict[str, list[ev.Item]] = {}
        for uid in event.uids:
            record = self._records.get(uid)
            if record is None or event.group in record.to_hand or record.channel.poison is not None:
                continue
            back.setdefault(record.channel.name, []).append(record.item)
            record.channel.returned(record, event.group)
            self._steps[record.channel.step].ledger.enter(record.item.ids, f"channel {record.channel.name}")
        for name, items in back.items():
            channel = self._channels[name]
            channel.readers[event.group].queue.put_back([entry_of(item) for item in items])
            self._pump(channel)
