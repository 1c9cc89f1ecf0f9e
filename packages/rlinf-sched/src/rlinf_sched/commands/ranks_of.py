"""How many ranks the workers of a flow accept, as they say themselves (``Worker.check_ranks``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlinf_sched.graph import SchedError
from rlinf_sched.units import counted

if TYPE_CHECKING:
    from rlinf_core.graph import StageSpec

ASKED = 256
"""Up to so many ranks a stage is asked about that does not accept all numbers of them."""


class Accepted:
    """By device stage whose ranks the plan decides: the numbers of ranks that it accepts, with a device each."""

    def __init__(self, stages: Mapping[str, StageSpec], groups: Mapping[str, Any], devices: int) -> None:
        self.counts: dict[str, tuple[int, ...]] = {}
        self.why: dict[str, str] = {}
        for name, stage in stages.items():
            if not stage.device or stage.ranks_fixed is not None or name not in groups:
                continue
            worker, cfg = groups[name].worker, groups[name].cfg
            faults = {n: fault for n in range(1, devices + 1) if (fault := worker.check_ranks(cfg, n))}
            if faults:
                self.why[name] = next(iter(faults.values()))
                more = range(devices + 1, max(devices, ASKED) + 1)
                good = [n for n in range(1, devices + 1) if n not in faults]
                self.counts[name] = tuple(good + [n for n in more if not worker.check_ranks(cfg, n)])

    def most(self, name: str, devices: int) -> int:
        """The largest accepted number up to ``devices``. Raises SchedError with the stage's own words when it accepts
        none."""
        if name not in self.counts:
            return devices
        fitting = [n for n in self.counts[name] if n <= devices]
        if not fitting:
            raise SchedError(f"group {name!r} cannot be put on {counted(devices, 'device')}: {self.why[name]}")
        return fitting[-1]
