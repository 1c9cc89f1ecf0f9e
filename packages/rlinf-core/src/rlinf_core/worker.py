"""What a user subclasses: ``Worker``, the ``@task`` mark and the ``In`` / ``Out`` annotations.

This module knows nothing of Ray, sockets or processes; the host process fills in a ``WorkerContext``.
"""

from __future__ import annotations

import builtins
import inspect
import logging
import typing
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from rlinf_core.errors import TraceError
from rlinf_core.types import ParallelInfo

if TYPE_CHECKING:
    import torch

    from rlinf_core.peers import Peer

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class In(Generic[T]):
    """The reading end of a channel, as a task sees it.

    Iterating yields single items until every writer has closed and the channel is drained. A failed writer
    raises ``ChannelPoisoned`` instead, so an end is always a clean one. All waits can be interrupted by the
    run being stopped (``Cancelled``). When unsure how to read, use ``batches()``: the plan then sets how many
    items move at once, without changing what is computed.
    """

    name: str

    @property
    def portion(self) -> int | None:
        """How many items the plan lets this rank take at once (``None``: everything). Only a task that cuts its own
        work, such as a simulator into sub-batches, need look at it; ``batches()`` keeps to it by itself."""
        raise _bare("In")

    def get(self, key: Hashable = ..., timeout: float | None = None) -> T:
        """Next item, of ``key`` or of any. Raises ``EndOfChannel``, ``ChannelPoisoned``, ``WaitTimeout``."""
        raise _bare("In")

    def get_nowait(self, key: Hashable = ...) -> T:
        """As ``get`` but raises ``ChannelEmpty`` when nothing can be taken now."""
        raise _bare("In")

    async def get_async(self, key: Hashable = ..., timeout: float | None = None) -> T:
        raise _bare("In")

    def get_batch(self, weight: float, timeout: float | None = None) -> list[T]:
        """Items up to a total ``weight``; a heavier head item comes alone. ``EndOfChannel`` at the end."""
        raise _bare("In")

    def batches(self, n: int | None = None) -> Iterator[list[T]]:
        """Lists of ``n`` items (the plan's portion by default; the last may be shorter) until the end.

        Where the plan says everything at once, ranks that work alone each get one list of about the same weight.
        For a stage with ``barrier = "group"`` only complete groups come, ``n`` is filled up to whole groups.
        For ``barrier = "batch"`` one list with everything. In a collective group every rank gets equally many
        lists, some of which may be empty. On a channel inside a cycle, where waiting for a full portion could be for
        ever, a list holds what is there now: at least one item and at most the portion.
        """
        raise _bare("In")

    def __iter__(self) -> Iterator[T]:
        raise _bare("In")

    def __aiter__(self) -> AsyncIterator[T]:
        raise _bare("In")


class Out(Generic[T]):
    """The writing end of a channel. It closes by itself when the task returns; a task that raises poisons it."""

    name: str

    def put(self, item: T, key: Hashable = None, weight: float = 1.0, timeout: float | None = None) -> None:
        """Hand an item on; ``weight`` is what ``get_batch`` counts, and what a channel dealt by weight goes by. A block
        that two stages pass to and fro has the number of its items as weight, which a profile reads.

        Waits for credit (items and bytes) once several puts of this writer have no answer; one that is refused raises
        at a later put or at the end. With ``timeout`` it waits for its own answer. Items put within a millisecond of
        each other travel together: the last of them is on its way a millisecond later, or once the task waits for
        anything (a call that keeps the interpreter to itself all the while delays it).
        """
        raise _bare("Out")

    def put_many(
        self, items: Sequence[T], keys: Sequence[Hashable] | None = None, weights: Sequence[float] | None = None
    ) -> None:
        """Put several items with one message; they get their credit in turn, in order. Waits as ``put``."""
        raise _bare("Out")

    def put_nowait(self, item: T, key: Hashable = None, weight: float = 1.0) -> None:
        """As ``put`` but raises ``ChannelFull`` when there is no credit now."""
        raise _bare("Out")

    async def put_async(self, item: T, key: Hashable = None, weight: float = 1.0) -> None:
        raise _bare("Out")

    def broadcast(self, item: T, keys: Iterable[Hashable]) -> None:
        """Put one item under several keys, encoded once."""
        raise _bare("Out")

    def close(self) -> None:
        """No more items from this writer. Closing twice is allowed; putting afterwards is ``ChannelClosed``."""
        raise _bare("Out")


def _bare(kind: str) -> TraceError:
    return TraceError(
        f"this {kind} is not connected: channels are made by `step.channels(...)` and passed to group calls"
    )


