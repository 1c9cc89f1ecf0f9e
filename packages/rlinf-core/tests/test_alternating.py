"""A share upstream of a pipe: producer and consumer alternate per portion, so that what runs beside them gets work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from driving import drive

from rlinf_core import In, Out, Worker, task
from rlinf_core.flow import trace
from rlinf_core.placement import ClusterInfo
from rlinf_core.plan import flatten, make_plan

SEEN: list[str] = []
_WRITING = threading.Lock()


class Stage(Worker):
    @task
    def work(self, numbers: In[int], out: Out[int]) -> None:
        for portion in numbers.batches():
            with self.on_device():
                with _WRITING:
                    SEEN.append(self.name)
                for n in portion:
                    out.put(n)


class Last(Worker):
    @task
    def take(self, numbers: In[int]) -> dict[str, float]:
        total = 0
        for portion in numbers.batches():
            with self.on_device():
                total += sum(portion)
        return {"total": total}


def program(flow: Any, cfg: Any) -> None:
    a, b = flow.group("a", Stage, cfg), flow.group("b", Stage, cfg)
    c = flow.group("c", Last, cfg)
    for step in flow.steps(2):
        numbers, made, done = step.channels("numbers", "made", "done")
        a.work(numbers, made)
        b.work(made, done)
        step.report(c.take(done), reduce="sum")
        step.feed(numbers, list(range(8)))  # last: nobody gives way to a stage that is not called yet
        step.join()


PIPED = """
name: mine
tree:
  pipe:
    up:
      share:
        first: {leaf: {stage: a, devices: "0", portion: 2%(how)s}}
        then: {leaf: {stage: b, devices: "0", portion: 2%(how)s}}
    down: {leaf: {stage: c, devices: "1", portion: 2}}
    portion: 2
"""
SHARED = """
name: mine
tree:
  share:
    first: {leaf: {stage: a, devices: "0", portion: 2}}
    then:
      share:
        first: {leaf: {stage: b, devices: "0", portion: 2}}
        then: {leaf: {stage: c, devices: "0-1", portion: 2}}
"""


@pytest.mark.parametrize("how", ["", ", resident: true"])
def test_upstream_of_a_pipe_they_alternate(tmp_path: Path, how: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PIPED % {"how": how})
    SEEN.clear()
    found = drive(program, {}, tmp_path, plan=str(path), devices=2)
    assert [m["total"] for m in found.metrics] == [28, 28]
    assert SEEN == ["a", "b"] * 8, "one portion each, in turn"


def test_where_nobody_waits_the_holder_keeps_the_devices(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(SHARED)
    SEEN.clear()
    found = drive(program, {}, tmp_path, plan=str(path), devices=2)
    assert [m["total"] for m in found.metrics] == [28, 28]
    assert SEEN[:4] == ["a"] * 4, "switching once per portion is the costly case"


def test_a_consumer_that_wants_more_does_not_hold_up_its_producer(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        PIPED.replace('stage: b, devices: "0", portion: 2', 'stage: b, devices: "0", portion: 5') % {"how": ""}
    )
    SEEN.clear()
    found = drive(program, {}, tmp_path, plan=str(path), devices=2)
    assert [m["total"] for m in found.metrics] == [28, 28]
    assert SEEN[:4] == ["a", "a", "a", "b"], "three portions of two before the first one of five"


def test_who_gives_way_to_whom(tmp_path: Path) -> None:
    graph, _ = trace(program, {}, seed=0, run_dir=tmp_path)
    cluster = ClusterInfo.virtual(4)
    path = tmp_path / "plan.yaml"
    path.write_text((PIPED % {"how": ""}).replace('"1"', '"3"').replace('"0"', '"0-1"'))
    flat = flatten(make_plan(str(path), graph, cluster), graph, cluster)
    assert flat.gives_way() == {"a[0]": ("b[0]",), "a[1]": ("b[1]",)}
    path.write_text(SHARED)
    assert flatten(make_plan(str(path), graph, cluster), graph, cluster).gives_way() == {}
