"""Payloads of channel items: encoding, the producer's store, and the socket link that moves them.

An item is pickled once with its buffers (tensors, arrays, large bytes) kept apart. A small one travels with its
``Descriptor``; a larger one stays in its producer's memory, and the hub sees only the descriptor: a consumer on the
same machine opens it through the link (``rlinf_core.links``), any other fetches it over a direct socket. Buffers are
copied when an item is put, so a producer may change a tensor in place afterwards.

Peers authenticate with the run's secret before anything is unpickled (``rlinf_core.hub.wire``).
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import itertools
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlinf_core.errors import ChannelError, PeerLost
from rlinf_core.hub import wire
from rlinf_core.links import SOCKET, LinkLoader

INLINE_BYTES = 8 << 10
"""An item of no more than this travels with its descriptor, through the hub, which does not look into it."""
IN_BAND_BYTES = 4 << 10
"""A buffer of no more than this is part of the pickle."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a payload lies: its producer's address and key there. ``nbytes`` counts all buffers.

    ``inline`` is the payload itself, for a small one that has no key (-1). ``ticket`` opens it through the producer's
    link (``rlinf_core.links``), ``holder`` says as which of its consumers (negative: only as a copy), ``private`` that
    there are others.
    """

    member: str
    address: tuple[str, int]
    key: int
    nbytes: int
    inline: bytes | None = None
    ticket: bytes | None = None
    holder: int = -1
    private: bool = False


Frame = list[bytes | bytearray | memoryview]


def _rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if 0 in shape:
        tensor = torch.empty(shape, dtype=kind)
    else:
        tensor = torch.frombuffer(buffer, dtype=kind).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_tensor(tensor: Any) -> Any:
    """A plain CPU tensor as an out-of-band buffer; any other as it pickles itself."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # a single element may have any stride, and counts as contiguous
    raw = flat.view(torch.uint8).numpy() if flat.numel() else b""
    requires_grad = bool(tensor.requires_grad and tensor.is_leaf)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _rebuild_tensor, (pickle.PickleBuffer(raw), dtype, tuple(tensor.shape), requires_grad)


_reducers: dict[type, Callable[[Any], Any]] = {}
"""The process's own table of reducers and ours for tensors; made anew when torch is loaded or the former grows."""


def _dispatch_table() -> dict[type, Callable[[Any], Any]]:
    global _reducers
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # another thread may be importing it
    if len(_reducers) != len(copyreg.dispatch_table) + (tensor is not None):
        ours = {} if tensor is None else {tensor: _reduce_tensor}
        _reducers = {**copyreg.dispatch_table, **ours}
    return _reducers


