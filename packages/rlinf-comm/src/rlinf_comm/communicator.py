"""``Communicator``: any object between any two processes of a run, in order, by the best way there is.

    comm = Communicator("generator[0]", secret, directory)
    comm.send({"tokens": tensor}, "actor[0]", meta={"step": 3})
    batch = comm.recv("generator[0]")                         # at the other end
    work = comm.isend(batch, "actor[1]"); ...; await work     # or work.wait()

Connections are made when first used and kept. Messages of a pair arrive in the order in which they were sent,
asynchronous ones included. Every operation ends: with its result, or with an error that names both ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_comm import broadcast, frames
from rlinf_comm.codec import decode, encode
from rlinf_comm.connection import Unsendable
from rlinf_comm.devices import visible_devices, work_on
from rlinf_comm.endpoint import Endpoint
from rlinf_comm.errors import CommError
from rlinf_comm.frames import Arrived, Packet
from rlinf_comm.thresholds import thresholds as measured_thresholds
from rlinf_comm.transports import wrong_names
from rlinf_comm.work import seconds_of
from rlinf_core.errors import describe

if TYPE_CHECKING:
    from types import TracebackType

    from rlinf_comm.directory import Directory
    from rlinf_comm.peer import Peer, PeerStats
    from rlinf_comm.selection import Thresholds
    from rlinf_comm.transports.base import Place
    from rlinf_comm.work import Work

WINDOW_BYTES = 64 << 20
MAX_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class Message:
    """What ``recv_message`` returns. ``meta``: what was given to ``send`` beside the object."""

    obj: Any
    meta: Any
    source: str


class Communicator:
    """This process under ``name``, towards all others that have the same ``secret`` and ``directory``.

    Args:
        name: of this end; unique in the run.
        secret: of the run, bytes. Who does not prove that it knows it is refused before anything of it is read.
        directory: where this end is published and the others are found.
        host: the address to listen at, which the other nodes reach.
        timeout: seconds that an operation takes at most where it does not say otherwise.
        window_bytes: of one sender, how much this end takes before it has consumed any (back-pressure). A larger
            message goes alone.
        max_connections: kept open at once; beyond that the one that has been idle for longest is closed, with notice.
        allow_pickle: objects that the codec has no form for are pickled. Both ends have proved that they know the
            secret before, so that a stranger cannot have anything unpickled here; who knows the secret can.
        devices: UUIDs of this process's accelerators, by local index (None: those that it sees).
        shm_limit_bytes: most shared memory that this end takes (None: a quarter of what the process may use).
        thresholds: sizes from which one way is faster than another (None: measured on this machine, or built in).
        capabilities: names of the transports to use (None: all that work here). One that is not installed is refused.

    All methods may be called from several threads. After ``fork`` the child has to make its own.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        directory: Directory,
        *,
        host: str = "127.0.0.1",
        timeout: float = 120.0,
        window_bytes: int = WINDOW_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        allow_pickle: bool = True,
        devices: Sequence[str] | None = None,
        shm_limit_bytes: int | None = None,
        thresholds: Thresholds | None = None,
        capabilities: frozenset[str] | None = None,
    ) -> None:
        if not name or not secret:
            raise CommError("a communicator needs a name and a secret")
        if not isinstance(secret, bytes | bytearray):
            raise CommError(f"{name}: the secret must be bytes, not {type(secret).__name__} (a text: .encode())")
        if capabilities is not None and (wrong := wrong_names(capabilities)):
            raise CommError(f"{name}: capabilities: {wrong}", me=name)
        timeout = seconds_of(timeout, f"{name}: timeout")
        if timeout == 0 or window_bytes <= 0 or max_connections <= 0:
            raise CommError(f"{name}: timeout, window_bytes and max_connections must be more than 0")
        self.name = name
        self.timeout = timeout
        self._allow_pickle = allow_pickle
        self._endpoint = Endpoint(
            name,
            secret,
            directory,
            host=host,
            timeout=timeout,
            window_bytes=window_bytes,
            max_connections=max_connections,
            devices=visible_devices() if devices is None else tuple(devices),
            shm_limit_bytes=shm_limit_bytes,
            thresholds=thresholds or measured_thresholds(),
            capabilities=capabilities,
        )

    @property
    def place(self) -> Place:
        return self._endpoint.place

    def place_of(self, peer: str) -> Place | None:
        """Where a peer is; None before the first connection to it."""
        return self._endpoint.peer(peer).place

    # Sending

    def send(
        self, obj: object, to: str, *, meta: object = None, timeout: float | None = None, confirm: bool = False
    ) -> None:
        """Send ``obj``; returns when it may be changed again, with ``confirm`` when the receiver has it.

        ``meta`` travels with it. Raises CodecError (it cannot be sent; the receiver is told, and its ``recv`` raises
        RemoteError), CommTimeout (it will not arrive, unless only the confirmation did not come), PeerLost, and
        RemoteError: with ``confirm`` of this message, else of an earlier one that the receiver could not decode; this
        one was then not sent.
        """
        peer, deadline = self._begin(to, timeout)
        packet, error = self._pack(obj, meta)
        what = f"a message of {packet.nbytes} bytes"

        def job() -> None:
            self._send(peer, packet, error, deadline, confirm, what)

        peer.send_lane.call(what, job, deadline, lambda: peer.timed_out(f"{what} to {to} had to wait", timeout or 0.0))

    def isend(
        self, obj: object, to: str, *, meta: object = None, timeout: float | None = None, confirm: bool = False
    ) -> Work:
        """``send`` that goes on by itself. Tensors in ``obj`` must not change before the handle is done."""
        peer, deadline = self._begin(to, timeout)
        packet, error = self._pack(obj, meta)
        what = f"sending {packet.nbytes} bytes from {self.name} to {to}"
        return peer.send_lane.submit(what, lambda: self._send(peer, packet, error, deadline, confirm, what))

    def flush(self, to: str, *, timeout: float | None = None) -> None:
        """Return when ``to`` has received and decoded all that it was sent. Raises RemoteError where it could not."""
        peer, deadline = self._begin(to, timeout)
        peer.send_lane.call("flush", lambda: peer.flush(deadline), deadline, lambda: peer.timed_out("flush", 0.0))

    def _begin(self, name: str, timeout: float | None) -> tuple[Peer, float]:
        self._endpoint.check()
        return self._endpoint.peer(name), time.monotonic() + self._seconds(timeout)

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else seconds_of(timeout)

    def _pack(self, obj: object, meta: object) -> tuple[Packet, Exception | None]:
        """The packet, or one that tells the receiver what went wrong, and the error."""
        try:
            skeleton, buffers = encode(obj, allow_pickle=self._allow_pickle, devices=True)
            packet = Packet(skeleton, list(buffers), work=work_on(buffers))
            if meta is not None:
                packet.meta, more = encode(meta, allow_pickle=self._allow_pickle)
                packet.buffers += more
                packet.meta_buffers = len(more)
        except Exception as error:  # also what an object's own code raises while it is taken apart
            return Packet(describe(error).encode(), flags=frames.FAILED), error
        return packet, None

    @staticmethod
    def _send(peer: Peer, packet: Packet, error: Exception | None, deadline: float, confirm: bool, what: str) -> None:
        if error is None:
            try:
                peer.send(packet, deadline, confirm=confirm, what=what)
                return
            except Unsendable as fault:
                error = fault.cause
                packet = Packet(describe(error).encode(), flags=frames.FAILED)
        try:
            peer.send(packet, deadline, confirm=False, what="the news of a failure")
        except CommError as other:
            error.add_note(f"{peer.name} could not be told: {other}")
        raise error

    # Receiving

    def recv(self, source: str, *, timeout: float | None = None) -> Any:
        """The next object from ``source``. Its tensors may be views of shared memory, which is used again when the last
        of them is gone.

        Raises CommTimeout (nothing is lost; call again), PeerLost (after all that did arrive has been received),
        RemoteError (the sender could not send it, or could not decode what this end had sent it before) and CodecError
        (it cannot be decoded here; the sender is told).
        """
        return self.recv_message(source, timeout=timeout).obj

    def recv_message(self, source: str, *, timeout: float | None = None) -> Message:
        """``recv``, with what was sent beside the object."""
        peer, deadline = self._begin(source, timeout)
        if not peer.recv_lane.busy:
            return self._unpack(peer, peer.receive(deadline))
        message: Message = peer.recv_lane.call(
            "recv",
            lambda: self._unpack(peer, peer.receive(deadline)),
            deadline,
            lambda: peer.timed_out(f"earlier receives from {source} have not ended", timeout or 0.0),
        )
        return message

    def irecv(self, source: str, *, timeout: float | None = None) -> Work:
        """``recv`` that goes on by itself."""
        peer, deadline = self._begin(source, timeout)
        what = f"receiving at {self.name} from {source}"
        return peer.recv_lane.submit(what, lambda: self._unpack(peer, peer.receive(deadline)).obj)

    def irecv_message(self, source: str, *, timeout: float | None = None) -> Work:
        """``recv_message`` that goes on by itself."""
        peer, deadline = self._begin(source, timeout)
        what = f"receiving at {self.name} from {source}"
        return peer.recv_lane.submit(what, lambda: self._unpack(peer, peer.receive(deadline)))

    def _unpack(self, peer: Peer, message: Arrived) -> Message:
        if message.flags & frames.FAILED:
            peer.consumed_one(message)
            raise peer.remote_error(message.skeleton.decode(errors="replace"))
        try:
            if message.error is not None:
                raise message.error
            split = len(message.buffers) - message.meta_buffers
            obj = decode(message.skeleton, message.buffers[:split], allow_pickle=self._allow_pickle)
            meta = None
            if message.meta:
                meta = decode(message.meta, message.buffers[split:], allow_pickle=self._allow_pickle)
        except BaseException as error:
            peer.consumed_one(message, describe(error) or "it could not be decoded")
            raise
        peer.consumed_one(message)
        return Message(obj, meta, peer.name)

    def broadcast(self, obj: object, *, source: str, members: Sequence[str], timeout: float | None = None) -> Any:
        """The object of ``source`` at all ``members`` (this end is one of them), which all call this with the same
        ``source`` and ``members`` in the same order; ``obj`` matters at the source alone. Not mixed up with ``send``.

        Returns when every member has it. When one of them fails, all raise: that one its own error, the others
        RemoteError with the texts, whoever misses somebody CommTimeout or PeerLost; the next broadcast works. The news
        of a failure may take a second more than ``timeout`` for each level of the tree.
        """
        self._endpoint.check()
        seconds = self._seconds(timeout)
        found = broadcast.run(
            self._endpoint, source, members, seconds, lambda: self._pack(obj, None), self._unpack_broadcast
        )
        return obj if self.name == source else found

    def _unpack_broadcast(self, message: Arrived) -> Any:
        try:
            if message.error is not None:
                raise message.error
            return decode(message.skeleton, message.buffers, allow_pickle=self._allow_pickle)
        finally:
            self._endpoint.peer(message.connection.peer.name).consumed_one(message)

    # Others

    def stats(self) -> dict[str, PeerStats]:
        """Per peer: messages, bytes, transports, and how often a transport had no room."""
        return {
            p.name: dataclasses.replace(p.stats, transports=dict(p.stats.transports)) for p in self._endpoint.peers()
        }

    def close(self) -> None:
        """Tell all peers, wait shortly until they have taken what they were sent, and free everything. Idempotent."""
        self._endpoint.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
