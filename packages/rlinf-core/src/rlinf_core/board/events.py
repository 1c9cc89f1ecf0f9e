"""What goes into the board and what comes out of it.

Events say what happened (a member asked, a writer closed, a process died); instructions say what the hub
must now send. Both are plain frozen data, so that the board can be driven and checked without any process.

Names: a channel is ``f"{step}:{name}"``; a member is ``group[rank]`` or ``driver``; a writer is
``member#call`` (``generator[0]#2``, ``driver#feed0``), whose member is the part before ``#``.
``req`` is chosen by the asker and unique over the board's life; each request gets exactly one answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, TypeAlias

Req: TypeAlias = Hashable
Barrier: TypeAlias = Literal["item", "group", "batch"]
Mode: TypeAlias = Literal["items", "portion", "weight"]
JoinBy: TypeAlias = Literal["id", "key", "group"]
Deal: TypeAlias = Literal["shared", "round_robin", "weight"]

DEALS: Final[tuple[Deal, ...]] = ("shared", "round_robin", "weight")
"""How the items of a channel get to the ranks of a reading group (see ``board.dealing``)."""
BARRIERS: Final = ("item", "group", "batch")
FULL: Final = "full"
"""Reason of a ``PutRefused`` that only means: no credit now (``put_nowait``)."""
PLAN: Final = -1
"""Value of ``n`` in a portion request that means: the portion the reader was registered with."""


class _Any(Enum):
    ANY = "any"

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any.ANY
"""Value of ``key`` in a request that takes the oldest item over all keys. Pickles to itself."""


@dataclass(frozen=True, slots=True)
class Item:
    """What the board knows of an item; the payload stays with its producer.

    ``descriptor`` says where the payload is and is opaque here. ``ids`` are the sample ids accounted for;
    an item counts ``len(ids)`` (at least 1) towards the ``group_size`` members of its ``group``.
    """

    descriptor: object
    key: Hashable | None = None
    weight: float = 1.0
    nbytes: int = 0
    ids: tuple[str, ...] = ()
    group: str | None = None
    group_size: int = 1
    uid: int = -1


# ------------------------------------------------------------------ events: set-up of a step


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """``max_items`` and ``max_bytes`` <= 0 mean no limit; ``spill`` lifts both (the writer holds a device
    that a reader waits for)."""

    name: str
    step: str
    max_items: int = 0
    max_bytes: int = 0
    spill: bool = False


@dataclass(frozen=True, slots=True)
class AddReader:
    """A group reads the channel. Before the first item; ``portion`` None means everything at once.

    ``ordered``: whole groups come in the order in which their samples entered the step, not as they happen to arrive,
    so that what a trainer adds up does not depend on timing. For ``barrier="group"``.
    """

    channel: str
    group: str
    ranks: int = 1
    collective: bool = False
    barrier: Barrier = "item"
    portion: int | None = None
    ordered: bool = False
    eager: bool = False
    """A portion is what is there now, at least one item: the channel is in a cycle, and waiting could be for ever."""
    deal: Deal = "shared"
    """``shared``: to the rank that asks first. Otherwise fixed for each item when it comes; not for collective groups
    nor for the barrier ``batch``."""


@dataclass(frozen=True, slots=True)
class AddWriter:
    channel: str
    writer: str


@dataclass(frozen=True, slots=True)
class SealWriters:
    """No more writers will register; only after it can the channel end."""

    channel: str


# ------------------------------------------------------------------ events: traffic


@dataclass(frozen=True, slots=True)
class Put:
    """Answered by ``PutDone`` once *all* items are in, or ``PutRefused``. ``nowait``: all now, or none.

    ``ahead``: the writer goes on without the answer (the same for the board).
    """

    req: Req
    writer: str
    channel: str
    items: tuple[Item, ...]
    nowait: bool = False
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class CloseWriter:
    channel: str
    writer: str


@dataclass(frozen=True, slots=True)
class PoisonWriter:
    channel: str
    writer: str
    cause: str


@dataclass(frozen=True, slots=True)
class Get:
    """Answered by ``Deliver``, ``End``, ``Poisoned`` or (``nowait``) ``Empty``.

    ``items``: between 1 and ``n`` items, as many as are there. ``portion``: exactly ``n`` (fewer only at
    the end; whole groups for a group barrier, so possibly more); ``n=None`` everything, ``n=PLAN`` as
    registered. ``weight``: items up to a total of ``weight``; a heavier head comes alone.

    ``ahead``: the reader goes on without the answer (the same for the board).
    """

    req: Req
    channel: str
    group: str
    rank: int = 0
    key: Hashable | None = ANY
    mode: Mode = "items"
    n: int | None = 1
    weight: float = 0.0
    nowait: bool = False
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class JoinReader:
    """Like ``Get`` but of matched pairs of two channels; answered by ``DeliverJoined`` for ``Deliver``."""

    req: Req
    group: str
    rank: int
    a: str
    b: str
    by: JoinBy = "id"
    mode: Mode = "items"
    n: int | None = 1
    weight: float = 0.0
    nowait: bool = False


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Withdraw a request. ``CancelDone`` comes if it was still waiting, else its answer was sent before."""

    req: Req


