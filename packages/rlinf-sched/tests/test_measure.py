"""From observed calls to samples and a problem: portions, ranks, cycles, releases, overhead."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_sched import FormulaCost, Profile, ProfileSample, SchedError, StepSample, predict
from rlinf_sched.calibrate import ROUND_TRIP, overhead
from rlinf_sched.commands.measure import (
    Flow,
    Observed,
    Setting,
    _free,
    _Lines,
    check_hybrid,
    counts,
    loops,
    measure,
    settings,
    step_times,
)
from rlinf_sched.commands.ranks_of import Accepted
from rlinf_sched.problemfile import problem_from_dict

graphs = pytest.importorskip("rlinf_core.graph", reason="core is not installed")
placement = pytest.importorskip("rlinf_core.placement", reason="core is not installed")


@dataclass
class Times:
    """What a rank reports of a call."""

    work: float
    items: int = 0
    wait: float = 0.0
    switch: float = 0.0
    peak_bytes: int = 0
    resident_bytes: int = 0
    puts: int = 0
    released: tuple[float, ...] = ()
    device_bytes: int = 0
    taken: tuple[tuple[str, int, float], ...] = ()


def told(observed: Observed, group: str, task: str, times: Sequence[Times], step: int = 1) -> None:
    call = SimpleNamespace(group=group, task=task, step=f"train/{step}")
    observed(call, [SimpleNamespace(times=t) for t in times])


def grpo() -> Any:
    """Prompts to samples (four each) to rewards on the CPU to a collective trainer that takes whole groups."""
    call, stage = graphs.CallSpec, graphs.StageSpec
    stages = {
        "gen": stage("gen"),
        "reward": stage("reward", device=False, ranks_fixed=2),
        "train": stage("train", collective=True, barrier="group"),
    }
    calls = (
        call("gen", "generate", ("prompts",), ("samples",)),
        call("reward", "score", ("samples",), ("scored",)),
        call("train", "train", ("scored",)),
    )
    phase = graphs.PhaseGraph("train", ("prompts", "samples", "scored"), ("prompts",), calls)
    return graphs.FlowGraph(stages, {"train": phase})


def observe(portion: int | None, ranks: int = 2) -> Observed:
    """Eight prompts; a second for a prompt, a tenth for a reward, a quarter for a sample trained."""
    seen = Observed()
    gen = [Times(8 / ranks, 8 // ranks, puts=32 // ranks, released=(1.0, 8 / ranks), wait=0.01) for _ in range(ranks)]
    told(seen, "gen", "generate", gen)
    told(seen, "reward", "score", [Times(1.6, 16, puts=16), Times(1.6, 16, puts=16)])
    told(seen, "train", "train", [Times(8 / ranks, 32 // ranks) for _ in range(ranks)])
    return seen


def test_portions_become_those_of_the_whole_stage() -> None:
    flow = Flow(grpo())
    flow.read(observe(None))
    assert flow.fed == 8
    assert flow.per_item == {"gen": 1.0, "reward": 4.0, "train": 4.0}
    whole = {s.stage: s for s in flow.samples(observe(None), Setting(2))}
    assert [whole[name].portion for name in ("gen", "reward", "train")] == [8, 8, 8]
    small = {s.stage: s for s in flow.samples(observe(2), Setting(2, 2))}
    # Two ranks take two prompts each; two CPU ranks two samples each (one prompt); the trainer a group for each rank.
    assert [small[name].portion for name in ("gen", "reward", "train")] == [4, 1, 2]
    assert [small[name].each for name in ("gen", "reward", "train")] == [2, 2, 8]
    assert small["reward"].devices == 0
    assert whole["gen"].released[0] == 0.25 and whole["gen"].released[-1] == 1.0


def test_several_tasks_of_a_stage_and_weights_do_not_count_items_twice() -> None:
    seen = observe(None)
    told(seen, "train", "logprobs", [Times(1.0, 16), Times(1.0, 16)])
    told(seen, "gen", "receive_weights", [Times(0.5, 7), Times(0.5, 7)])
    flow = Flow(grpo())
    flow.read(seen)
    assert flow.per_item["train"] == 4.0
    sample = next(s for s in flow.samples(seen, Setting(2)) if s.stage == "train")
    assert sample.seconds == 5.0 and sample.ranks == (5.0, 5.0) and sample.taken == (16, 16)


def test_two_channels_of_a_task_give_each_item_once() -> None:
    seen = Observed({("train", "train"): 2})
    told(seen, "train", "train", [Times(1.0, 64)])
    assert seen.steps[1, "train"].taken() == [32]


def test_warm_up_steps_and_other_phases_are_left_out() -> None:
    seen = Observed()
    told(seen, "gen", "generate", [Times(1.0, 1)], step=0)
    seen(SimpleNamespace(group="gen", task="generate", step="eval/3"), [SimpleNamespace(times=Times(1.0, 1))])
    assert not seen.steps
    with pytest.raises(SchedError, match="no stage read any item"):
        Flow(grpo()).read(seen)


def test_the_problem_says_what_the_flow_is() -> None:
    flow = Flow(grpo())
    flow.read(observe(None))
    data = flow.problem(4)
    assert data["stages"]["train"] == {"barrier": "group", "device": True, "per_item": 4.0, "collective": True}
    assert data["stages"]["reward"]["ranks"] == 2
    assert "device_bytes" not in data
    seen = observe(None)
    told(seen, "train", "train", [Times(1.0, 16, device_bytes=1000), Times(1.0, 16, device_bytes=800)])
    flow.read(seen)
    assert flow.problem(4)["device_bytes"] == 720, "nine tenths of the smallest device that was seen"


def test_more_devices_than_there_are_cannot_be_measured() -> None:
    cluster = placement.ClusterInfo.virtual(4)
    assert counts(None, cluster) == [1, 2, 4] and counts([3, 2], cluster) == [2, 3]
    with pytest.raises(SchedError, match="--devices 8: there are 4"):
        counts([2, 8], cluster)
    with pytest.raises(SchedError, match="no device to measure on"):
        counts(None, placement.ClusterInfo(()))


def test_a_profile_of_the_flow_predicts_it() -> None:
    flow = Flow(grpo())
    flow.read(observe(None))
    samples = [s for n in (1, 2, 4) for s in flow.samples(observe(None, n), Setting(n))]
    problem, warnings = problem_from_dict(flow.problem(4), Profile("f", "h", tuple(samples)))
    assert any("taken on" in warning for warning in warnings)
    leaves = [{"leaf": {"stage": name, "devices": "0-3", "resident": True}} for name in ("gen", "train")]
    data = {"cpu": {"reward": 2}, "tree": {"share": {"first": leaves[0], "then": leaves[1]}}}
    assert predict(problem, data).seconds == pytest.approx(2 + 1.6 + 2, rel=0.05)


# ------------------------------------------------------------------ cycles


def embodied(fed: bool) -> Any:
    call, stage = graphs.CallSpec, graphs.StageSpec
    stages = {name: stage(name) for name in ("sim", "policy", "train")}
    source = ("starts",) if fed else ()
    calls = (
        call("sim", "rollout", (*source, "actions"), ("observations", "episodes"), ends=True),
        call("policy", "act", ("observations",), ("actions",)),
        call("train", "train", ("episodes",)),
    )
    phase = graphs.PhaseGraph("train", (*source, "observations", "actions", "episodes"), source, calls)
    return graphs.FlowGraph(stages, {"train": phase})


def test_a_cycle_that_owns_its_items() -> None:
    # Two simulators with four environments each, ten rounds; what moves are batches of environments.
    seen = Observed()
    told(seen, "sim", "rollout", [Times(20.0, 10), Times(20.0, 10)])
    told(seen, "policy", "act", [Times(5.0, 10), Times(5.0, 10)])
    told(seen, "train", "train", [Times(8.0, 8)])
    flow = Flow(embodied(False))
    flow.read(seen)
    assert (flow.fed, flow.rounds) == (8, {"sim": 10})
    samples = {s.stage: s for s in flow.samples(seen, Setting(2))}
    assert (samples["sim"].portion, samples["sim"].items, samples["sim"].each) == (8, 80, 4)
    data = flow.problem(2)
    assert data["cycles"] == [{"members": ["sim", "policy"], "rounds": 10, "ends": "sim", "collocate": True}]
    problem, _ = problem_from_dict(data, Profile("f", "h", tuple(samples.values())))
    at = np.array([2])
    assert float(problem.costs["sim"].seconds(at, 8, 0)[0]) == pytest.approx(2.0)
    assert float(problem.costs["policy"].seconds(at, 8, 0)[0]) == pytest.approx(0.5)


def test_a_cycle_that_is_fed() -> None:
    seen = Observed({("sim", "rollout"): 1})
    told(seen, "sim", "rollout", [Times(6.0, 8 + 24 - 8, puts=24)])
    told(seen, "policy", "act", [Times(3.0, 16, puts=16)])
    told(seen, "train", "train", [Times(8.0, 8)])
    (loop,) = loops(embodied(True))
    assert (loop.head, loop.other, loop.fed) == ("sim", "policy", True)
    flow = Flow(embodied(True))
    flow.read(seen)
    assert flow.fed == 8 and flow.rounds == {"sim": 2}


def test_blocks_that_say_how_many_items_they_are() -> None:
    """Ten environments of two ranks, in sub-batches of 3 and 2; eight rounds. The last answer is for values alone."""
    flow, seen = Flow(embodied(True)), Observed({("sim", "rollout"): 2})
    took = (("starts", 5, 5.0), ("actions", 16, 40.0))
    told(seen, "sim", "rollout", [Times(4.0, 21, wait=3.0, taken=took)] * 2)
    told(seen, "policy", "act", [Times(1.6, 8, taken=(("observations", 8, 20.0),))] * 4)
    told(seen, "train", "train", [Times(2.0, 10, taken=(("episodes", 10, 10.0),))])
    flow.read(seen)
    assert (flow.fed, flow.rounds, flow.per_item["train"]) == (10, {"sim": 8}, 1.0)
    samples = {s.stage: s for s in flow.samples(seen, Setting(4))}
    sim, policy = samples["sim"], samples["policy"]
    assert (sim.taken, sim.each, sim.items) == ((40, 40), 3, 80)
    assert (policy.taken, policy.each) == ((20,) * 4, 3)
    assert sim.waits == 0.0, "it waits for the policy, which is no cost of a message"
    problem, _ = problem_from_dict(flow.problem(4), Profile("f", "h", tuple(samples.values())))
    assert [(c.members, c.rounds) for c in problem.graph.cycles] == [(("sim", "policy"), 8)]
    assert float(problem.costs["sim"].seconds(np.array([2]), 10, 0)[0]) == pytest.approx(0.5, rel=0.2)


def test_only_numbers_of_ranks_that_the_workers_accept() -> None:
    def check(cfg: Any, ranks: int) -> str:
        return "" if 12 % ranks == 0 else f"12 environments cannot be shared out over {ranks} ranks"

    graph = embodied(True)
    groups = {
        name: SimpleNamespace(cfg=None, worker=SimpleNamespace(check_ranks=lambda cfg, n: "")) for name in graph.stages
    }
    groups["sim"].worker.check_ranks = check
    assert Accepted(graph.stages, groups, 4).counts == {}, "there is nothing to say as long as all are accepted"
    accepted = Accepted(graph.stages, groups, 5)
    assert accepted.counts == {"sim": (1, 2, 3, 4, 6, 12)}
    assert [accepted.most("sim", n) for n in (1, 4, 5)] == [1, 4, 4] and accepted.most("policy", 5) == 5
    groups["sim"].worker.check_ranks = lambda cfg, n: "at least 8" if n < 8 else ""
    with pytest.raises(SchedError, match="group 'sim' cannot be put on 2 devices: at least 8"):
        Accepted(graph.stages, groups, 8).most("sim", 2)


def test_a_stage_is_profiled_and_planned_on_what_it_accepts() -> None:
    accepted = Accepted({}, {}, 0)
    accepted.counts["sim"] = (1, 2, 4)
    flow, seen = Flow(embodied(True), accepted), Observed()
    took = (("starts", 4, 4.0), ("actions", 2, 8.0))
    told(seen, "sim", "rollout", [Times(4.0, 6, taken=took)] * 2)
    told(seen, "policy", "act", [Times(1.6, 2, taken=(("observations", 2, 8.0),))] * 3)
    told(seen, "train", "train", [Times(2.0, 8)])
    flow.read(seen)
    samples = {s.stage: s for s in flow.samples(seen, Setting(3))}
    assert (samples["sim"].devices, samples["policy"].devices) == (2, 3)
    assert flow.quarter(3)["sim"] == 1
    assert (
        flow.problem(3)["stages"]["sim"]["counts"] == [1, 2, 4] and "counts" not in flow.problem(3)["stages"]["policy"]
    )


def test_a_flow_without_hybrid_plans_is_told_before_any_run() -> None:
    with pytest.raises(SchedError, match="needs three stages on devices, and this flow has 2 .gen, train.; plan=auto"):
        check_hybrid(grpo())
    check_hybrid(embodied(False))


def test_a_cycle_of_three_is_refused() -> None:
    call, stage = graphs.CallSpec, graphs.StageSpec
    calls = (call("a", "t", ("z",), ("x",), ends=True), call("b", "t", ("x",), ("y",)), call("c", "t", ("y",), ("z",)))
    phase = graphs.PhaseGraph("train", ("x", "y", "z"), (), calls)
    with pytest.raises(SchedError, match="a, b, c feed each other: a cycle of two stages can be planned, not of 3"):
        loops(graphs.FlowGraph({n: stage(n) for n in "abc"}, {"train": phase}))


# ------------------------------------------------------------------ short runs


def test_short_runs_and_their_portions(tmp_path: Path) -> None:
    assert [(s.devices, s.small) for s in settings([1, 2, 4], None)] == [
        (4, False),
        (2, False),
        (1, False),
        (4, True),
        (1, True),
    ]
    assert [(s.devices, s.portion) for s in settings([1, 2], [None, 4])] == [(2, None), (2, 4), (1, None), (1, 4)]
    flow = Flow(grpo())
    flow.read(observe(None))
    assert flow.quarter(2) == {"gen": 1, "reward": 4, "train": 8}
    rows = [
        {"step": 0, "phase": "train", "time/step_s": 9.0},
        {"step": 1, "phase": "train", "time/step_s": 2.0},
        {"step": 1, "phase": "eval", "time/step_s": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert step_times(tmp_path, Setting(2)) == [StepSample(2, 0, 2.0)]


def test_the_step_s_own_time_is_what_the_stages_leave() -> None:
    def sample(stage: str, seconds: float, takes: int, puts: int) -> ProfileSample:
        waits = 0.01 * takes + 0.002 * puts if stage == "a" else 0.0
        each = 0 if takes == 1 else 8 // takes
        return ProfileSample(stage, 1, 8, 8, seconds, 0, 0.5, (seconds,), (8,), each, puts, waits=waits)

    whole = [sample("a", 4.0, 1, 32), sample("b", 2.0, 1, 0)]
    step = 4 + 2 + 2 * 0.5 + 2 * 2 * 0.01 + 0.002 * 32 + 0.3
    profile = Profile("f", "h", (*whole, sample("a", 4.0, 4, 32)), (StepSample(1, 0, step), StepSample(1, 2, 99.0)))
    found = overhead(profile)
    assert (found.take, found.put, found.step) == pytest.approx((0.01, 0.002, 0.3))
    assert overhead(Profile("f", "h", tuple(whole))).step == 0.0


def test_waiting_for_the_step_to_begin_is_no_cost_of_a_take() -> None:
    def sample(devices: int, takes: int, puts: int, disturbed: float = 0.0) -> ProfileSample:
        waits = 0.03 + 0.002 * takes + 0.0005 * puts + disturbed
        each = 0 if takes == 1 else 8 // takes
        times, taken = (1.0,) * devices, (8,) * devices
        return ProfileSample("a", devices, 8, 8, 1.0, 0, 0.0, times, taken, each, puts, waits=waits)

    calm = [sample(1, 1, 64), sample(1, 4, 64), sample(2, 1, 32), sample(4, 1, 16), sample(4, 4, 16)]
    found = overhead(Profile("f", "h", (*calm, *calm, sample(1, 4, 64, 0.5), sample(4, 1, 16, 0.5))))
    assert (found.take, found.put, found.step) == pytest.approx((0.002, 0.0005, 0.03))


def test_a_take_costs_a_message_at_least() -> None:
    samples = tuple(
        ProfileSample("a", 1, 8, 8, 1.0, 0, 0.0, (1.0,), (8,), each, 0, waits=0.01 - 0.001 * bool(each))
        for each in (0, 2)
    )
    assert overhead(Profile("f", "h", samples)).take == pytest.approx(ROUND_TRIP)


def test_what_the_turns_of_a_cycle_cost_beside_its_stages() -> None:
    data: dict[str, Any] = {
        "devices": 4,
        "items": 8,
        "stages": {"sim": {}, "policy": {}},
        "edges": [["sim", "policy"], ["policy", "sim"]],
        "cycles": [{"members": ["sim", "policy"], "rounds": 10, "ends": "sim", "collocate": True}],
    }
    samples = tuple(
        ProfileSample(name, n, 8, 80, 80 / n, ranks=(80 / n,) * n, taken=(80 // n,) * n, each=8 // n)
        for name in ("sim", "policy")
        for n in (1, 2, 4)
    )
    # A round is a take of either; each costs 0.1 s more for every further rank.
    steps = tuple(StepSample(n, 0, 160 / n + 20 * 0.1 * (n - 1)) for n in (1, 2, 4))
    problem, _ = problem_from_dict(data, Profile("f", "h", samples, steps))
    for n in (1, 2, 3, 4):
        leaves = [{"leaf": {"stage": name, "devices": f"0-{n - 1}"}} for name in ("sim", "policy")]
        found = predict(problem, {"devices": 4, "tree": {"cycle": {"a": leaves[0], "b": leaves[1]}}})
        own = 10 * 2 * math.ceil(8 / n) if n != 3 else 10 * 2 * 8 / 3
        assert found.seconds == pytest.approx(own + 20 * 0.1 * (n - 1), rel=0.15 if n == 3 else 0.02)


def test_samples_of_no_stage_are_told() -> None:
    data = {"devices": 1, "items": 4, "stages": {"a": {}}}
    samples = (ProfileSample("a", 1, 4, 4, 1.0), ProfileSample("b", 1, 4, 4, 1.0))
    _, warnings = problem_from_dict(data, Profile("f", "h", samples))
    assert warnings == ["the profile has samples of 'b', which is no stage of problem"]
    with pytest.raises(SchedError, match="samples of stage 'a' took no time at all"):
        problem_from_dict(data, Profile("f", "h", (ProfileSample("a", 1, 4, 4, 0.0),)))


def test_fitted_costs_are_marked_as_measured() -> None:
    data = {"devices": 1, "items": 4, "stages": {"a": {}}}
    problem, _ = problem_from_dict(data, Profile("f", "h", (ProfileSample("a", 1, 4, 4, 1.0),)))
    assert isinstance(problem.costs["a"], FormulaCost) and problem.costs["a"].measured


def test_a_profile_does_not_mix_with_an_earlier_one(tmp_path: Path) -> None:
    assert _free(tmp_path) == tmp_path / "runs"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs-2").mkdir()
    assert _free(tmp_path) == tmp_path / "runs-3"


def test_a_line_for_each_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = SimpleNamespace(plan="auto", profile=SimpleNamespace(steps=2))
    lines = _Lines(2)
    lines.begin(cfg, tmp_path)
    for number, setting in enumerate((Setting(8), Setting(1, small=True))):
        lines.starts(number, setting)
        lines.ends(number, setting, [1.0, 2.0])
    shown = capsys.readouterr().err.splitlines()
    then = f"then the plan; to keep it for other runs: plan={tmp_path / 'plan.yaml'}"
    assert shown[0] == f"profile: 2 short runs of 3 to 5 steps, {then}"
    assert shown[1].startswith("profile: run 1 of 2: 8 devices, everything at once: 1.5 s/step, about ")
    assert shown[2:] == ["profile: run 2 of 2: 1 device, a quarter at once: 1.5 s/step"]


def test_on_a_terminal_the_line_stands_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    lines = _Lines(1)
    lines.starts(0, Setting(2))
    lines.breaks()
    lines.starts(0, Setting(2))
    lines.ends(0, Setting(2), [])
    what = "profile: run 1 of 1: 2 devices, everything at once"
    assert terminal.getvalue() == f"{what} …\r\n{what} …\r{what}  \n"


def test_the_largest_part_of_a_rank() -> None:
    flow = Flow(grpo())
    flow.read(observe(None))
    # Of 8 prompts: 4 for a generator's rank; of 32 samples: 16 for a reward's, all for the group of trainers.
    assert flow.part(2) == 32
    assert flow.quarter(2) == {"gen": 1, "reward": 4, "train": 8}


def test_a_placement_of_a_device_stage_is_not_planned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_core import runner
    from rlinf_core.config import Config

    monkeypatch.setattr(runner, "prepare", lambda cfg, out: (None, grpo(), {}))
    cfg = Config({"plan": "auto", "placement": {"reward": "2", "train": "0-1"}})
    with pytest.raises(SchedError, match="placement.train: where stages on devices run is what is being planned"):
        measure(cfg, "toy", None, None, tmp_path)
