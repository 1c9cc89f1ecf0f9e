"""Through shared memory of the sender's process: one copy at the sender, none at the receiver.

The ticket is the slot's reference; see ``rlinf_comm.arena`` for how the memory comes back without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rlinf_comm import arena, slots
from rlinf_comm.errors import NoRoom, PeerLost
from rlinf_comm.transports.base import Buffer, BufferSpec, Link, Transport


class ShmTransport(Transport):
    name: ClassVar[str] = "shm"

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._arena: arena.Arena = link.shared["arena"]
        link.shared["pids"].add(link.peer.pid)

    @classmethod
    def unavailable(cls) -> str:
        return slots.unavailable()

    def offer(self, buffers: Sequence[Buffer]) -> bytes:
        slot = self._arena.put([b for b in buffers if isinstance(b, memoryview)], (self.link.peer_name,))
        if slot is None:
            size = sum(b.nbytes for b in buffers)
            raise NoRoom(
                f"no room for {size} bytes of shared memory (the limit is {self._arena.limit} bytes: shm_limit_bytes)",
                me=self.link.my_name,
                peer=self.link.peer_name,
            )
        self._arena.release(slot)  # the receiver's hold keeps it
        return ticket_of(slot, 0)

    def pull(self, ticket: bytes, specs: Sequence[BufferSpec]) -> list[Buffer]:
        try:
            return list(slots.open_slot(ticket[1:], ticket[0]))
        except slots.OwnerGone as error:
            me, peer = self.link.my_name, self.link.peer_name
            raise PeerLost(f"{me}: a message of {peer} is lost with it: {error}", me=me, peer=peer) from error

    def release(self, ticket: bytes) -> None:
        withdraw(ticket)

    def close(self, lost: bool) -> None:
        if lost:
            self._arena.drop(self.link.peer_name)
        slots.mapped.forget(self.link.peer.pid)  # what is still looked at keeps its mapping


def ticket_of(slot: arena.Slot, place: int) -> bytes:
    """What the holder at ``place`` needs to open a slot."""
    return bytes([place]) + slot.ref


def withdraw(ticket: bytes) -> None:
    """End the hold that a ticket stands for, when its holder does not know of it."""
    try:
        slots.open_slot(ticket[1:], ticket[0])  # and let it go again
    except slots.SlotGone:
        pass  # it is in use for something else already
