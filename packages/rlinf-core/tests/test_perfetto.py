"""The trace file."""

from __future__ import annotations

import json

import pytest

from rlinf_core.perfetto import Trace


def test_groups_are_processes_and_ranks_are_threads() -> None:
    trace = Trace()
    trace.add("train", "actor", 1, 12.0, 13.0, {"step": "train/0"})
    trace.add("inner", "generator", 0, 10.5, 10.75)
    trace.add("generate", "generator", 0, 10.5, 11.5)
    trace.add("published", "actor", 0, 13.0, 13.0)
    events = json.loads(trace.to_json())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["actor", "generator"]
    assert sum(event["name"] == "thread_name" for event in events) == 3
    spans = [event for event in events if event["ph"] != "M"]
    assert [span["name"] for span in spans] == ["generate", "inner", "train", "published"]
    assert spans[0] | {"pid": names[spans[0]["pid"]]} == {
        "name": "generate",
        "cat": "rlinf",
        "ph": "X",
        "pid": "generator",
        "tid": 0,
        "ts": 0.0,
        "dur": 1e6,
        "args": {},
    }
    assert spans[2]["ts"] == 1.5e6 and spans[2]["args"] == {"step": "train/0"} and spans[3]["ph"] == "i"


def test_a_span_cannot_end_before_it_starts_and_the_rest_is_counted() -> None:
    trace = Trace(limit=1)
    with pytest.raises(ValueError, match=r"'x' of actor\[0\]"):
        trace.add("x", "actor", 0, 2.0, 1.0)
    for _ in range(3):
        trace.add("x", "actor", 0, 1.0, 2.0)
    assert json.loads(trace.to_json())["otherData"] == {"spans left out": 2}
    assert json.loads(Trace().to_json())["traceEvents"] == []
