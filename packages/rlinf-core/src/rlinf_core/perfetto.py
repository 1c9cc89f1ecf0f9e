"""Spans of a run as a Chrome trace, which https://ui.perfetto.dev opens.

Each group is a process and each of its ranks a thread of it, so that the picture has one track per rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """What one rank did from ``start`` to ``end`` (seconds on one clock, any origin)."""

    name: str
    group: str
    rank: int
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


class Trace:
    """Collects spans and instants; times become microseconds from the earliest one. At most ``limit`` are kept
    (the first ones), the rest is counted and said in the file."""

    def __init__(self, limit: int = 200_000) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self._limit = limit

    def add(
        self, name: str, group: str, rank: int, start: float, end: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Record a span; ``end`` == ``start`` marks an instant. Raises ValueError when it ends before it starts."""
        if end < start:
            raise ValueError(f"span {name!r} of {group}[{rank}] ends {start - end:.6f} s before it starts")
        if len(self.spans) >= self._limit:
            self.dropped += 1
            return
        self.spans.append(Span(name, group, rank, start, end, dict(args or {})))

    def events(self) -> list[dict[str, Any]]:
        """The Chrome trace events: names of tracks first, then spans in order of their start."""
        origin = min((span.start for span in self.spans), default=0.0)
        groups = {group: pid for pid, group in enumerate(dict.fromkeys(span.group for span in self.spans), start=1)}
        ranks = sorted({(groups[span.group], span.rank) for span in self.spans})
        events: list[dict[str, Any]] = []
        for group, pid in groups.items():
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": group}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        for pid, rank in ranks:
            label = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": label})
        # a span that encloses others must come before them when they start together
        for span in sorted(self.spans, key=lambda span: (span.start, -span.end)):
            event: dict[str, Any] = {
                "name": span.name,
                "cat": "rlinf",
                "pid": groups[span.group],
                "tid": span.rank,
                "ts": round((span.start - origin) * 1e6, 3),
                "args": dict(span.args),
            }
            if span.end > span.start:
                event |= {"ph": "X", "dur": round((span.end - span.start) * 1e6, 3)}
            else:
                event |= {"ph": "i", "s": "t"}
            events.append(event)
        return events

    def to_json(self) -> str:
        data: dict[str, Any] = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        if self.dropped:
            data["otherData"] = {"spans left out": self.dropped}
        return json.dumps(data, default=str)
