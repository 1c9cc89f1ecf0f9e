"""One object to all members of a group.

Members of one machine get it through one slot of shared memory, however many they are; machines are reached along a
binomial tree of one member each, which hands on what came without decoding it. Then the members report back along the
same tree and learn how it went: when ``broadcast`` returns, every member has the object, and when one fails, all raise.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_comm import frames
from rlinf_comm.codec import CodecError
from rlinf_comm.connection import large
from rlinf_comm.errors import CommError, CommTimeout, RemoteError
from rlinf_comm.frames import Arrived, Packet
from rlinf_comm.mailbox import DATA, REPORT, VERDICT, Key, Mark
from rlinf_comm.slots import HOLDERS
from rlinf_comm.transports.shm import ticket_of, withdraw
from rlinf_core.errors import describe

if TYPE_CHECKING:
    from rlinf_comm.endpoint import Endpoint

GRACE_S = 1.0
"""Beyond the timeout, for each level of the tree, so that who has waited in vain can still say for whom."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A member's place. ``parent``: empty at the source. ``near``: children that share its memory, ``far``: others."""

    parent: str
    near: tuple[str, ...]
    far: tuple[str, ...]
    height: int = 0
    """Levels below this member."""
    levels: int = 0
    """Levels below the source."""

    @property
    def children(self) -> tuple[str, ...]:
        return (*self.far, *self.near)


def tree_of(me: str, source: str, members: Sequence[str], machine: Mapping[str, str]) -> Tree:
    """The place of ``me``. ``machine``: member -> what is equal for members that share memory. Pure; the same members
    in the same order give the same tree everywhere."""
    ordered = [source, *(m for m in members if m != source)]
    machines: dict[str, list[str]] = {}
    for member in ordered:
        machines.setdefault(machine[member], []).append(member)
    leaders = [names[0] for names in machines.values()]
    mine = machines[machine[me]]
    levels = (len(leaders) - 1).bit_length() + 1
    if me != mine[0]:
        return Tree(mine[0], (), (), 0, levels)
    number = leaders.index(me)
    top = number.bit_length()
    parent = leaders[number - (1 << (top - 1))] if number else ""
    far = []
    step = 1 << top
    while number + step < len(leaders):
        far.append(leaders[number + step])
        step <<= 1
    return Tree(parent, tuple(mine[1:]), tuple(reversed(far)), len(far) + 1, levels)