@dataclass(frozen=True, slots=True)
class Fetched:
    """The group has the payloads of these items; one that every reading group has is released."""

    uids: tuple[int, ...]
    group: str


@dataclass(frozen=True, slots=True)
class Return:
    """The group, of one rank, was delivered these items and has not looked at them: they are undelivered again, before
    all others of their channel. In the order in which they were delivered."""

    uids: tuple[int, ...]
    group: str


# ------------------------------------------------------------------ events: account and failure


@dataclass(frozen=True, slots=True)
class Drop:
    ids: tuple[str, ...]
    reason: str
    member: str
    step: str


@dataclass(frozen=True, slots=True)
class Trained:
    ids: tuple[str, ...]
    member: str
    step: str


@dataclass(frozen=True, slots=True)
class Carry:
    """The ids leave this step's account and enter that of ``to_step``."""

    ids: tuple[str, ...]
    to_step: str
    member: str
    step: str


@dataclass(frozen=True, slots=True)
class MemberDied:
    member: str
    cause: str


@dataclass(frozen=True, slots=True)
class FailStep:
    """The step has failed for a reason outside its channels (a task raised): poison all of them."""

    step: str
    cause: str


@dataclass(frozen=True, slots=True)
class EndStep:
    """Ask for the account; answered by ``StepAccount``. Changes nothing."""

    step: str


@dataclass(frozen=True, slots=True)
class CloseStep:
    """Forget the step: everything that is left is released, every request still waiting is answered."""

    step: str


Event: TypeAlias = (
    OpenChannel
    | AddReader
    | AddWriter
    | SealWriters
    | Put
    | CloseWriter
    | PoisonWriter
    | Get
    | JoinReader
    | CancelRequest
    | Fetched
    | Return
    | Drop
    | Trained
    | Carry
    | MemberDied
    | FailStep
    | EndStep
    | CloseStep
)


# ------------------------------------------------------------------ instructions


@dataclass(frozen=True, slots=True)
class PutDone:
    req: Req


@dataclass(frozen=True, slots=True)
class PutRefused:
    """``admitted`` items of the request were taken before it was refused (0 for ``nowait``)."""

    req: Req
    reason: str
    admitted: int = 0


@dataclass(frozen=True, slots=True)
class Deliver:
    """``items`` carry their ``uid``; empty for a rank whose shard of a collective portion is empty."""

    req: Req
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class DeliverJoined:
    req: Req
    pairs: tuple[tuple[Item, Item], ...]


@dataclass(frozen=True, slots=True)
class End:
    req: Req


@dataclass(frozen=True, slots=True)
class Poisoned:
    req: Req
    cause: str


@dataclass(frozen=True, slots=True)
class Empty:
    req: Req


@dataclass(frozen=True, slots=True)
class CancelDone:
    """The request was withdrawn before it was answered. ``admitted``: items of a put that are in already."""

    req: Req
    admitted: int = 0


@dataclass(frozen=True, slots=True)
class Released:
    """``member`` may free the payloads behind these descriptors."""

    member: str
    descriptors: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StepAccount:
    """Where each id of the step ended. ``unread``: items per channel that some reading group never took; ``untaken``:
    of these channels, which ranks still have items that were dealt to them, in words."""

    step: str
    trained: tuple[str, ...]
    dropped: Mapping[str, str]
    carried: Mapping[str, str]
    lost: Mapping[str, str]
    unread: Mapping[str, int] = field(default_factory=dict)
    untaken: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepFailed:
    """First cause of a step's failure; sent once per step. All its channels are poisoned with it."""

    step: str
    cause: str


Instruction: TypeAlias = (
    PutDone
    | PutRefused
    | Deliver
    | DeliverJoined
    | End
    | Poisoned
    | Empty
    | CancelDone
    | Released
    | StepAccount
    | StepFailed
)


def member_of(writer: str) -> str:
    """``generator[0]#2`` -> ``generator[0]``."""
    return writer.partition("#")[0]


def group_of_member(member: str) -> str:
    """``generator[0]`` -> ``generator``; ``driver`` -> ``driver``."""
    return member.partition("[")[0]
