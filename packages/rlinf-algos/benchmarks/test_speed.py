"""pytest-benchmark over the same contenders: ``pytest packages/rlinf-algos/benchmarks [--smoke-sizes]``.

Also asserts what must hold on any machine: the contenders of a case agree.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from contenders import CASES, SMOKE

CHOSEN = SMOKE if os.environ.get("RLINF_BENCHMARK_SMOKE", "1") == "1" else CASES
SAME = ("GAE", "group advantage", "log-probs", "from hidden")


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, make in CHOSEN.items() for name in make()])
def test_speed(benchmark, case, name):
    torch.set_num_threads(1)
    runs = CHOSEN[case]()
    benchmark.group = case
    result = benchmark(runs[name])
    plain = {"gaps", "ends"}
    if case.startswith(SAME) and not plain & set(name.split()):
        torch.testing.assert_close(result, next(iter(runs.values()))(), atol=1e-3, rtol=1e-3)