class Broadcast:
    """One broadcast at one member."""

    def __init__(self, endpoint: Endpoint, source: str, members: Sequence[str], deadline: float) -> None:
        me = endpoint.name
        if len(set(members)) != len(members) or source not in members or me not in members:
            raise CommError(
                f"a broadcast from {source} needs members, each once, with {source} and {me} among them; "
                f"it has {', '.join(members) or 'none'}",
                me=me,
            )
        self._endpoint = endpoint
        self._source = source
        self._deadline = deadline
        self._grace = min(GRACE_S, (deadline - time.monotonic()) / 4)
        self._failed: list[str] = []
        group = hashlib.sha256(json.dumps([source, list(members)]).encode()).digest()[:8]
        number = endpoint.next_broadcast(group) if me == source else 0
        self._key = Key(group, bytes.fromhex(endpoint.uid), number)
        """Elsewhere than at the source: its, as soon as the object has come."""
        self.tree = tree_of(me, source, members, {m: self._machine(m) for m in members})

    def _machine(self, member: str) -> str:
        place = self._endpoint.place_of(member, self._deadline)
        return place.node if "shm" in place.capabilities else member

    def fetch(self) -> Arrived:
        """At a member that is not the source: what its parent sends, handed on to its children."""
        group = self._key.group
        parent = self._endpoint.peer(self.tree.parent)
        try:
            message = parent.receive_collective(lambda box: box.take_data(group, time.monotonic()), self._deadline)
        except CommTimeout:
            raise  # the children's time is over too
        except CommError as error:
            self.hand_on(Packet(describe(error).encode(), flags=frames.FAILED))
            raise
        self._key = Mark.unpack(message.meta).key
        packet = Packet(message.skeleton, list(message.buffers), flags=message.flags & frames.FAILED)
        if message.error is not None:
            packet = Packet(describe(message.error).encode(), flags=frames.FAILED)
        self.hand_on(packet)
        return message

    def hand_on(self, packet: Packet) -> None:
        """Send to the children; what goes wrong with one of them is kept for the report."""
        failed = []
        for child in self.tree.far:
            failed += self._send(child, DATA, packet)
        near = self.tree.near
        for at in range(0, len(near), HOLDERS):
            failed += self._share(near[at : at + HOLDERS], packet)
        self._failed = failed

    def _share(self, children: Sequence[str], packet: Packet) -> list[str]:
        endpoint = self._endpoint
        places = large(packet.buffers)[0]
        buffers = [b for b in (packet.buffers[i] for i in places) if isinstance(b, memoryview)]
        slot = None
        if sum(b.nbytes for b in buffers) >= endpoint.thresholds.shm_from and len(children) > 1:
            slot = endpoint.arena.put(buffers, children)
        failed: list[str] = []
        if slot is None:
            for child in children:
                failed += self._send(child, DATA, packet)
            return failed
        unsent = [ticket_of(slot, i) for i in range(len(children))]
        try:
            for child in children:
                if self._reaches(child):
                    failed += self._send(child, DATA, packet, {"shm": unsent[0]})
                else:
                    withdraw(unsent[0])
                    failed += self._send(child, DATA, packet)
                del unsent[0]
        finally:
            for ticket in unsent:
                withdraw(ticket)
            endpoint.arena.release(slot)
        return failed

    def _reaches(self, child: str) -> bool:
        """Whether a child that is said to share memory does; known once there is a connection."""
        try:
            return "shm" in self._endpoint.peer(child).connected(self._deadline).place.capabilities
        except CommError:
            return False  # sending to it says what is wrong

    def _send(
        self,
        child: str,
        kind: bytes,
        packet: Packet,
        tickets: dict[str, bytes] | None = None,
        later: float = 0.0,
    ) -> list[str]:
        flags = packet.flags | frames.COLLECTIVE
        left = max(0.0, self._deadline - time.monotonic())
        mark = Mark(self._key, kind, left + (self.tree.levels + 2) * self._grace).pack()
        own = Packet(packet.skeleton, list(packet.buffers), mark, flags=flags, tickets=tickets, work=packet.work)
        try:
            what = f"a broadcast of {packet.nbytes} bytes from {self._source}"
            self._endpoint.peer(child).send(own, self._deadline + later, confirm=False, what=what, apart=True)
        except CommError as error:
            if tickets is not None:
                withdraw(tickets["shm"])
            return [describe(error)]
        return []

    def _tell(self, peer: str, kind: bytes, text: str) -> list[str]:
        return self._send(peer, kind, Packet(text.encode()), later=(self.tree.levels + 1) * self._grace)

    def settle(self, error: BaseException | None) -> None:
        """Report, and raise what went wrong anywhere. ``error``: of this member itself."""
        failed = list(self._failed)
        if error is not None:
            failed.append(f"{self._endpoint.name}: {describe(error)}")
        for child in self.tree.children:
            failed += self._listen(child, REPORT, self.tree.height)
        if self.tree.parent:
            failed += self._tell(self.tree.parent, REPORT, "\n".join(failed))
            verdict = "\n".join(self._listen(self.tree.parent, VERDICT, self.tree.levels + 1))
        else:
            verdict = "\n".join(failed)
        for child in self.tree.children:
            self._tell(child, VERDICT, verdict)
        if error is not None:
            raise error
        if verdict:
            me = self._endpoint.name
            text = f"{me}: the broadcast from {self._source} failed: {verdict}"
            raise RemoteError(text, me=me, peer=self._source, text=verdict)

    def _listen(self, peer: str, kind: bytes, levels: int) -> list[str]:
        """``levels``: how many others may have waited to the end of their time before this can come."""
        try:
            message = self._receive(peer, kind, levels * self._grace)
        except CommError as error:
            return [describe(error)]
        self._endpoint.peer(peer).consumed_one(message)
        return [message.skeleton.decode(errors="replace")] if message.skeleton else []

    def _receive(self, name: str, kind: bytes, later: float) -> Arrived:
        key = self._key
        return self._endpoint.peer(name).receive_collective(lambda box: box.take(key, kind), self._deadline + later)


def run(
    endpoint: Endpoint,
    source: str,
    members: Sequence[str],
    timeout: float,
    pack: Callable[[], tuple[Packet, Exception | None]],
    unpack: Callable[[Arrived], object],
) -> object:
    """``pack`` makes the packet at the source; ``unpack`` decodes what came at the others."""
    broadcast = Broadcast(endpoint, source, members, time.monotonic() + timeout)
    if endpoint.name == source:
        packet, error = pack()
        try:
            frames.check_size(packet)
        except CodecError as large_error:
            packet, error = Packet(describe(large_error).encode(), flags=frames.FAILED), large_error
        broadcast.hand_on(packet)
        if error is not None:
            raise error
        broadcast.settle(None)
        return None
    message = broadcast.fetch()
    peer = endpoint.peer(broadcast.tree.parent)
    if message.flags & frames.FAILED:
        peer.consumed_one(message)
        text = message.skeleton.decode(errors="replace")
        raise RemoteError(f"{source} failed on a broadcast: {text}", me=endpoint.name, peer=source, text=text)
    obj, fault = None, None
    try:
        obj = unpack(message)
    except Exception as caught:  # the others are told, then it is raised
        fault = caught
    broadcast.settle(fault)
    return obj
