"""The hub's sockets: an asyncio server in a thread of the driver, around ``HubCore``.

It refuses connections without the run's secret, turns a broken connection into the member's death at once, and
watches for runs that cannot move any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlinf_core.errors import describe
from rlinf_core.hub import codec
from rlinf_core.hub.connection import Connection
from rlinf_core.hub.core import HubCore, Outgoing
from rlinf_core.hub.messages import DRIVER, Accepted, Blocked, Failure, Hello, Log, Release, Stacks

DEADLOCK_AFTER_S = 10.0
"""All open calls wait and no message has come for this long: nothing can move any more."""
STACKS_AFTER_S = 3.0
LATER_S = 0.02
"""What nobody waits for (``_LATER``) goes with the next message to the same member, or after this."""
TOGETHER = 32
"""Or once there are so many of them."""
_LATER = (Release, Accepted)
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
        self._connections: dict[str, Connection] = {}
        """Of the members that have said who they are and are not lost."""
        self._open: set[Connection] = set()
        self._unsent: dict[Connection, None] = {}
        """Connections with messages that are not sent yet."""
        self._last_message = time.monotonic()
        self._heard: dict[str, float] = {}
        """When each member last said anything."""
        self._device_waits: dict[tuple[str, int], tuple[float, float]] = {}
        """Since when each wait for devices lasts, and after how many seconds it is next mentioned."""
        self._later: dict[Connection, asyncio.TimerHandle] = {}
        """Connections with messages that nobody waits for, and when those go at the latest."""
        self._behind: dict[Connection, tuple[int, float]] = {}
        """Members with too much waiting for them -> what they had taken, and when they last took more."""
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
            connection = self._connections.get(member)
            if connection is not None:
                self.ended(connection)
                connection.close()

        self._loop.call_soon_threadsafe(body)

    def call(self, function: Callable[[HubCore], Any]) -> Any:
        """Run ``function(core)`` on the hub's thread and return its value, or raise what it raises."""
        done: Future[Any] = Future()

        def body() -> None:
            try:
                done.set_result(function(self.core))
            except BaseException as error:  # the caller's own: it is raised there
                done.set_exception(error)

        self._loop.call_soon_threadsafe(body)
        try:
            return done.result(10.0)
        except TimeoutError as error:
            if done.done():
                raise
            raise TimeoutError("the hub's thread does not answer") from error

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            listening = self._loop.create_server(lambda: Connection(self, self._secret), self._host, 0, backlog=1024)
            server = self._loop.run_until_complete(listening)
            self.address = (self._host, server.sockets[0].getsockname()[1])
        finally:
            self._ready.set()
        watch = self._loop.create_task(self._watch())
        self._loop.run_forever()
        server.close()
        self._connections.clear()  # the hub ends: what that does to a connection means nothing any more
        for connection in self._open:
            connection.close()
        pending = asyncio.all_tasks(self._loop) | {watch}
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        for connection in self._open:  # whoever has not taken its last messages by now will not
            connection.abort()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    # What connections report

    def opened(self, connection: Connection) -> None:
        """Somebody has connected; who it is it must still prove."""
        self._open.add(connection)

    def greeted(self, connection: Connection, hello: Hello) -> bool:
        """A member says who it is; ``False`` for one that is there already."""
        if hello.member in self._connections:
            return False
        self._connections[hello.member] = connection
        self._decide(hello.member, hello)
        return True

    def received(self, connection: Connection, message: Any) -> None:
        """A message of a member. What it causes goes out with ``flush``."""
        self._last_message = self._heard[connection.member] = time.monotonic()
        if isinstance(message, Blocked):
            self._unsent[connection] = None  # the answer may be among what waits for company
        self._decide(connection.member, message)

    def unreadable(self, connection: Connection, error: Exception) -> None:
        """A member sent what cannot be read (a key that cannot be unpickled here, say)."""
        member = connection.member or "a new member"
        cause = f"{member} sent what cannot be read by the driver: {describe(error)}"
        self._route(self.core.fail(Failure(connection.member, cause, traceback.format_exc())))

    def ended(self, connection: Connection) -> None:
        """The connection is over or about to be; may be said more than once."""
        member = connection.member
        if member and self._connections.get(member) is connection:
            del self._connections[member]
            self._behind.pop(connection, None)
            self._say(self.core.lost(member))

    def closed(self, connection: Connection) -> None:
        """Nothing of the connection is left."""
        self.ended(connection)
        self._open.discard(connection)
        if (timer := self._later.pop(connection, None)) is not None:
            timer.cancel()

    def flush(self, sender: Connection | None = None) -> None:
        """Send what has been decided: one write for each member. ``sender`` caused it, and has to wait where a member
        is behind with taking what is sent to it."""
        for connection in self._unsent:
            connection.flush()
            if connection.full:
                self._behind.setdefault(connection, (connection.taken(), time.monotonic()))
                if sender is not None and sender is not connection:
                    connection.hold_up(sender)
        self._unsent.clear()

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
        """Put messages into the queues of their members; ``flush`` sends them."""
        for member, message in outgoing:
            connection = self._connections.get(member)
            if connection is not None:
                waiting = connection.queue(codec.pack(message))
                if not isinstance(message, _LATER) or waiting >= TOGETHER:
                    self._unsent[connection] = None
                elif connection not in self._unsent and connection not in self._later:
                    self._later[connection] = self._loop.call_later(LATER_S, self._now, connection)

    def _now(self, connection: Connection) -> None:
        del self._later[connection]
        self._unsent[connection] = None
        self.flush()

    def _say(self, outgoing: Outgoing) -> None:
        self._route(outgoing)
        self.flush()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self._watch_devices()
            self._watch_backlogs()
            silent = time.monotonic() - self._last_message
            if not any(s.calls for s in self.core.members.values()) or self.core.failure is not None:
                continue
            if silent > DEADLOCK_AFTER_S and self.core.stuck():
                self._say(self.core.fail(Failure("", "nothing can move any more:\n" + self.core.report())))
            elif silent > self._stall_timeout:
                await self._report_stall(silent)

    def _watch_backlogs(self) -> None:
        """A member that takes nothing of what waits for it fails the run, by name."""
        now = time.monotonic()
        for connection, (taken, since) in list(self._behind.items()):
            if not connection.full:
                del self._behind[connection]
            elif connection.taken() > taken:
                self._behind[connection] = (connection.taken(), now)
            elif now - since > self._stall_timeout and self.core.failure is None:
                cause = (
                    f"{connection.member} has taken nothing for {now - since:.0f} s of the "
                    f"{connection.backlog() / 2**20:.0f} MiB of messages that wait for it"
                )
                self._say(self.core.fail(Failure(connection.member, cause)))

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
                self._say([(DRIVER, Log("run", "stderr", f"{now - since:.0f} s already: {text}"))])

    async def _report_stall(self, silent: float, cause: str = "") -> None:
        self._stacks.clear()
        before = self._last_message
        self._say([(m, Stacks()) for m in self._connections if m != DRIVER])
        await asyncio.sleep(STACKS_AFTER_S)
        mute = [m for m in self._connections if m != DRIVER and m not in self._stacks]
        self._last_message = before
        lines = [
            cause
            or f"no worker has said anything for {silent:.0f} s (cluster.stall_timeout_s={self._stall_timeout:g}):",
            self.core.report(),
        ]
        if mute:
            lines.append("not even a sign of life from: " + ", ".join(mute))
        stacks = "".join(f"{m} is at:\n{text}" for m, text in self._stacks.items() if text)
        self._say(self.core.fail(Failure("", "\n".join(lines), stacks)))