def encode(item: Any) -> Frame:
    """Pickle ``item`` into a frame: the pickle first, then views of its larger buffers (nothing of them is copied).

    Raises ``ChannelError`` naming what cannot be pickled.
    """
    buffers: list[memoryview] = []

    def apart(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= IN_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    try:
        pickler = pickle.Pickler(stream, protocol=5, buffer_callback=apart)
        pickler.dispatch_table = _dispatch_table()
        pickler.dump(item)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise ChannelError(f"a {type(item).__name__} cannot be sent through a channel: {error}") from error
    return [stream.getvalue(), *buffers]


def decode(frame: Frame) -> Any:
    """Inverse of ``encode``; arrays and tensors use the frame's buffers in place."""
    return pickle.loads(frame[0], buffers=frame[1:])


class PayloadStore:
    """What this process has put and nobody has finished fetching."""

    def __init__(self, link: LinkLoader | None = None) -> None:
        self._keys = itertools.count()
        self._kept: dict[int, tuple[Frame | None, Any, int]] = {}
        """Key -> the frame, or what the link made of it, and how many consumers have not released it."""
        self._lock = threading.Lock()
        self._link = link or LinkLoader(SOCKET)

    def add(self, frame: Frame, references: int = 1, holders: int = 0) -> tuple[int, bytes | None]:
        """Keep a copy of the frame until it was released ``references`` times; returns its key and a link's ticket.
        ``holders``: see ``Link.put``."""
        ticket = None
        kept: tuple[Frame | None, Any, int] | None = None
        link = self._link.get()
        if link is not None:
            placed = link.put([memoryview(b).cast("B") for b in frame], holders)
            if placed is not None:
                slot, ticket = placed
                kept = (None, slot, references)
        if kept is None:
            kept = ([frame[0], *(bytearray(b) for b in frame[1:])], None, references)
        key = next(self._keys)
        with self._lock:
            self._kept[key] = kept
        return key, ticket

    def get(self, key: int) -> Frame | None:
        """The frame; it may be changed by its producer as soon as it is released."""
        with self._lock:
            kept = self._kept.get(key)
        if kept is None or kept[0] is not None:
            return kept[0] if kept is not None else None
        link = self._link.get()
        assert link is not None, "a slot is of a link"
        return [*link.read(kept[1])]

    def open(self, descriptor: Descriptor) -> Frame | None:
        """What the descriptor's ticket opens, or ``None``: then it has to be fetched."""
        link = self._link.get() if descriptor.ticket is not None else None
        if link is None or descriptor.ticket is None:
            return None
        opened = link.open(descriptor.ticket, descriptor.holder, descriptor.private)
        return None if opened is None else [*opened]

    def release(self, keys: Iterable[int]) -> None:
        for key in keys:
            with self._lock:
                kept = self._kept.get(key)
                if kept is None:
                    continue
                if kept[2] > 1:
                    self._kept[key] = (kept[0], kept[1], kept[2] - 1)
                    continue
                del self._kept[key]
            if kept[0] is None and (link := self._link.get()) is not None:
                link.release(kept[1])

    def __len__(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        self._link.close()


_COUNT = struct.Struct("<q")


def _send_frame(sock: socket.socket, frame: Frame) -> None:
    sizes = struct.pack(f"<q{len(frame)}q", len(frame), *(len(b) for b in frame))
    sock.sendall(sizes)
    for buffer in frame:
        sock.sendall(buffer)


def _recv_frame(sock: socket.socket) -> Frame | None:
    """Read one frame; ``None`` means that the producer no longer has the payload."""
    (count,) = _COUNT.unpack(wire.recv_exactly(sock, 8))
    if count < 0:
        return None
    sizes = struct.unpack(f"<{count}q", wire.recv_exactly(sock, 8 * count))
    return [wire.recv_exactly(sock, size) for size in sizes]


class PayloadServer:
    """Serves this process's store to consumers; one thread accepts, one per consumer connection answers."""

    def __init__(self, store: PayloadStore, secret: bytes, host: str) -> None:
        self._store = store
        self._secret = secret
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="rlinf-payload-accept", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), name="rlinf-payload", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        self._open.add(sock)
        try:
            wire.authenticate_incoming(sock, self._secret)
            while True:
                (count,) = _COUNT.unpack(wire.recv_exactly(sock, 8))
                keys = struct.unpack(f"<{count}q", wire.recv_exactly(sock, 8 * count))
                for key in keys:
                    frame = self._store.get(key)
                    if frame is None:
                        sock.sendall(_COUNT.pack(-1))
                    else:
                        _send_frame(sock, frame)
        except (OSError, EOFError, wire.AuthenticationError):
            return  # the consumer left, or a stranger without the secret was turned away
        finally:
            self._open.discard(sock)
            sock.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # wakes the accepting thread, which would take one more connection
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._open):
            sock.close()


class PayloadFetcher:
    """The consumer's side: one kept connection per producer, made on first use."""

    def __init__(self, secret: bytes, store: PayloadStore, member: str, timeout: float = 120.0) -> None:
        self._secret = secret
        self._store = store
        self._member = member
        self._timeout = timeout
        self._sockets: dict[tuple[str, int], socket.socket] = {}
        self._lock = threading.Lock()

    def fetch(self, descriptors: list[Descriptor]) -> list[Any]:
        """Decoded items in the order asked. Raises ``ChannelError`` naming the producer that is gone."""
        frames: dict[int, Frame] = {}
        by_producer: dict[tuple[str, int], list[int]] = {}
        for position, descriptor in enumerate(descriptors):
            if descriptor.inline is not None:
                frames[position] = [descriptor.inline]
            elif (opened := self._store.open(descriptor)) is not None:
                frames[position] = opened
            elif descriptor.member == self._member:
                own = self._store.get(descriptor.key)
                if own is None:
                    raise ChannelError(f"payload {descriptor.key} of {self._member} was already released")
                frames[position] = [own[0], *(bytearray(b) for b in own[1:])]
            else:
                by_producer.setdefault(descriptor.address, []).append(position)
        with self._lock:
            for address, positions in by_producer.items():
                member = descriptors[positions[0]].member
                frames.update(self._from(address, member, positions, [descriptors[p].key for p in positions]))
        return [decode(frames.pop(p)) for p in range(len(descriptors))]

    def _from(self, address: tuple[str, int], member: str, positions: list[int], keys: list[int]) -> dict[int, Frame]:
        try:
            sock = self._sockets.get(address)
            if sock is None:
                sock = wire.connect(address, self._secret, self._timeout)
                self._sockets[address] = sock
            sock.sendall(struct.pack(f"<q{len(keys)}q", len(keys), *keys))
            received = {position: _recv_frame(sock) for position in positions}
        except (OSError, EOFError) as error:
            broken = self._sockets.pop(address, None)
            if broken is not None:
                broken.close()
            raise PeerLost(f"cannot fetch {len(keys)} item(s) from {member}: {error or 'connection closed'}") from error
        missing = [p for p, frame in received.items() if frame is None]
        if missing:
            raise ChannelError(f"{member} no longer has {len(missing)} of the {len(keys)} item(s) asked for")
        return {p: frame for p, frame in received.items() if frame is not None}

    def close(self) -> None:
        with self._lock:
            for sock in self._sockets.values():
                sock.close()
            self._sockets.clear()
