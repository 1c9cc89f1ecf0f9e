"""Puts that a task goes on without: how many, what the hub takes for a wait, order, refusals and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlinf_core.board import events as ev
from rlinf_core.channel import WINDOW_BYTES, WINDOW_ITEMS, Clock, Endpoint, Sections, Writer
from rlinf_core.errors import Cancelled, ChannelError, WaitTimeout
from rlinf_core.hub import client as client_module
from rlinf_core.hub.client import HubClient
from rlinf_core.hub.messages import DRIVER, Blocked, Call, Cancel, ChannelArg, Hello, Offload
from rlinf_core.hub.server import HubServer
from rlinf_core.payload import INLINE_BYTES, PayloadFetcher, PayloadStore

SECRET = b"s" * 32
PATIENCE_S = 20.0
CHANNEL = "x/0:c"


class Rig:
    """A hub with one open channel of credit 1, a writer ``a[0]`` in a thread of its own, the driver and a reader."""

    def __init__(self) -> None:
        self.hub = HubServer("127.0.0.1", SECRET, 60.0)
        self.hub.start()
        self.driver = HubClient(self.hub.address, SECRET, Hello(DRIVER, 0, "", ("", 0)))
        self.reader = HubClient(self.hub.address, SECRET, Hello("b[0]", 0, "", ("", 0)))
        self.driver.send(
            ev.OpenChannel(CHANNEL, "x/0", 1, 0),
            ev.AddReader(CHANNEL, "b"),
            ev.AddWriter(CHANNEL, "a[0]#0"),
            ev.SealWriters(CHANNEL),
        )
        self.store = PayloadStore()
        self.ends: list[Any] = []
        self.done = threading.Event()
        self.offloads = 0

    def start(self, body: Callable[[Writer], Any]) -> None:
        """Run ``body(writer)`` on the engine thread of ``a[0]``."""
        started = threading.Event()

        def main() -> None:
            self.client = HubClient(self.hub.address, SECRET, Hello("a[0]", 0, "", ("", 0)))
            self.client.serve_offload = self.offload
            fetcher = PayloadFetcher(SECRET, self.store, "a[0]")
            end = Endpoint(self.client, self.store, fetcher, ("", 0), "a", 0, Clock(), Sections())
            started.set()
            try:
                self.ends.append(body(Writer(end, ChannelArg(CHANNEL, "out", "a[0]#0"))))
            except Exception as error:
                self.ends.append(error)
            self.done.set()

        threading.Thread(target=main, daemon=True).start()
        assert started.wait(PATIENCE_S)

    def offload(self) -> None:
        self.offloads += 1
        raise RuntimeError("as asked")

    def end(self) -> Any:
        assert self.done.wait(PATIENCE_S), "the writer goes on"
        return self.ends[0]

    def until(self, what: Callable[[Any], bool]) -> None:
        """Ask the hub until ``what(core)`` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.hub.call(what):
            assert time.monotonic() < deadline, "it never came to that"

    def until_pending(self, count: int) -> None:
        self.until(lambda core: core.board.stats(CHANNEL)["pending"] == count)

    def until_waiting(self) -> None:
        self.until(lambda core: "a[0]" in core.members and bool(core.members["a[0]"].waits))

    def waits(self) -> list[str]:
        return self.hub.call(lambda core: list(core.members["a[0]"].waits.values()))

    def get(self) -> Any:
        """The key of the next item; ``None`` at the end."""
        answer = self.reader.wait(self.reader.request(lambda req: ev.Get(req, CHANNEL, "b"), "an item"), PATIENCE_S)
        return answer.items[0].key if isinstance(answer, ev.Deliver) else None

    def say(self, message: Any) -> None:
        """A message from the hub to the writer."""
        self.hub.call(lambda core: self.hub._say([("a[0]", message)]))

    def stop(self) -> None:
        for client in (self.driver, self.reader):
            client.close()
        self.hub.stop()


@pytest.fixture(name="rig")
def _rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(client_module, "QUICK_S", -1.0)  # each put travels alone, whatever the machine's load
    rig = Rig()
    yield rig
    rig.stop()


def puts(count: int, size: int = 10, then: Callable[[Writer], Any] | None = None) -> Callable[[Writer], Any]:
    def body(writer: Writer) -> Any:
        for key in range(count):
            writer.put(b"x" * size, key=key)
        return then(writer) if then is not None else None

    return body


def test_the_writer_goes_on_within_the_window_and_is_no_wait(rig: Rig) -> None:
    rig.start(puts(1 + WINDOW_ITEMS))
    assert rig.end() is None
    rig.until_pending(WINDOW_ITEMS)
    assert rig.waits() == []
    assert [rig.get() for _ in range(1 + WINDOW_ITEMS)] == list(range(1 + WINDOW_ITEMS))
    rig.until(lambda core: not core.members["a[0]"].beside)


def test_beyond_it_the_writer_waits_and_the_hub_knows(rig: Rig) -> None:
    rig.start(puts(2 + WINDOW_ITEMS))
    rig.until_waiting()
    assert rig.waits() == [f"credit to put on channel {CHANNEL!r}"]
    rig.driver.send(Call(1, "a[0]", "task", "work", "x/0"))
    rig.until(lambda core: core.stuck())
    assert not rig.done.is_set()
    assert [rig.get() for _ in range(2 + WINDOW_ITEMS)] == list(range(2 + WINDOW_ITEMS))
    assert rig.end() is None
    assert rig.waits() == []