@overload
def task(function: F) -> F: ...


@overload
def task(*, ends: bool = False) -> Callable[[F], F]: ...


def task(function: F | None = None, *, ends: bool = False) -> F | Callable[[F], F]:
    """Mark a method as a task that the flow may call.

    ``ends=True`` names it as the one that ends a cycle of channels (simulator and policy, say): it closes the output
    that the others read, so that they see the end and close theirs.
    """

    def mark(method: F) -> F:
        method._rlinf_task = True  # type: ignore[attr-defined]
        method._rlinf_ends = ends  # type: ignore[attr-defined]
        return method

    return mark if function is None else mark(function)


class WorkerContext(Protocol):
    """What the host gives a worker."""

    cfg: Any
    name: str
    rank: int
    world_size: int
    parallel: ParallelInfo
    seed: int
    run_dir: Path
    slots: int | None
    step: str
    step_index: int
    peer: Peer

    def on_device(self) -> AbstractContextManager[None]: ...

    def account(self, kind: str, ids: tuple[str, ...], detail: str) -> None: ...


class Worker:
    """One rank of a worker group: an ordinary object in its own process.

    Subclass it, mark methods with ``@task``, and let the flow call them. ``setup`` runs once before the first
    task; heavy imports belong there (or below), so that reading a recipe stays cheap. All methods run on the
    process's main thread.

    Class attributes say how the group may be scheduled: ``device`` (runs on devices; ``False`` for CPU stages),
    ``collective`` (the ranks compute together and are dealt whole portions, e.g. a data-parallel trainer),
    ``process_group`` (collective ranks that open a torch.distributed group, so that each needs a process) and
    ``barrier`` (``"item"``, ``"group"`` or ``"batch"``: what must be complete before the stage can work).
    ``ranks`` fixes the number of processes of a CPU stage.
    """

    device: bool = True
    collective: bool = False
    process_group: bool = True
    barrier: str = "item"
    ranks: int = 1

    _ctx: WorkerContext

    @property
    def cfg(self) -> Any:
        """The configuration node given to ``flow.group``."""
        return self._ctx.cfg

    @property
    def name(self) -> str:
        return self._ctx.name

    @property
    def rank(self) -> int:
        return self._ctx.rank

    @property
    def world_size(self) -> int:
        return self._ctx.world_size

    @property
    def parallel(self) -> ParallelInfo:
        return self._ctx.parallel

    @property
    def seed(self) -> int:
        """The run's root seed, the same in every rank."""
        return self._ctx.seed

    @property
    def run_dir(self) -> Path:
        return self._ctx.run_dir

    @property
    def slots(self) -> int | None:
        """Concurrency slots or micro-batch that the plan chose for this stage; ``None``: the engine's own setting."""
        return self._ctx.slots

    @property
    def step(self) -> str:
        """Name of the step of the running task, e.g. ``train/3``."""
        return self._ctx.step

    @property
    def step_index(self) -> int:
        return self._ctx.step_index

    @property
    def peer(self) -> Peer:
        """What this rank needs to talk to others of the run beside channels (see ``rlinf_comm.communicator_of``)."""
        return self._ctx.peer

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger(f"rlinf.{self._ctx.name}[{self._ctx.rank}]")

    @classmethod
    def check_ranks(cls, cfg: Any, ranks: int) -> str:
        """Why the group cannot have ``ranks`` ranks with the configuration ``cfg``; empty when it can. Asked before
        anything is started, without devices: nothing heavy may be imported."""
        return ""

    @classmethod
    def most_ranks(cls, cfg: Any) -> int | None:
        """Ranks beyond which more would only slow the group down with the configuration ``cfg``; ``None`` where there
        is no such number. ``plan=temporal`` and ``plan=spatial`` give it no more; ``placement`` and a plan file may,
        and ``plan=auto`` measures. Asked like ``check_ranks``."""
        return None

    def setup(self) -> None:
        """Build what the tasks need (engines, models). Runs once, in the worker's process; in a group that shares its
        devices it runs while the group has them, and ``offload`` follows. The first section calls ``onload``."""

    def onload(self) -> None:
        """Bring state onto the device. Called when the group's turn comes, not before every task."""

    def offload(self) -> None:
        """Take state off the device. Called only when another stage wants it, and once after ``setup`` in a group that
        shares its devices."""

    def memory_bytes(self) -> int | None:
        """Bytes on each of its devices while it is loaded, for a stand-in on CPU slots that does not really take them;
        ``None``: what loading takes is measured."""
        return None

    def teardown(self) -> None:
        """Free what ``setup`` made (pools, files). Runs when the run ends in order."""

    def on_device(self) -> AbstractContextManager[None]:
        """A section that needs the group's devices: waits for the device lock, onloads if needed. Nestable."""
        return self._ctx.on_device()

    def drop(self, what: Any, reason: str) -> None:
        """Take samples (items or ids, one or many) out of the step's account by name."""
        if not reason:
            raise ValueError("drop() needs a reason: it is what the account shows for the sample")
        self._ctx.account("drop", account_ids(what), reason)

    def trained(self, what: Any) -> None:
        """Mark samples (items or ids, one or many) as used up: trained on, or counted in an evaluation."""
        self._ctx.account("trained", account_ids(what), "")

    # Weight publication: `source_group.publish_weights(to=target_group)` runs the two tasks at the end of this module.

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Whole parameters under their published names; every rank of a collective group is asked."""
        raise TraceError(f"{type(self).__name__} publishes weights but does not define weights()")

    def install_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise TraceError(f"{type(self).__name__} receives weights but does not define install_weights()")

    def carry(self, what: Any, to_step: str) -> None:
        """Move samples from this step's account to that of a later step (its name, e.g. ``train/4``), where they must
        end. The worker keeps the items and puts them into that step itself."""
        if not to_step:
            raise ValueError("carry() needs the name of a later step")
        self._ctx.account("carry", account_ids(what), to_step)

    @task
    def publish_weights(self, channel: Out[Any], version: int, targets: int) -> None:
        """Send ``weights()`` to each of ``targets`` ranks of the receiving group, encoded once."""
        with self.on_device():
            tensors = [(name, tensor.detach()) for name, tensor in self.weights()]
            if self.rank == 0:
                channel.broadcast((version, tensors), keys=range(targets))

    @task
    def receive_weights(self, channel: In[Any]) -> None:
        version, tensors = channel.get(key=self.rank)  # before the section: the sender may need the same device
        with self.on_device():
            self.install_weights(version, tensors)


def account_ids(what: Any) -> tuple[str, ...]:
    """Ids of one item or id, or of an iterable of them; items without ``account_ids`` are refused."""
    if isinstance(what, str):
        return (what,)
    ids = getattr(what, "account_ids", None)
    if callable(ids):
        return tuple(ids())
    if isinstance(what, Iterable):
        return tuple(i for part in what for i in account_ids(part))
    raise ValueError(f"{type(what).__name__} has no account_ids(): pass samples or sample ids")


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Signature of a task as the flow needs it: directions of its channel parameters."""

    name: str
    parameters: tuple[str, ...]
    directions: dict[str, str]
    ends: bool = False


