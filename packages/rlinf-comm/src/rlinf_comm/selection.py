"""Which transport carries a message: a pure function of where both ends are, what they have, and how much moves.

The order of preference, best first (what an end lacks is passed over, and the next one taken):

| ends | memory | order |
|---|---|---|
| one process | any | inproc |
| one node | host to host, fewer than ``shm_from`` bytes | tcp (the control stream, a socket), shm, gloo |
| one node | host to host, more | shm, tcp, gloo |
| two nodes | host to host | tcp, gloo (from ``gloo_from`` bytes: gloo, tcp) |
| one node | on one accelerator | cuda_ipc |
| one node | from one accelerator to another | nccl, cuda_ipc when the receiver sees the sender's device |
| two nodes | from one accelerator to another | nccl |
| any | accelerator to host, host to accelerator, or none of the above is there | as host to host, by a copy |

NCCL refuses two ranks on one device, so it is no way from a device to itself. Where a copy to host memory is needed
first, the choice says so (``staged``); the copy to the receiver's device is the receiver's.

A transport that another package brings (``Other``) moves host memory between any ends that it says it suits: with
``prefer`` before all of the above (for accelerators: before the copy to host memory), else after them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_comm.errors import NoRoute
from rlinf_core.errors import describe as error_text

if TYPE_CHECKING:
    from rlinf_comm.transports.base import Place

log = logging.getLogger("rlinf.comm")

SEVERAL = "several"
"""``Summary.source_device`` when the buffers of one message lie on more than one accelerator."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What one message moves: bytes in host memory, bytes on accelerators, and which ones.

    ``source_device`` is the UUID of the accelerator that holds the device bytes; ``target_device`` that of the one
    where they are to be in the end. Empty means host memory. (Tensors without elements are on a device, too.)
    """

    host_bytes: int = 0
    device_bytes: int = 0
    source_device: str = ""
    target_device: str = ""

    def __post_init__(self) -> None:
        if self.host_bytes < 0 or self.device_bytes < 0:
            raise ValueError(f"a message cannot have {self.host_bytes} + {self.device_bytes} bytes")
        if self.device_bytes and not self.source_device:
            raise ValueError(f"{self.device_bytes} bytes are on an accelerator, but it is not said on which")

    @property
    def total(self) -> int:
        return self.host_bytes + self.device_bytes


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Sizes at which one way becomes faster than another, in bytes. ``source`` says where they are from."""

    shm_from: int = 64 << 10
    """Shared memory instead of the control stream, within one node."""
    gloo_from: int | None = None
    """Gloo instead of tcp, between nodes. None: never. (Over a virtual cable gloo moved about half as much per second
    as tcp from 1 MiB, and far less at 64 KiB.)"""
    source: str = "built in"

    def __post_init__(self) -> None:
        for name, value in (("shm_from", self.shm_from), ("gloo_from", self.gloo_from)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport by its registered name, and why it. ``staged``: device buffers are copied to host memory first."""

    name: str
    why: str
    staged: bool = False


@dataclass(frozen=True, slots=True)
class Other:
    """A transport that is not built in: ``suits(source, target, summary)`` says which messages it can carry."""

    name: str
    prefer: bool
    suits: Callable[[Place, Place, Summary], bool]

    def carries(self, source: Place, target: Place, summary: Summary) -> bool:
        """Whether it suits; one that fails to answer does not (the log has the error)."""
        try:
            return bool(self.suits(source, target, summary))
        except Exception as error:  # a plugin's fault: the message goes another way
            log.warning("transport %s does not say whether it suits: %s", self.name, error_text(error))
            return False


def select(
    source: Place,
    target: Place,
    summary: Summary,
    table: Thresholds,
    without: frozenset[str] = frozenset(),
    others: Sequence[Other] = (),
) -> Choice:
    """The best transport that both ends have, for a message from ``source`` to ``target``.

    ``without`` names transports that have just refused this message (no room), so that the next best is taken.
    ``others``: those that this process has beside the built-in ones. Raises NoRoute, naming both ends and what each
    lacks, when nothing is left.
    """
    wanted = list(candidates(source, target, summary, table, others))
    for choice in wanted:
        if choice.name not in without and not lacking(choice.name, source, target):
            return choice
    reasons = []
    for name in dict.fromkeys(choice.name for choice in wanted):
        ends = " and ".join(describe(end) for end in lacking(name, source, target))
        reasons.append(f"{name} is missing at {ends}" if ends else f"{name} has no room for it")
    named = {choice.name for choice in wanted}
    reasons += [f"{other.name} does not suit" for other in others if other.name not in named]
    raise NoRoute(
        f"nothing can move {summary.total} bytes from {describe(source)} to {describe(target)}: {'; '.join(reasons)}"
    )


def lacking(name: str, source: Place, target: Place) -> list[Place]:
    """The ends that do not have the transport (one entry when both ends are the same place)."""
    return list(dict.fromkeys(end for end in (source, target) if name not in end.capabilities))


def describe(place: Place) -> str:
    """A place in words, for messages."""
    return f"process {place.pid} on node {place.node[:12]}"


def same_process(source: Place, target: Place) -> bool:
    return source.node == target.node and source.pid == target.pid


def candidates(
    source: Place, target: Place, summary: Summary, table: Thresholds, others: Sequence[Other] = ()
) -> Iterator[Choice]:
    """Every transport that could carry the message, best first, whether the ends have it or not."""
    first, last = ([other for other in others if other.prefer == prefer] for prefer in (True, False))
    if not summary.source_device:
        yield from _brought(first, source, target, summary)
    if same_process(source, target):
        yield Choice("inproc", "both ends are one process: the buffers are handed over")
    if summary.source_device and summary.target_device and summary.source_device != SEVERAL:
        yield from _between_devices(source, target, summary)
    if summary.source_device:
        yield from _brought(first, source, target, summary)
    yield from _through_host(source, target, summary, table)
    yield from _brought(last, source, target, summary)


def _brought(others: Sequence[Other], source: Place, target: Place, summary: Summary) -> Iterator[Choice]:
    staged = bool(summary.source_device)
    copied = ", copied to host memory first" if staged else ""
    for other in others:
        # One that an end lacks is not asked, but named where nothing is left.
        if lacking(other.name, source, target) or other.carries(source, target, summary):
            place = "before the built-in ones" if other.prefer else "where no built-in one is left"
            yield Choice(other.name, f"brought by another package, {place}{copied}", staged)


def _between_devices(source: Place, target: Place, summary: Summary) -> Iterator[Choice]:
    one_node = source.node == target.node
    if one_node and summary.source_device == summary.target_device:
        yield Choice("cuda_ipc", "the receiver maps the memory of the device that both use")
        return
    yield Choice("nccl", f"from one accelerator to another, {'in one node' if one_node else 'between nodes'}")
    if one_node and summary.source_device in target.devices:
        yield Choice("cuda_ipc", "the receiver sees the sender's device and maps its memory")


def _through_host(source: Place, target: Place, summary: Summary, table: Thresholds) -> Iterator[Choice]:
    staged = bool(summary.source_device)
    copied = ", copied to host memory first" if staged else ""
    size = summary.total
    stream = Choice("tcp", f"written to the stream between the two{copied}", staged)
    if source.node == target.node:
        few, many = f"fewer than {table.shm_from} bytes", f"{table.shm_from} bytes or more"
        shared = Choice("shm", f"shared memory of one node, {many}{copied}", staged)
        if size < table.shm_from:
            shared = Choice("shm", f"shared memory of one node{copied}", staged)
            yield Choice("tcp", f"{few}: written to the stream between the two{copied}", staged)
            yield shared
        else:
            yield shared
            yield stream
        yield Choice("gloo", f"host memory within one node{copied}", staged)
        return
    gloo = Choice("gloo", f"host memory between nodes{copied}", staged)
    if table.gloo_from is not None and size >= table.gloo_from:
        yield gloo
        yield stream
    else:
        yield stream
        yield gloo
