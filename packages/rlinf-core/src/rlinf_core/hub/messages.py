"""What travels between the hub and its members besides board and lock events. Plain picklable data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a member: who it is and where it can be reached."""

    member: str
    pid: int
    host: str
    payload_address: tuple[str, int]
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChannelArg:
    """A channel passed to a task. ``writer`` is set for outputs."""

    channel: str
    direction: str
    writer: str = ""
    portion: int | None = None
    """For inputs: what the plan lets a rank take at once (``None``: everything)."""
    sole: bool = False
    """For outputs: one group reads the channel. For inputs: this rank is alone with what it is dealt, and holds no
    device that others want, so that it may ask for items before it needs them."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run ``task`` on ``member``. ``kind`` is ``setup``, ``task``, ``stop``, or ``aside``: a task that need not
    await its turn but is run at the next safe point (installing weights between samples)."""

    call_id: int
    member: str
    kind: str
    task: str
    step: str = ""
    step_index: int = 0
    arguments: bytes = b""
    """Pickled ``(args, kwargs)``; only the member unpickles it, so that a fault there is that task's error."""
    outputs: tuple[ChannelArg, ...] = ()
    inputs: tuple[str, ...] = ()
    """Full names of the channels that the task reads."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of one call on one rank; ``start`` and ``end`` are wall-clock (``time.time``).

    ``wait`` is spent waiting for items, credit or payloads, ``lock`` for devices, ``switch`` loading and
    offloading; what remains of ``end - start`` is the task's own work.
    """

    start: float
    end: float
    wait: float = 0.0
    lock: float = 0.0
    switch: float = 0.0
    aside: float = 0.0
    """Other calls that were served while this one waited."""
    items: int = 0
    """Items that the call took from its channels."""
    peak_bytes: int = 0
    """Most device memory during the call, above what the process has with everything offloaded."""
    resident_bytes: int = 0
    """Device memory that loading added (0: nothing was loaded in this call)."""
    switch_before: float = 0.0
    """Loading and offloading since the previous call ended."""
    puts: int = 0
    """Items that the call put."""
    released: tuple[float, ...] = ()
    """When 1/k, 2/k, … of what it made was out, in seconds of its own work (see ``callstats.Releases``)."""
    device_bytes: int = 0
    """Memory of one of its devices (0: a CPU slot, which has what the machine has)."""
    taken: tuple[tuple[str, int, float], ...] = ()
    """(channel, items that the call took from it, their weight); pairs of two channels under the first one's."""

    @property
    def work(self) -> float:
        return max(0.0, self.end - self.start - self.wait - self.lock - self.switch - self.aside)


@dataclass(frozen=True, slots=True)
class CallResult:
    call_id: int
    member: str
    ok: bool
    value: bytes
    """Pickled return value (empty when the task failed)."""
    times: CallTimes
    error: str = ""
    traceback_text: str = ""
    secondary: bool = False
    """The task failed only because something else did (poisoned input, cancelled run)."""
    reads: tuple[str, ...] = ()
    bad_input: bool = False
    """What the user gave is wrong (``RLinfError.bad_input``)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first real cause of a failed run."""

    member: str
    message: str
    traceback_text: str = ""
    bad_input: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    cause: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Write ``value`` under ``key`` into the run's directory, in place of what was there."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is under ``key``; answered by ``Found`` once there is something."""

    req: tuple[str, int]
    key: str


@dataclass(frozen=True, slots=True)
class Found:
    """``value`` is ``None`` for a lookup that was withdrawn."""

    req: tuple[str, int]
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The asker of a lookup does not wait any longer. Answered by ``Found``, unless that is under way."""

    req: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Release:
    """Payloads that nobody will fetch any more."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Another replica wants the devices: offload at the next safe point."""


@dataclass(frozen=True, slots=True)
class Log:
    member: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Died:
    member: str
    cause: str


@dataclass(frozen=True, slots=True)
class Stacks:
    """Request (empty ``text``) and answer of a member's engine-thread stack, for reports of stalls."""

    member: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Acquire:
    """A rank asks for its replica's devices; answered with ``Granted``.

    ``again``: it was inside a section when a wait of it ended early, and goes on in that section.
    """

    req: tuple[str, int]
    member: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    req: tuple[str, int]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseDevices:
    member: str


@dataclass(frozen=True, slots=True)
class Offloaded:
    member: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """``PutDone`` of a put that nobody waits for."""

    req: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Blocked:
    """The member now waits for the answer of a put that it went on without."""

    req: tuple[str, int]


@dataclass(frozen=True, slots=True)
class AtSafePoint:
    """A get or join made inside a section: while it waits the hub may give the devices to others."""

    event: Any


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A member leaves in order; the end of its connection is no death."""

    member: str


@dataclass(frozen=True, slots=True)
class Feeding:
    """The driver starts (+1) or ends (-1) feeding a channel: while it iterates the user's data it is not stuck."""

    change: int
