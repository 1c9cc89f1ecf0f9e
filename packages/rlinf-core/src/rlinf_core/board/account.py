"""The account of the steps on the board, what a drop means downstream, and the end of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from rlinf_core.board import events as ev
from rlinf_core.board.events import group_of_member, member_of
from rlinf_core.board.ledger import EndKind, Ledger
from rlinf_core.board.moving import Moving, StepState


class Accounts(Moving):
    """Every sample id of a step ends once."""

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

    def _downstream(self, step: StepState, group: str) -> set[str]:
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

    def _end_ids(self, step: StepState, kind: EndKind, ids: Iterable[str], text: str, member: str) -> None:
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
        untaken: dict[str, str] = {}
        for name, channel in step.channels.items():
            for pending in channel.pending:
                where = f"{member_of(pending.put.writer)}, waiting to put it on channel {name}"
                for item in pending.put.items[pending.done :]:
                    waiting.update(dict.fromkeys(item.ids, where))
            if channel.unread():
                unread[name] = channel.unread()
                untaken[name] = channel.untaken()
        account = step.ledger.account(waiting, unread)
        self._out.append(dataclasses.replace(account, untaken=untaken))

    def _close_step(self, event: ev.CloseStep) -> None:
        step = self._steps.pop(event.step, None)
        if step is None:
            return
        for channel in step.channels.values():
            self._poison(channel, f"step {event.step} is closed")
            del self._channels[channel.name]
            for record in list(channel.records.values()):
                self._free(record)
