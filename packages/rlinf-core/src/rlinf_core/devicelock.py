"""The device lock of the whole cluster: one pure state machine, events in, instructions out.

The unit is a *replica* (ranks that compute together). Its rules:

- A replica gets all its devices at once or none, so no two replicas can each hold what the other needs.
- Among waiters that share devices the flow's order decides (producers before consumers), then arrival. A
  waiter that is first in that order reserves its devices: a later one does not slip past it.
- A rank of the holder that comes late is let in while its peers are in the same round (their collective work
  needs it), whoever else waits. Ranks enter and leave; nested entries are counted.
- A holder that leaves with ``more`` (it has queued input) keeps its devices and comes back; ``Idle`` gives
  them up. A holder that has left stays loaded until somebody else wants the devices (lazy offload).
- A *resident* replica stays loaded and is never asked to offload. Replicas of one *set* (a cycle such as simulator and
  policy) are loaded together and offloaded together. Either way those on one device take turns without switching: they
  exclude each other in time, not in memory.
- A dead replica's devices are free at once.

What the caller owes: a rank that waits inside its section for something which only a waiting replica can
give must leave the section first (``get`` is such a safe point), and a task that returns says ``Idle``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

from rlinf_core.errors import PlanError, nearest


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """``devices``: all it needs (none for a CPU stage). ``order``: place of its stage in the flow. ``together``: name
    of the set of stages that are loaded at the same time (empty: none)."""

    devices: frozenset[int]
    ranks: int = 1
    order: int = 0
    resident: bool = False
    together: str = ""

    def fits_beside(self, other: ReplicaSpec) -> bool:
        """Whether both may be loaded on one device at the same time."""
        return self.resident or other.resident or (self.together != "" and self.together == other.together)


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Acquire:
    """The rank wants in. Answered by ``Grant`` or ``Refused``. Inside already: counted, granted at once."""

    replica: str
    rank: int


@dataclass(frozen=True, slots=True)
class Release:
    """The rank leaves one (nested) entry. ``more``: it has queued input, so its replica keeps the devices."""

    replica: str
    rank: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """The rank (``None``: every rank) has no queued input, is held up by back-pressure, or its task returned:
    the replica need not be kept for it."""

    replica: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has loaded after ``Grant(load=True)`` (``None``: all ranks). Only for what ``explain`` says."""

    replica: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A rank has given its memory back after ``AskOffload`` (``None``: all ranks); all must, to free devices."""

    replica: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Died:
    """The replica is gone; every later ``Acquire`` of it is refused."""

    replica: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Withdraw a waiting ``Acquire``. One that was granted before is not touched: the rank releases it."""

    replica: str
    rank: int


LockEvent: TypeAlias = Acquire | Release | Idle | Loaded | Offloaded | Died | Cancel


# ------------------------------------------------------------------ instructions


@dataclass(frozen=True, slots=True)
class Grant:
    """The rank is in. ``load``: the replica was offloaded since (or never loaded), so it loads first."""

    replica: str
    rank: int
    load: bool = False


@dataclass(frozen=True, slots=True)
class AskOffload:
    """All ranks of the replica give their memory back and say ``Offloaded``; ``wanted_by`` waits for it."""

    replica: str
    wanted_by: str


