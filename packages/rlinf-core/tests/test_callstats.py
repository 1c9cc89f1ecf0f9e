"""Release curves and device memory of a call."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.callstats import QUANTILES, DeviceMemory, Releases


def test_a_group_counts_when_its_last_sample_is_out() -> None:
    releases = Releases()
    for group, seconds in (("a", 1.0), ("b", 2.0), ("a", 5.0), ("b", 3.0)):
        releases.add([group], seconds)
    releases.add([None, None], 4.0)
    assert releases.puts == 6
    assert releases.curve() == (3.0, 4.0, 4.0, 5.0)
    assert Releases().curve() == ()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_the_curve_is_the_times_at_equal_parts(times: list[float]) -> None:
    releases = Releases()
    for seconds in times:
        releases.add([None], seconds)
    curve = releases.curve()
    assert len(curve) == min(QUANTILES, len(times))
    assert list(curve) == sorted(curve) and curve[-1] == max(times)
    for part, seconds in enumerate(curve):
        assert sum(t <= seconds for t in times) * len(curve) >= (part + 1) * len(times)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_sees_memory_that_is_gone_again() -> None:
    memory = DeviceMemory()
    memory.restart()
    before = memory.in_use()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    held = memory.in_use()
    del block
    assert held - before > 60 << 20
    assert memory.in_use() - before < 8 << 20
    assert memory.peak() - before > 60 << 20
