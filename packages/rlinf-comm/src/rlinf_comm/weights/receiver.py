"""A target rank's part of a transfer: ``Receiver``.

It stages all that a version consists of, checks it, and only then installs. Whatever happens before leaves the version
in use untouched, raises an error that says how far it came, and gives the staged memory back; the next version works.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rlinf_comm.weights.checksum import check_kind, checksum
from rlinf_comm.weights.differences import first_difference
from rlinf_comm.weights.errors import (
    ChecksumError,
    LayoutError,
    MismatchError,
    StaleVersion,
    TransferInterrupted,
    WeightsError,
    is_elsewhere,
)
from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.local import Install, Pieces, Staging, Tensors, check_pieces, check_tensors, cut
from rlinf_comm.weights.movers import Arrived, Header, Mover
from rlinf_comm.weights.plan import Bucket, TransferPlan, plan
from rlinf_comm.weights.sender import LEADER, TIMEOUT_S
from rlinf_core.errors import Cancelled, ChannelPoisoned, EndOfChannel

SLICE_S = 0.5
"""With several sources: how soon the others are left when one has failed."""


def _named(header: Header) -> str:
    """The sender's name for a message, where it has said it."""
    return f" {header['member']}" if header.get("member") else ""


class _Stopped(WeightsError):
    """Another source has failed: this one is not waited for any more."""


@dataclass
class _Incoming:
    """What comes from one source for the version that is being staged."""

    version: int
    source: int
    kind: str
    buckets: Sequence[Bucket]
    deadline: float
    stop: threading.Event | None = None


