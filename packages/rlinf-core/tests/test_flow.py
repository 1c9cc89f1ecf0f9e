"""The trace: what the program may do, what is refused, and that the graph is what was called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_core import In, Out, Worker, task
from rlinf_core.errors import TraceError
from rlinf_core.flow import Flow, trace
from rlinf_core.graph import CallSpec
from rlinf_core.worker import task_spec


class Maker(Worker):
    @task
    def make(self, source: In[NotImported], toys: Out[NotImported], scale: float = 1.0) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Unknown names in annotations count as Any."""

    @task
    def count(self) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return []

    def helper(self) -> None:
        pass


class User(Worker):
    device = False

    @task
    def use(self, toys: In[int]) -> dict[str, float]:
        return {}

    def install_weights(self, version: int, weights: Any) -> None:
        pass


def run(program: Any, cfg: Any = None) -> Any:
    return trace(program, cfg, seed=0, run_dir=Path("runs"))


def good(flow: Flow, cfg: Any) -> None:
    maker, user = flow.group("maker", Maker), flow.group("user", User)
    for step in flow.steps(3):
        source, toys = step.channels("source", "toys")
        step.feed(source, [1, 2])
        maker.make(source, toys, scale=2.0)
        step.report(user.use(toys))
        maker.publish_weights(to=user)
        step.join()


def test_directions_come_from_annotations_even_with_unknown_names() -> None:
    assert task_spec(Maker, "make").directions == {"source": "in", "toys": "out"}


def test_the_graph_is_what_was_called() -> None:
    graph, groups = run(good)
    phase = graph.phases["train"]
    assert phase.calls == (
        CallSpec("maker", "make", ("source",), ("toys",)),
        CallSpec("user", "use", ("toys",), ()),
    )
    assert phase.feeds == ("source",) and phase.weights == (("maker", "user"),)
    assert list(groups) == ["maker", "user"] and not graph.stages["user"].device


def test_feeding_does_not_iterate_while_tracing() -> None:
    def program(flow: Flow, cfg: Any) -> None:
        maker, user = flow.group("maker", Maker), flow.group("user", User)
        for step in flow.steps(1):
            source, toys = step.channels("source", "toys")
            step.feed(source, lambda: pytest.fail("iterated"))  # type: ignore[arg-type, return-value]
            maker.make(source, toys)
            user.use(toys)

    run(program)


def body(change: Any) -> Any:
    """A program whose one step is ``change(flow, step, maker, user, source, toys)``."""

    def program(flow: Flow, cfg: Any) -> None:
        maker, user = flow.group("maker", Maker), flow.group("user", User)
        for step in flow.steps(1):
            source, toys = step.channels("source", "toys")
            step.feed(source, [])
            change(flow, step, maker, user, source, toys)

    return program


def reads_a_result(flow: Any, step: Any, maker: Any, user: Any, source: Any, toys: Any) -> None:
    maker.make(source, toys)
    if user.use(toys)["reward"] > 1:
        pass


def branches_on_metrics(flow: Any, step: Any, maker: Any, user: Any, source: Any, toys: Any) -> None:
    maker.make(source, toys)
    user.use(toys)
    if step.join():
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reads_a_result, r"the result of user\.use\(\) is read while the flow is traced"),
        (branches_on_metrics, r"the metrics of step train/0 is read while the flow is traced"),
        (lambda f, s, m, u, a, b: m.helper(), r"method without @task 'helper'; its tasks are: count, make"),
        (lambda f, s, m, u, a, b: m.mkae(a, b), r"has no method 'mkae'"),
        (lambda f, s, m, u, a, b: m.make(a), r"channel parameter\(s\) toys not given"),
        (lambda f, s, m, u, a, b: m.make(a, 3), r"parameter 'toys' is a channel \(out\), got a int"),
        (lambda f, s, m, u, a, b: m.make(a, b, a), r"parameter 'scale' got a channel but is not annotated"),
        (lambda f, s, m, u, a, b: m.make(a, b, sclae=2), r"has no parameter 'sclae' \(did you mean 'scale'\?\)"),
        (lambda f, s, m, u, a, b: m.make(a, b, 1, 2), r"takes 3 argument\(s\)"),
        (lambda f, s, m, u, a, b: m.make(a, b, source=a), r"got parameter 'source' twice"),
        (lambda f, s, m, u, a, b: s.channels("toys"), r"channel 'toys' is opened twice"),
        (lambda f, s, m, u, a, b: s.channels("no:colon"), r"channel name 'no:colon'"),
        (lambda f, s, m, u, a, b: s.report(3), r"step\.report\(\) takes what a group call returned"),
        (lambda f, s, m, u, a, b: u.publish_weights(to=m), r"User \(group 'user'\) must define weights\(\)"),
        (lambda f, s, m, u, a, b: m.make(a, b), r"channel 'toys' has no reader"),
        (lambda f, s, m, u, a, b: (u.use(a), u.use(b)), r"channel 'toys' has no writer"),
        (lambda f, s, m, u, a, b: f.group("maker", Maker), r"group 'maker' is declared twice"),
        (lambda f, s, m, u, a, b: f.group("x", int), r"not a subclass of Worker"),
        (lambda f, s, m, u, a, b: f.group("driver", Maker), r"use an identifier other than 'driver'"),
        (lambda f, s, m, u, a, b: list(f.steps(-1)), r"must be a whole number >= 0"),
        (lambda f, s, m, u, a, b: list(f.steps(2.5)), r"must be a whole number >= 0"),
    ],
)
def test_refusals_name_what_is_wrong(change: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        run(body(change))


def test_a_call_outside_a_step_is_refused() -> None:
    def program(flow: Flow, cfg: Any) -> None:
        flow.group("maker", Maker).count()

    with pytest.raises(TraceError, match=r"maker\.count\(\) is called outside a step"):
        run(program)


def test_one_phase_at_two_places_must_make_the_same_calls() -> None:
    def program(flow: Flow, cfg: Any) -> None:
        maker = flow.group("maker", Maker)
        for _ in flow.steps(1, name="a"):
            maker.count()
        for _ in flow.steps(1, name="a"):
            maker.count()
            maker.count()

    with pytest.raises(TraceError, match=r"differ: call 2 was not there when traced and is maker\.count\(\) now"):
        run(program)


def test_a_program_without_steps_is_refused() -> None:
    with pytest.raises(TraceError, match="makes no step"):
        run(lambda flow, cfg: None)


def test_every_is_true_while_tracing_so_that_rare_phases_are_seen() -> None:
    def program(flow: Flow, cfg: Any) -> None:
        maker = flow.group("maker", Maker)
        for step in flow.steps(10):
            maker.count()
            if flow.every(step, 5):
                for _ in flow.steps(1, name="rare"):
                    maker.count()
            assert not flow.every(step, 0)

    graph, _ = run(program)
    assert set(graph.phases) == {"train", "rare"}
