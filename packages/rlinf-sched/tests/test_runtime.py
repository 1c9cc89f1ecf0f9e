"""Plans of the runtime, read back and carried out rank by rank: by hand, and against the planner's prices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rlinf_sched import (
    Cycle,
    FormulaCost,
    Graph,
    Memory,
    Problem,
    SchedError,
    Stage,
    StreamCost,
    plan,
    predict,
    to_plan,
)
from rlinf_sched.export import plan_data
from rlinf_sched.planread import processes, read_plan
from rlinf_sched.streaming import weibull
from rlinf_sched.tree import Leaf, Pipe, Share


def leaf(stage: str, devices: str, **rest: Any) -> dict[str, Any]:
    return {"leaf": {"stage": stage, "devices": devices, **rest}}


def share(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {"share": {"first": first, "then": then}}


def pipe(up: dict[str, Any], down: dict[str, Any], portion: int | None = None) -> dict[str, Any]:
    return {"pipe": {"up": up, "down": down} | ({} if portion is None else {"portion": portion})}


def chain(devices: int = 4, items: int = 8, switch: float = 0.0, **costs: FormulaCost | float) -> Problem:
    """Stages whose ranks take so many seconds for an item each, one after the other."""
    stages = {name: Stage(name) for name in costs}
    found = {
        name: cost
        if isinstance(cost, FormulaCost)
        else FormulaCost(spread=cost, load=switch / 2, offload=switch / 2, measured=True)
        for name, cost in costs.items()
    }
    return Problem(Graph(stages, tuple(pairwise(stages))), found, devices, items)


def seconds(problem: Problem, tree: dict[str, Any], **rest: Any) -> float:
    return predict(problem, {"tree": tree, **rest}).seconds


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-2", ((0,), (1,), (2,))),
        ("0,2", ((0,), (2,))),
        ("0-3:0-1", ((0, 1), (2, 3))),
        ("0-1:0-3", ((0,), (0,), (1,), (1,))),
        ("all", ((0,), (1,), (2,), (3,))),
        ("all:0", ((0, 1, 2, 3),)),
        ("0-1,3", ((0,), (1,), (3,))),
    ],
)
def test_placements(text: str, expected: tuple[tuple[int, ...], ...]) -> None:
    assert processes(text, 4, "here") == expected


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (leaf("a", "0"), "device stage 'b' has no leaf"),
        (pipe(leaf("a", "0"), leaf("c", "1")), "there is no stage 'c'"),
        (pipe(leaf("a", "0"), leaf("b", "1-9")), "'b' is placed on device 9 and there are 4"),
        (pipe(leaf("a", "x"), leaf("b", "1")), "'x' is no placement that can be predicted"),
        (pipe(leaf("a", "0-2:0-1"), leaf("b", "3")), "3 devices do not go evenly with 2 processes"),
        ({"share": {"first": leaf("a", "0")}}, "tree.share: lacks 'then'"),
        ({"sharing": {}}, "not 'sharing' (did you mean 'share'?)"),
        ({"leaf": {"stage": "a", "device": "0"}}, "unknown key 'device' (did you mean 'devices'?)"),
    ],
)
def test_plans_that_are_none(tree: dict[str, Any], why: str) -> None:
    with pytest.raises(SchedError) as caught:
        predict(chain(a=1.0, b=1.0), {"tree": tree})
    assert why in str(caught.value)


def test_a_plan_of_another_flow_is_told() -> None:
    problem = chain(a=1.0)
    graph = Graph(problem.graph.stages, (), flow="f00d")
    other = Problem(graph, problem.costs, 4, 8)
    assert read_plan({"flow": "beef", "tree": leaf("a", "0")}, other).warnings != ()
    assert read_plan({"flow": "f00d", "tree": leaf("a", "0")}, other).warnings == ()


# ------------------------------------------------------------------ by hand


def test_in_turn_with_switches_by_hand() -> None:
    # Each of two ranks takes four items; both stages are loaded and offloaded once.
    tree = share(leaf("a", "0-1"), leaf("b", "0-1"))
    assert seconds(chain(switch=3.0, a=1.0, b=2.0), tree) == pytest.approx(4 + 8 + 2 * 3)


def test_what_stays_loaded_does_not_switch() -> None:
    tree = share(leaf("a", "0-1", resident=True), leaf("b", "0-1", resident=True))
    assert seconds(chain(switch=3.0, a=1.0, b=2.0), tree) == pytest.approx(4 + 8)


def test_a_portion_is_what_one_rank_takes() -> None:
    # Two ranks of a: 2 at once, so four rounds of two... b has one rank and takes 2 as they come.
    run = predict(chain(a=1.0, b=0.25), {"tree": pipe(leaf("a", "0-1", portion=2), leaf("b", "2", portion=2))})
    assert run.busy == pytest.approx({"a": 4.0, "b": 2.0})
    assert run.seconds == pytest.approx(4.0 + 2 * 0.5)


def test_a_collective_group_is_dealt_its_portion() -> None:
    problem = chain(a=1.0, b=FormulaCost(spread=1.0, measured=True, share=True))
    stages = {**problem.graph.stages, "b": Stage("b", collective=True)}
    problem = Problem(Graph(stages, problem.graph.edges), problem.costs, 4, 8)
    run = predict(problem, {"tree": pipe(leaf("a", "0-1"), leaf("b", "2-3", portion=4))})
    assert run.busy["b"] == pytest.approx(2 * 2.0)


def test_items_go_on_as_they_are_made() -> None:
    steady = FormulaCost(spread=1.0, measured=True, curve=(0.25, 0.5, 0.75, 1.0))
    tree = pipe(leaf("a", "0"), leaf("b", "1", portion=2))
    assert seconds(chain(a=steady, b=0.5), tree) == pytest.approx(8 + 1)
    late = FormulaCost(spread=1.0, measured=True)
    assert seconds(chain(a=late, b=0.5), tree) == pytest.approx(8 + 4)


def test_a_holder_keeps_its_devices_while_it_has_input() -> None:
    # a's whole output is there when b begins: b does all its portions, then c.
    tree = pipe(leaf("a", "0"), share(leaf("b", "1", portion=2), leaf("c", "1", portion=2)), 2)
    run = predict(chain(switch=1.0, a=0.0, b=1.0, c=1.0), {"tree": tree})
    assert run.switching == pytest.approx(2.0)
    order = [bar.stage for bar in run.bars if bar.what == "work" and bar.first == 1]
    assert order == ["b"] * 4 + ["c"] * 4


def test_slow_input_makes_them_alternate() -> None:
    tree = pipe(leaf("a", "0", portion=2), share(leaf("b", "1", portion=2), leaf("c", "1", portion=2)), 2)
    run = predict(chain(switch=0.2, a=5.0, b=1.0, c=1.0), {"tree": tree})
    order = [bar.stage for bar in run.bars if bar.what == "work" and bar.first == 1]
    assert order == ["b", "c"] * 4
    assert run.switching == pytest.approx(8 * 0.2)


def test_a_share_above_a_pipe_takes_turns_for_every_portion() -> None:
    # All of its input is there at once, and yet it gives way: the stage behind the share waits for what comes out.
    tree = pipe(share(leaf("a", "0", portion=2), leaf("b", "0", portion=2)), leaf("c", "1", portion=2), 2)
    problem = chain(a=1.0, b=1.0, c=1.0)
    run = predict(problem, {"tree": tree})
    assert run.seconds == pytest.approx(8 + 8 + 2)
    work = sorted((bar.start, bar.stage) for bar in run.bars if bar.first == 0 and bar.what == "work")
    assert [stage for _, stage in work] == ["a", "b"] * 4
    priced = Pipe(Share(Leaf("a", 1, 2), Leaf("b", 1, 2)), Leaf("c", 1, 2), 2)
    assert predict(problem, plan_data(problem, problem, priced)).seconds == pytest.approx(18)


def test_every_rank_of_a_group_gets_a_group() -> None:
    stages = {"a": Stage("a"), "b": Stage("b", "group", 1, collective=True)}
    costs = {"a": FormulaCost(measured=True), "b": FormulaCost(spread=1.0, grain=1.0, share=True, measured=True)}
    problem = Problem(Graph(stages, (("a", "b"),)), costs, 4, 8)
    run = predict(problem, {"tree": pipe(leaf("a", "0"), leaf("b", "1-2", portion=1))})
    assert run.busy["b"] == pytest.approx(4.0), "two groups at a time, not one for the first rank"


def test_whole_groups_come_in_their_order() -> None:
    # Two ranks make groups; the second one's are ready at once, but the first group comes late.
    costs = {
        "a": FormulaCost(spread=1.0, measured=True, curve=(0.5, 1.0)),
        "b": FormulaCost(spread=0.1, measured=True, share=True),
    }
    for collective, begins in ((False, 0.5), (True, 0.5)):
        stages = {"a": Stage("a"), "b": Stage("b", "group", 1, collective=collective)}
        problem = Problem(Graph(stages, (("a", "b"),)), costs, 4, 2)
        run = predict(problem, {"tree": pipe(leaf("a", "0"), leaf("b", "1", portion=1))})
        first = min(bar.start for bar in run.bars if bar.stage == "b")
        assert first >= begins * 2 * 0.5


def test_a_cpu_stage_has_its_own_portion() -> None:
    stages = {"a": Stage("a"), "reward": Stage("reward", device=False, ranks=2, per_item=2.0)}
    costs = {"a": FormulaCost(spread=1.0, measured=True), "reward": FormulaCost(spread=0.5, fixed=1.0, measured=True)}
    problem = Problem(Graph(stages, (("a", "reward"),)), costs, 2, 8)
    tree = leaf("a", "0", portion=2)
    whole = predict(problem, {"cpu": {"reward": 2}, "tree": tree})
    small = predict(problem, {"cpu": {"reward": 2}, "cpu_portion": {"reward": 4}, "tree": tree})
    assert whole.busy["reward"] == pytest.approx(1 + 2)
    assert small.busy["reward"] == pytest.approx(2 * (1 + 1))


def test_a_cycle_takes_turns_or_overlaps() -> None:
    stages = {"sim": Stage("sim"), "policy": Stage("policy"), "train": Stage("train", "batch", collective=True)}
    edges = (("sim", "policy"), ("policy", "sim"), ("sim", "train"))
    graph = Graph(stages, edges, (Cycle(("sim", "policy"), 10, "sim", True),))
    costs = {name: FormulaCost(spread=0.1, measured=True) for name in ("sim", "policy")}
    costs["train"] = FormulaCost(spread=1.0, measured=True, share=True)
    problem = Problem(graph, costs, 4, 8)
    same = {"cycle": {"a": leaf("sim", "0-1"), "b": leaf("policy", "0-1")}}
    assert seconds(problem, share(same, leaf("train", "0-1"))) == pytest.approx(10 * (0.4 + 0.4) + 4)
    apart = {"cycle": {"a": leaf("sim", "0-1"), "b": leaf("policy", "2-3"), "portion": 2}}
    halves = seconds(problem, share(apart, leaf("train", "0-3")))
    # Two sub-batches of two on every rank: while one is with the policy the other one is stepped.
    assert halves == pytest.approx(10 * 0.4 + 0.2 + 2)
    # On their way for 0.05 s, and 0.01 s for the second rank: 19 times in turn; each half has as far to go.
    slow = replace(problem, hop=(0.05, 0.01))
    assert seconds(slow, share(same, leaf("train", "0-1"))) == pytest.approx(10 * 0.8 + 4 + 19 * 0.06)
    assert seconds(slow, share(apart, leaf("train", "0-3"))) == pytest.approx(10 * (0.4 + 0.12) + 0.14 + 2)


def test_scattered_times_repeat_and_their_mean_is_longer_with_more_ranks() -> None:
    cost = FormulaCost(spread=1.0, noise=1.0, measured=True)
    problem = chain(8, 64, a=cost)
    one = predict(problem, {"tree": leaf("a", "0")}, seeds=32).seconds
    eight = predict(problem, {"tree": leaf("a", "0-7")}, seeds=32).seconds
    assert one == pytest.approx(64, rel=0.1)
    assert eight > 8 * 1.2
    assert predict(problem, {"tree": leaf("a", "0-7")}, seeds=32).seconds == eight
    small = predict(problem, {"tree": leaf("a", "0-7", portion=1)}, seeds=32).seconds
    assert small < eight, "small portions even the ranks out"


def test_declared_streams_draw_their_lengths_by_rank() -> None:
    stream = StreamCost(lengths=weibull(1.8, 7, 26, 64), slots=(4,), alpha=0.1, beta=0.02, group=2)
    stages = {"gen": Stage("gen", group=2), "train": Stage("train", "group", 2, collective=True)}
    problem = Problem(Graph(stages, (("gen", "train"),)), {"gen": stream, "train": FormulaCost(spread=0.2)}, 4, 32)
    data = {"tree": pipe(leaf("gen", "0-1"), leaf("train", "2-3", portion=4))}
    drawn, expected = predict(problem, data, seeds=24), predict(problem, data, seeds=0)
    assert drawn.seconds == pytest.approx(expected.seconds, rel=0.15)
    assert min(bar.start for bar in drawn.bars if bar.stage == "train") < 0.8 * drawn.busy["gen"]


def test_overhead_is_in_every_step() -> None:
    problem = chain(a=1.0)
    later = Problem(problem.graph, problem.costs, 4, 8, overhead=0.5)
    tree = leaf("a", "0")
    assert seconds(later, tree) == pytest.approx(seconds(problem, tree) + 0.5)


# ------------------------------------------------------------------ from the planner


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_exported_plans_take_what_they_were_priced_at(names: str) -> None:
    costs = {
        name: FormulaCost(
            spread=1.0 + i, serial=0.1, fixed=0.2, load=1.0, offload=1.0, memory=Memory(resident=60.0), measured=True
        )
        for i, name in enumerate(names)
    }
    # Ranks that share their portions: nothing but the planner's own arithmetic is left.
    stages = {name: Stage(name, collective=True) for name in names}
    found = plan(Problem(Graph(stages, tuple(pairwise(names))), costs, 6, 32, device_bytes=100.0))
    for name, candidate in found.families.items():
        again = predict(found.original, to_plan(found, candidate)).seconds
        assert again == pytest.approx(candidate.rescored)
        # Side by side, a stage is loaded only when it has input; the planner counts both at the same time.
        more = 1.0 if name == "hybrid" else 0.0
        assert candidate.seconds * (1 - 1e-6) <= again <= (candidate.seconds + more) * (1 + 1e-6)


def test_what_the_planner_decided_is_in_the_file() -> None:
    stages = {"a": Stage("a", per_item=4.0), "b": Stage("b", collective=True, per_item=4.0)}
    costs = {
        name: FormulaCost(spread=1.0, step=0.1, micro=(2, 4), memory=Memory(resident=10.0), measured=True)
        for name in stages
    }
    problem = Problem(Graph(stages, (("a", "b"),)), costs, 8, 32)
    data = plan_data(problem, problem, Pipe(Leaf("a", 4, 8, 2), Leaf("b", 4, 8, 4), 8))
    up, down = data["tree"]["pipe"]["up"]["leaf"], data["tree"]["pipe"]["down"]["leaf"]
    assert up == {"stage": "a", "devices": "0-3", "portion": 8, "slots": 2}, "32 of its items over four ranks"
    assert down == {"stage": "b", "devices": "4-7", "portion": 32, "slots": 4}, "dealt over its ranks"
    swapped = plan_data(problem, problem, Share(Leaf("a", 8, 32, 2), Leaf("b", 8, 32, 4), True, False))
    first, then = (swapped["tree"]["share"][side]["leaf"] for side in ("first", "then"))
    assert "resident" not in first and then["resident"] is True


def test_core_reads_every_key() -> None:
    plandata = pytest.importorskip("rlinf_core.plandata", reason="core is not installed")
    stages = {
        "sim": Stage("sim"),
        "policy": Stage("policy"),
        "cpu": Stage("cpu", device=False),
        "train": Stage("train"),
    }
    edges = (("sim", "policy"), ("policy", "sim"), ("sim", "cpu"), ("cpu", "train"))
    graph = Graph(stages, edges, (Cycle(("sim", "policy"), 10, "sim", True),))
    costs = {name: FormulaCost(spread=0.1, fixed=0.01, measured=True) for name in stages}
    found = plan(Problem(graph, costs, 4, 16))
    for candidate in found.families.values():
        data = to_plan(found, candidate)
        read = plandata.Plan.from_dict(data)
        assert read.to_dict()["tree"] == data["tree"]
        assert predict(found.original, data).seconds == pytest.approx(candidate.rescored)
