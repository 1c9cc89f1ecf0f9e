"""The board's state, and how items move through it: into channels, to readers, out; and how a step fails."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_core.board import events as ev
from rlinf_core.board.channel import Channel, Reader, Record
from rlinf_core.board.entries import Drained, Fault
from rlinf_core.board.events import Instruction, Item, Req, member_of
from rlinf_core.board.join import Matcher
from rlinf_core.board.ledger import Ledger


@dataclass(slots=True)
class StepState:
    ledger: Ledger
    channels: dict[str, Channel] = field(default_factory=dict)
    matchers: dict[tuple[str, str, str], Matcher] = field(default_factory=dict)
    failed: str | None = None
    reach: dict[str, set[str]] = field(default_factory=dict)


class Moving:
    """What every part of the board works on."""

    def __init__(self) -> None:
        self._steps: dict[str, StepState] = {}
        self._channels: dict[str, Channel] = {}
        self._records: dict[int, Record] = {}
        self._asked: dict[Req, Channel | Matcher] = {}
        self._carried: dict[str, Ledger] = {}
        self._dead: dict[str, str] = {}
        self._next_uid = 0
        self._out: list[Instruction] = []
        self._freed: dict[str, list[object]] = {}

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
            moved = bool(channel.pending) and self._admit_pending(channel, relief=False)
            channel.finish_if_ended()
            for group, reader in channel.readers.items():
                moved |= self._serve(channel, group, reader, todo)
            if not channel.pending:
                return  # nothing that could still come in: what was served cannot move anything here
            if not moved:
                if not channel.starving():
                    return
                self._admit_pending(channel, relief=True)

    def _serve(self, channel: Channel, group: str, reader: Reader, todo: dict[str, Channel]) -> bool:
        """Answer what requests of one group can be answered, in the order they came."""
        matcher = reader.matcher
        waiting = reader.waiting if matcher is None else matcher.waiting
        if not waiting:
            return False
        queue = reader.queue if matcher is None else matcher.queue
        moved = False
        again = True
        while again and waiting and not queue.empty():
            again = False
            for want in list(waiting.values()):
                taken = queue.take(want)
                if taken is None:
                    continue
                del waiting[want.req]
                del self._asked[want.req]
                again = moved = True
                if isinstance(taken, Drained):
                    self._out.append(ev.End(want.req))
                    continue
                holder = f"{group}[{want.rank}] in {channel.step}"
                for entry in taken:
                    for item in entry.items:
                        self._hand(item, group, holder)
                if matcher is None:
                    self._out.append(ev.Deliver(want.req, tuple(entry.items[0] for entry in taken)))
                else:
                    pairs = tuple((entry.items[0], entry.items[1]) for entry in taken)
                    self._out.append(ev.DeliverJoined(want.req, pairs))
                if queue.empty():  # with many waiting, asking each of them would cost
                    break
        if moved and matcher is not None:
            other = self._channels[matcher.other(channel.name)]
            todo[other.name] = other
        return moved

    def _hand(self, item: Item, group: str, holder: str) -> None:
        record = self._records[item.uid]
        record.channel.handed(record, group)
        if item.ids:
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

    def _admit_pending(self, channel: Channel, relief: bool) -> bool:
        """Take pending puts in while credit lasts; with ``relief`` one item beyond it."""
        moved = False
        while channel.pending:
            head = channel.pending[0]
            if head.done < len(head.put.items):
                item = head.put.items[head.done]
                fits = channel.fits((item,))
                if not fits:
                    if not relief:
                        break
                    relief = False
                self._admit(channel, item, head.put.writer, not fits)
                head.done += 1
                moved = True
            if head.done == len(head.put.items):
                channel.pending.popleft()
                self._asked.pop(head.req, None)
                self._out.append(ev.PutDone(head.req))
                moved = True
        return moved

    def _admit(self, channel: Channel, item: Item, writer: str, beyond: bool) -> None:
        i = item  # twice as fast as dataclasses.replace, and done for every item
        item = Item(i.descriptor, i.key, i.weight, i.nbytes, i.ids, i.group, i.group_size, self._next_uid)
        self._next_uid += 1
        record, gone = channel.admit(item, writer, beyond)
        self._records[item.uid] = record
        if item.ids:
            self._steps[channel.step].ledger.enter(item.ids, f"channel {channel.name}", item.group)
        for group, left in gone:
            self._discard(left, group)
        if not record.to_fetch and item.uid in self._records:  # nobody reads the channel
            self._free(record)

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

    def _fail(self, step: StepState, cause: str) -> None:
        if step.failed is None:
            step.failed = cause
            self._out.append(ev.StepFailed(step.ledger.step, cause))
        for channel in step.channels.values():
            self._poison(channel, cause)
