"""What carries manifests and buckets from a source rank to target ranks.

``ControlMover`` sends over point-to-point messages (``rlinf_comm.Communicator`` through ``CommunicatorControl``); on
one machine a bucket is written once into shared memory and all targets look at it. ``ChannelMover`` sends through a
flow's channel.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from rlinf_comm import slots
from rlinf_comm.arena import Arena, Slot
from rlinf_comm.errors import CommError, PeerLost
from rlinf_comm.weights.local import Packed

if TYPE_CHECKING:
    from rlinf_comm.communicator import Communicator

Header = dict[str, Any]
Holder = tuple[int, int]
"""(target rank, process id)."""
Lost = dict[int, Exception]
"""Target ranks that could not be reached, with the cause."""
LOOK_AGAIN_S = 0.005
"""Between two looks at whether targets have opened what they were sent."""


@dataclass
class Payload:
    """A bucket ready to go: its pieces (where they lie now) and what the mover keeps about it."""

    pieces: list[torch.Tensor]
    slot: Slot | None = None
    packed: torch.Tensor | None = None


@dataclass
class Arrived:
    """A message as it came: the pieces as tensors, or packed in one buffer of bytes, or neither (a manifest)."""

    header: Header
    pieces: list[torch.Tensor] | None = None
    packed: torch.Tensor | None = None


class Mover(ABC):
    """One rank's end. A source uses ``pack`` and ``send``, a target ``receive``."""

    concurrent: ClassVar[bool] = False
    """``receive`` may wait for several sources at once, in threads; a timeout loses nothing."""
    name: str = ""
    """Of this end in the run (``rollout[0]``), where it is known: for messages."""

    def pack(self, packed: Packed, targets: Sequence[int]) -> Payload:
        """Make a bucket ready for ``targets``. Here: tensors, copied only where they are converted or have gaps."""
        return Payload(packed.tensors())

    @abstractmethod
    def send(self, header: Header, payload: Payload | None, targets: Sequence[int], timeout: float) -> Lost:
        """Hand a message to each of ``targets``; returns those that could not be reached."""

    @abstractmethod
    def receive(self, source: int, timeout: float) -> Arrived:
        """The next message of ``source``, in the order in which it was sent. Raises what the carrier raises when the
        source is gone or ``timeout`` (seconds) has passed."""

    def settle(self, timeout: float) -> Lost:
        """Wait until nobody depends on this process any more for what was sent; returns the targets that still do after
        ``timeout`` (seconds), or have ended before. Here: what was sent is the carrier's."""
        return {}

    def discard(self, message: Arrived) -> None:
        """A message that is not wanted: give back what it holds. The tensors of it must not be used any more."""
        message.pieces = message.packed = None


class Control(Protocol):
    """Point-to-point messages between ranks, in order per pair, of any Python object that holds tensors. What was sent
    may be changed once ``send`` has returned."""

    def send(self, obj: Any, target: int, timeout: float) -> None: ...

    def receive(self, source: int, timeout: float) -> Any: ...

    def process(self, target: int) -> int | None:
        """The id of ``target``'s process when it can map this one's shared memory, else ``None``."""
        ...


