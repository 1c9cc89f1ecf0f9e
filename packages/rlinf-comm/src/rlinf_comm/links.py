"""The link of core's channels through shared memory (entry-point group ``rlinf.links``): see ``rlinf_core.links``."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_comm import arena, slots
from rlinf_core.errors import RLinfError


class SharedMemoryLink:
    """Items lie in the producer's arena. A consumer that is alone with an item gets it without a copy."""

    name = "shm"

    def __init__(self, limit_bytes: int = 0) -> None:
        if why := slots.unavailable():
            raise RLinfError(f"no shared memory: {why}")
        self._arena = arena.Arena(limit_bytes or None)

    def put(self, buffers: Sequence[memoryview], holders: int) -> tuple[arena.Slot, bytes] | None:
        alone = 0 < holders <= slots.HOLDERS
        slot = self._arena.put(buffers, range(holders) if alone else ())
        if slot is None:
            return None
        if alone:
            self._arena.release(slot)  # it is used again as soon as its consumers are done, whoever learns of that when
        return slot, slot.ref

    def read(self, slot: arena.Slot) -> list[memoryview]:
        return self._arena.read(slot)

    def release(self, slot: arena.Slot) -> None:
        self._arena.forget(slot)

    def open(self, ticket: bytes, holder: int, private: bool) -> list[memoryview] | None:
        if not slots.reaches(ticket):
            return None
        try:
            return slots.open_slot(ticket, holder if 0 <= holder < slots.HOLDERS else None, private=private)
        except slots.SlotGone:
            return None  # the socket says whether its process is gone

    def close(self) -> None:
        self._arena.close()
