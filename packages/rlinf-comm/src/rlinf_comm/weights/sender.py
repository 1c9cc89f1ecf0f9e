"""A source rank's part of a transfer: ``Sender``.

It says first what will come (the manifest: version, layouts, count, bytes), then sends its buckets. Every target is
told the version by rank 0 of the sources, also when nothing else comes from there.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlinf_comm.weights.checksum import check_kind, checksum
from rlinf_comm.weights.errors import MismatchError, StaleVersion, TransferInterrupted, WeightsError, is_elsewhere
from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.local import Packed, Tensors, check_tensors
from rlinf_comm.weights.movers import Header, Lost, Mover
from rlinf_comm.weights.plan import BUCKET_BYTES, plan
from rlinf_core.errors import Cancelled, ChannelError

TIMEOUT_S = 120.0
LEADER = 0
"""The source rank that tells every target about a version."""

log = logging.getLogger("rlinf.weights")


@dataclass(frozen=True)
class Sent:
    """``nbytes``: what this rank wrote, each bucket once however many targets share it."""

    version: int
    buckets: int
    nbytes: int
    seconds: float


class Sender:
    """One rank of the sources.

    The plan is made once, here; a wrong pair of layouts is refused before anything moves. ``without``: parameters that
    the targets do without. ``checksum``: ``none``, ``crc32`` or ``xxh3``.
    """

    def __init__(
        self,
        rank: int,
        source: Layout,
        target: Layout,
        mover: Mover,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        checksum: str = "none",
        without: Collection[str] = (),
    ) -> None:
        check_kind(checksum)
        self._rank = rank
        self._mover = mover
        self._source = source
        # For who does not know the plan yet. Ranks differ in a few numbers, so that this is a tenth of the size.
        self._layout = zlib.compress(source.data, 1) if rank == LEADER else b""
        # For a target whose own layout is another: it can then say in what.
        self._told = zlib.compress(target.data, 1) if rank == LEADER else b""
        self._kind = checksum
        self._without = sorted(without)
        try:
            self.plan = plan(source, target, bucket_bytes, without=without)
        except MismatchError as error:
            if not mover.name:
                raise
            raise MismatchError(f"{mover.name}: {error}") from error
        self.targets = len(target.ranks)
        self._last: int | None = None

    def connect(self, mover: Mover) -> None:
        """Use another mover from now on."""
        self._mover = mover

    def send(self, version: int, tensors: Tensors, timeout: float = TIMEOUT_S) -> Sent:
        """Send the rank's tensors (by place) as ``version``; ``timeout`` (seconds) bounds each message.

        They may be changed as soon as this returns. Targets that are lost do not keep the others from getting theirs;
        then ``TransferInterrupted`` names them. A number is used once: after a failure the next version has another.
        """
        began = time.perf_counter()
        if self._last is not None and version <= self._last:
            raise StaleVersion(f"rank {self._rank}: version {version} comes after version {self._last} was sent")
        check_tensors(self._source, self._rank, tensors)
        self._last = version
        lost: Lost = {}
        buckets = self.plan.buckets[self._rank]
        done = 0
        try:
            self._announce(version, timeout, lost)
            for bucket in buckets:
                targets = [t for t in bucket.targets if t not in lost]
                if targets:
                    payload = self._mover.pack(Packed(bucket, tensors), targets)
                    header = self._header("bucket", version, index=bucket.index)
                    header["checksum"] = checksum(self._kind, payload.pieces)
                    lost.update(self._mover.send(header, payload, targets, timeout))
                done += 1
        except (Cancelled, ChannelError):
            raise  # the flow says why, and tells the readers
        except Exception as error:
            self._abort(version, f"{type(error).__name__}: {error}", lost, timeout)
            if isinstance(error, WeightsError):
                raise
            raise TransferInterrupted(
                f"version {version}: rank {self._rank} stopped after {done} of {len(buckets)} buckets: {error}"
            ) from error
        if lost:
            first = next(iter(lost.values()))
            names = ", ".join(map(str, sorted(lost)))
            what = f"version {version}: target rank {names} did not get it: {first}"
            raise TransferInterrupted(what, elsewhere=is_elsewhere(first)) from first
        nbytes = sum(bucket.nbytes for bucket in buckets)
        return Sent(version, len(buckets), nbytes, time.perf_counter() - began)

    def close(self, timeout: float = TIMEOUT_S) -> None:
        """Return when every target has what it was sent: to be called before this process ends, or the mover's
        communicator or arena is closed. ``send`` alone does not wait for targets that come to a version later.

        Raises ``TransferInterrupted`` naming the targets that have not read all of it within ``timeout`` (seconds), or
        whose process has ended. May be called again, and followed by another ``send``.
        """
        lost = self._mover.settle(timeout)
        if lost:
            why = "; ".join(f"target rank {target}: {error}" for target, error in sorted(lost.items()))
            first = next(iter(lost.values()))
            raise TransferInterrupted(
                f"rank {self._rank}: not all that was sent up to version {self._last} was taken: {why}",
                elsewhere=is_elsewhere(first),
            ) from first

    def _header(self, kind: str, version: int, **more: object) -> Header:
        return {"kind": kind, "version": version, "source": self._rank, **more}

    def _announce(self, version: int, timeout: float, lost: Lost) -> None:
        for target in range(self.targets):
            mine = [bucket for bucket in self.plan.buckets[self._rank] if target in bucket.targets]
            if not mine and self._rank != LEADER:
                continue
            header = self._header(
                "manifest",
                version,
                plan=self.plan.fingerprint,
                source_layout=self._source.fingerprint,
                source_data=self._layout,
                target_layout=self.plan.target,
                target_data=self._told,
                member=self._mover.name,
                bucket_bytes=self.plan.bucket_bytes,
                without=self._without,
                count=len(mine),
                nbytes=sum(bucket.nbytes for bucket in mine),
                checksum=self._kind,
            )
            lost.update(self._mover.send(header, None, [target], timeout))

    def _abort(self, version: int, why: str, lost: Mapping[int, Exception], timeout: float) -> None:
        told = [target for target in range(self.targets) if target not in lost]
        try:
            self._mover.send(self._header("abort", version, why=why), None, told, timeout)
        except Exception as error:
            # They find out by themselves, later: the first failure is the one to raise.
            log.warning("version %s: the targets could not be told that it stopped: %s", version, error)
