"""The death of a member, and failures from outside the channels."""

from __future__ import annotations

from rlinf_core.board import events as ev
from rlinf_core.board.channel import Channel
from rlinf_core.board.events import group_of_member, member_of
from rlinf_core.board.moving import Moving, StepState


class Deaths(Moving):
    """What only a dead member could have handed over is dropped by name, and its steps fail."""

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

    def _involved(self, step: StepState, member: str, group: str) -> bool:
        return any(
            group in channel.readers or any(member_of(writer) == member for writer in channel.writers)
            for channel in step.channels.values()
        )

    def _bury(self, step: StepState, channel: Channel, event: ev.MemberDied, group: str) -> None:
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
