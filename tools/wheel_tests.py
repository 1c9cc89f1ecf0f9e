"""Which tests of a package run on its wheel: ``check_wheels`` puts this beside them as ``conftest.py``.

That the code is right is shown by all tests from the checkout. What a wheel can get wrong (a requirement that is not
declared, a file that was left behind) shows when each part is used once: of every file the first tests, each with one
of its cases. Those that start Ray or are slow are not asked for.
"""

from __future__ import annotations

from collections import Counter

import pytest

EACH = 3
"""Test functions of a file."""
LEFT_OUT = ("test_data_parallel.py", "test_deepspeed_ranks.py", "test_megatron_ranks.py", "test_planner_exact.py")
"""Files whose first test is already a long session; what they load others load too."""


@pytest.hookimpl(trylast=True)  # what the command line deselects is gone by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    taken: Counter[object] = Counter()
    seen: set[str] = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function not in seen and taken[item.path] < EACH and item.path.name not in LEFT_OUT:
            seen.add(function)
            taken[item.path] += 1
            kept.append(item)
        else:
            left.append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept
