"""docs/communication.md says what is so: its examples run, its tables name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_comm.selection import Choice, Summary, Thresholds, candidates
from rlinf_comm.transports.base import Place

DOC = Path(__file__).resolve().parents[1] / "docs" / "communication.md"
ERRORS = re.compile(r"`(\w+(?:Error|Lost|Closed|Timeout|Limit|Failed|Route))`")


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", DOC.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_examples_run_one_after_the_other() -> None:
    found = blocks()
    assert len(found) >= 5
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(found)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_every_transport_of_the_selection_has_a_row() -> None:
    ends = [Place(node, pid, frozenset(), ("A", "B")) for node in "mn" for pid in (1, 2)]
    summaries = [Summary(1), *(Summary(0, 1, "A", target) for target in ("A", "B", ""))]
    offered: set[Choice] = set()
    for target in ends:
        for summary in summaries:
            offered.update(candidates(ends[0], target, summary, Thresholds()))
    rows = re.findall(r"^\| `(\w+)` \|", DOC.read_text(), flags=re.MULTILINE)
    assert {choice.name for choice in offered} <= set(rows)


@pytest.mark.parametrize("name", sorted(set(ERRORS.findall(DOC.read_text()))))
def test_every_error_it_names_exists(name: str) -> None:
    from rlinf_comm import CodecError, errors

    assert issubclass(getattr(errors, name, CodecError), Exception)
    assert hasattr(errors, name) or name == "CodecError"


def test_every_argument_it_names_exists() -> None:
    import inspect

    from rlinf_comm.communicator import Communicator

    tuning = DOC.read_text().partition("## Tuning")[2]
    names = set(re.findall(r"^\| `(\w+)` \|", tuning, flags=re.MULTILINE))
    assert len(names) >= 6 and names <= set(inspect.signature(Communicator).parameters)
