"""Plans: the static modes, YAML and JSON, what a run reads from them, and every fault by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core import Worker
from rlinf_core.config import Config
from rlinf_core.devicelock import DeviceLock, ReplicaSpec
from rlinf_core.errors import PlacementError, PlanError
from rlinf_core.flow import GroupSpec
from rlinf_core.graph import CallSpec, FlowGraph, PhaseGraph, StageSpec
from rlinf_core.placement import ClusterInfo
from rlinf_core.plan import (
    DEFAULT_PORTION,
    FlatPlan,
    Leaf,
    Node,
    Parallel,
    Pipe,
    Plan,
    Share,
    check_spec,
    flatten,
    leaves,
    make_plan,
    validate,
)
from rlinf_core.runner import plan_for

TWO, FOUR = ClusterInfo.virtual(2), ClusterInfo.virtual(4)


def flow(*stages: StageSpec, phases: dict[str, PhaseGraph] | None = None) -> FlowGraph:
    """A chain prompts -> first -> ... -> last of the stages, in phase ``train``."""
    channels = tuple(f"c{i}" for i in range(len(stages)))
    calls = tuple(
        CallSpec(stage.name, "run", (channels[i],), channels[i + 1 : i + 2]) for i, stage in enumerate(stages)
    )
    chain = PhaseGraph("train", channels, channels[:1], calls)
    return FlowGraph({stage.name: stage for stage in stages}, phases or {"train": chain})


GEN = StageSpec("gen")
REWARD = StageSpec("reward", device=False)
ACTOR = StageSpec("actor", collective=True, barrier="group")
GRPO = flow(GEN, REWARD, ACTOR)


def chain_of(*names: str, **kw: Any) -> FlowGraph:
    return flow(*(StageSpec(name, **kw) for name in names))


def flat(spec: str, graph: FlowGraph, cluster: ClusterInfo, **kw: Any) -> FlatPlan:
    return flatten(make_plan(spec, graph, cluster, **kw), graph, cluster)


class TestTemporal:
    def test_all_device_stages_in_turn_on_all_devices(self) -> None:
        plan = make_plan("temporal", GRPO, TWO)
        assert plan.tree == Share(Leaf("gen", "0-1"), Leaf("actor", "0-1"))
        assert plan.cpu == {"reward": 1}
        assert (plan.devices, plan.flow) == (2, GRPO.fingerprint())
        found = flatten(plan, GRPO, TWO)
        assert found.groups["gen"].processes == found.groups["actor"].processes == ((0,), (1,))
        assert found.groups["reward"].processes == ((),)
        assert [found.groups[name].resident for name in ("gen", "reward", "actor")] == [False, True, False]
        assert [found.groups[name].order for name in ("gen", "reward", "actor")] == [0, 1, 2]

    def test_a_stage_that_more_ranks_would_slow_down_gets_no_more(self) -> None:
        plan = make_plan("temporal", GRPO, TWO, most_ranks={"actor": 1})
        assert plan.tree == Share(Leaf("gen", "0-1"), Leaf("actor", "0"))
        four = ClusterInfo.virtual(4)
        assert make_plan("spatial", GRPO, four, most_ranks={"actor": 1}).tree == Pipe(
            Leaf("gen", "0-1", 8), Leaf("actor", "2", 1), 8
        )
        asked = make_plan("temporal", GRPO, TWO, most_ranks={"actor": 1}, placement={"actor": "0-1"})
        assert asked.tree == Share(Leaf("gen", "0-1"), Leaf("actor", "0-1"))

    def test_everything_at_once_and_spilled(self) -> None:
        found = flat("temporal", GRPO, TWO)
        assert [found.portion_for("train", c, g) for c, g in (("c0", "gen"), ("c1", "reward"), ("c2", "actor"))] == [
            None
        ] * 3
        assert found.spills("train", "c2"), "gen holds the devices that actor waits for"
        assert not found.spills("train", "c1"), "reward is on the CPU and drains it"
        assert not found.spills("train", "c0")

    def test_portion_from_the_config(self) -> None:
        found = flat("temporal", GRPO, TWO, portion=4)
        assert [found.portion[f"train:c{i}"] for i in range(3)] == [4, 4, 4]

    def test_order_of_the_flow(self) -> None:
        tree = make_plan("temporal", chain_of("a", "b", "c"), TWO).tree
        assert [leaf.stage for leaf in leaves(tree)] == ["a", "b", "c"]
        assert tree == Share(Leaf("a", "0-1"), Share(Leaf("b", "0-1"), Leaf("c", "0-1")))

    def test_one_device_stage_is_a_leaf_and_resident(self) -> None:
        graph = flow(GEN, REWARD)
        plan = make_plan("temporal", graph, TWO)
        assert plan.tree == Leaf("gen", "0-1")
        assert flatten(plan, graph, TWO).groups["gen"].resident

    def test_no_device_stage(self) -> None:
        for mode in ("temporal", "spatial"):
            plan = make_plan(mode, flow(REWARD), ClusterInfo.virtual(0))
            assert plan.tree is None
            assert "no device stage" in plan.describe()

    @pytest.mark.parametrize(
        ("stage", "devices", "text"),
        [
            (StageSpec("a", ranks_fixed=1), 2, "0-1:0"),
            (StageSpec("a", ranks_fixed=2), 4, "0-3:0-1"),
            (StageSpec("a", ranks_fixed=2), 3, "0-1"),
            (StageSpec("a", ranks_fixed=4), 2, "0-1:0-3"),
            (StageSpec("a", ranks_fixed=3), 2, "0:0-2"),
            (StageSpec("a", barrier="batch"), 2, "0"),
            (StageSpec("a", barrier="batch", collective=True), 2, "0-1"),
        ],
    )
    def test_ranks_on_devices(self, stage: StageSpec, devices: int, text: str) -> None:
        tree = make_plan("temporal", flow(stage), ClusterInfo.virtual(devices)).tree
        assert isinstance(tree, Leaf)
        assert tree.devices == text

    def test_cpu_ranks(self) -> None:
        graph = flow(GEN, StageSpec("reward", device=False, ranks_fixed=3))
        assert flat("temporal", graph, TWO).groups["reward"].processes == ((), (), ())


class TestSpatial:
    def test_devices_split_over_the_stages(self) -> None:
        plan = make_plan("spatial", GRPO, ClusterInfo.virtual(5))
        assert plan.tree == Pipe(Leaf("gen", "0-2", 8), Leaf("actor", "3-4", 1), DEFAULT_PORTION)
        found = flatten(plan, GRPO, ClusterInfo.virtual(5))
        assert all(group.resident for group in found.groups.values())
        assert not found.spill

    def test_portions_respect_barriers(self) -> None:
        graph = flow(GEN, REWARD, StageSpec("critic", barrier="batch", collective=True), ACTOR)
        found = flat("spatial", graph, FOUR)
        assert found.portion_for("train", "c0", "gen") == DEFAULT_PORTION
        assert found.portion_for("train", "c1", "reward") == DEFAULT_PORTION
        assert found.portion_for("train", "c2", "critic") is None
        assert found.portion_for("train", "c3", "actor") == 1, "rounded up to one whole group by the channel"
        found = flat("spatial", graph, FOUR, portion=3)
        assert [found.portion[f"train:c{i}"] for i in range(4)] == [3, 3, None, 3]

    def test_one_device_stage(self) -> None:
        plan = make_plan("spatial", flow(GEN, REWARD), TWO)
        assert plan.tree == Leaf("gen", "0-1", DEFAULT_PORTION)

    def test_three_stages(self) -> None:
        tree = make_plan("spatial", chain_of("a", "b", "c"), FOUR).tree
        assert [leaf.devices for leaf in leaves(tree)] == ["0-1", "2", "3"]

    def test_too_few_devices(self) -> None:
        with pytest.raises(PlanError) as caught:
            make_plan("spatial", chain_of("a", "b", "c"), TWO)
        text = str(caught.value)
        assert "3 stages (a, b, c) and 2 devices" in text
        assert "set cluster.virtual_devices to at least 3" in text


class TestWhatARunReads:
    def test_replicas_of_the_lock(self) -> None:
        found = flat("temporal", GRPO, TWO)
        assert found.replica_specs() == {
            "gen[0]": ReplicaSpec(frozenset({0}), 1, 0, False),
            "gen[1]": ReplicaSpec(frozenset({1}), 1, 0, False),
            "reward[0]": ReplicaSpec(frozenset(), 1, 1, True),
            "actor": ReplicaSpec(frozenset({0, 1}), 2, 2, False),
        }
        assert found.groups["actor"].replica(1) == ("actor", 1)
        assert found.groups["gen"].replica(1) == ("gen[1]", 0)
        DeviceLock(found.replica_specs())

    def test_hybrid_tree(self) -> None:
        """Generation and reference pipelined, then all devices to the actor."""
        graph = chain_of("gen", "ref", "actor")
        plan = Plan("mine", Share(Pipe(Leaf("gen", "0-2"), Leaf("ref", "3"), 4), Leaf("actor", "0-3")))
        found = flatten(plan, graph, FOUR)
        assert [found.groups[name].resident for name in ("gen", "ref", "actor")] == [False] * 3
        assert found.portion_for("train", "c1", "ref") == 4
        assert found.portion_for("train", "c2", "actor") is None
        assert found.spills("train", "c2")
        assert not found.spills("train", "c1")
        DeviceLock(found.replica_specs())

    def test_the_innermost_pipe_counts(self) -> None:
        graph = chain_of("a", "b", "c")
        plan = Plan("p", Pipe(Pipe(Leaf("a", "0"), Leaf("b", "1"), 2), Leaf("c", "2"), 16))
        found = flatten(plan, graph, FOUR)
        assert [found.portion[f"train:c{i}"] for i in range(3)] == [None, 2, 16]
        leaf = Plan("p", Pipe(Pipe(Leaf("a", "0", 5), Leaf("b", "1", 7), 2), Leaf("c", "2"), 16), portion=9)
        assert [flatten(leaf, graph, FOUR).portion[f"train:c{i}"] for i in range(3)] == [5, 7, 16]

    def test_a_cpu_stage_between_takes_the_portion_of_the_pipe_around_it(self) -> None:
        graph = flow(StageSpec("a"), REWARD, StageSpec("b"), StageSpec("c"))
        plan = Plan("p", Pipe(Pipe(Leaf("a", "0"), Leaf("b", "1"), 2), Leaf("c", "2"), 16), cpu={"reward": 1})
        assert flatten(plan, graph, FOUR).portion_for("train", "c1", "reward") == 2

    def test_two_readers_of_one_channel(self) -> None:
        phase = PhaseGraph("train", ("x",), ("x",), (CallSpec("a", "f", ("x",)), CallSpec("b", "f", ("x",))))
        graph = FlowGraph({"a": StageSpec("a"), "b": StageSpec("b")}, {"train": phase})
        found = flatten(Plan("p", Parallel(Leaf("a", "0", 3), Leaf("b", "1"))), graph, TWO)
        assert found.portion_for("train", "x", "a") == 3
        assert found.portion_for("train", "x", "b") is None
        assert found.portion["train:x"] == 3

    def test_what_one_group_writes_for_its_own_later_call_must_fit(self) -> None:
        phase = PhaseGraph(
            "train",
            ("x", "y"),
            ("x",),
            (CallSpec("a", "first", ("x",), ("y",)), CallSpec("a", "second", ("y",))),
        )
        found = flat("temporal", FlowGraph({"a": StageSpec("a")}, {"train": phase}), TWO)
        assert found.spills("train", "y")

    def test_describe(self) -> None:
        text = make_plan("spatial", GRPO, TWO).describe()
        assert text.splitlines() == [
            "plan spatial",
            "  pipelined, 8 items at once:",
            "    gen on 0, 8 items at once",
            "    actor on 1, 1 item at once",
            "  reward: 1 rank on the CPU",
        ]
        tree = Share(Parallel(Leaf("a", "0"), Leaf("b", "1")), Pipe(Leaf("c", "0"), Leaf("d", "1")))
        text = Plan("p", tree, predicted={"step": 1.25}).describe()
        for part in ("in turn on the same devices:", "side by side:", "everything at once", "predicted step: 1.25 s"):
            assert part in text


NODES: st.SearchStrategy[Node] = st.recursive(
    st.builds(
        Leaf,
        st.sampled_from(["gen", "actor", "ref"]),
        st.sampled_from(["0-3", "all", "gpu_a:0-1:0"]),
        st.one_of(st.none(), st.integers(1, 64)),
    ),
    lambda inner: st.one_of(
        st.builds(Share, inner, inner),
        st.builds(Parallel, inner, inner),
        st.builds(Pipe, inner, inner, st.one_of(st.none(), st.integers(1, 64))),
    ),
    max_leaves=6,
)


class TestText:
    @settings(max_examples=60, deadline=None)
    @given(
        st.builds(
            Plan,
            name=st.text(max_size=8),
            tree=st.one_of(st.none(), NODES),
            cpu=st.dictionaries(st.text(min_size=1, max_size=5), st.integers(1, 9), max_size=2),
            devices=st.one_of(st.none(), st.integers(1, 4096)),
            flow=st.text("0123456789abcdef", max_size=16),
            portion=st.one_of(st.none(), st.integers(1, 99)),
            predicted=st.dictionaries(st.text(min_size=1, max_size=5), st.floats(0, 1e6), max_size=2),
        )
    )
    def test_yaml_and_json_round_trip(self, plan: Plan) -> None:
        assert Plan.from_yaml(plan.to_yaml()) == plan
        assert Plan.from_yaml(plan.to_json()) == plan
        assert Plan.from_dict(json.loads(plan.to_json())) == plan

    def test_a_file_by_hand(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(
            "tree:\n  pipe:\n    up: {leaf: {stage: gen, devices: 0}}\n"
            "    down: {leaf: {stage: actor, devices: '1'}}\n    portion: 4\ncpu: {reward: 2}\n"
        )
        plan = make_plan(str(path), GRPO, TWO)
        assert plan == Plan("plan", Pipe(Leaf("gen", "0"), Leaf("actor", "1"), 4), {"reward": 2})
        assert flatten(plan, GRPO, TWO).portion_for("train", "c2", "actor") == 4

    def test_portion_of_the_config_replaces_that_of_a_file(self, tmp_path: Path) -> None:
        graph = flow(GEN, StageSpec("ref"), StageSpec("mid", barrier="batch"), StageSpec("last"))
        tree = Share(Pipe(Leaf("gen", "0", 2), Leaf("ref", "1"), 3), Share(Leaf("mid", "0"), Leaf("last", "0-1")))
        path = tmp_path / "mine.yaml"
        path.write_text(Plan("mine", tree).to_yaml())
        found = flat(str(path), graph, TWO, portion=5)
        assert [found.portion[f"train:c{i}"] for i in range(4)] == [5, 5, None, 5]

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("tree: [", "not valid YAML at line 1, column 8"),
            ("[]", "plan: [] is not a mapping with the keys name, devices"),
            ("", "plan: None is not a mapping"),
            ("name: x", "has no key 'tree'"),
            ("tree: null\ncpus: {}", "unknown key 'cpus' (did you mean 'cpu'?)"),
            ("tree: null\n1: 2", "unknown key 1"),
            ("tree: null\nname: 3", "plan.name: 3 is not text; put it in quotes"),
            ("tree: null\ndevices: two", "plan.devices: 'two' is not a number of devices (1 or more)"),
            ("tree: null\ncpu: {reward: 0}", "plan.cpu.reward: 0 is not a number of ranks"),
            ("tree: null\ncpu: [1]", "plan.cpu: [1] is not a mapping"),
            ("tree: null\npredicted: {step: fast}", "plan.predicted.step: 'fast' is not a number of seconds"),
            ("tree: null\nportion: 0", "plan.portion: 0 is not a number of items (1 or more)"),
            ("tree: {}", "plan.tree: [] must be exactly one of leaf, share, pipe, parallel"),
            ("tree: {share: {first: {}}}", "plan.tree.share: has no key 'then'; share has first and then"),
            ("tree: {shares: {}}", "plan.tree: unknown key 'shares' (did you mean 'share'?)"),
            ("tree: {leaf: {stage: a}}", "plan.tree.leaf: has no key 'devices'"),
            ("tree: {leaf: {stage: a, devices: [0]}}", "plan.tree.leaf.devices: [0] is not text"),
            ("tree: {leaf: {stage: a, devices: '0', portion: true}}", "plan.tree.leaf.portion: True is not a number"),
            ("tree: {leaf: {stage: a, devices: '0', size: 3}}", "plan.tree.leaf: unknown key 'size'"),
            (
                "tree: {pipe: {up: {leaf: {stage: a, devices: '0'}}, down: 3}}",
                "plan.tree.pipe.down: 3 is not a mapping",
            ),
            (
                "tree: {parallel: {a: {leaf: {stage: a, devices: '0'}}, b: {}, portion: 3}}",
                "plan.tree.parallel: unknown key 'portion'",
            ),
        ],
    )
    def test_bad_text(self, text: str, fault: str) -> None:
        with pytest.raises(PlanError) as caught:
            Plan.from_yaml(text)
        assert fault in str(caught.value)


class TestBadRequests:
    @pytest.mark.parametrize(
        ("spec", "fault"),
        [
            ("hybrid", "plan: 'hybrid' is found by profiling"),
            ("auto", "plan: 'auto' is found by profiling"),
            ("temporl", "plan: 'temporl' is not a mode (did you mean 'temporal'?)"),
            ("", "plan: '' is not a mode"),
            ("plans/none.yaml", "plan: there is no file 'plans/none.yaml'"),
            ("none.yml", "plan: there is no file 'none.yml'"),
            ("hybird", "plan: 'hybird' is not a mode (did you mean 'hybrid'?)"),
            ("x" * 5000, "is not a mode"),
            ("/", "plan: '/' is a directory; give the path of a plan's YAML file"),
            ("/dev/null", "plan: '/dev/null' is not a regular file"),
        ],
    )
    def test_spec(self, spec: str, fault: str) -> None:
        with pytest.raises(PlanError) as caught:
            make_plan(spec, GRPO, TWO)
        assert fault in str(caught.value)
        with pytest.raises(PlanError) as early:
            check_spec(spec)
        assert str(early.value) == str(caught.value)

    def test_what_can_be_a_plan_before_the_flow_is_known(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.yaml"
        path.write_text("{name: mine, tree: null}")
        assert check_spec("temporal") is None and check_spec("spatial") is None
        assert check_spec(str(path)) == Plan("mine", None)

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("tree: &a {share: {first: *a, then: *a}}", "first: a YAML alias puts a node there that is in the tree"),
            (
                "tree: {share: {first: &a {leaf: {stage: gen, devices: '0'}}, then: *a}}",
                "tree.share.then: a YAML alias puts a node there",
            ),
            ("tree: " + "{share: {then: 0, first: " * 60 + "0" + "}}" * 60, ".tree: more than 50 nodes deep"),
            ("tree: " + "{share: {then: 0, first: " * 1500 + "0" + "}}" * 1500, "nested too deep to be read"),
            ('{"tree": ' + "[" * 100000, "nested too deep to be read"),
            ("name: 2020-13-45", "not valid YAML: month must be in 1..12"),
        ],
    )
    def test_trees_without_end(self, tmp_path: Path, text: str, fault: str) -> None:
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        with pytest.raises(PlanError) as caught:
            make_plan(str(path), GRPO, TWO)
        assert str(caught.value).startswith(f"plan {path}") and fault in str(caught.value)
        assert len(str(caught.value)) < 500

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.yaml"
        path.write_bytes(b"\xff\xfe\x00\xd8")
        with pytest.raises(PlanError, match="cannot be read"):
            make_plan(str(path), GRPO, TWO)

    @pytest.mark.parametrize("portion", [0, -3, True])
    def test_portion(self, portion: int) -> None:
        with pytest.raises(PlanError, match=f"portion: {portion} is not a number of items"):
            make_plan("temporal", GRPO, TWO, portion=portion)

    def test_no_devices(self) -> None:
        for mode in ("temporal", "spatial"):
            with pytest.raises(PlanError, match="gen, actor need devices and the cluster has none"):
                make_plan(mode, GRPO, ClusterInfo.virtual(0))


class TestPlacementOfTheConfig:
    def test_replaces_devices_and_ranks(self) -> None:
        plan = make_plan("temporal", GRPO, TWO, placement={"actor": "0", "reward": "3"})
        found = flatten(plan, GRPO, TWO)
        assert found.groups["actor"].processes == ((0,),)
        assert found.groups["reward"].processes == ((), (), ())

    @pytest.mark.parametrize(
        ("placement", "fault"),
        [
            ({"actr": "0"}, "placement.actr: the flow has no group 'actr' (did you mean 'actor'?); groups: gen"),
            ({"actor": "5"}, "placement.actor: '5' names device 5, but there are 2"),
            ({"actor": "0,0"}, "placement.actor: '0,0' names device 0 twice"),
            ({"reward": "0-1"}, "placement.reward: '0-1': 'reward' runs on the CPU"),
            ({"reward": "0"}, "placement.reward: '0': 'reward' runs on the CPU"),
            ({"reward": "9" * 5000}, "'reward' runs on the CPU and has no devices; give its number of ranks"),
        ],
    )
    def test_faults(self, placement: dict[str, str], fault: str) -> None:
        with pytest.raises(PlacementError) as caught:
            make_plan("temporal", GRPO, TWO, placement=placement)
        assert fault in str(caught.value)

    def test_ranks_beyond_reason(self) -> None:
        with pytest.raises(PlanError, match="cpu.reward: 99999 ranks are more than 1024 processes on each"):
            make_plan("temporal", GRPO, TWO, placement={"reward": "99999"})

    def test_the_plan_is_checked_again(self) -> None:
        with pytest.raises(PlanError, match="'gen' and 'actor' run at the same time but both are placed on device 0"):
            make_plan("spatial", GRPO, TWO, placement={"actor": "0"})
        with pytest.raises(PlanError, match="have no device in common"):
            make_plan("temporal", GRPO, TWO, placement={"gen": "0", "actor": "1"})


def fault(tree: Node | None, graph: FlowGraph = GRPO, cluster: ClusterInfo = TWO, **kw: Any) -> str:
    kw.setdefault("cpu", {"reward": 1} if "reward" in graph.stages else {})
    with pytest.raises(PlanError) as caught:
        validate(Plan("p", tree, **kw), graph, cluster)
    return str(caught.value)


GOOD = Share(Leaf("gen", "0-1"), Leaf("actor", "0-1"))


class TestFaultsOfAPlan:
    def test_the_good_one(self) -> None:
        validate(Plan("p", GOOD, {"reward": 1}), GRPO, TWO)

    def test_another_flow_or_cluster(self) -> None:
        assert "flow: 'beef' is another flow" in fault(GOOD, flow="beef")
        assert "devices: the plan was made for 8 devices, and the cluster has 2" in fault(GOOD, devices=8)

    def test_missing_and_unknown_stages(self) -> None:
        assert "tree: device stage 'actor' has no leaf" in fault(Leaf("gen", "0-1"))
        assert "tree: device stage 'gen' has no leaf" in fault(None)
        text = fault(Share(Leaf("gen", "0-1"), Leaf("acter", "0-1")))
        assert "tree.share.then.leaf.stage: the flow has no stage 'acter' (did you mean 'actor'?)" in text
        assert "- plan p: tree: device stage 'actor' has no leaf" in text, "every fault is listed"

    def test_twice(self) -> None:
        assert "'gen' has a leaf already" in fault(Share(GOOD, Leaf("gen", "0-1")))

    def test_cpu_stages(self) -> None:
        assert "cpu: CPU stage 'reward' has no number of ranks" in fault(GOOD, cpu={})
        assert "cpu.gen: 'gen' is a device stage" in fault(GOOD, cpu={"reward": 1, "gen": 1})
        assert "cpu.rewrd: the flow has no stage 'rewrd'" in fault(GOOD, cpu={"reward": 1, "rewrd": 1})
        assert "'reward' runs on the CPU; give its ranks" in fault(Share(GOOD, Leaf("reward", "0")))

    def test_a_cpu_stage_of_another_phase_need_not_be_named(self) -> None:
        chain, more = GRPO.phases["train"], StageSpec("scorer", device=False)
        check = PhaseGraph("evaluate", ("x",), ("x",), (CallSpec("scorer", "score", ("x",)),))
        graph = FlowGraph({**GRPO.stages, "scorer": more}, {"train": chain, "evaluate": check})
        assert len(flatten(Plan("p", GOOD, {"reward": 1}), graph, TWO).groups["scorer"].processes) == 1
        given = Plan("p", GOOD, {"reward": 1, "scorer": 3})
        assert len(flatten(given, graph, TWO).groups["scorer"].processes) == 3
        assert "cpu: CPU stage 'reward' has no number of ranks" in fault(GOOD, graph, cpu={})

    def test_devices_that_are_not_there(self) -> None:
        with pytest.raises(PlacementError, match=r"tree.share.then.leaf.devices: '0-7' names device 2, but"):
            validate(Plan("p", Share(Leaf("gen", "0-1"), Leaf("actor", "0-7")), {"reward": 1}), GRPO, TWO)

    def test_pipe_and_parallel_need_separate_devices(self) -> None:
        for kind in (Pipe, Parallel):
            assert "both are placed on device 0, 1" in fault(kind(Leaf("gen", "0-1"), Leaf("actor", "0-1")))

    def test_the_order_of_the_flow(self) -> None:
        for tree in (Share(Leaf("actor", "0"), Leaf("gen", "0")), Pipe(Leaf("actor", "0"), Leaf("gen", "1"))):
            assert "'actor' takes what 'gen' makes, so 'gen' must come first; swap the two sides" in fault(tree)
        text = fault(Parallel(Leaf("actor", "0"), Leaf("gen", "1")))
        assert "'actor' takes what 'gen' makes, so they are not parallel" in text

    def test_a_cycle_cannot_take_turns(self) -> None:
        phase = PhaseGraph(
            "train",
            ("obs", "act"),
            (),
            (CallSpec("sim", "run", ("act",), ("obs",), True), CallSpec("policy", "run", ("obs",), ("act",))),
        )
        graph = FlowGraph({"sim": StageSpec("sim"), "policy": StageSpec("policy")}, {"train": phase})
        assert "'sim' and 'policy' feed each other" in fault(Share(Leaf("sim", "0"), Leaf("policy", "0")), graph)
        validate(Plan("p", Pipe(Leaf("sim", "0"), Leaf("policy", "1"))), graph, TWO)

    def test_a_portion_that_breaks_a_barrier(self) -> None:
        graph = flow(StageSpec("gen"), StageSpec("norm", barrier="batch"))
        text = fault(Share(Leaf("gen", "0-1"), Leaf("norm", "0", 4)), graph)
        assert "leaf.portion: 4 would break the barrier of 'norm', which needs the whole batch" in text

    def test_a_batch_cannot_be_shared_by_ranks_that_work_alone(self) -> None:
        graph = flow(StageSpec("gen"), StageSpec("norm", barrier="batch"))
        text = fault(Share(Leaf("gen", "0-1"), Leaf("norm", "0-1")), graph)
        assert "2 ranks cannot share it; give it one rank, or make the worker collective" in text

    def test_ranks_that_the_program_fixes(self) -> None:
        graph = flow(dataclasses.replace(GEN, ranks_fixed=1))
        assert "'gen' gets 2 ranks but the program fixes 1" in fault(Leaf("gen", "0-1"), graph)


def test_a_number_of_ranks_that_a_worker_refuses_is_found_with_the_plan() -> None:
    class Even(Worker):
        @classmethod
        def check_ranks(cls, cfg: Any, ranks: int) -> str:
            return f"{cfg} and {ranks} ranks" if ranks % 2 else ""

    graph = flow(StageSpec("actor", collective=True, barrier="group"))
    groups = {"actor": GroupSpec("actor", Even, "the key", "group")}
    cfg = Config({"plan": "temporal", "portion": None, "placement": {}})
    assert len(plan_for(cfg, graph, groups, TWO)[1].groups["actor"].processes) == 2
    with pytest.raises(PlanError, match="group 'actor': the key and 3 ranks"):
        plan_for(cfg, graph, groups, ClusterInfo.virtual(3))
