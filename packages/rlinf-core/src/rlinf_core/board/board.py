"""The board: all channels and accounts of the open steps. Events in, instructions out; no I/O, no time.

Guarantees, each checked against a model in the tests: every request gets exactly one answer; nothing is
lost or doubled; items of one key come in order; no end before all writers have closed and everything is
drained; credit is exceeded only by a lone item in an empty channel and while a reader waits for more than
the limit lets in (see ``Channel.starving``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlinf_core.board import events as ev
from rlinf_core.board.channel import Channel, PendingPut, Reader, Record
from rlinf_core.board.events import Event, Instruction, Item, Req, group_of_member, member_of
from rlinf_core.board.join import Matcher
from rlinf_core.board.ledger import EndKind, Ledger
from rlinf_core.board.queue import DRAINED, Fault, ReaderQueue, Want
from rlinf_core.errors import ChannelError, nearest


@dataclass(slots=True)
class _Step:
    ledger: Ledger
    channels: dict[str, Channel] = field(default_factory=dict)
    matchers: dict[tuple[str, str, str], Matcher] = field(default_factory=dict)
    failed: str | None = None
    reach: dict[str, set[str]] = field(default_factory=dict)


class Board:
    """The state machine behind every channel of a run."""

    def __init__(self) -> None:
        self._steps: dict[str, _Step] = {}
        self._channels: dict[str, Channel] = {}
        self._records: dict[int, Record] = {}
        self._asked: dict[Req, Channel | Matcher] = {}
        self._carried: dict[str, Ledger] = {}
        self._dead: dict[str, str] = {}
        self._next_uid = 0
        self._out: list[Instruction] = []
        self._freed: dict[str, list[object]] = {}
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
            self._steps[event.step] = _Step(carried)
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

    # ------------------------------------------------------------ put

    def _put(self, event: ev.Put) -> None:
        channel = self._channels.get(event.channel)
        refusal = self._why_not_put(channel, event)
        if channel is None or refusal is not None:
            self._out.append(ev.PutRefused(event.req, refusal or ""))
            return
        # A single item is let in where a blocked put would be: the reader cannot go on without it.
        room = channel.fits(event.items) or (len(event.items) == 1 and channel.starving())
        if event.nowait and (channel.pending or not room):
            self._out.append(ev.PutRefused(event.req, ev.FULL))
            return
        channel.pending.append(PendingPut(event))
        self._asked[event.req] = channel
        self._pump(channel)

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

    def _admit_pending(self, channel: Channel, relief: bool) -> bool:
        """Take pending puts in while credit lasts; with ``relief`` one item beyond it."""
        moved = False
        while channel.pending:
            head = channel.pending[0]
            if head.done < len(head.put.items):
                item = head.put.items[head.done]
                if not channel.fits((item,)):
                    if not relief:
                        break
                    relief = False
                self._admit(channel, item, head.put.writer)
                head.done += 1
                moved = True
            if head.done == len(head.put.items):
                channel.pending.popleft()
                self._asked.pop(head.req, None)
                self._out.append(ev.PutDone(head.req))
                moved = True
        return moved

    def _admit(self, channel: Channel, item: Item, writer: str) -> None:
        item = dataclasses.replace(item, uid=self._next_uid)
        self._next_uid += 1
        record, gone = channel.admit(item, writer)
        self._records[item.uid] = record
        self._steps[channel.step].ledger.enter(item.ids, f"channel {channel.name}", item.group)
        for group, left in gone:
            self._discard(left, group)
        if not record.to_fetch and item.uid in self._records:  # nobody reads the channel
            self._free(record)

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

    # ------------------------------------------------------------ get

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
        return None

    def _new_matcher(self, event: ev.JoinReader, left: Channel, right: Channel, step: _Step) -> Matcher | None:
        spec = left.readers[event.group].spec
        where = f"join({left.name}, {right.name})"
        order = step.ledger.order if spec.ordered and spec.barrier == "group" else None
        queue = ReaderQueue(where, event.group, spec.ranks, spec.collective, spec.barrier, spec.portion, order)
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

    # ------------------------------------------------------------ moving things

    def _pump(self, *channels: Channel) -> None:
        """Let puts in and serve readers until nothing moves. A fault fails the step."""
        todo: dict[str, Channel] = {channel.name: channel for channel in channels}
        while todo:
            _, channel = todo.popitem()
            if channel.poison is not None or channel.name not in self._channels:
                continue
            try:
                self._pump_one(channel, todo)
            except Fault as fault:
                self._fail(self._steps[channel.step], str(fault))
                return

    def _pump_one(self, channel: Channel, todo: dict[str, Channel]) -> None:
        while True:
            moved = self._admit_pending(channel, relief=False)
            moved |= channel.finish_if_ended()
            for group, reader in channel.readers.items():
                moved |= self._serve(channel, group, reader, todo)
            if moved:
                continue
            if channel.pending and channel.starving():
                self._admit_pending(channel, relief=True)
                continue
            return

    def _serve(self, channel: Channel, group: str, reader: Reader, todo: dict[str, Channel]) -> bool:
        """Answer what requests of one group can be answered, in the order they came."""
        matcher = reader.matcher
        waiting = reader.waiting if matcher is None else matcher.waiting
        queue = reader.queue if matcher is None else matcher.queue
        moved = False
        again = True
        while again and waiting:
            again = False
            for want in list(waiting.values()):
                taken = queue.take(want)
                if taken is None:
                    continue
                del waiting[want.req]
                del self._asked[want.req]
                again = moved = True
                if taken is DRAINED:
                    self._out.append(ev.End(want.req))
                    continue
                assert isinstance(taken, tuple)
                holder = f"{group}[{want.rank}] in {channel.step}"
                for entry in taken:
                    for item in entry.items:
                        self._hand(item, group, holder)
                if matcher is None:
                    self._out.append(ev.Deliver(want.req, tuple(entry.items[0] for entry in taken)))
                else:
                    pairs = tuple((entry.items[0], entry.items[1]) for entry in taken)
                    self._out.append(ev.DeliverJoined(want.req, pairs))
        if moved and matcher is not None:
            other = self._channels[matcher.other(channel.name)]
            todo[other.name] = other
        return moved

    def _hand(self, item: Item, group: str, holder: str) -> None:
        record = self._records[item.uid]
        record.channel.handed(record, group)
        self._steps[record.channel.step].ledger.enter(item.ids, holder)

    def _discard(self, item: Item, group: str) -> None:
        """The group will never be handed the item."""
        record = self._records.get(item.uid)
        if record is not None:
            record.channel.handed(record, group)
            record.to_fetch.discard(group)
            if not record.to_fetch:
                self._free(record)

    def _free(self, record: Record) -> None:
        del self._records[record.item.uid]
        del record.channel.records[record.item.uid]
        self._freed.setdefault(member_of(record.writer), []).append(record.item.descriptor)

    # ------------------------------------------------------------ account

    def _drop(self, event: ev.Drop) -> None:
        step = self._steps.get(event.step)
        if step is None:
            return
        self._end_ids(step, "dropped", event.ids, event.reason, event.member)
        if step.failed is not None:
            return
        group = group_of_member(event.member)
        news = [(sample, step.ledger.group_of(sample)) for sample in event.ids]
        touched = [step.channels[name] for name in self._downstream(step, group)]
        for channel in touched:
            for reader_group, item in channel.note_dropped(news):
                self._discard(item, reader_group)
        self._pump(*touched)

    def _downstream(self, step: _Step, group: str) -> set[str]:
        """Channels that what the group writes can reach: only there a drop means that no sample comes."""
        if group not in step.reach:
            writes: dict[str, set[str]] = {}
            for channel in step.channels.values():
                for writer in channel.writers:
                    writes.setdefault(group_of_member(member_of(writer)), set()).add(channel.name)
            found: set[str] = set()
            todo = [group]
            while todo:
                for name in writes.get(todo.pop(), set()) - found:
                    found.add(name)
                    todo.extend(step.channels[name].readers)
            step.reach[group] = found
        return step.reach[group]

    def _trained(self, event: ev.Trained) -> None:
        step = self._steps.get(event.step)
        if step is not None:
            self._end_ids(step, "trained", event.ids, "", event.member)

    def _carry(self, event: ev.Carry) -> None:
        step = self._steps.get(event.step)
        if step is None:
            return
        self._end_ids(step, "carried", event.ids, event.to_step, event.member)
        target = self._steps.get(event.to_step)
        if target is None and event.to_step not in self._carried:
            self._carried[event.to_step] = Ledger(event.to_step)
        ledger = target.ledger if target else self._carried[event.to_step]
        ledger.enter(event.ids, f"{event.member} (carried from {event.step})")

    def _end_ids(self, step: _Step, kind: EndKind, ids: Iterable[str], text: str, member: str) -> None:
        wrong = step.ledger.end(kind, ids, text, member)
        if wrong is not None:
            self._fail(step, wrong)

    def _end_step(self, event: ev.EndStep) -> None:
        step = self._steps.get(event.step)
        if step is None:
            self._out.append(ev.StepAccount(event.step, (), {}, {}, {}))
            return
        waiting: dict[str, str] = {}
        unread: dict[str, int] = {}
        for name, channel in step.channels.items():
            for pending in channel.pending:
                where = f"{member_of(pending.put.writer)}, waiting to put it on channel {name}"
                for item in pending.put.items[pending.done :]:
                    waiting.update(dict.fromkeys(item.ids, where))
            if channel.unread():
                unread[name] = channel.unread()
        self._out.append(step.ledger.account(waiting, unread))

    def _close_step(self, event: ev.CloseStep) -> None:
        step = self._steps.pop(event.step, None)
        if step is None:
            return
        for channel in step.channels.values():
            self._poison(channel, f"step {event.step} is closed")
            del self._channels[channel.name]
            for record in list(channel.records.values()):
                self._free(record)

    # ------------------------------------------------------------ failure

    def _poison(self, channel: Channel, cause: str) -> None:
        """Answer everything that waits on the channel, now; what comes later is answered on arrival."""
        if channel.poison is None:
            channel.poison = cause
        cause = channel.poison
        for pending in channel.pending:
            self._asked.pop(pending.req, None)
            self._out.append(ev.PutRefused(pending.req, f"poisoned: {cause}", pending.done))
        channel.pending.clear()
        for reader in channel.readers.values():
            for waiting in (reader.waiting, reader.matcher.waiting if reader.matcher else {}):
                for req in waiting:
                    self._asked.pop(req, None)
                    self._out.append(ev.Poisoned(req, cause))
                waiting.clear()

    def _fail(self, step: _Step, cause: str) -> None:
        if step.failed is None:
            step.failed = cause
            self._out.append(ev.StepFailed(step.ledger.step, cause))
        for channel in step.channels.values():
            self._poison(channel, cause)

    def _fail_step(self, event: ev.FailStep) -> None:
        step = self._steps.get(event.step)
        if step is not None:
            self._fail(step, event.cause)

    def _member_died(self, event: ev.MemberDied) -> None:
        self._dead[event.member] = event.cause
        group = group_of_member(event.member)
        for step in self._steps.values():
            if not self._involved(step, event.member, group):
                continue
            for channel in step.channels.values():
                self._bury(step, channel, event, group)
            self._fail(step, f"{event.member} died: {event.cause}")

    def _involved(self, step: _Step, member: str, group: str) -> bool:
        return any(
            group in channel.readers or any(member_of(writer) == member for writer in channel.writers)
            for channel in step.channels.values()
        )

    def _bury(self, step: _Step, channel: Channel, event: ev.MemberDied, group: str) -> None:
        """Forget what a dead member asked for, and drop by name what only it could have handed over."""
        for pending in [p for p in channel.pending if member_of(p.put.writer) == event.member]:
            channel.pending.remove(pending)
            self._asked.pop(pending.req, None)
        reader = channel.readers.get(group)
        if reader is not None:
            for waiting in (reader.waiting, reader.matcher.waiting if reader.matcher else {}):
                for want in [w for w in waiting.values() if f"{group}[{w.rank}]" == event.member]:
                    del waiting[want.req]
                    self._asked.pop(want.req, None)
        for writer in channel.writers:
            if member_of(writer) == event.member:
                channel.close(writer)
        lost = {
            record.item.uid: record.item
            for record in channel.records.values()
            if member_of(record.writer) == event.member and record.to_fetch
        }
        reason = f"its producer {event.member} died: {event.cause}"
        for item in lost.values():
            open_ids = [sample for sample in item.ids if not step.ledger.is_ended(sample)]
            step.ledger.end("dropped", open_ids, reason, event.member)
        for name, other in channel.readers.items():
            for uid in lost:
                if other.matcher is None:
                    other.queue.remove(uid)
            if other.matcher is not None:
                for orphan in other.matcher.remove(lost.keys()):
                    self._discard(orphan, name)
        for uid in lost:
            if uid in self._records:
                record = self._records[uid]
                for name in list(record.to_hand):
                    channel.handed(record, name)
                self._free(record)


def describe_lost(lost: Mapping[str, str], limit: int = 10) -> str:
    """``id (last holder), ...`` for a message, longest lists cut."""
    shown = [f"{sample} (last with {holder})" for sample, holder in list(lost.items())[:limit]]
    more = f" and {len(lost) - limit} more" if len(lost) > limit else ""
    return ", ".join(shown) + more
