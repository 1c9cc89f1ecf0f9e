"""What the hub decides, without any I/O: messages of members in, messages to members out.

It keeps the channel board and the device lock, routes calls and results, remembers who waits for what, and turns
the first failure into the run's cause. ``rlinf_core.hub.server`` gives it sockets and a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from rlinf_core import devicelock
from rlinf_core.board import events as ev
from rlinf_core.board.board import Board
from rlinf_core.devicelock import DeviceLock
from rlinf_core.hub.messages import (
    DRIVER,
    Accepted,
    Acquire,
    AtSafePoint,
    Blocked,
    Call,
    CallResult,
    Cancel,
    Died,
    Failure,
    Feeding,
    Found,
    Goodbye,
    Granted,
    Hello,
    Log,
    Lookup,
    Offload,
    Offloaded,
    Publish,
    Release,
    ReleaseDevices,
    Stacks,
    Withdraw,
)
from rlinf_core.payload import Descriptor

Outgoing = list[tuple[str, Any]]
_BOARD_EVENTS = get_args(ev.Event)


@dataclass
class MemberState:
    """What the hub knows of one member."""

    hello: Hello
    leaving: bool = False
    calls: dict[int, Call] = field(default_factory=dict)
    waits: dict[tuple[str, int], str] = field(default_factory=dict)
    beside: dict[tuple[str, int], str] = field(default_factory=dict)
    """Unanswered puts and gets that it does not wait for, or not yet."""
    feeds: int = 0

    def describe(self) -> str:
        if not self.calls:
            return "idle"
        call = next(iter(self.calls.values()))
        name = f"{call.task} of {call.step}" if call.step else call.task
        if not self.waits:
            return f"working in {name}"
        return f"in {name}, waiting for " + " and ".join(self.waits.values())


class HubCore:
    """State of one run's hub. ``lock_replica`` names the lock replica and rank of each member that has devices."""

    def __init__(self) -> None:
        self.board = Board()
        self.lock: DeviceLock | None = None
        self.lock_replica: dict[str, tuple[str, int]] = {}
        self.members: dict[str, MemberState] = {}
        self.failure: Failure | None = None
        self.driver_waits: Callable[[], bool] = lambda: True
        """Whether the program waits for a step (it may be about to feed or call something otherwise)."""
        self._lock_reqs: dict[tuple[str, int], tuple[str, int]] = {}
        self._suspended: dict[tuple[str, int], tuple[str, int]] = {}
        """Waiting request -> (replica, rank) that left its section for the wait."""
        self._alternating: dict[str, tuple[str, ...]] = {}
        self._held_back: dict[str, Acquire] = {}
        """Acquisitions that are not passed to the lock yet, by member."""
        self._published: dict[str, bytes] = {}
        self._lookups: dict[tuple[str, int], str] = {}
        self._regaining: dict[tuple[str, int], tuple[tuple[str, int], Any]] = {}
        """(replica, rank) -> the request and the answer it gets once it is in its section again."""

    def set_lock(
        self,
        lock: DeviceLock,
        replicas: Mapping[str, tuple[str, int]],
        alternating: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """``alternating``: by member, those that it gives way to after each portion (see ``FlatPlan.alternating``)."""
        self.lock = lock
        self.lock_replica = dict(replicas)
        self._alternating = dict(alternating or {})

    def handle(self, member: str, message: Any) -> Outgoing:
        """Decide what one message of ``member`` causes."""
        return self._handle(member, message) + self._let_in()

    def _handle(self, member: str, message: Any) -> Outgoing:
        if isinstance(message, _BOARD_EVENTS):
            return self._board(member, message)
        if isinstance(message, AtSafePoint):
            return self._board(member, message.event, inside=True)
        if isinstance(message, Acquire | ReleaseDevices | Offloaded):
            return self._device(member, message)
        if isinstance(message, Publish | Lookup | Withdraw):
            return self._directory(member, message)
        if isinstance(message, Blocked):
            return self._blocked(member, message.req)
        if isinstance(message, Call):
            return self._call(message)
        if isinstance(message, CallResult):
            return self._result(message)
        if isinstance(message, Hello):
            self.members[member] = MemberState(message)
            return [(DRIVER, message)] if member != DRIVER else []
        if isinstance(message, Goodbye):
            self.members[member].leaving = True
            return []
        if isinstance(message, Feeding):
            self.members[member].feeds += message.change
            return []
        if isinstance(message, Log | Stacks):
            return [(DRIVER, message)]
        if isinstance(message, Failure):
            return self.fail(message)
        if isinstance(message, Cancel):
            return [(m, message) for m in self.members if m != DRIVER]
        raise TypeError(f"unknown message {type(message).__name__} from {member}")

    # The run's directory

    def _directory(self, member: str, message: Publish | Lookup | Withdraw) -> Outgoing:
        if isinstance(message, Publish):
            self._published[message.key] = message.value
            waiting = [req for req, key in self._lookups.items() if key == message.key]
            return [one for req in waiting for one in self._found(req, message.value)]
        if isinstance(message, Withdraw):
            return self._found(message.req, None) if message.req in self._lookups else []
        if message.key in self._published:
            return [(member, Found(message.req, self._published[message.key]))]
        self._lookups[message.req] = message.key
        if message.req[1] >= 0 and (state := self.members.get(member)) is not None:
            state.waits[message.req] = f"{message.key!r} in the run's directory"
        return self._idle(member)

    def _found(self, req: tuple[str, int], value: bytes | None) -> Outgoing:
        del self._lookups[req]
        state = self.members.get(req[0])
        if state is None:
            return []
        state.waits.pop(req, None)
        return [(req[0], Found(req, value))]

    # Calls

    def _call(self, call: Call) -> Outgoing:
        state = self.members.get(call.member)
        if state is None:
            return self.fail(Failure(call.member, f"{call.member} is not there to run {call.task!r}"))
        state.calls[call.call_id] = call
        return [(call.member, call)]

    def _result(self, result: CallResult) -> Outgoing:
        state = self.members.get(result.member)
        call = state.calls.pop(result.call_id, None) if state is not None else None
        out: Outgoing = self._idle(result.member)
        if not result.ok:
            if not result.secondary:
                task = f" in {call.task} of {call.step}" if call and call.step else f" in {call.task}" if call else ""
                text = f"{result.member} failed{task}: {result.error}"
                out += self.fail(Failure(result.member, text, result.traceback_text, result.bad_input))
            if call is not None:
                out += self._poison(call, result.error)
        out.append((DRIVER, result))
        return out

    def _poison(self, call: Call, cause: str) -> Outgoing:
        out: Outgoing = []
        for arg in call.outputs:
            out += self._instructions(
                self.board.handle(ev.PoisonWriter(channel=arg.channel, writer=arg.writer, cause=cause))
            )
        return out

    def fail(self, failure: Failure) -> Outgoing:
        """Record the first failure, tell the driver, and stop everybody else."""
        if self.failure is not None:
            return []
        self.failure = failure
        cancel = Cancel(f"the run is being stopped: {failure.message}")
        return [(DRIVER, failure), *((m, cancel) for m in self.members if m != DRIVER)]

    def lost(self, member: str) -> Outgoing:
        """The member's connection ended."""
        self._held_back.pop(member, None)
        return self._lost(member) + self._let_in()

    def _lost(self, member: str) -> Outgoing:
        state = self.members.pop(member, None)
        self._lookups = {req: key for req, key in self._lookups.items() if req[0] != member}
        if state is None or state.leaving or member == DRIVER:
            return []
        out: Outgoing = [(DRIVER, Died(member, state.describe()))]
        cause = f"{member} died while {state.describe()}"
        out += self.fail(Failure(member, cause))
        out += self._instructions(self.board.handle(ev.MemberDied(member=member, cause=cause)))
        replica = self.lock_replica.get(member)
        if self.lock is not None and replica is not None:
            out += self._lock_instructions(self.lock.handle(devicelock.Died(replica[0], cause)))
        return out

    # Channels

    def _board(self, member: str, event: Any, inside: bool = False) -> Outgoing:
        req = getattr(event, "req", None)
        state = self.members.get(member)
        if isinstance(event, ev.CancelRequest):
            instructions = self.board.handle(event)
            withdrawn = any(isinstance(i, ev.CancelDone) and i.req == event.req for i in instructions)
            if (
                withdrawn
            ):  # else it was answered before, and that answer counts, be it that its devices are still to come
                self._suspended.pop(cast(tuple[str, int], event.req), None)
            return self._instructions(instructions)
        # A negative number: asked by a thread beside the engine thread, or ahead by that: it may be at work meanwhile.
        if req is not None and state is not None:
            if req[1] >= 0 or member == DRIVER:
                state.waits[req] = _wait_text(event)
            elif isinstance(event, ev.Put | ev.Get) and event.ahead:
                state.beside[req] = _wait_text(event)
        out = self._instructions(self.board.handle(event))
        if req is not None and state is not None and req in state.waits:
            # It waits: for input, or for credit. Either way another replica may have the devices meanwhile.
            out += self._suspend(member, req) if inside else self._idle(member)
        return out

    def _blocked(self, member: str, req: tuple[str, int]) -> Outgoing:
        """From now on the member waits, unless it has been answered meanwhile."""
        state = self.members[member]
        if req not in state.beside:
            return []
        state.waits[req] = state.beside.pop(req)
        return self._idle(member)

    def _instructions(self, instructions: list[Any]) -> Outgoing:
        out: Outgoing = []
        for instruction in instructions:
            req: Any = getattr(instruction, "req", None)
            if req is not None:
                out += self._answer(req, instruction)
            elif isinstance(instruction, ev.Released):
                descriptors = cast(tuple[Descriptor, ...], instruction.descriptors)
                if keys := tuple(d.key for d in descriptors if d.inline is None):
                    out.append((instruction.member, Release(keys)))
            elif isinstance(instruction, ev.StepFailed):
                out += self.fail(Failure("", f"step {instruction.step}: {instruction.cause}"))
            else:
                out.append((DRIVER, instruction))
        return out

    def _answer(self, req: tuple[str, int], answer: Any) -> Outgoing:
        """Send an answer, once the asker has its devices again if it gave them up for the wait."""
        state = self.members.get(req[0])
        if state is None:
            return []
        place = self._suspended.pop(req, None)
        if place is not None and self.lock is not None and not isinstance(answer, ev.Poisoned):
            self._regaining[place] = (req, answer)
            state.waits[req] = "devices"
            return self._lock_instructions(self.lock.handle(devicelock.Acquire(*place)))
        state.waits.pop(req, None)
        if state.beside.pop(req, None) is not None and isinstance(answer, ev.PutDone):
            answer = Accepted(req)
        return [(req[0], answer)]

    # Devices

    def _idle(self, member: str) -> Outgoing:
        """The member has no work for its devices now: others may have them."""
        place = self.lock_replica.get(member)
        if place is None or self.lock is None:
            return []
        return self._lock_instructions(self.lock.handle(devicelock.Idle(*place)))

    def _suspend(self, member: str, req: tuple[str, int]) -> Outgoing:
        """A get inside a section is a safe point: the rank leaves the section until its answer is there."""
        place = self.lock_replica.get(member)
        if place is None or self.lock is None or place[1] not in self.lock.inside(place[0]):
            return []
        self._suspended[req] = place
        return self._lock_instructions(self.lock.handle(devicelock.Release(*place)))

    def _has_input(self, member: str) -> bool:
        group, _, rest = member.partition("[")
        rank = int(rest.rstrip("]"))
        calls = self.members[member].calls.values()
        return any(self.board.ready(channel, group, rank) for call in calls for channel in call.inputs)

    def _device(self, member: str, message: Acquire | ReleaseDevices | Offloaded) -> Outgoing:
        if self.lock is None or member not in self.lock_replica:
            raise ValueError(f"{member} has no devices in this plan")
        replica, rank = self.lock_replica[member]
        if isinstance(message, ReleaseDevices):
            more = self._has_input(member) and not self._gives_way(member)
            return self._lock_instructions(self.lock.handle(devicelock.Release(replica, rank, more)))
        if isinstance(message, Offloaded):
            return self._lock_instructions(self.lock.handle(devicelock.Offloaded(replica, rank)))
        if message.again and rank in self.lock.inside(replica):
            return [(member, Granted(message.req))]
        state = self.members[member]
        if not message.again and self._gives_way(member):
            self._held_back[member] = message
            state.waits[message.req] = "devices"
            return self._idle(member)  # nor does it keep the devices meanwhile
        self._lock_reqs[replica, rank] = message.req
        out = self._lock_instructions(self.lock.handle(devicelock.Acquire(replica, rank)))
        if (replica, rank) in self._lock_reqs:
            state.waits[message.req] = "devices"
        return out

    def _gives_way(self, member: str) -> bool:
        """Whether a stage that takes what this one makes, on its devices and in turn with it, is at work on that or
        about to be: not so while it waits for more input, or for credit. Nor does a rank whose peers are at work: their
        round needs it."""
        if member not in self._alternating or self.lock is None or self.lock.is_late(*self.lock_replica[member]):
            return False
        for other in self._alternating[member]:
            state = self.members.get(other)
            if state is not None and state.calls and (not state.waits or "devices" in state.waits.values()):
                return True
        return False

    def _let_in(self) -> Outgoing:
        """Pass on the acquisitions of those that no longer have to give way."""
        out: Outgoing = []
        if not self._held_back:
            return out
        for member in [m for m in self._held_back if not self._gives_way(m)]:
            message = self._held_back.pop(member)
            state = self.members[member]
            state.waits.pop(message.req, None)
            out += self._device(member, message)
        return out

    def _lock_instructions(self, instructions: list[Any]) -> Outgoing:
        out: Outgoing = []
        for instruction in instructions:
            if isinstance(instruction, devicelock.Grant | devicelock.Refused):
                place = (instruction.replica, instruction.rank)
                if place in self._regaining:
                    asked, answer = self._regaining.pop(place)
                    out += self._answer(asked, answer)
                    continue
                req = self._lock_reqs.pop((instruction.replica, instruction.rank), None)
                if req is None:
                    continue  # the asker died meanwhile
                state = self.members.get(req[0])
                if state is not None:
                    state.waits.pop(req, None)
                    out.append((req[0], Granted(req, getattr(instruction, "reason", ""))))
            elif isinstance(instruction, devicelock.AskOffload):
                out += [(m, Offload()) for m, (name, _) in self.lock_replica.items() if name == instruction.replica]
        return out

    def device_waits(self) -> dict[tuple[str, int], tuple[str, list[str]]]:
        """Every wait for devices: what holds it up, in words, and the members that hold the devices."""
        found: dict[tuple[str, int], tuple[str, list[str]]] = {}
        for name, state in self.members.items():
            for req in (r for r, what in state.waits.items() if what == "devices" and name in self.lock_replica):
                assert self.lock is not None
                replica = self.lock_replica[name][0]
                holders = self.lock.holders(replica)
                members = [m for m, (place, _) in self.lock_replica.items() if place in holders]
                text = self.lock.explain(replica)
                if name in self._held_back:
                    members = [m for m in self._alternating[name] if m in self.members]
                    text = f"{name} gives way to {', '.join(members)}, which takes what it makes; {text}"
                found[req] = (text, members)
        return found

    def report(self) -> str:
        """One line per member: what it does or waits for."""
        lines = []
        for name, state in self.members.items():
            if name == DRIVER and not state.waits:
                continue
            lines.append(f"  {name}: {state.describe()}")
            for req, what in state.waits.items():
                if what != "devices" and req not in self._lookups:
                    lines.append(f"    {self.board.explain_request(req)}")
                elif what == "devices" and self.lock is not None and name in self.lock_replica:
                    lines.append(f"    {self.lock.explain(self.lock_replica[name][0])}")
        return "\n".join(lines)

    def stuck(self) -> bool:
        """True when calls are open and every member that has one waits: nothing can move any more.

        A member that offloads for another is at work, though it may have no call: a large state takes its time.
        """
        if self.lock is not None and self.lock.offloading():
            return False
        busy = [s for s in self.members.values() if s.calls]
        driver = self.members.get(DRIVER)
        feeding = driver is not None and driver.feeds > len(driver.waits)
        return bool(busy) and self.driver_waits() and not feeding and all(s.waits for s in busy)


def _wait_text(event: Any) -> str:
    if isinstance(event, ev.Put):
        return f"credit to put on channel {event.channel!r}"
    if isinstance(event, ev.Get):
        return f"an item of channel {event.channel!r}"
    if isinstance(event, ev.JoinReader):
        return f"a pair of channels {event.a!r} and {event.b!r}"
    return type(event).__name__
