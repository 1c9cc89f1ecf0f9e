"""Costs by hand: staircases, tables, streaming generation with its release curve, cycles."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_sched import Cycle, FormulaCost, Graph, Memory, Problem, Stage, StreamCost, TableCost
from rlinf_sched.costmodel import APART, IN_TURN, SplitCost
from rlinf_sched.cycles import collapse, round_seconds
from rlinf_sched.streaming import at_parts, decode, group_ends, representative, weibull

COUNTS = np.array([1, 2, 4])


def test_formula_by_hand() -> None:
    cost = FormulaCost(fixed=1, serial=0.5, spread=2, log=3)
    assert cost.seconds(COUNTS, 8, 0).tolist() == [1 + 4 + 16, 1 + 4 + 8 + 3, 1 + 4 + 4 + 6]


def test_micro_batches_make_a_staircase() -> None:
    cost = FormulaCost(spread=1, step=10, micro=(4,))
    assert cost.seconds(COUNTS, 10, 4).tolist() == [3 * 14, 2 * 14, 14]
    assert [float(cost.seconds(np.array([1]), c, 4)[0]) for c in (1, 4, 5, 8)] == [14, 14, 28, 28]


def test_memory_by_hand() -> None:
    cost = FormulaCost(memory=Memory(resident=8, sharded=True, item=2), micro=(3,), replica=2)
    assert cost.resident(np.array([2, 4, 8])).tolist() == [8, 4, 2]
    assert cost.working(np.array([2, 4, 8]), 8, 3).tolist() == [6, 6, 4]


def test_table_is_exact_at_its_points_and_a_power_law_between() -> None:
    cost = TableCost(points={(1, 4): 8.0, (4, 4): 2.0, (1, 8): 16.0, (4, 8): 4.0})
    assert cost.seconds(np.array([1, 2, 4, 8]), 4, 0).tolist() == pytest.approx([8, 4, 2, 1])
    assert cost.seconds(np.array([1]), 6, 0).tolist() == pytest.approx([12])


def test_decoding_by_hand() -> None:
    # Two slots; steps take 1 + active. Samples of 2, 4 and 1 steps: 0 ends after 2 of 3 s each,
    # then 2 runs beside 1 for one step, whose last step takes 2 s alone.
    assert decode([2, 4, 1], 2, 1, 1).tolist() == [6, 11, 9]


def test_groups_end_with_their_last_sample_and_parts_with_their_last_group() -> None:
    ends = group_ends(np.array([1.0, 5.0, 2.0, 3.0]), 2)
    assert ends.tolist() == [3, 5]
    assert at_parts(ends, 2).tolist() == [3, 5]
    assert at_parts(ends, 4).tolist() == [3, 3, 5, 5]
    assert at_parts(ends, 1).tolist() == [5]


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20), st.integers(1, 8))
def test_decoding_ends_no_earlier_than_its_longest_and_fills_its_slots(lengths: list[float], slots: int) -> None:
    finish = decode(lengths, slots, 1.0, 0.0)
    assert finish.max() >= max(lengths) * (1 - 1e-9)
    assert finish.max() <= sum(lengths) * (1 + 1e-9)
    if slots == 1:
        assert finish.tolist() == pytest.approx(np.cumsum(lengths).tolist())
    if slots >= len(lengths):
        assert finish.tolist() == pytest.approx(lengths)


def test_the_critical_replica_has_the_longest_of_all_samples() -> None:
    lengths = weibull(1.8, 70, 260)
    assert max(representative(lengths, 4, 64)) == max(representative(lengths, 64, 64))
    assert sum(representative(lengths, 64, 64)) / 64 == pytest.approx(sum(lengths) / len(lengths), rel=0.02)


def test_weibull_has_the_published_quantiles() -> None:
    found = np.array(weibull(1.8, 70, 260, 20_000))
    for at, seconds in ((0.5, 59.9), (0.95, 127), (0.99, 160)):
        assert np.quantile(found, at) == pytest.approx(seconds, rel=0.06)


@given(st.integers(1, 16), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4]))
def test_releases_rise_and_end_with_the_total(devices: int, parts: int, slots: int) -> None:
    cost = StreamCost(lengths=weibull(1.8, 7, 26, 32), slots=(slots,), alpha=0.1, beta=0.01, fixed=1.0)
    released = cost.release(devices, 16, parts, slots)
    assert (np.diff(released) >= 0).all()
    assert released[-1] == pytest.approx(float(cost.seconds(np.array([devices]), 16, slots)[0]))
    table = cost.release_table(np.array([devices, 1]), 16, parts, slots)
    assert table[0].tolist() == released.tolist()


def test_a_round_of_a_cycle_by_hand() -> None:
    assert float(round_seconds(3.0, 2.0, 1)) == 5
    assert float(round_seconds(1.5, 1.0, 2)) == 3
    assert float(round_seconds(0.5, 2.0, 2)) == 4
    # What is on its way keeps nobody busy: it counts where nothing else could be done meanwhile.
    assert float(round_seconds(3.0, 2.0, 1, 0.5)) == 5.5
    assert float(round_seconds(0.5, 2.0, 2, 0.5)) == 4
    assert float(round_seconds(1.0, 1.0, 2, 0.5)) == 2.5


def cycle_problem(devices: int, collocate: bool = True, room: float = math.inf) -> Problem:
    stages = {"sim": Stage("sim"), "policy": Stage("policy")}
    graph = Graph(stages, (("sim", "policy"), ("policy", "sim")), (Cycle(("sim", "policy"), 10, "sim", collocate),))
    costs = {
        "sim": FormulaCost(spread=1, memory=Memory(resident=5)),
        "policy": FormulaCost(spread=2, memory=Memory(resident=6)),
    }
    return Problem(graph, costs, devices, 12, room)


def brute_cycle(devices: int) -> float:
    best = math.inf
    for a in range(1, devices):
        for b in range(1, devices - a + 1):
            for k in (1, 2, 3, 4):
                s, p = 12 / k / a, 2 * 12 / k / b
                best = min(best, 10 * (s + p if k == 1 else max(k * max(s, p), s + p)))
    return best


@pytest.mark.parametrize("devices", [2, 3, 5, 6])
def test_a_cycle_takes_its_best_split(devices: int) -> None:
    whole = collapse(cycle_problem(devices))
    (name,) = whole.graph.stages
    cost = whole.costs[name]
    assert isinstance(cost, SplitCost)
    assert float(cost.seconds(np.array([devices]), 12, APART)[0]) == pytest.approx(brute_cycle(devices))
    assert float(cost.seconds(np.array([devices]), 12, IN_TURN)[0]) == pytest.approx(10 * 36 / devices)
    assert float(cost.resident(np.array([devices]), APART)[0]) == 6
    assert float(cost.resident(np.array([devices]), IN_TURN)[0]) == 11
    a, b, _ = cost.table[12, APART][3][devices]
    assert a + b <= devices


def test_a_cycle_pays_for_what_is_on_its_way() -> None:
    problem = replace(cycle_problem(4), hop=(0.5, 0.25))
    (cost,) = collapse(problem).costs.values()
    assert isinstance(cost, SplitCost)
    # Four ranks of either: a hop takes 0.5 + 3 * 0.25 s, two of them a round.
    assert float(cost.seconds(np.array([4]), 12, IN_TURN)[0]) == pytest.approx(10 * (36 / 4 + 2 * 1.25))
    before = collapse(cycle_problem(4)).costs["sim+policy"].seconds(np.array([4]), 12, APART)[0]
    after = float(cost.seconds(np.array([4]), 12, APART)[0])
    assert before <= after <= before + 10 * (1.0 + 2 * 0.25)


def test_a_cycle_that_does_not_fit_in_turn_is_split() -> None:
    (cost,) = collapse(cycle_problem(4, room=10)).costs.values()
    assert cost.options(12) == (APART,)
