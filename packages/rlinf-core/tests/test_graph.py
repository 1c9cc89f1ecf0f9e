"""The flow graph: order, fingerprint, and every fault by name."""

from __future__ import annotations

import dataclasses

import pytest

from rlinf_core.errors import TraceError
from rlinf_core.graph import CallSpec, FlowGraph, PhaseGraph, StageSpec


def call(text: str, ends: bool = False) -> CallSpec:
    """``"gen.run a,b > c"``"""
    head, _, outputs = text.partition(">")
    name, _, inputs = head.strip().partition(" ")
    group, task = name.split(".")
    return CallSpec(group, task, _names(inputs), _names(outputs), ends)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def graph(
    *calls: CallSpec | str, feeds: str = "", stages: str = "", weights: tuple[tuple[str, str], ...] = ()
) -> FlowGraph:
    made = tuple(call(c) if isinstance(c, str) else c for c in calls)
    channels = dict.fromkeys([*_names(feeds), *(name for c in made for name in (*c.inputs, *c.outputs))])
    groups = dict.fromkeys([*_names(stages), *(c.group for c in made)])
    phase = PhaseGraph("train", tuple(channels), _names(feeds), made, weights)
    return FlowGraph({name: StageSpec(name) for name in groups}, {"train": phase})


def grpo() -> FlowGraph:
    return graph(
        "gen.generate prompts > samples",
        "reward.score samples > scored",
        "actor.train scored",
        feeds="prompts",
        stages="actor,reward,gen",
        weights=(("actor", "gen"),),
    )


def fault(flow: FlowGraph) -> str:
    with pytest.raises(TraceError) as caught:
        flow.validate()
    return str(caught.value)


def test_a_flow_in_order() -> None:
    flow = grpo()
    flow.validate()
    assert flow.order() == ["gen", "reward", "actor"]
    assert flow.edges() == {"actor": set(), "reward": {"actor"}, "gen": {"reward"}}
    assert flow.downstream("gen") == {"reward", "actor"}
    assert flow.phases["train"].stage_edges() == (("gen", "samples", "reward"), ("reward", "scored", "actor"))


def test_ties_are_broken_by_first_call() -> None:
    flow = graph("a.f x > p", "c.f p > q", "b.f p > r", "d.f q, r", feeds="x", stages="d,b,c,a")
    assert flow.order() == ["a", "c", "b", "d"]


def test_a_cycle_stands_together() -> None:
    flow = graph(
        call("sim.step actions > obs, episodes", ends=True), "policy.act obs > actions", "actor.train episodes"
    )
    flow.validate()
    assert flow.order() == ["sim", "policy", "actor"]
    assert "sim" in flow.downstream("sim")
    assert "actor" not in flow.downstream("actor")


def test_order_over_phases() -> None:
    one = grpo()
    warm = PhaseGraph("warm", ("data",), ("data",), (call("actor.warm data"),))
    flow = FlowGraph(one.stages, {"warm": warm, **one.phases})
    flow.validate()
    assert flow.order() == ["gen", "reward", "actor"]


def test_fingerprint_sees_every_change() -> None:
    flow = grpo()
    assert flow.fingerprint() == grpo().fingerprint()
    assert len(flow.fingerprint()) == 16
    stages = {**flow.stages, "gen": dataclasses.replace(flow.stages["gen"], barrier="group")}
    assert FlowGraph(stages, flow.phases).fingerprint() != flow.fingerprint()
    phase = dataclasses.replace(flow.phases["train"], weights=())
    assert FlowGraph(flow.stages, {"train": phase}).fingerprint() != flow.fingerprint()


class TestFaults:
    def test_no_writer(self) -> None:
        assert "channel 'x' has no writer (read by b.f)" in fault(graph("a.f y > z", "b.f z, x", feeds="y"))

    def test_no_reader(self) -> None:
        assert "channel 'z' has no reader (written by a.f, a feed)" in fault(graph("a.f y > z", feeds="y, z"))

    def test_nobody_touches_it(self) -> None:
        flow = FlowGraph({}, {"train": PhaseGraph("train", ("x",))})
        assert "channel 'x' has no writer (read by nobody)" in fault(flow)

    def test_cycle_without_a_named_end(self) -> None:
        text = fault(graph("sim.step actions > obs", "policy.act obs > actions"))
        assert "sim.step, policy.act feed each other" in text
        assert "@task(ends=True)" in text

    def test_a_call_that_feeds_itself(self) -> None:
        assert "a.f feed each other" in fault(graph("a.f x > x"))

    def test_a_call_that_waits_for_a_later_one_of_its_group(self) -> None:
        text = fault(graph("a.first y", "b.f x > y", "a.second > x"))
        assert "a.first waits for what comes after a.second" in text

    def test_an_unknown_group(self) -> None:
        flow = dataclasses.replace(grpo(), stages={"gem": StageSpec("gem"), "reward": StageSpec("reward")})
        assert "gen.generate is of an unknown group (did you mean 'gem'?)" in fault(flow)

    def test_an_unknown_channel(self) -> None:
        phase = PhaseGraph("train", ("samples",), (), (call("a.f sample"),))
        text = fault(FlowGraph({"a": StageSpec("a")}, {"train": phase}))
        assert "a.f uses channel 'sample', which the step did not open (did you mean 'samples'?)" in text

    def test_an_unknown_feed(self) -> None:
        phase = PhaseGraph("train", ("samples",), ("sample",))
        assert "feed of channel 'sample'" in fault(FlowGraph({}, {"train": phase}))

    def test_unknown_weights(self) -> None:
        text = fault(graph("a.f x", feeds="x", weights=(("a", "gen"),)))
        assert "publish_weights names unknown group 'gen'" in text

    def test_never_called(self) -> None:
        assert "group 'idle' is declared but no step calls it" in fault(graph("a.f x", feeds="x", stages="idle"))
        graph("a.f x", feeds="x", stages="idle", weights=(("a", "idle"),)).validate()

    @pytest.mark.parametrize(
        ("stage", "text"),
        [
            (StageSpec("a", barrier="grup"), "barrier 'grup' is not one of item, group, batch (did you mean 'group'?)"),
            (StageSpec("a", ranks_fixed=0), "ranks 0 is not a positive number"),
            (StageSpec("b"), "described under another name, 'b'"),
        ],
    )
    def test_stages(self, stage: StageSpec, text: str) -> None:
        assert text in fault(FlowGraph({"a": stage}))


class TestWhatCannotWait:
    def test_deferred_channels(self) -> None:
        """The second call of a group starts when the first has returned: what passes between them must fit."""
        flow = graph("a.first x > y", "b.f y > z", "a.second z > w", "c.f w", feeds="x")
        assert flow.phases["train"].deferred() == {"z"}
        flow = graph("a.first x > y", "a.second y", feeds="x")
        assert flow.phases["train"].deferred() == {"y"}
        assert grpo().phases["train"].deferred() == frozenset()

    def test_blockers(self) -> None:
        phase = grpo().phases["train"]
        assert phase.blockers("samples") == {("gen", "reward")}
        assert phase.blockers("scored") == {("gen", "actor"), ("reward", "actor")}
        assert phase.blockers("prompts") == frozenset()
