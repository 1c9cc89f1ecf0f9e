"""Explanations: what decided a tie, and facts that would flip the winner, which must be true of the times shown."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from rlinf_sched import (
    FormulaCost,
    Graph,
    Memory,
    Problem,
    Stage,
    StreamCost,
    explain,
    plan,
    predict,
    simulate,
    to_plan,
)
from rlinf_sched.commands.profile import header
from rlinf_sched.explain import rescaled, scaled
from rlinf_sched.planner import Plan

FACT = re.compile(r"(\w+) would win if (\w+) (?:took ([0-9.]+) times as long|were free)")


def chain(many: int) -> Graph:
    names = [f"s{i}" for i in range(many)]
    return Graph({name: Stage(name) for name in names}, tuple(pairwise(names)))


def tied() -> Plan:
    """In turn is a little faster, with switches; apart there are none."""
    cost = FormulaCost(spread=1.0, load=0.1, offload=0.1, memory=Memory(resident=60), error=0.2)
    return plan(Problem(chain(2), {"s0": cost, "s1": cost}, 2, 64, device_bytes=100.0))


def test_the_winner_of_a_tie_comes_first_and_says_why() -> None:
    found = tied()
    explanation = explain(found)
    assert [line.family for line in explanation.lines] == ["spatial", "temporal"]
    assert explanation.lines[0].seconds > explanation.lines[1].seconds
    assert explanation.lines[0].wins == "temporal is 0.9% faster, within 10.0%: fewer switches (0, not 2)"
    text = explanation.text()
    assert "as good: 0.9% faster; the best has fewer switches (0, not 2)" in text
    assert "loses:" not in text
    assert not explanation.flips, "the other one is the faster already"


def test_a_tie_that_memory_decides() -> None:
    found = tied()
    rival = replace(found.families["temporal"], switches=found.best.switches, tree=found.best.tree)
    rival = replace(rival, price=replace(rival.price, peak=found.best.price.peak * 2))
    line = explain(replace(found, families={"spatial": found.best, "temporal": rival})).lines[0]
    assert line.wins.endswith(": a lower peak of memory (60 B, not 120 B)")


def test_what_is_as_fast_is_not_called_faster_or_slower() -> None:
    found = tied()
    rival = replace(found.families["temporal"], rescored=found.best.rescored * 1.0001)
    text = explain(replace(found, families={"spatial": found.best, "temporal": rival})).text()
    assert "chosen: temporal is as fast: fewer switches (0, not 2)" in text
    assert "as good: as fast; the best has fewer switches (0, not 2)" in text


def test_a_family_that_was_asked_for_though_another_is_faster() -> None:
    found = plan(Problem(chain(2), {"s0": FormulaCost(spread=1.0), "s1": FormulaCost(spread=1.0)}, 2, 64))
    assert header(found, found.best) == "share(s0@2, s1@2): 64 s (temporal)"
    assert header(found, found.families["spatial"]).endswith(
        "\nspatial as asked, although temporal is 1.5% faster (64 s)"
    )


@pytest.mark.parametrize("room", [100.0, 1e9])
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("measured", [True, False])
def test_facts_that_flip_the_winner_do(turn: int, room: float, measured: bool) -> None:
    costs = {
        f"s{i}": FormulaCost(
            serial=0.05 * (1 + (i + turn) % 3),
            spread=0.5 + 0.4 * ((i * turn) % 3),
            load=0.5,
            offload=0.5,
            measured=measured,
            memory=Memory(resident=60.0),
        )
        for i in range(3)
    }
    problem = Problem(chain(3), costs, 4, 32, device_bytes=room)
    found = plan(problem)
    assert explain(found).flips
    for fact in explain(found).flips:
        match = FACT.fullmatch(fact)
        assert match is not None
        family, what, factor = match.groups()
        changed = scaled(problem, switch=0.0)
        if factor is not None:
            by = float(factor)
            cost = replace(costs[what], spread=costs[what].spread * by, serial=costs[what].serial * by)
            changed = replace(problem, costs={**costs, what: cost})
        times = []
        for candidate in (found.families[family], found.best):
            if measured:
                times.append(predict(changed, to_plan(found, candidate)).seconds)
            else:
                times.append(simulate(candidate.tree, changed, rule="lock").seconds)
        assert times[0] < times[1], fact


def test_free_switching_flips_nothing_where_nothing_switches() -> None:
    costs = {name: FormulaCost(spread=1.0, measured=True) for name in ("s0", "s1", "s2")}
    assert not any("free" in fact for fact in explain(plan(Problem(chain(3), costs, 4, 32))).flips)


def test_a_streaming_cost_stays_one_when_it_is_multiplied() -> None:
    cost = StreamCost(lengths=(1.0, 4.0), slots=(2,), alpha=0.5, beta=0.1, fixed=1.0, load=1.0)
    twice = rescaled(cost, 2.0, switch=0.5)
    assert isinstance(twice, StreamCost)
    assert (twice.alpha, twice.beta, twice.fixed, twice.load) == (1.0, 0.2, 2.0, 0.5)
