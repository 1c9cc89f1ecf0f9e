"""The simulator: timelines by hand, the lock's two rules, back-pressure, drawn lengths, charts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from rlinf_sched import FormulaCost, Graph, Problem, SchedError, Stage, StreamCost, simulate
from rlinf_sched.gantt import to_perfetto, write_perfetto, write_png
from rlinf_sched.streaming import weibull
from rlinf_sched.tree import Leaf, Parallel, Pipe, Share


def problem(switch: float = 0.0, **seconds: float) -> Problem:
    """A chain of stages that take so many seconds for an item on any number of devices."""
    names = list(seconds)
    graph = Graph({name: Stage(name) for name in names}, tuple(pairwise(names)))
    costs = {name: FormulaCost(serial=each, load=switch / 2, offload=switch / 2) for name, each in seconds.items()}
    return Problem(graph, costs, 4, 8)


def test_in_turn_by_hand() -> None:
    run = simulate(Share(Leaf("a", 4, 8), Leaf("b", 4, 8), True, True), problem(switch=3.0, a=1, b=2))
    assert run.seconds == 8 + 16 + 2 * 3
    assert run.switching == 6
    assert [(bar.stage, bar.what, bar.start, bar.end) for bar in run.bars] == [
        ("a", "switch", 0, 3),
        ("a", "work", 3, 11),
        ("b", "switch", 11, 14),
        ("b", "work", 14, 30),
    ]
    assert run.idle(4) == pytest.approx(6 / 30)


def test_a_pipe_fills_and_drains_by_hand() -> None:
    run = simulate(Pipe(Leaf("a", 1, 2), Leaf("b", 3, 2), 2), problem(a=1, b=2))
    assert run.seconds == 2 + 4 * 4
    assert run.busy == {"a": 8, "b": 16}
    assert [bar.first for bar in run.bars if bar.stage == "b"] == [1, 1, 1, 1]


def test_side_by_side_takes_the_slower() -> None:
    assert simulate(Parallel(Leaf("a", 1, 8), Leaf("b", 3, 8)), problem(a=1, b=2)).seconds == 16


TURNS = Pipe(Leaf("a", 1, 2), Share(Leaf("b", 1, 2), Leaf("c", 1, 2), True, True), 2)


def test_a_holder_keeps_the_device_while_it_has_input_under_the_locks_rule() -> None:
    fast = problem(switch=1.0, a=0.1, b=1, c=1)
    strict, lazy = (simulate(TURNS, fast, rule=rule) for rule in ("tree", "lock"))
    assert strict.switching == 8
    assert lazy.switching < strict.switching
    assert lazy.seconds < strict.seconds
    assert lazy.busy == pytest.approx(strict.busy)


def test_with_slow_input_both_rules_are_the_same() -> None:
    slow = problem(switch=1.0, a=10, b=1, c=1)
    assert simulate(TURNS, slow, rule="lock").seconds == simulate(TURNS, slow).seconds


def test_back_pressure_holds_the_upstream_up_but_not_the_pipe() -> None:
    chain = problem(a=1, b=2)
    tree = Pipe(Leaf("a", 1, 1), Leaf("b", 1, 1), 1)
    free, held = simulate(tree, chain), simulate(tree, chain, capacity=2)
    assert free.seconds == held.seconds
    ends = [max(bar.end for bar in run.bars if bar.stage == "a") for run in (free, held)]
    assert ends[0] == 8
    assert ends[1] > 8


@pytest.mark.parametrize(("arguments", "why"), [({"rule": "fifo"}, "rule 'fifo'"), ({"capacity": 1}, "capacity 1")])
def test_wrong_settings_are_refused(arguments: dict[str, object], why: str) -> None:
    with pytest.raises(SchedError, match=why):
        simulate(Leaf("a", 1, 8), problem(a=1), **arguments)  # type: ignore[arg-type]


def streaming_problem() -> Problem:
    graph = Graph(
        {"gen": Stage("gen", group=2), "train": Stage("train", barrier="group", group=2)}, (("gen", "train"),)
    )
    stream = StreamCost(lengths=weibull(1.8, 7, 26, 64), slots=(4,), alpha=0.1, beta=0.02, group=2)
    return Problem(graph, {"gen": stream, "train": FormulaCost(spread=0.2)}, 4, 32)


def test_drawn_lengths_scatter_about_the_expectation_and_a_seed_repeats() -> None:
    tree = Pipe(Leaf("gen", 2, 32, 4), Leaf("train", 2, 4), 4)
    expected = simulate(tree, streaming_problem()).seconds
    drawn = [simulate(tree, streaming_problem(), seed=seed).seconds for seed in range(20)]
    assert simulate(tree, streaming_problem(), seed=3).seconds == drawn[3]
    assert len(set(drawn)) == 20
    assert sum(drawn) / 20 == pytest.approx(expected, rel=0.15)


def test_training_begins_before_generation_ends() -> None:
    run = simulate(Pipe(Leaf("gen", 2, 32, 4), Leaf("train", 2, 4), 4), streaming_problem())
    first = min(bar.start for bar in run.bars if bar.stage == "train")
    assert first < max(bar.end for bar in run.bars if bar.stage == "gen")


def test_thousands_of_devices_are_one_server_each() -> None:
    chain = problem(a=1, b=2)
    run = simulate(Pipe(Leaf("a", 2000, 1), Leaf("b", 2096, 1), 1), chain)
    assert run.used == 4096
    assert len(run.bars) == 16


def test_trace_for_perfetto(tmp_path: Path) -> None:
    run = simulate(Share(Leaf("a", 4, 8), Leaf("b", 4, 8), True, True), problem(switch=3.0, a=1, b=2))
    events = to_perfetto(run)["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["switch a", "a 0", "switch b", "b 0"]
    assert events[0]["args"]["name"] == "a (devices 0-3)"
    write_perfetto(run, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == to_perfetto(run)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_chart(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    write_png(simulate(TURNS, problem(switch=1.0, a=1, b=1, c=1)), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_charts_of_one_folder_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    for tree in (Pipe(Leaf("a", 2, 4), Leaf("b", 1, 4), 4), Pipe(Leaf("b", 1, 4), Leaf("a", 2, 4), 4)):
        run = simulate(tree, problem(a=1, b=1))
        write_png(run, tmp_path / "chart.png", devices=8, stages=("a", "b"))
    for figure in drawn:
        axes = figure.axes[0]
        assert axes.get_ylim()[1] == 8, "idle devices are there"
        assert all(tick == round(tick) for tick in axes.get_yticks())
        legend = axes.get_legend()
        assert legend is not None
        colours = {
            text.get_text(): to_hex(patch.get_facecolor())
            for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)
        }
        assert colours == {"a": "#4477aa", "b": "#ee6677"}