class _AnyForUnknown(dict[str, Any]):
    """Annotation namespace in which a name that cannot be found is ``Any`` (it may be a typing-only import)."""

    def __missing__(self, key: str) -> Any:
        if hasattr(builtins, key):
            return getattr(builtins, key)
        return Any


def task_spec(worker: type[Worker], name: str) -> TaskSpec:
    """Resolve a task's channel directions from its annotations (on the driver only).

    Raises ``TraceError`` when the method is missing or not marked with ``@task``.
    """
    function = getattr(worker, name, None)
    if function is None or not getattr(function, "_rlinf_task", False):
        tasks = task_names(worker)
        state = "has no method" if function is None else "has a method without @task"
        raise TraceError(f"{worker.__name__} {state} {name!r}; its tasks are: {', '.join(tasks) or 'none'}")
    signature = inspect.signature(function)
    namespace = _AnyForUnknown(vars(inspect.getmodule(function) or builtins))
    namespace.setdefault("In", In)
    namespace.setdefault("Out", Out)
    directions: dict[str, str] = {}
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    for parameter in parameters:
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, namespace)
            except (TypeError, AttributeError, SyntaxError, NameError):
                annotation = Any
        origin = typing.get_origin(annotation) or annotation
        if origin is In or origin is Out:
            directions[parameter.name] = "in" if origin is In else "out"
    ends = bool(getattr(function, "_rlinf_ends", False))
    return TaskSpec(name, tuple(p.name for p in parameters), directions, ends)


def task_names(worker: type[Worker]) -> list[str]:
    """Names of the user's tasks of a worker class (the two of weight publication left out)."""
    own = {"publish_weights", "receive_weights"}
    return sorted(n for n in dir(worker) if n not in own and getattr(getattr(worker, n, None), "_rlinf_task", False))