def test_large_puts_are_waited_for(rig: Rig) -> None:
    rig.start(puts(2, size=WINDOW_BYTES + 1))
    rig.until_waiting()
    rig.until_pending(1)
    assert [rig.get(), rig.get()] == [0, 1]
    assert rig.end() is None


def test_close_waits_for_all_that_was_put(rig: Rig) -> None:
    rig.start(puts(4, then=Writer.close))
    rig.until_waiting()
    rig.until_pending(3)
    assert not rig.done.is_set()
    assert [rig.get() for _ in range(4)] == [0, 1, 2, 3]
    assert rig.end() is None
    assert rig.get() is None, "the end comes after the last item"
    rig.until(lambda core: not core.members["a[0]"].beside and not core.members["a[0]"].waits)


@pytest.mark.parametrize("then", [Writer.close, lambda writer: writer.put("more")])
def test_a_refused_put_is_raised_at_the_next_chance(rig: Rig, then: Callable[[Writer], Any]) -> None:
    has_put = threading.Event()

    def body(writer: Writer) -> Any:
        puts(3, size=20_000)(writer)
        has_put.set()
        for pending, *_ in writer._unanswered:
            rig.client.wait(pending, PATIENCE_S)
        with pytest.raises(ChannelError, match=r"channel 'x/0:c': poisoned: as asked") as first:
            then(writer)
        with pytest.raises(ChannelError, match="poisoned"):  # there is one more
            writer.close()
        writer.close()
        return first.value

    rig.start(body)
    rig.until_pending(2)
    assert has_put.wait(PATIENCE_S)  # the last put itself may else be the one that hears of it
    rig.driver.send(ev.FailStep("x/0", "as asked"))
    assert isinstance(rig.end(), ChannelError), rig.ends
    assert len(rig.store) == 1, "what was refused is let go"


def test_a_failure_meanwhile_ends_the_wait(rig: Rig) -> None:
    rig.start(puts(3, then=Writer.close))
    rig.until_waiting()
    rig.driver.send(ev.FailStep("x/0", "as asked"))
    assert isinstance(rig.end(), ChannelError) and "poisoned: as asked" in str(rig.end())


def test_cancelling_ends_the_wait(rig: Rig) -> None:
    rig.start(puts(3, then=Writer.close))
    rig.until_waiting()
    rig.driver.send(Cancel("as asked"))
    assert isinstance(rig.end(), Cancelled)


def test_with_a_timeout_a_put_waits_for_its_own_answer(rig: Rig) -> None:
    late = threading.Event()

    def body(writer: Writer) -> None:
        puts(3)(writer)
        with pytest.raises(WaitTimeout):
            writer.put("late", key="late", timeout=0.05)
        late.set()
        writer.put("last", key="last")
        writer.close()

    rig.start(body)
    assert late.wait(PATIENCE_S)
    rig.until_pending(3)
    assert [rig.get() for _ in range(4)] == [0, 1, 2, "last"]
    assert rig.end() is None, rig.ends


def test_what_fails_in_a_wait_withdraws_that_put_alone(rig: Rig) -> None:
    def body(writer: Writer) -> None:
        with pytest.raises(RuntimeError, match="as asked"):
            puts(2 + WINDOW_ITEMS)(writer)
        writer.close()

    rig.start(body)
    rig.until_waiting()
    rig.say(Offload())
    rig.until(lambda core: core.board.stats(CHANNEL)["pending"] == WINDOW_ITEMS)
    assert [rig.get() for _ in range(1 + WINDOW_ITEMS)] == [0, *range(2, 2 + WINDOW_ITEMS)], "the oldest was withdrawn"
    assert rig.end() is None, rig.ends


def test_an_offload_is_served_by_a_put_that_does_not_wait(rig: Rig) -> None:
    asked = threading.Event()

    def body(writer: Writer) -> None:
        assert asked.wait(PATIENCE_S)
        writer.put("x")

    rig.start(body)
    rig.client._dispatch(Offload())
    asked.set()
    assert isinstance(rig.end(), RuntimeError)
    assert rig.offloads == 1


def test_blocked_after_the_answer_is_no_wait(rig: Rig) -> None:
    rig.start(puts(1, then=lambda writer: rig.client.send(Blocked(("a[0]", -1)))))
    assert rig.end() is None
    rig.until_pending(0)
    rig.until(lambda core: not core.members["a[0]"].beside)
    assert rig.waits() == []


@pytest.mark.parametrize(
    ("items", "options"),
    [
        ([bytes(INLINE_BYTES + 1), threading.Lock()], {}),
        ([bytes(INLINE_BYTES + 1)] * 2, {"weights": [1.0, -1.0]}),
        ([bytes(INLINE_BYTES + 1)] * 2, {"keys": ["a"]}),
    ],
    ids=["an item that cannot be sent", "a weight that is none", "a key too few"],
)
def test_of_many_that_are_not_put_none_is_kept(rig: Rig, items: list[Any], options: dict[str, Any]) -> None:
    rig.start(lambda out: out.put_many(items, **options))
    assert isinstance(rig.end(), ChannelError | ValueError)
    assert len(rig.store) == 0
