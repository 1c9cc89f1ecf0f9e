"""Balanced dequeue as a user meets it: said in the program or the configuration, refused by name, run in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cyclic_workers
import pytest
from driving import drive

from rlinf_core import In, Out, Worker, task
from rlinf_core.config import compose
from rlinf_core.errors import ChannelError, ConfigError, RLinfError, TraceError
from rlinf_core.flow import Flow, trace
from rlinf_core.graph import FlowGraph
from rlinf_core.hub import server

WEIGHTS = [5.0, 1.0, 1.0, 1.0, 2.0, 4.0, 1.0, 1.0, 1.0]


class Maker(Worker):
    device = False

    @task
    def make(self, seeds: In[int], items: Out[int], more: Out[int]) -> None:
        for _ in seeds:
            for index, weight in enumerate(self.cfg["weights"]):
                items.put(index, weight=weight)
        more.put(0)


class Reader(Worker):
    """Three ranks that work alone; each returns what it got as a sum of powers of two."""

    device = False
    ranks = 3

    @task
    def read(self, items: In[int]) -> dict[str, float]:
        got = list(items)
        assert got == sorted(got), "out of order"
        return {f"rank{self.rank}": float(sum(2**index for index in got))}

    @task
    def read_portions(self, items: In[int]) -> dict[str, float]:
        return {f"rank{self.rank}": float(sum(2**index for portion in items.batches(2) for index in portion))}

    @task
    def read_late(self, items: In[int], more: In[int]) -> dict[str, float]:
        """Rank 0 waits for something else first."""
        return {"late": float(more.get())} if self.rank == 0 else self.read(items)

    @task
    def read_some(self, items: In[int]) -> dict[str, float]:
        return {} if self.rank == 0 else self.read(items)


class Together(Worker):
    collective = True
    process_group = False

    @task
    def train(self, items: In[int]) -> dict[str, float]:
        return {"count": float(sum(len(batch) for batch in items.batches()))}


class Sink(Worker):
    device = False

    @task
    def take(self, items: In[int]) -> dict[str, float]:
        return {"more": float(len(list(items)))}


def program(flow: Flow, cfg: Any) -> None:
    maker, reader, sink = flow.group("maker", Maker, cfg), flow.group("reader", Reader), flow.group("sink", Sink)
    for step in flow.steps(cfg.get("steps", 1)):
        seeds, more = step.channels("seeds", "more")
        items = step.channel("items", deal=cfg["deal"])
        step.feed(seeds, [1])
        maker.make(seeds, items, more)
        if cfg.get("task") == "read_late":
            step.report(reader.read_late(items, more), reduce="sum")
        else:
            step.report(getattr(reader, cfg.get("task", "read"))(items), reduce="sum")
        sink.take(more)
        step.join()


def two_readers(flow: Flow, cfg: Any) -> None:
    maker, reader = flow.group("maker", Maker, cfg), flow.group("reader", Reader)
    together, sink = flow.group("together", Together), flow.group("sink", Sink)
    for step in flow.steps(1):
        seeds, more = step.channels("seeds", "more")
        items = step.channel("items", deal=cfg["deal"])
        step.feed(seeds, [1])
        maker.make(seeds, items, more)
        step.report(reader.read(items))
        step.report(together.train(items), reduce="sum")
        sink.take(more)
        step.join()


def fed(flow: Flow, cfg: Any) -> None:
    reader = flow.group("reader", Reader)
    for step in flow.steps(1):
        items = step.channel("items", deal="weight")
        step.feed(items, range(len(WEIGHTS)), weight=lambda index: WEIGHTS[index])
        step.report(reader.read(items), reduce="sum")
        step.join()


def traced(program: Any, deal: Any, deals: Any = None) -> FlowGraph:
    graph, _ = trace(program, {"deal": deal, "weights": WEIGHTS}, seed=0, run_dir=Path("runs"), deals=deals)
    return graph


def shares(metrics: dict[str, float]) -> list[list[int]]:
    return [[i for i in range(len(WEIGHTS)) if int(metrics[f"rank{rank}"]) >> i & 1] for rank in range(3)]


class TestTrace:
    def test_the_graph_knows_how_a_channel_is_dealt(self) -> None:
        phase = traced(program, "weight").phases["train"]
        assert phase.deals == (("items", "", "weight"),)
        assert (phase.deal("items", "reader"), phase.deal("seeds", "maker")) == ("weight", "shared")
        assert traced(program, "shared").phases["train"].deals == ()

    def test_by_group(self) -> None:
        for program, deals in ({"reader": "weight"}, None), ("shared", {"items": "reader: weight"}):
            phase = traced(two_readers, program, deals).phases["train"]
            assert (phase.deal("items", "reader"), phase.deal("items", "together")) == ("weight", "shared")

    def test_the_configuration_comes_first(self) -> None:
        phase = traced(program, "weight", {"items": "round_robin"}).phases["train"]
        assert phase.deal("items", "reader") == "round_robin"
        assert traced(program, "weight", {"items": "shared"}).phases["train"].deals == ()

    def test_it_is_no_part_of_the_fingerprint(self) -> None:
        assert traced(program, "weight").fingerprint() == traced(program, "shared").fingerprint()

    @pytest.mark.parametrize(
        ("program", "deal", "deals", "fault"),
        [
            (
                program,
                "wieght",
                None,
                "step.channel('items', deal=...): one of shared, round_robin, weight, got 'wieght'",
            ),
            (program, 3, None, "got int"),
            (program, {3: "weight"}, None, "by names of groups, got a int"),
            (program, {"reader": "wait"}, None, "reader: one of shared, round_robin, weight, got 'wait'"),
            (
                program,
                "shared",
                {"items": "reader:weight,reader:shared"},
                "channels.deals.items: group:way, each group",
            ),
            (
                program,
                {"raeder": "weight"},
                None,
                "dealt to group 'raeder', which does not read it (did you mean 'reader'?)",
            ),
            (
                program,
                {"maker": "weight"},
                None,
                "'maker', which does not read it (did you mean 'reader'?); it is read by reader",
            ),
            (two_readers, "weight", None, "cannot be dealt to group 'together': its ranks compute together"),
            (two_readers, "weight", None, "name the groups that it is for: deal={'reader': 'weight'}"),
            (
                program,
                "shared",
                {"itms": "weight"},
                "channels.deals.itms: no step opens such a channel (did you mean 'items'?)",
            ),
            (program, "shared", {"items": "wait"}, "channels.deals.items: one of shared, round_robin, weight"),
        ],
    )
    def test_what_is_refused(self, program: Any, deal: Any, deals: Any, fault: str) -> None:
        with pytest.raises(TraceError) as caught:
            traced(program, deal, deals)
        assert fault in str(caught.value)

    def test_a_later_step_may_not_differ(self, tmp_path: Path) -> None:
        class Changing(dict[str, Any]):
            """Deals otherwise the third time (the trace and the first step are the same)."""

            def __getitem__(self, key: str) -> Any:
                if key == "deal":
                    self["asked"] = self.get("asked", 0) + 1
                    return "weight" if self["asked"] > 2 else "shared"
                return super().__getitem__(key)

        with pytest.raises(TraceError, match=r"step train/1 opens channel 'items' dealt by weight, which was shared"):
            drive(program, Changing(weights=WEIGHTS, steps=2), tmp_path)


def test_a_wrong_key_is_refused_when_composing(tmp_path: Path) -> None:
    text = "from rlinf_core.config import recipe\n\n@recipe\ndef program(flow, cfg):\n    pass\n"
    (tmp_path / "mine.py").write_text(text)
    good = ["num_steps=1", "channels.deals.items=weight", "channels.deals.more='sink:round_robin'"]
    cfg = compose(str(tmp_path / "mine.py"), good)
    assert cfg.channels.deals.to_dict() == {"items": "weight", "more": "sink:round_robin"}
    with pytest.raises(ConfigError, match=r"channels\.deals\.items: one of shared, round_robin, weight, got 'waight'"):
        compose(str(tmp_path / "mine.py"), ["num_steps=1", "channels.deals.items=waight"])
    with pytest.raises(ConfigError, match=r"a mapping to text, got text; .* channels\.deals\.CHANNEL=weight$"):
        compose(str(tmp_path / "mine.py"), ["num_steps=1", "channels.deals=weight"])
    with pytest.raises(ConfigError, match=r"got an integer; .* placement\.GROUP=1$"):
        compose(str(tmp_path / "mine.py"), ["num_steps=1", "placement=1"])


class TestRun:
    @pytest.mark.parametrize("task", ["read", "read_portions"])
    def test_round_robin_and_weight(self, tmp_path: Path, task: str) -> None:
        cfg = {"weights": WEIGHTS, "task": task, "steps": 2}
        robin = drive(program, {**cfg, "deal": "round_robin"}, tmp_path / "a", deals=None)
        for metrics in robin.metrics:
            assert shares(metrics) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
        weight = drive(program, {**cfg, "deal": "weight"}, tmp_path / "b")
        for metrics in weight.metrics:
            assert shares(metrics) == [[0, 8], [1, 3, 5], [2, 4, 6, 7]]

    def test_a_feed_has_weights_too(self, tmp_path: Path) -> None:
        (metrics,) = drive(fed, {}, tmp_path).metrics
        assert shares(metrics) == [[0, 8], [1, 3, 5], [2, 4, 6, 7]]

    def test_shared_loses_and_doubles_nothing(self, tmp_path: Path) -> None:
        (metrics,) = drive(program, {"weights": WEIGHTS, "deal": "shared"}, tmp_path).metrics
        assert sorted(i for share in shares(metrics) for i in share) == list(range(len(WEIGHTS)))

    def test_the_configuration_overrides_the_program(self, tmp_path: Path) -> None:
        cfg = {"weights": WEIGHTS, "deal": "weight"}
        (metrics,) = drive(program, cfg, tmp_path, deals={"items": "round_robin"}).metrics
        assert shares(metrics) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]

    def test_a_rank_that_never_reads_is_named(self, tmp_path: Path) -> None:
        cfg = {"weights": WEIGHTS, "deal": "round_robin", "task": "read_some"}
        with pytest.raises(ChannelError, match=r"3 on channel 'train/0:items' \(3 dealt to reader\[0\]\)"):
            drive(program, cfg, tmp_path)

    def test_a_rank_that_holds_everything_up_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "DEADLOCK_AFTER_S", 0.2)
        cfg = {"weights": [1.0] * 60, "deal": "round_robin", "task": "read_late"}
        with pytest.raises(RLinfError, match="nothing can move any more") as caught:
            drive(program, cfg, tmp_path, max_items=4)
        assert "4 dealt to reader[0], which asks for nothing" in str(caught.value)

    def test_other_readers_of_the_channel_share_or_compute_together(self, tmp_path: Path) -> None:
        cfg = {"weights": WEIGHTS, "deal": {"reader": "weight"}}
        (metrics,) = drive(two_readers, cfg, tmp_path).metrics
        assert metrics["count"] == len(WEIGHTS)
        assert shares(metrics) == [[0, 8], [1, 3, 5], [2, 4, 6, 7]]


@pytest.mark.parametrize(("plan", "devices"), [("temporal", 1), ("temporal", 2), ("spatial", 3), ("spatial", 6)])
@pytest.mark.parametrize("portion", [None, 1, 3])
def test_a_cycle_with_dealt_and_keyed_channels(tmp_path: Path, plan: str, devices: int, portion: int | None) -> None:
    """Simulators ask for actions by key, which counts more than whom they were dealt to."""
    cfg = {"num_steps": 2, "envs": 8, "rounds": 3}
    deals = {"envs": "round_robin", "observations": "weight", "actions": "round_robin"}
    found = drive(cyclic_workers.program, cfg, tmp_path, plan=plan, devices=devices, portion=portion, deals=deals)
    assert [m["total"] for m in found.metrics] == cyclic_workers.expected(cfg)
