"""Transports that other packages bring: taken where they suit, and passed over where they are broken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import acme_transports
import numpy as np
import pytest
from acme_transports import FileTransport

from rlinf_comm import doctor, transports
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import LocalDirectory
from rlinf_comm.errors import CommError, NoRoute
from rlinf_comm.routing import Router
from rlinf_comm.selection import Other, Summary, Thresholds, select
from rlinf_comm.transports.base import Place, Transport
from rlinf_core import registry
from rlinf_core.cli.doctor import Ask
from rlinf_core.errors import PluginError
from rlinf_core.registry import Entry

MIB = 1 << 20
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs classes of ``acme_transports`` (name=class) beside what is there."""
    there = registry.installed_entries()

    def add(**classes: str) -> None:
        made = [
            Entry("rlinf.transports", name, f"acme_transports:{cls}", name.replace("_", "-"), "0.1.0")
            for name, cls in classes.items()
        ]
        monkeypatch.setattr(registry, "installed_entries", lambda: (*there, *made))
        transports.forget()

    yield add
    transports.forget()


def exchange(nbytes: int, capabilities: frozenset[str] | None = None) -> dict[str, int]:
    """Sends so many bytes from one communicator to another; what moved them."""
    directory = LocalDirectory()
    with (
        Communicator("a", b"s", directory, timeout=20, capabilities=capabilities) as a,
        Communicator("b", b"s", directory, timeout=20, capabilities=capabilities) as b,
    ):
        data = np.arange(nbytes, dtype=np.uint8)
        for _ in range(2):
            a.send(data, "b")
            np.testing.assert_array_equal(b.recv("a"), data)
        return a.stats()["b"].transports


def test_one_that_is_preferred_carries_what_suits_it(install: Install) -> None:
    install(acme_file="FileTransport")
    assert transports.load("acme_file") is FileTransport
    assert exchange(MIB) == {"acme_file": 2}
    assert exchange(MIB - 1) == {"inproc": 2}


def test_one_that_is_not_comes_after_the_built_in_ones(install: Install) -> None:
    install(acme_last="LastTransport")
    assert exchange(MIB) == {"inproc": 2}
    assert exchange(MIB, frozenset({"acme_last"})) == {"acme_last": 2}


def test_both_ends_must_have_it(install: Install) -> None:
    install(acme_file="FileTransport")
    directory = LocalDirectory()
    with (
        Communicator("a", b"s", directory, timeout=20) as a,
        Communicator("b", b"s", directory, timeout=20, capabilities=frozenset({"tcp"})) as b,
    ):
        a.send(np.zeros(MIB), "b")
        assert b.recv("a").nbytes == 8 * MIB
        assert a.stats()["b"].transports == {"tcp": 1}


def test_without_room_the_next_one_takes_the_message(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(acme_file="FileTransport")
    monkeypatch.setattr(FileTransport, "room", False)
    assert exchange(MIB, frozenset({"acme_file", "tcp"})) == {"tcp": 2}


def test_where_nothing_is_left_it_is_named(install: Install) -> None:
    install(acme_file="FileTransport")
    here = Place("m", 1, frozenset({"acme_file"}))
    with pytest.raises(NoRoute, match="acme_file does not suit"):
        select(here, Place("m", 2, here.capabilities), Summary(5), Thresholds(), others=transports.others())
    with pytest.raises(NoRoute, match="acme_file is missing at process 2 on node m"):
        select(here, Place("m", 2, frozenset()), Summary(5), Thresholds(), others=transports.others())
    with pytest.raises(NoRoute, match="acme_file is missing at process 2 on node m"):
        Router(here, Place("m", 2, frozenset()), Thresholds()).choose([memoryview(b"12345")], frozenset())


@pytest.mark.parametrize("prefer", [True, False])
def test_memory_of_an_accelerator_is_copied_to_the_host_for_it(prefer: bool) -> None:
    other = Other("acme", prefer, lambda source, target, summary: True)
    everything = frozenset({"acme", "nccl", "tcp"})
    source, target = Place("m", 1, everything, ("A",)), Place("n", 2, everything, ("B",))
    summary = Summary(0, 7, "A", "B")
    assert select(source, target, summary, Thresholds(), others=[other]).name == "nccl"
    choice = select(source, target, summary, Thresholds(), frozenset({"nccl"}), [other])
    assert (choice.name, choice.staged) == ("acme" if prefer else "tcp", True)
    choice = select(source, target, summary, Thresholds(), frozenset({"nccl", "tcp"}), [other])
    assert (choice.name, choice.staged) == ("acme", True) and "copied to host memory first" in choice.why


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        ("NoTransport", "not a Transport: NoTransport is no subclass of rlinf_comm.transports.base.Transport"),
        ("__doc__", "not a Transport: str is no subclass of"),
        ("Unfinished", "not a Transport: Unfinished does not define pull"),
        ("Nowhere", "cannot be imported: AttributeError"),
        ("Sulky", "not today"),
    ],
)
def test_a_broken_one_is_reported_and_passed_over(
    install: Install, caplog: pytest.LogCaptureFixture, cls: str, why: str
) -> None:
    install(acme_file=cls)
    with caplog.at_level(logging.WARNING, "rlinf.comm"):
        assert exchange(MIB) == {"inproc": 2}
    assert [r.getMessage() for r in caplog.records if "acme_file (acme-file 0.1.0) is not used: " in r.getMessage()]
    assert caplog.text.count("acme_file (acme-file 0.1.0)") == 1 and why in caplog.text
    (line,) = [line for line in doctor.section(Ask()) if "acme_file" in line]
    assert line.startswith("not here: acme_file (acme-file 0.1.0): ") and why in line
    with pytest.raises(CommError, match="capabilities: transport 'acme_file' cannot be used: "):
        Communicator("c", b"s", LocalDirectory(), capabilities=frozenset({"acme_file", "tcp"}))


def test_loading_what_is_no_transport_says_so(install: Install) -> None:
    install(acme_file="NoTransport")
    with pytest.raises(PluginError, match="not a Transport"):
        transports.load("acme_file")


def test_two_that_claim_one_name_are_both_passed_over(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(acme_file="FileTransport")
    known = registry.installed_entries()
    twin = Entry("rlinf.transports", "acme_file", "acme_transports:FileTransport", "acme-twin", "2")
    monkeypatch.setattr(registry, "installed_entries", lambda: (*known, twin))
    transports.forget()
    assert exchange(MIB) == {"inproc": 2}
    assert "is claimed by acme-file 0.1.0" in transports.unusable()["acme_file"]


def test_one_that_cannot_say_whether_it_suits_does_not(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(acme_unsure="UnsureTransport")
    assert exchange(MIB) == {"inproc": 2}
    assert "acme_unsure does not say whether it suits: LookupError: I have no table" in caplog.text


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(CommError, match=r"c: capabilities: there is no transport 'tpc'.*tcp.*; installed: .*shm"):
        Communicator("c", b"s", LocalDirectory(), capabilities=frozenset({"tpc", "shm"}))


def test_the_doctor_shows_where_one_comes_from_and_what_it_carries(install: Install) -> None:
    install(acme_file="FileTransport", acme_last="LastTransport")
    lines = list(doctor.section(Ask()))
    assert lines[0].startswith("transports: acme_file (acme-file 0.1.0), acme_last (acme-last 0.1.0), ")


def test_by_default_a_transport_suits_everywhere_after_the_others() -> None:
    place = Place("m", 1, frozenset())
    assert Transport.suits(place, place, Summary(1)) and not Transport.prefer
    assert acme_transports.Unfinished.unavailable() == ""