@dataclass(frozen=True, slots=True)
class FreedByDeath:
    """A dead holder's devices are free; ``waiters`` are the (replica, rank) that waited for one of them."""

    replica: str
    devices: frozenset[int]
    waiters: tuple[tuple[str, int], ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    replica: str
    rank: int
    reason: str


LockInstruction: TypeAlias = Grant | AskOffload | FreedByDeath | Refused


class _State(Enum):
    OUT = "not loaded"
    HOLDING = "holding"
    OFFLOADING = "offloading"


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    spec: ReplicaSpec
    state: _State = _State.OUT
    inside: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    more: set[int] = field(default_factory=set)
    to_load: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    dead: str | None = None

    @property
    def round(self) -> int:
        return max(self.entries.values(), default=0)

    @property
    def busy(self) -> bool:
        """A rank is inside, or it will come back at once."""
        return bool(self.inside or self.more)

    def is_late(self, rank: int) -> bool:
        """Peers are inside in a round that this rank has not entered yet."""
        return bool(self.inside) and self.entries.get(rank, 0) < self.round

    @property
    def place(self) -> tuple[int, int]:
        return (self.spec.order, min(self.waiting.values(), default=0))


class DeviceLock:
    """Who may use which devices."""

    def __init__(self, replicas: Mapping[str, ReplicaSpec]) -> None:
        self._replicas = {name: _Replica(name, spec) for name, spec in replicas.items()}
        self._sharing: dict[str, list[_Replica]] = {}
        """Those that must be offloaded before it can load."""
        self._beside: dict[str, list[_Replica]] = {}
        """Those that may be loaded meanwhile but must not be at work."""
        for one in self._replicas.values():
            common = [o for o in self._replicas.values() if o is not one and one.spec.devices & o.spec.devices]
            self._sharing[one.name] = [o for o in common if not one.spec.fits_beside(o.spec)]
            self._beside[one.name] = [o for o in common if one.spec.fits_beside(o.spec)]
        self._clock = 0
        self._out: list[LockInstruction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Acquire: self._acquire,
            Release: self._release,
            Idle: self._idle,
            Loaded: self._loaded,
            Offloaded: self._offloaded,
            Died: self._died,
            Cancel: self._cancel,
        }

    def handle(self, event: LockEvent) -> list[LockInstruction]:
        """Apply one event; returns what to do, in order."""
        self._out = []
        self._handlers[type(event)](event)
        return self._out

    def reorder(self, orders: Mapping[str, int]) -> None:
        """Other places in the flow's order, from the next decision on; names that it does not have are left out."""
        for name, order in orders.items():
            if name in self._replicas:
                replica = self._replicas[name]
                replica.spec = replace(replica.spec, order=order)

    # ------------------------------------------------------------ what holds

    def holder_of(self, device: int) -> tuple[str, ...]:
        """Replicas whose memory is on the device or that may use it now (several residents may share one)."""
        return tuple(
            replica.name
            for replica in self._replicas.values()
            if device in replica.spec.devices and replica.state is not _State.OUT
        )

    def inside(self, replica: str) -> tuple[int, ...]:
        """Ranks inside a section."""
        return tuple(sorted(self._get(replica).inside))

    def is_late(self, replica: str, rank: int) -> bool:
        """Whether peers of the rank are inside, in a round that it has not entered yet."""
        return self._get(replica).is_late(rank)

    def waiting(self) -> tuple[tuple[str, int], ...]:
        """All waiting (replica, rank), in the order in which they are served."""
        found = sorted((r for r in self._replicas.values() if r.waiting), key=lambda r: r.place)
        return tuple((replica.name, rank) for replica in found for rank in replica.waiting)

    def offloading(self) -> bool:
        """Whether a replica that was asked to offload has not done so yet."""
        return any(replica.state is _State.OFFLOADING for replica in self._replicas.values())

    def holders(self, replica: str) -> tuple[str, ...]:
        """Who has what this replica needs: loaded rivals, and who is at work beside it."""
        rivals = [other.name for other in self._sharing[replica] if other.state is not _State.OUT]
        return (*rivals, *(other.name for other in self._beside[replica] if other.inside))

    def explain(self, replica: str) -> str:
        """Who holds what this replica waits for, as one line; for waits that reach their deadline."""
        me = self._get(replica)
        if me.dead is not None:
            return f"{replica} died: {me.dead}"
        need = _devices(me.spec.devices)
        if not me.waiting:
            return f"{replica} ({need}): {self._status(me)}"
        parts = [f"{replica} waits for {need} (ranks {_ranks(me.waiting)})"]
        for other in self._beside[replica]:
            if other.inside:
                shared = _devices(other.spec.devices & me.spec.devices)
                parts.append(f"{shared} with {other.name}: {self._status(other)}")
        for other in self._sharing[replica]:
            if other.state is not _State.OUT:
                shared = _devices(other.spec.devices & me.spec.devices)
                parts.append(f"{shared} with {other.name}: {self._status(other)}")
            elif other.waiting and other.place < me.place:
                parts.append(f"{other.name} is before it in the flow and waits for {_devices(other.spec.devices)}")
        if me.state is _State.HOLDING:
            parts.append(f"it holds them itself: {self._status(me)}")
        return "; ".join(parts)

    def _status(self, replica: _Replica) -> str:
        if replica.state is _State.OUT:
            return "not loaded, not waiting" if not replica.waiting else "waiting"
        if replica.state is _State.OFFLOADING:
            return f"asked to offload, ranks {_ranks(replica.loaded)} have not yet"
        if replica.inside:
            missing = [rank for rank in range(replica.spec.ranks) if rank not in replica.loaded]
            loading = f", ranks {_ranks(missing)} still loading" if missing else ""
            return f"in use by ranks {_ranks(replica.inside)}{loading}"
        return "kept, it has queued input" if replica.more else "loaded and idle"

    def _get(self, name: str) -> _Replica:
        if name not in self._replicas:
            raise PlanError(f"replica {name!r} is not in the plan{nearest(name, self._replicas)}")
        return self._replicas[name]

    # ------------------------------------------------------------ events

    def _acquire(self, event: Acquire) -> None:
        replica = self._get(event.replica)
        if replica.dead is not None:
            self._out.append(Refused(event.replica, event.rank, f"{event.replica} died: {replica.dead}"))
        elif not 0 <= event.rank < replica.spec.ranks:
            reason = f"rank {event.rank} is not one of the {replica.spec.ranks} ranks of {event.replica}"
            self._out.append(Refused(event.replica, event.rank, reason))
        elif event.rank in replica.inside:
            replica.inside[event.rank] += 1
            self._out.append(Grant(event.replica, event.rank))
        elif event.rank not in replica.waiting:
            self._clock += 1
            replica.waiting[event.rank] = self._clock
            self._settle()

    def _release(self, event: Release) -> None:
        replica = self._get(event.replica)
        if event.rank not in replica.inside:
            return  # of a replica that died meanwhile
        replica.inside[event.rank] -= 1
        if replica.inside[event.rank]:
            return
        del replica.inside[event.rank]
        if event.more:
            replica.more.add(event.rank)
        else:
            replica.more.discard(event.rank)
        self._settle()

    def _idle(self, event: Idle) -> None:
        replica = self._get(event.replica)
        if event.rank is None:
            replica.more.clear()
        replica.more.discard(-1 if event.rank is None else event.rank)
        self._settle()

    def _loaded(self, event: Loaded) -> None:
        replica = self._get(event.replica)
        if replica.state is _State.HOLDING:
            replica.loaded.update(range(replica.spec.ranks) if event.rank is None else (event.rank,))

    def _offloaded(self, event: Offloaded) -> None:
        replica = self._get(event.replica)
        if replica.state is not _State.OFFLOADING:
            return
        if event.rank is None:
            replica.loaded.clear()
        replica.loaded.discard(-1 if event.rank is None else event.rank)
        if not replica.loaded:
            replica.state = _State.OUT
            self._settle()

    def _cancel(self, event: Cancel) -> None:
        if self._get(event.replica).waiting.pop(event.rank, None) is not None:
            self._settle()

    def _died(self, event: Died) -> None:
        replica = self._get(event.replica)
        if replica.dead is not None:
            return
        held = replica.spec.devices if replica.state is not _State.OUT else frozenset()
        replica.dead = event.cause or "no cause given"
        replica.state = _State.OUT
        for ranks in (replica.inside, replica.waiting, replica.entries):
            ranks.clear()
        replica.more.clear()
        replica.loaded.clear()
        waiters = tuple((name, rank) for name, rank in self.waiting() if self._replicas[name].spec.devices & held)
        self._out.append(FreedByDeath(event.replica, held, waiters, event.cause))
        self._settle()

    # ------------------------------------------------------------ decisions

    def _settle(self) -> None:
        """Grant what can be granted, in order; ask idle holders to offload for the first waiters."""
        reserved: list[_Replica] = []
        for replica in sorted((r for r in self._replicas.values() if r.waiting), key=lambda r: r.place):
            rivals, beside = self._sharing[replica.name], self._beside[replica.name]
            ahead = any(other in rivals for other in reserved)
            free = not any(other.inside for other in beside)
            if replica.state is _State.HOLDING:
                # Its rivals hold nothing. Late ranks always; a new round only if nobody before it waits, or
                # its input is queued (it keeps what it has).
                behind = any(other.waiting for other in (*rivals, *beside))
                for rank in list(replica.waiting):
                    allowed = replica.more or not (ahead or (replica.inside and behind))
                    if replica.is_late(rank) or (free and allowed):
                        self._enter(replica, rank)
                continue
            loaded = any(other.state is not _State.OUT for other in rivals)
            if replica.state is _State.OUT and free and not ahead and not loaded:
                replica.state = _State.HOLDING  # all its devices at once, or none
                replica.loaded.clear()
                replica.to_load = set(range(replica.spec.ranks))
                for rank in list(replica.waiting):
                    self._enter(replica, rank)
                continue
            reserved.append(replica)
        for replica in reserved:
            for other in self._sharing[replica.name]:
                if other.state is _State.HOLDING and self._at_rest(other) and not self._before(other, replica):
                    other.state = _State.OFFLOADING
                    other.loaded = set(range(other.spec.ranks))
                    self._out.append(AskOffload(other.name, replica.name))

    def _at_rest(self, replica: _Replica) -> bool:
        """Neither it nor anyone of its set is at work or will come back at once: a set is offloaded as a whole."""
        mates = [o for o in self._beside[replica.name] if o.spec.together and o.spec.together == replica.spec.together]
        return not any(one.busy for one in (replica, *mates))

    def _before(self, holder: _Replica, waiter: _Replica) -> bool:
        """The holder itself waits, only for the one beside it to leave, and comes first in the flow."""
        return bool(holder.waiting) and holder.place < waiter.place and any(o.inside for o in self._beside[holder.name])

    def _enter(self, replica: _Replica, rank: int) -> None:
        del replica.waiting[rank]
        replica.more.discard(rank)
        replica.inside[rank] = 1
        replica.entries[rank] = replica.entries.get(rank, 0) + 1
        load = rank in replica.to_load
        replica.to_load.discard(rank)
        self._out.append(Grant(replica.name, rank, load))


def _devices(devices: Iterable[int]) -> str:
    found = sorted(devices)
    if not found:
        return "no device"
    return f"device{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks)) or "none"
