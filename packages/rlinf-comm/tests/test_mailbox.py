"""What is kept of broadcasts that nobody has come for, and what is thrown away."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_comm import frames
from rlinf_comm.errors import FrameError
from rlinf_comm.frames import Arrived
from rlinf_comm.mailbox import DATA, REPORT, VERDICT, Key, Mailbox, Mark

GROUP, OTHER = b"group---", b"other---"
SOURCE = b"source--"


def key(number: int, group: bytes = GROUP, source: bytes = SOURCE) -> Key:
    return Key(group, source, number)


def arrived(which: Key, kind: bytes = DATA, *, failed: bool = False, seconds: float = 100.0) -> Arrived:
    flags = frames.COLLECTIVE | (frames.FAILED if failed else 0)
    nowhere: Any = None
    return Arrived(nowhere, 1, flags, b"", Mark(which, kind, seconds).pack(), 0, [], [])


def test_a_mark_is_read_as_it_was_written() -> None:
    mark = Mark(key(7), REPORT, 1.5)
    assert Mark.unpack(mark.pack()) == mark
    with pytest.raises(FrameError, match="3 bytes are no mark"):
        Mark.unpack(b"abc")


def test_a_later_object_replaces_the_earlier_one_of_its_group() -> None:
    box = Mailbox()
    first, second, elsewhere = arrived(key(1)), arrived(key(1, source=b"reborn--")), arrived(key(1, OTHER))
    for message in (first, elsewhere, second):
        box.add(message, 0.0)
    assert box.take_data(GROUP, 1.0) is second
    assert box.take_data(GROUP, 1.0) is None
    assert box.take_data(OTHER, 1.0) is elsewhere


def test_failures_are_taken_in_their_order() -> None:
    box = Mailbox()
    failure, whole = arrived(key(1), failed=True), arrived(key(2))
    box.add(failure, 0.0)
    box.add(whole, 0.0)
    assert box.take_data(GROUP, 1.0) is failure
    assert box.take_data(GROUP, 1.0) is whole


def test_the_end_of_a_broadcast_takes_an_object_that_was_missed_with_it() -> None:
    box = Mailbox()
    box.add(arrived(key(1)), 0.0)
    box.add(arrived(key(1), VERDICT), 0.0)
    assert len(box) == 0
    verdict = arrived(key(2), VERDICT)
    box.add(verdict, 0.0)
    assert box.take(key(2), REPORT) is None
    assert box.take(key(2), VERDICT) is verdict


def test_a_later_report_replaces_the_earlier_one() -> None:
    box = Mailbox()
    box.add(arrived(key(1), REPORT), 0.0)
    box.add(arrived(key(2), REPORT), 0.0)
    assert len(box) == 1
    assert box.take(key(2), REPORT) is not None


def test_what_a_predecessor_began_goes_no_further() -> None:
    box = Mailbox()
    box.add(arrived(key(1)), 0.0)
    box.add(arrived(key(2, OTHER), REPORT), 0.0)
    box.begin_again()
    assert box.take_data(GROUP, 1.0) is None
    assert box.take(key(2, OTHER), REPORT) is not None


def test_what_is_too_old_is_not_taken_and_goes_with_the_next() -> None:
    box = Mailbox()
    box.add(arrived(key(1), failed=True, seconds=5.0), 0.0)
    assert box.take_data(GROUP, 5.0) is None
    box.add(arrived(key(1, OTHER)), 6.0)
    assert len(box) == 1
