"""What has come of broadcasts from one peer and is not taken yet.

Nobody may be there to take it: a member that was late, or has begun again, or calls with other members. So what can
be of no use any more is thrown away as soon as that is known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rlinf_comm import frames
from rlinf_comm.errors import FrameError
from rlinf_comm.frames import Arrived

DATA, REPORT, VERDICT = b"d", b"r", b"v"
_MARK = struct.Struct("<8s8sQcd")


class Key(NamedTuple):
    """One broadcast of a group. The source counts; members take the number from what comes."""

    group: bytes
    """8 bytes: a digest of source and members."""
    source: bytes
    """8 bytes: of the source's process, which begins to count anew when it is another."""
    number: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The meta data of a broadcast's messages."""

    key: Key
    kind: bytes
    seconds: float
    """After its arrival nobody can have a use for it any more when so long has passed."""

    def pack(self) -> bytes:
        return _MARK.pack(*self.key, self.kind, self.seconds)

    @classmethod
    def unpack(cls, data: bytes) -> Mark:
        """Raises FrameError."""
        try:
            group, source, number, kind, seconds = _MARK.unpack(data)
        except struct.error as error:
            raise FrameError(f"{len(data)} bytes are no mark of a broadcast") from error
        return cls(Key(group, source, number), kind, seconds)


@dataclass(slots=True)
class _Entry:
    message: Arrived
    mark: Mark
    until: float

    @property
    def waits_for_us(self) -> bool:
        """Its sender does not go on to the next broadcast before this one has ended here or failed there."""
        return self.mark.kind == DATA and not self.message.flags & frames.FAILED


class Mailbox:
    """Not safe for threads. ``now``: ``time.monotonic()``."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, message: Arrived, now: float) -> None:
        """Raises FrameError for what has no mark of a broadcast."""
        mark = Mark.unpack(message.meta)
        self._entries = [e for e in self._entries if now < e.until and not _replaces(mark, e)]
        # Its sender has given the broadcast up if its end comes before the object was taken here.
        missed = [e for e in self._entries if e.waits_for_us and mark.kind == VERDICT and e.mark.key == mark.key]
        if missed:
            self._entries = [e for e in self._entries if e not in missed]
            return
        self._entries.append(_Entry(message, mark, now + mark.seconds))

    def take_data(self, group: bytes, now: float) -> Arrived | None:
        """The object of the group's broadcast that goes on now."""
        return self._take(lambda e: e.mark.kind == DATA and e.mark.key.group == group and now < e.until)

    def take(self, key: Key, kind: bytes) -> Arrived | None:
        return self._take(lambda e: e.mark.kind == kind and e.mark.key == key)

    def _take(self, wanted: Callable[[_Entry], bool]) -> Arrived | None:
        for i, entry in enumerate(self._entries):
            if wanted(entry):
                del self._entries[i]
                return entry.message
        return None

    def begin_again(self) -> None:
        """The peer is another process now: what its predecessor began goes no further. How something went may still be
        asked for."""
        self._entries = [e for e in self._entries if e.mark.kind != DATA]

    def clear(self) -> None:
        self._entries.clear()


def _replaces(mark: Mark, entry: _Entry) -> bool:
    """Whether what comes with ``mark`` shows that the sender is past the broadcast of ``entry``."""
    if mark.key.group != entry.mark.key.group or mark.kind != entry.mark.kind:
        return False
    return entry.waits_for_us or mark.kind != DATA
