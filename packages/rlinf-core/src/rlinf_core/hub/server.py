"""The hub's sockets: an asyncio server in a thread of the driver, around ``HubCore``.

It refuses connections without the run's secret, turns a broken connection into the member's death at once, and
watches for runs that cannot move any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlinf_core.errors import describe
from rlinf_core.hub import wire
from rlinf_core.hub.core import HubCore, Outgoing
from rlinf_core.hub.messages import DRIVER, Failure, Hello, Log, Stacks

DEADLOCK_AFTER_S = 10.0
"""All open calls wait and no message has come for this long: nothing can move any more."""
STACKS_AFTER_S = 3.0
DEVICE_NOTE_S = 60.0
"""A wait for devices is mentioned after this long, and again each time it has doubled."""


class HubServer:
    """Serves one run. With calls open and no message from any member for ``stall_timeout_s``, the run fails."""

    def __init__(self, host: str, secret: bytes, stall_timeout_s: float) -> None:
        self.core = HubCore()
        self._host = host
        self._secret = secret
        self._stall_timeout = stall_timeout_s
        self._loop = asyncio.new_event_loop()
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._last_message = time.monotonic()
        self._heard: dict[str, float] = {}
        """When each member last said anything."""
        self._device_waits: dict[tuple[str, int], tuple[float, float]] = {}
        """Since when each wait for devices lasts, and after how many seconds it is next mentioned."""
        self._stacks: dict[str, str] = {}
        self._ready = threading.Event()
        self.address: tuple[str, int] = ("", 0)
        self._thread = threading.Thread(target=self._run, name="rlinf-hub", daemon=True)

    def start(self) -> tuple[str, int]:
        self._thread.start()
        self._ready.wait()
        if not self.address[1]:
            raise OSError(f"the hub cannot listen on {self._host}")
        return self.address

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)

    def declare_dead(self, member: str) -> None:
        """The member's process has ended although its connection still stands (a fork of it may hold that)."""

        def body() -> None:
            writer = self._writers.pop(member, None)
            if writer is not None:
                writer.close()
                self._route(self.core.lost(member))

        self._loop.call_soon_threadsafe(body)

    def call(self, function: Callable[[HubCore], Any]) -> Any:
        """Run ``function(core)`` on the hub's thread and return its value."""
        done = threading.Event()
        result: list[Any] = []

        def body() -> None:
            result.append(function(self.core))
            done.set()

        self._loop.call_soon_threadsafe(body)
        if not done.wait(10.0):
            raise TimeoutError("the hub's thread does not answer")
        return result[0]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(asyncio.start_server(self._serve, self._host, 0, backlog=1024))
            self.address = (self._host, server.sockets[0].getsockname()[1])
        finally:
            self._ready.set()
        watch = self._loop.create_task(self._watch())
        self._loop.run_forever()
        watch.cancel()
        server.close()
        for writer in self._writers.values():
            writer.close()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = ""
        try:
            await wire.accept_stream(reader, writer, self._secret)
            hello = await asyncio.wait_for(wire.read_message(reader), wire.AUTH_TIMEOUT_S)
            if not isinstance(hello, Hello) or hello.member in self._writers:
                return
            member = hello.member
            self._writers[member] = writer
            self._route(self.core.handle(member, hello))
            while True:
                try:
                    message = await wire.read_message(reader)
                except (OSError, EOFError, TimeoutError):
                    raise
                except Exception as error:  # what was sent (a key, say) cannot be unpickled here
                    cause = f"{member} sent what cannot be read by the driver: {describe(error)}"
                    self._route(self.core.fail(Failure(member, cause, traceback.format_exc())))
                    return
                self._last_message = self._heard[member] = time.monotonic()
                self._decide(member, message)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError):
            pass  # the hub ends, the member left, or a stranger was turned away; what that means is decided below
        finally:
            writer.close()
            if member and self._writers.pop(member, None) is not None:
                self._route(self.core.lost(member))

    def _decide(self, member: str, message: Any) -> None:
        if isinstance(message, Stacks):
            self._stacks[member] = message.text
            return
        try:
            self._route(self.core.handle(member, message))
        except Exception as error:  # a fault of ours must stop the run by name, not freeze it
            text = traceback.format_exc()
            name = type(message).__name__
            self._route(self.core.fail(Failure("hub", f"the hub failed on {name} of {member}: {error!r}", text)))

    def _route(self, outgoing: Outgoing) -> None:
        for member, message in outgoing:
            writer = self._writers.get(member)
            if writer is not None and not writer.is_closing():
                with contextlib.suppress(ConnectionError):  # seen by the reader as the member's end
                    writer.write(wire.pack(message))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self._watch_devices()
            silent = time.monotonic() - self._last_message
            if not any(s.calls for s in self.core.members.values()) or self.core.failure is not None:
                continue
            if silent > DEADLOCK_AFTER_S and self.core.stuck():
                self._route(self.core.fail(Failure("", "nothing can move any more:\n" + self.core.report())))
            elif silent > self._stall_timeout:
                await self._report_stall(silent)

    async def _watch_devices(self) -> None:
        """Say who holds devices that somebody waits long for; a holder that is silent all the while fails the run."""
        now = time.monotonic()
        waits = self.core.device_waits() if self.core.failure is None else {}
        self._device_waits = {req: self._device_waits.get(req, (now, DEVICE_NOTE_S)) for req in waits}
        for req, (since, note) in list(self._device_waits.items()):
            text, holders = waits[req]
            heard = max([since, *(self._heard.get(m, since) for m in holders)])
            if holders and now - heard > self._stall_timeout:
                limit = f"cluster.stall_timeout_s={self._stall_timeout:g}"
                await self._report_stall(now - heard, f"{', '.join(holders)} did not return devices ({limit}): {text}")
                return
            if now - since > note:
                self._device_waits[req] = (since, 2 * note)
                self._route([(DRIVER, Log("run", "stderr", f"{now - since:.0f} s already: {text}"))])

    async def _report_stall(self, silent: float, cause: str = "") -> None:
        self._stacks.clear()
        before = self._last_message
        self._route([(m, Stacks()) for m in self._writers if m != DRIVER])
        await asyncio.sleep(STACKS_AFTER_S)
        mute = [m for m in self._writers if m != DRIVER and m not in self._stacks]
        self._last_message = before
        lines = [
            cause
            or f"no worker has said anything for {silent:.0f} s (cluster.stall_timeout_s={self._stall_timeout:g}):",
            self.core.report(),
        ]
        if mute:
            lines.append("not even a sign of life from: " + ", ".join(mute))
        stacks = "".join(f"{m} is at:\n{text}" for m, text in self._stacks.items() if text)
        self._route(self.core.fail(Failure("", "\n".join(lines), stacks)))