class Receiver:
    """One rank of the targets. What comes is installed in one of two ways:

    - ``install(version, [(place, tensor), ...])`` is called once per version, with every place of the rank. The tensors
      may lie in memory that other ranks read as well: they are to be copied, not changed. With ``views=True`` they may
      be used in place (pointed at instead of copied) until the next version's ``install`` has returned.
    - ``into``: the rank's own tensors by place, which are filled piece by piece once everything is there.

    ``version`` is the one in use (-1: none yet).
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        mover: Mover,
        *,
        install: Install | None = None,
        into: Tensors | None = None,
        views: bool = False,
        version: int = -1,
    ) -> None:
        if (install is None) == (into is None) or (views and install is None):
            raise ValueError("give install=, with or without views, or into=")
        if into is not None:
            check_tensors(layout, rank, into)
        self._rank = rank
        self._layout = layout
        self._mover = mover
        self._install = install
        self._into = into
        self._views = views
        self.version = version
        self._memory: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._plans: dict[tuple[str, int, tuple[str, ...]], TransferPlan] = {}
        self._ahead: dict[int, Arrived] = {}
        self._staged: tuple[int, Staging | Pieces] | None = None
        self._in_use: list[tuple[str, torch.Tensor]] = []

    def connect(self, mover: Mover) -> None:
        """Use another mover from now on; what was on its way over the one before is given up."""
        self._mover = mover
        self._ahead.clear()

    def receive(self, timeout: float = TIMEOUT_S) -> int:
        """Stage and install one version; returns it. ``timeout`` (seconds) is for all of it."""
        self.stage(timeout)
        return self.commit()

    def stage(self, timeout: float = TIMEOUT_S) -> int:
        """Take in one version whole, without installing it; returns it.

        Raises ``TransferInterrupted`` (lost peer, deadline, sender's failure, another version in between),
        ``ChecksumError``, ``MismatchError`` (the sides do not mean the same transfer) or ``StaleVersion``.
        """
        self._staged = None
        deadline = time.monotonic() + timeout
        version, sources = self._manifests(deadline)
        into: Staging | Pieces
        if self._into is not None:
            into = Pieces(self._rank, self._into)
        else:
            into = Staging(self._layout, self._rank, self._memory)
        try:
            self._take_in(into, sources)
        except BaseException:
            into.clear()  # the error's traceback would keep it
            raise
        self._staged = (version, into)
        return version

    def _take_in(self, into: Staging | Pieces, sources: Sequence[_Incoming]) -> None:
        """All buckets of all sources, one source after the other or, where it is allowed, all at once: a source that is
        not read from may keep others waiting."""
        if len(sources) < 2 or not self._mover.concurrent:
            for incoming in sources:
                self._drain(into, incoming)
            return
        stop = threading.Event()
        with ThreadPoolExecutor(len(sources)) as pool:
            for incoming in sources:
                incoming.stop = stop
            tasks = [pool.submit(self._drain, into, incoming) for incoming in sources]
        failures = [error for task in tasks if (error := task.exception()) is not None]
        for error in failures:
            if not isinstance(error, _Stopped):
                raise error

    def _drain(self, into: Staging | Pieces, incoming: _Incoming) -> None:
        try:
            for done, bucket in enumerate(incoming.buckets):
                into.add(bucket, self._bucket(incoming, bucket, done))
        except BaseException:
            if incoming.stop is not None:
                incoming.stop.set()
            raise

    def commit(self) -> int:
        """Install what ``stage`` took in. What ``install`` raises is passed on, and the version does not count."""
        if self._staged is None:
            raise WeightsError("there is nothing to install: stage() has not taken in a version")
        (version, staged), self._staged = self._staged, None
        if isinstance(staged, Pieces):
            staged.copy()
        elif self._install is not None:
            tensors = staged.finish()
            self._install(version, tensors)
            if self._views:
                self._in_use = tensors
                self._memory, self._spare = self._spare, self._memory
        self.version = version
        return version

    def _manifests(self, deadline: float) -> tuple[int, list[_Incoming]]:
        """The version that comes now, and what comes from each source."""
        lead = self._manifest(LEADER, deadline)
        version = int(lead["version"])
        if version <= self.version:
            raise StaleVersion(f"rank {self._rank}: version {version} came, but {self.version} is in use")
        made = self._plan_of(lead)
        expected = made.for_target(self._rank)
        sources: list[_Incoming] = []
        for source in sorted({LEADER, *expected}):
            header = lead if source == LEADER else self._manifest(source, deadline, version)
            if header["version"] != version:
                raise TransferInterrupted(
                    f"rank {self._rank}: version {version} of source rank {LEADER} came with version "
                    f"{header['version']} of source rank {source}; version {self.version} stays in use"
                )
            buckets = expected.get(source, ())
            self._agree(header, made, source, buckets)
            sources.append(_Incoming(version, source, str(header["checksum"]), buckets, deadline))
        return version, sources

    def _manifest(self, source: int, deadline: float, version: int = -1) -> Header:
        """The next manifest of a source; leftovers of versions that were given up are passed over."""
        while True:
            message = self._next(source, deadline, "its manifest")
            header = message.header
            if header["kind"] != "manifest":
                self._mover.discard(message)
            elif header["version"] >= version:
                if header["version"] > version >= 0:
                    self._ahead[source] = message
                return header

    def _plan_of(self, header: Header) -> TransferPlan:
        if header["target_layout"] != self._layout.fingerprint:
            raise MismatchError(
                f"{self._who}: the sender{_named(header)} was told another layout of the targets than this rank has: "
                + self._difference(header)
            )
        key = (str(header["source_layout"]), int(header["bucket_bytes"]), tuple(header["without"]))
        if key not in self._plans:
            self._plans.clear()
            source = Layout.from_data(zlib.decompress(header["source_data"]))
            self._plans[key] = plan(source, self._layout, key[1], without=key[2])
        return self._plans[key]

    @property
    def _who(self) -> str:
        name = self._mover.name
        return f"{name} (rank {self._rank})" if name else f"rank {self._rank}"

    def _difference(self, header: Header) -> str:
        calls = "target_layout() of the sender", "weight_layout() here"
        try:
            told = Layout.from_data(zlib.decompress(header["target_data"]))
        except (KeyError, zlib.error, LayoutError):  # only the way to say it is lost
            return f"compare {calls[0]} with {calls[1]}"
        return first_difference(told, self._layout, *calls)

    def _agree(self, header: Header, made: TransferPlan, source: int, buckets: Sequence[Bucket]) -> None:
        check_kind(header["checksum"])
        mine = {"plan": made.fingerprint, "count": len(buckets), "nbytes": sum(bucket.nbytes for bucket in buckets)}
        for what, value in mine.items():
            if header[what] != value:
                raise MismatchError(
                    f"{self._who}: source rank {source}{_named(header)} says {what} {header[what]} of version "
                    f"{header['version']}, here it is {value}: compare bucket_bytes, without and the layouts of both"
                )

    def _bucket(self, incoming: _Incoming, bucket: Bucket, done: int) -> list[torch.Tensor]:
        version, source, count = incoming.version, incoming.source, len(incoming.buckets)
        far = f"rank {self._rank}: version {version} was interrupted after {done} of {count} buckets of rank {source}"
        stays = f"version {self.version} stays in use"
        what = f"bucket {done + 1} of {count} of version {version}"
        message = self._next(source, incoming.deadline, what, far, incoming.stop)
        header = message.header
        if header["kind"] == "abort":
            raise TransferInterrupted(f"{far}: it stopped: {header['why']}; {stays}", elsewhere=True)
        if header["kind"] == "manifest":
            self._ahead[source] = message
            raise TransferInterrupted(f"{far}: it began version {header['version']}; {stays}")
        if header["version"] != version or header["index"] != bucket.index:
            self._mover.discard(message)
            found = f"bucket {header['index']} of version {header['version']}"
            raise TransferInterrupted(f"{far}: {found} came instead of bucket {bucket.index}; {stays}")
        pieces = cut(bucket, message.packed) if message.packed is not None else message.pieces or []
        check_pieces(bucket, pieces)
        if incoming.kind != "none" and checksum(incoming.kind, pieces) != header["checksum"]:
            pieces.clear()
            self._mover.discard(message)
            first, last = bucket.moves[0].parameter, bucket.moves[-1].parameter
            raise ChecksumError(f"{far}: the {incoming.kind} of the next ({first} to {last}) does not match; {stays}")
        return pieces

    def _next(
        self, source: int, deadline: float, what: str, far: str = "", stop: threading.Event | None = None
    ) -> Arrived:
        if source in self._ahead:
            return self._ahead.pop(source)
        far = far or f"rank {self._rank}: no new version"
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the time is up")
                try:
                    return self._mover.receive(source, left if stop is None else min(left, SLICE_S))
                except TimeoutError:
                    if stop is None or time.monotonic() >= deadline:
                        raise
                    if stop.is_set():
                        raise _Stopped(f"{far}: another source has failed") from None
        except (Cancelled, ChannelPoisoned, EndOfChannel, _Stopped):
            raise  # the flow, or the other source, says why
        except Exception as error:
            raise TransferInterrupted(
                f"{far}: {what} of source rank {source} did not come: {type(error).__name__}: {error}; "
                f"version {self.version} stays in use",
                elsewhere=is_elsewhere(error),
            ) from error
