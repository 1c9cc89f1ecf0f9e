"""The limit for any way that copies once: the machine's memcpy, in one process."""

from __future__ import annotations

import time

import numpy as np

from ways.cases import Case
from ways.pair import Contender, Sample

AREA = 256 << 20


class Memcpy(Contender):
    name = "memcpy (limit)"
    kind = "limit"
    round_trips = False

    def start(self) -> None:
        self.area = np.zeros(AREA, np.uint8)

    def throughput(self, case: Case, count: int) -> Sample:
        sources = [np.arange(case.nbytes, dtype=np.uint8) for _ in case.batch()]
        slots = min(64, AREA // case.nbytes)
        targets = [self.area[n * case.nbytes : (n + 1) * case.nbytes] for n in range(slots)]
        cpu, began = time.process_time(), time.perf_counter()
        for n in range(count):
            targets[n % slots][:] = sources[n % len(sources)]
        return Sample(count, time.perf_counter() - began, time.process_time() - cpu)

    def pingpong(self, case: Case, count: int) -> list[float]:
        raise NotImplementedError("nobody answers a memcpy")

    def stop(self) -> None:
        del self.area
