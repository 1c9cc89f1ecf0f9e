"""The math reward inside Ray actors: on the main thread, and on a thread that cannot have signal handlers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlinf_reasoning.rewards.pool import RewardItem, RewardPool

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

CASES = [
    (r"Answer: \boxed{5}", "5", 1.0),
    (r"\boxed{3}. Wait, \boxed{4}", "4", 1.0),
    (r"\boxed{\frac12}", r"\frac13", 0.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{9^{9^{9^{9}}}}", "1", None),
    ("no answer at all", "7", 0.0),
    ("", "7", 0.0),
]


class Scoring:
    """An actor whose calls run on other threads than the main one when it has several."""

    def score(self) -> tuple[bool, list[float | None]]:
        import threading

        items = [RewardItem(text, gold, {}) for text, gold, _ in CASES]
        with RewardPool("rlinf_reasoning.rewards.math:MathReward", timeout_s=2.0) as pool:
            values = [score.value for score in pool.score(items)]
        return threading.current_thread() is threading.main_thread(), values


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()


@pytest.mark.parametrize("threads", [1, 4])
def test_the_same_scores_in_an_actor(threads: int) -> None:
    actor: Any = ray.remote(Scoring).options(num_cpus=0, max_concurrency=threads).remote()
    on_main_thread, values = ray.get(actor.score.remote(), timeout=200)
    assert on_main_thread == (threads == 1)
    assert values == [score for _, _, score in CASES]