class ControlMover(Mover):
    """Over point-to-point messages.

    Targets on this machine get a reference to shared memory that the bucket is packed into, written once for all of
    them; they read it in place, and it is used again when the last of them has dropped its views. Targets elsewhere,
    and all when the arena has no room, get the packed bytes in the message. Tensors on a device go as they are, by the
    control's own transports (gpu-only: nccl between devices, by handle on the same one).

    Memory that a target looks at is taken from it only when its process has ended: one that is slow, or whose
    connection broke, may still compute with the version before.

    So a source must not end, nor close the arena, before its targets have opened what it sent last: ``Sender.close``.
    """

    concurrent = True

    def __init__(self, control: Control, arena: Arena | None = None) -> None:
        self._control = control
        self.name = str(getattr(control, "name", ""))
        self._arena = arena
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._known: dict[int, Holder] = {}
        self._doubtful: set[Holder] = set()
        self._mapped: dict[int, int] = {}
        """Source -> the process whose shared memory is mapped for it."""

    def pack(self, packed: Packed, targets: Sequence[int]) -> Payload:
        if packed.device.type != "cpu":
            buffer = torch.empty(packed.bucket.nbytes, dtype=torch.uint8, device=packed.device)
            return Payload(packed.write(buffer), packed=buffer)
        slot = None if self._arena is None else self._reserve(self._arena, packed.bucket.nbytes, targets)
        if slot is None or self._arena is None:
            if self._scratch.numel() < packed.bucket.nbytes:
                self._scratch = torch.empty(packed.bucket.nbytes, dtype=torch.uint8)
            buffer = self._scratch[: packed.bucket.nbytes]
            return Payload(packed.write(buffer), packed=buffer)
        (memory,) = self._arena.read(slot)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        return Payload(packed.write(buffer), slot, buffer)

    def send(self, header: Header, payload: Payload | None, targets: Sequence[int], timeout: float) -> Lost:
        lost: Lost = {}
        slot = payload.slot if payload is not None else None
        try:
            for target in targets:
                body: Any = None if payload is None else payload.packed
                if slot is not None and (holder := self._known.get(target)) in slot.holders:
                    body = (slot.ref, slot.holders.index(holder))
                try:
                    self._control.send((header, body), target, timeout)
                except (CommError, OSError, EOFError) as error:
                    lost[target] = error
        finally:
            if self._arena is not None:
                self._settle(self._arena, slot, lost)
        return lost

    def _reserve(self, arena: Arena, nbytes: int, targets: Sequence[int]) -> Slot | None:
        holders: list[Holder] = []
        for target in targets:
            process = self._control.process(target)
            if process is None:
                continue
            holder = (target, process)
            if self._known.get(target, holder) != holder:
                self._doubtful.add(self._known[target])  # another process has taken its place
            self._known[target] = holder
            holders.append(holder)
        self._drop_ended(arena)
        # Those for whom a slot has no place get the bytes in the message.
        return arena.reserve([nbytes], holders[: slots.HOLDERS]) if holders else None

    def _settle(self, arena: Arena, slot: Slot | None, lost: Lost) -> None:
        for target in lost:
            if (holder := self._known.get(target)) is not None:
                self._doubtful.add(holder)
                if slot is not None:
                    arena.withdraw(slot, holder)
        if slot is not None:
            arena.release(slot)
        self._drop_ended(arena)

    def _drop_ended(self, arena: Arena) -> None:
        for holder in [h for h in self._doubtful if _ended(h[1])]:
            self._doubtful.discard(holder)
            arena.drop(holder)

    def settle(self, timeout: float) -> Lost:
        """A target opens shared memory when it comes to a bucket: until then this process must be there."""
        lost: Lost = {}
        deadline = time.monotonic() + timeout
        while self._arena is not None:
            awaited = self._arena.awaited()
            # Those whose connection broke are lost already, and are no longer expected.
            waiting = {h for h in self._known.values() if h in awaited and h not in self._doubtful}
            for holder in [h for h in waiting if _ended(h[1])]:
                lost[holder[0]] = PeerLost(f"its process {holder[1]} has ended")
                self._arena.drop(holder)
                waiting.discard(holder)
            left = deadline - time.monotonic()
            if left <= 0:
                lost.update({h[0]: TimeoutError(f"it has not read it within {timeout:.1f} s") for h in waiting})
            if not waiting or left <= 0:
                break
            time.sleep(min(LOOK_AGAIN_S, left))  # a mark is a byte in shared memory: there is nothing to wait on
        return lost

    def receive(self, source: int, timeout: float) -> Arrived:
        try:
            header, body = self._control.receive(source, timeout)
        except PeerLost:
            self._forget(source)
            raise
        if body is None or isinstance(body, torch.Tensor):
            return Arrived(header, packed=body)
        ref, place = body
        (memory,) = slots.open_slot(ref, place)
        process = slots.REF.unpack_from(ref)[1]
        if self._mapped.get(source, process) != process:
            self._forget(source)
        self._mapped[source] = process
        return Arrived(header, packed=torch.frombuffer(memory, dtype=torch.uint8))

    def _forget(self, source: int) -> None:
        """The process of ``source`` has ended, or another has its place: what is still looked at keeps its mapping."""
        if (process := self._mapped.pop(source, None)) is not None:
            slots.mapped.forget(process)


def _ended(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in ("Z", "X")  # nobody has asked for its exit code yet


class CommunicatorControl:
    """A ``Communicator`` as a ``Control``. ``name_of``: a rank of the other side -> its communicator's name."""

    def __init__(self, communicator: Communicator, name_of: Callable[[int], str]) -> None:
        self._communicator = communicator
        self.name = communicator.name
        self._name_of = name_of

    def send(self, obj: Any, target: int, timeout: float) -> None:
        self._communicator.send(obj, self._name_of(target), timeout=timeout)

    def receive(self, source: int, timeout: float) -> Any:
        return self._communicator.recv(self._name_of(source), timeout=timeout)

    def process(self, target: int) -> int | None:
        """Known from the manifest on, which makes the connection."""
        place = self._communicator.place_of(self._name_of(target))
        if place is None or place.node != self._communicator.place.node or "shm" not in place.capabilities:
            return None
        return place.pid


class ChannelMover(Mover):
    """Through a channel of a flow: one item per message, put once for all its targets. ``channel`` is the task's
    ``Out`` at a source and its ``In`` at a target, ``name`` the worker's."""

    def __init__(self, channel: Any, rank: int, name: str = "") -> None:
        self._channel = channel
        self._rank = rank
        self.name = name

    def send(self, header: Header, payload: Payload | None, targets: Sequence[int], timeout: float) -> Lost:
        item = (header, None if payload is None else payload.pieces)
        self._channel.broadcast(item, keys=[f"{self._rank}>{target}" for target in targets])
        return {}

    def receive(self, source: int, timeout: float) -> Arrived:
        header, pieces = self._channel.get(key=f"{source}>{self._rank}", timeout=timeout)
        return Arrived(header, pieces)
