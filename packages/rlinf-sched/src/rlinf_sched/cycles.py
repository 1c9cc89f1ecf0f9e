"""A cycle as one stage: simulator and policy on a split of the devices, with k sub-batches, or in turn.

One round takes a + s for k = 1, else max(k·max(a(b/k), s(b/k)), a(b/k) + s(b/k)): while one sub-batch is stepped the
next is inferred.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rlinf_sched.costmodel import Cost, Floats, Memory, SplitCost
from rlinf_sched.graph import Cycle, Graph, Stage

SUB_BATCHES = (1, 2, 3, 4, 8)


def collapse(problem: object) -> object:
    raise NotImplementedError
