"""What is to be planned: a graph with costs, on so many devices, for so many items."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlinf_sched.costmodel import Cost
from rlinf_sched.graph import Graph, SchedError, Stage
from rlinf_sched.units import counted, size


@dataclass(frozen=True)
class Problem:
    """``items`` of one step on ``devices``. ``device_bytes``: memory of one device; ``host_bytes``: host memory for
    what is offloaded, per device (infinite where not given). ``portions``: sizes to consider (empty: up to
    ``max_portions`` halvings of ``items`` that the barriers allow). ``node``: devices of one node. ``overhead``:
    seconds of every step beside its stages. ``hop``: seconds that what one stage of a cycle gives is on its way to the
    other, and how much longer with each further rank of the giver."""

    graph: Graph
    costs: Mapping[str, Cost]
    devices: int
    items: int
    device_bytes: float = math.inf
    host_bytes: float = math.inf
    portions: tuple[int, ...] = ()
    max_portions: int = 8
    node: int = 8
    overhead: float = 0.0
    hop: tuple[float, float] = (0.0, 0.0)

    def hops(self, ranks: int) -> float:
        """Seconds of a hop from a stage of so many ranks."""
        return self.hop[0] + self.hop[1] * (ranks - 1)

    def validate(self) -> None:
        """Raise SchedError for what can be seen before any search, by name."""
        self.graph.validate()
        for name in ("devices", "items"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise SchedError(f"{name} is a positive integer, not {getattr(self, name)!r}")
        for name, stage in self.graph.stages.items():
            if name not in self.costs:
                raise SchedError(f"stage {name!r} has no cost: profile it, or give its cost")
            if not stage.accepted(self.devices):
                what = f"one of {list(stage.counts)}" if stage.counts else f"a multiple of {stage.multiple}"
                extra = "" if stage.ranks is None else f" that goes evenly with its {stage.ranks} ranks"
                limits = f", at least {stage.least}" if stage.least > 1 else ""
                raise SchedError(
                    f"stage {name!r} accepts no device count up to {self.devices}: it needs {what}{extra}{limits}"
                )
            if stage.barrier == "group" and self.items % stage.group:
                raise SchedError(
                    f"{self.items} items are no whole number of groups: stage {name!r} needs groups of {stage.group}"
                )
        for portion in self.portions:
            if type(portion) is not int or portion < 1 or self.items % portion:
                raise SchedError(f"portion {portion!r} does not divide the {self.items} items of a step")
            for name, stage in self.graph.stages.items():
                if stage.barrier == "group" and portion % stage.group:
                    raise SchedError(
                        f"portion {portion} breaks the groups of stage {name!r}: it needs a multiple of {stage.group}"
                    )
        self._check_memory()

    def sizes(self) -> tuple[int, ...]:
        """Portion sizes to consider, falling, the whole step first."""
        if self.portions:
            return tuple(sorted({self.items, *self.portions}, reverse=True))
        unit = math.lcm(*(stage.group for stage in self.graph.stages.values() if stage.barrier == "group"))
        found = [self.items]
        while len(found) < self.max_portions and found[-1] % (2 * unit) == 0:
            found.append(found[-1] // 2)
        return tuple(found)

    def evaluated(self, stage: Stage, counts: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Device counts as the cost wants them: a CPU stage has its ranks."""
        return np.array(counts if stage.device else [stage.ranks or 1], dtype=np.int64)

    def _check_memory(self) -> None:
        for name, stage in self.graph.stages.items():
            if not stage.device or math.isinf(self.device_bytes):
                continue
            cost = self.costs[name]
            counts = np.array(stage.accepted(self.devices), dtype=np.int64)
            smallest = min((c for c in self.sizes() if stage.takes(c, self.items)), default=self.items)
            need = min(
                float((cost.resident(counts) + cost.working(counts, smallest, option)).min())
                for option in cost.options(smallest)
            )
            if need > self.device_bytes:
                raise SchedError(
                    f"stage {name!r} does not fit: it needs {size(need)} on device 0, as on any other, and one has "
                    f"{size(self.device_bytes)}, {size(need - self.device_bytes)} short; give it more devices, a "
                    "smaller micro-batch or fewer slots"
                )
        held = sum(
            float(self.costs[name].resident(np.array(stage.accepted(self.devices))).min())
            for name, stage in self.graph.stages.items()
            if stage.device and not stage.swappable
        )
        device_stages = [stage for stage in self.graph.stages.values() if stage.device]
        if len(device_stages) > self.devices and held > self.device_bytes:
            names = ", ".join(repr(s.name) for s in device_stages if not s.swappable)
            raise SchedError(
                f"{names} cannot be offloaded and must share {counted(self.devices, 'device')}: together they hold "
                f"{size(held)} and a device has {size(self.device_bytes)}, {size(held - self.device_bytes)} short"
            )
