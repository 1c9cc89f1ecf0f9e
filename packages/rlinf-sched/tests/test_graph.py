"""Graphs: what is refused by name, plain data and back, which device counts a stage accepts."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_sched import Graph, GraphError, Stage

PPO: dict[str, Any] = {
    "stages": {"simulator": {"device": False}, "policy": {"multiple": 2}, "trainer": {"barrier": "group", "group": 4}},
    "edges": [["simulator", "policy"], ["policy", "simulator"], ["policy", "trainer"]],
    "cycles": [{"members": ["simulator", "policy"], "rounds": 8, "ends": "simulator", "collocate": False}],
}


def test_plain_data_and_back() -> None:
    graph = Graph.from_dict(PPO)
    assert graph.to_dict() == PPO | {"cycles": PPO["cycles"]}
    assert Graph.from_dict(graph.to_dict()) == graph


def test_components_come_producers_first_and_keep_a_cycle_together() -> None:
    assert Graph.from_dict(PPO).components() == [("simulator", "policy"), ("trainer",)]
    diamond = Graph({name: Stage(name) for name in "dbca"}, (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")))
    order = [part[0] for part in diamond.components()]
    assert order.index("a") < order.index("b") < order.index("d")
    assert order.index("a") < order.index("c") < order.index("d")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cycles": []}, "'simulator' and 'policy' feed each other and nothing ends it"),
        ({"cycles": [{"members": ["simulator", "policy"], "rounds": 0, "ends": "policy"}]}, "has no end: rounds is 0"),
        ({"cycles": [{"members": ["simulator", "policy"], "rounds": 1, "ends": "trainer"}]}, "ended by 'trainer'"),
        ({"cycles": [{"members": ["simulator", "policy"], "rounds": 1}]}, "cycles[0] lacks ends"),
        ({"edges": [["simulator", "polcy"]]}, "stage 'polcy', which there is not (did you mean 'policy'?)"),
        ({"edges": [["simulator"]]}, "pairs of producer and consumer"),
        ({"edges": [["simulator", "policy"]], "cycles": []}, "stage 'trainer' is unreachable"),
        ({"edges": [["simulator", "policy"]]}, "is named, but they do not feed each other"),
        (
            {"edges": [["simulator", "policy"], ["trainer", "policy"]], "cycles": [], "inputs": ["simulator"]},
            "stage 'trainer' is unreachable",
        ),
        ({"stages": {}}, "the graph has no stage"),
        ({"stages": {"a": {"barier": "item"}}}, "unknown key 'barier' (did you mean 'barrier'?)"),
        ({"stages": {"a": {"barrier": "groop"}}}, "barrier 'groop' is not one of item, group, batch"),
        ({"stages": {"a": {"multiple": 0}}}, "multiple is an integer of at least 1, not 0"),
        ({"stages": {"a": {"counts": [0]}}}, "counts are positive device counts"),
    ],
)
def test_faults_are_named(change: dict[str, Any], why: str) -> None:
    with pytest.raises(GraphError) as caught:
        Graph.from_dict(PPO | change)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "counts"),
    [
        (Stage("a"), (1, 2, 3, 4, 5, 6, 7, 8)),
        (Stage("a", multiple=2, least=3), (4, 6, 8)),
        (Stage("a", counts=(3, 8, 16)), (3, 8)),
        (Stage("a", ranks=4), (1, 2, 4, 8)),
        (Stage("a", most=2), (1, 2)),
        (Stage("a", device=False), (0,)),
    ],
)
def test_accepted_device_counts(stage: Stage, counts: tuple[int, ...]) -> None:
    assert stage.accepted(8) == counts


def test_barriers_say_which_portions() -> None:
    assert Stage("a").takes(3, 8)
    assert not Stage("a", barrier="group", group=4).takes(6, 24)
    assert Stage("a", barrier="group", group=4).takes(8, 24)
    assert not Stage("a", barrier="batch").takes(8, 24)
