"""Whole toy flows in debug mode (threads, real sockets, no Ray): values, faults, the account, and no hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import toy_workers as toys
from driving import Kept, drive

from rlinf_core import In, Out, Prompt, Worker, task
from rlinf_core.config.node import MissingKeyError
from rlinf_core.errors import (
    AccountError,
    Cancelled,
    ChannelError,
    ChannelPoisoned,
    ConfigError,
    EndOfChannel,
    PlanError,
    TraceError,
    WaitTimeout,
    WorkerError,
)
from rlinf_core.hub import server
from rlinf_core.hub.core import HubCore

SMALL = {"num_steps": 3, "prompts": 5, "group_size": 4}


@pytest.mark.parametrize("plan", ["temporal", "spatial"])
@pytest.mark.parametrize("portion", [None, 1, 3])
def test_the_same_program_gives_the_same_under_every_plan_and_portion(tmp_path: Path, plan: str, portion: int) -> None:
    devices = 1 if plan == "temporal" else 2
    kept = drive(toys.program, SMALL, tmp_path, plan=plan, devices=devices, portion=portion)
    assert [m["total"] for m in kept.metrics] == toys.expected(3, 5, 4)


def test_a_swapped_stage_is_offloaded_only_when_another_wants_the_device(tmp_path: Path) -> None:
    shared = drive(toys.program, SMALL, tmp_path, plan="temporal", devices=1).metrics[-1]
    assert (shared["onloads"], shared["offloads"]) == (3, 3), "an offload after set-up, then a switch per step"
    alone = drive(toys.program, SMALL, tmp_path, plan="spatial", devices=2).metrics[-1]
    assert (alone["onloads"], alone["offloads"]) == (1, 0)


def test_a_channel_smaller_than_the_batch_does_not_block_a_shared_device(tmp_path: Path) -> None:
    kept = drive(toys.program, SMALL, tmp_path, plan="temporal", devices=1, max_items=2)
    assert [m["total"] for m in kept.metrics] == toys.expected(3, 5, 4)
    kept = drive(toys.program, SMALL, tmp_path, plan="spatial", devices=2, max_items=2)
    assert [m["total"] for m in kept.metrics] == toys.expected(3, 5, 4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("setup:raise", r"maker\[0\] failed in setup: RuntimeError: as asked"),
        ("setup_doubler:raise", r"doubler\[0\] failed in setup: RuntimeError: as asked"),
        ("make:raise", r"maker\[0\] failed in make of train/0: RuntimeError: as asked"),
        ("double:raise", r"doubler\[0\] failed in double of train/0: RuntimeError: as asked"),
        ("add:raise", r"adder\[0\] failed in add of train/0: RuntimeError: as asked"),
        ("add:exit", r"adder\[0\] failed in add of train/0: the task called sys\.exit\(3\)"),
    ],
)
def test_a_worker_that_raises_fails_the_run_with_its_own_traceback(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        drive(toys.program, {**SMALL, "fault": fault}, tmp_path, devices=1)
    assert "toy_workers.py" in str(caught.value) and "host.py" not in str(caught.value)


def test_drops_are_named_and_a_forgotten_sample_is_an_error(tmp_path: Path) -> None:
    kept = drive(toys.program, {**SMALL, "drop": "p1/2"}, tmp_path, devices=1)
    assert kept.dropped == [{"p1/2": "asked for"}] * 3
    assert kept.metrics[0]["samples/dropped"] == 1
    assert kept.metrics[0]["total"] == toys.expected(1, 5, 4)[0] - 2 * 3
    with pytest.raises(
        AccountError, match=r"step train/0: 20 sample\(s\) were neither trained on nor dropped.*\n.*p0/0"
    ):
        drive(toys.program, {**SMALL, "forget": True}, tmp_path, devices=1)


def two_readers(flow: Any, cfg: Any) -> None:
    """The maker's toys go to two groups, each of which gets all of them; a third joins the two streams."""
    maker = flow.group("maker", toys.Maker, cfg)
    doubler = flow.group("doubler", toys.Doubler, cfg)
    pairs = flow.group("pairs", toys.PairAdder, cfg)
    for step in flow.steps(cfg["num_steps"]):
        prompts, made, doubled = step.channels("prompts", "made", "doubled")
        step.feed(prompts, toys.prompts_of(step.index, cfg["prompts"], cfg["group_size"]))
        maker.make(prompts, made)
        doubler.double(made, doubled)
        step.report(pairs.add(made, doubled))
        step.join()


def test_two_groups_read_one_channel_and_join_matches_by_id(tmp_path: Path) -> None:
    total = sum(2 * (p + i) ** 2 for p in range(5) for i in range(4))
    kept = drive(two_readers, SMALL, tmp_path, devices=1)
    assert [m["pairs"] for m in kept.metrics] == [total] * 3
    kept = drive(two_readers, {**SMALL, "drop": "p4/3"}, tmp_path, devices=1)
    assert [m["pairs"] for m in kept.metrics] == [total - 2 * 7**2] * 3


class Reader(Worker):
    device = False

    @task
    async def tally(self, items: In[int]) -> dict[str, float]:
        return {"sum": sum([item async for item in items])}

    @task
    def first_of_key(self, items: In[int], key: str) -> dict[str, float]:
        value = items.get(key=key)
        rest = [item for batch in items.batches(2) for item in batch]
        return {"value": value, "rest": len(rest)}

    @task
    def weighted(self, items: In[int]) -> dict[str, float]:
        sizes = []
        while True:
            try:
                sizes.append(len(items.get_batch(weight=10.0)))
            except EndOfChannel:
                return {"batches": len(sizes), "items": sum(sizes)}

    @task
    def impatient(self, items: In[int]) -> dict[str, float]:
        items.get(timeout=0.05)
        return {}


class Writer(Worker):
    device = False

    @task
    async def write(self, items: Out[int], count: int) -> None:
        for i in range(count):
            await items.put_async(i)

    @task
    def write_keyed(self, items: Out[int]) -> None:
        for i, key in enumerate("abab"):
            items.put(i, key=key, weight=4.0)
        items.put(99, key="heavy", weight=50.0)

    @task
    def never(self, items: Out[int], other: In[int]) -> None:
        other.get()


def passing(write: Any, read: Any) -> Any:
    def program(flow: Any, cfg: Any) -> None:
        writer, reader = flow.group("writer", Writer), flow.group("reader", Reader)
        for step in flow.steps(1):
            items = step.channels("items")
            write(writer, items)
            step.report(read(reader, items))
            step.join()

    return program


@pytest.mark.parametrize(
    ("write", "read", "want"),
    [
        (lambda w, c: w.write(c, 100), lambda r, c: r.tally(c), {"sum": 4950}),
        (lambda w, c: w.write(c, 0), lambda r, c: r.tally(c), {"sum": 0}),
        (lambda w, c: w.write_keyed(c), lambda r, c: r.first_of_key(c, "b"), {"value": 1, "rest": 4}),
        (lambda w, c: w.write_keyed(c), lambda r, c: r.weighted(c), {"batches": 3, "items": 5}),
    ],
)
def test_async_keys_and_weights(tmp_path: Path, write: Any, read: Any, want: dict[str, float]) -> None:
    metrics = drive(passing(write, read), None, tmp_path, devices=1).metrics[0]
    assert {k: metrics[k] for k in want} == want


def test_a_get_with_a_deadline_names_the_channel(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        writer, reader = flow.group("writer", Writer), flow.group("reader", Reader)
        for step in flow.steps(1):
            items, back = step.channels("items", "back")
            step.feed(back, iter_blocked())
            writer.never(items, back)
            reader.impatient(items)
            step.join()

    released = threading.Event()

    def iter_blocked() -> Any:
        def items() -> Any:
            released.wait(20)
            yield from ()

        return items

    with pytest.raises(WorkerError, match=r"reader\[0\] failed .* WaitTimeout: .*'train/0:items'.* within 0\.05 s"):
        drive(program, None, tmp_path, devices=1)
    released.set()


def test_a_feed_that_raises_fails_the_step_by_name(tmp_path: Path) -> None:
    def items() -> Any:
        yield 1
        raise KeyError("no such row")

    def program(flow: Any, cfg: Any) -> None:
        reader = flow.group("reader", Reader)
        for step in flow.steps(1):
            channel = step.channels("items")
            step.feed(channel, items)
            reader.tally(channel)
            step.join()

    with pytest.raises(WorkerError, match=r"the feed of channel 'train/0:items' failed: KeyError: 'no such row'"):
        drive(program, None, tmp_path, devices=1)


def test_a_later_step_that_calls_differently_is_refused_before_it_runs(tmp_path: Path) -> None:
    calls = []

    def program(flow: Any, cfg: Any) -> None:
        writer, reader = flow.group("writer", Writer), flow.group("reader", Reader)
        calls.append(flow)
        for step in flow.steps(2):
            items = step.channels("items")
            writer.write(items, 1)
            if len(calls) == 2 and step.index == 1:
                reader.first_of_key(items, "x")
            else:
                reader.tally(items)
            step.join()

    with pytest.raises(
        TraceError, match=r"train/1 differs.*call 2 was reader\.tally\(items\) when traced and is reader\.first"
    ):
        drive(program, None, tmp_path, devices=1)


class Crossed(Worker):
    """Writes one channel whole before it touches the other, for a reader that wants them the other way round."""

    device = False

    @task
    def write(self, one: Out[int], two: Out[int]) -> None:
        for i in range(5):
            one.put(i)
        two.put(1)

    @task
    def read(self, one: In[int], two: In[int]) -> None:
        for _ in two:
            pass
        for _ in one:
            pass


def test_a_deadlock_is_found_and_says_who_waits_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEADLOCK_AFTER_S", 0.2)

    def program(flow: Any, cfg: Any) -> None:
        a, b = flow.group("a", Crossed), flow.group("b", Crossed)
        for step in flow.steps(1):
            one, two = step.channels("one", "two")
            a.write(one, two)
            b.read(one, two)
            step.join()

    with pytest.raises(WorkerError, match="nothing can move any more") as caught:
        drive(program, None, tmp_path, devices=1, max_items=2)
    assert "a[0]: in write of train/0, waiting for credit to put on channel 'train/0:one'" in str(caught.value)
    assert "b[0]: in read of train/0, waiting for an item of channel 'train/0:two'" in str(caught.value)
    assert drive(program, None, tmp_path, devices=1, max_items=10).metrics


class Heavy(Worker):
    """Once it has worked, it is still offloading when the hub looks whether anything can move."""

    looked: Any = None  # event

    def setup(self) -> None:
        self.worked = False

    @task
    def work(self) -> None:
        with self.on_device():
            self.worked = True

    def offload(self) -> None:
        assert not self.worked or Heavy.looked.wait(30)


def test_a_long_offload_is_no_deadlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEADLOCK_AFTER_S", 0.0)
    Heavy.looked = threading.Event()
    look = HubCore.stuck

    def stuck(core: HubCore) -> bool:
        found = look(core)
        if core.lock is not None and core.lock.offloading():
            Heavy.looked.set()
        return found

    monkeypatch.setattr(HubCore, "stuck", stuck)

    def program(flow: Any, cfg: Any) -> None:
        one, two = flow.group("one", Heavy), flow.group("two", Heavy)
        for step in flow.steps(2):
            one.work()
            two.work()
            step.join()

    assert len(drive(program, None, tmp_path, devices=1).metrics) == 2
    assert Heavy.looked.is_set()


def test_a_worker_that_never_returns_is_reported_with_its_stack(tmp_path: Path) -> None:
    done = threading.Event()
    Sleeper.done = done

    def program(flow: Any, cfg: Any) -> None:
        sleeper = flow.group("sleeper", Sleeper)
        for step in flow.steps(1):
            sleeper.sleep()
            step.join()

    with pytest.raises(
        WorkerError, match=r"no worker has said anything.*\n.*sleeper\[0\]: working in sleep of train/0"
    ) as caught:
        drive(program, None, tmp_path, devices=1, stall_timeout_s=0.3)
    assert "self.done.wait" in str(caught.value)
    done.set()


class Sleeper(Worker):
    device = False
    done: Any = None

    @task
    def sleep(self) -> None:
        self.done.wait(30)

    @task
    def strange(self) -> Any:
        return lambda: 1


def test_a_handle_has_values_durations_and_deadlines(tmp_path: Path) -> None:
    Sleeper.done = threading.Event()
    seen: dict[str, Any] = {}

    def program(flow: Any, cfg: Any) -> None:
        sleeper = flow.group("sleeper", Sleeper)
        for step in flow.steps(1):
            handle = sleeper.sleep()
            if hasattr(type(handle), "wait"):
                with pytest.raises(WaitTimeout, match=r"sleeper\.sleep\(\) not done by sleeper\[0\] within 0\.1 s"):
                    handle.wait(0.1)
                Sleeper.done.set()
                seen["values"] = handle.wait(10)
                seen["durations"] = handle.durations
            step.join()

    drive(program, None, tmp_path, devices=1)
    assert seen["values"] == [None] and set(seen["durations"]) == {"min", "mean", "max"}


def test_a_result_that_cannot_be_sent_names_the_task(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        sleeper = flow.group("sleeper", Sleeper)
        for step in flow.steps(1):
            sleeper.strange()
            step.join()

    with pytest.raises(WorkerError, match=r"strange\(\) returned a function that cannot be sent to the driver"):
        drive(program, None, tmp_path, devices=1)


def test_an_unread_item_is_an_error(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        writer, reader = flow.group("writer", Writer), flow.group("reader", Reader)
        for step in flow.steps(1):
            items = step.channels("items")
            writer.write(items, 3)
            reader.impatient(items)
            step.join()

    with pytest.raises(ChannelError, match=r"items were put that nobody took: 2 on channel 'train/0:items'"):
        drive(program, None, tmp_path, devices=1)


def test_no_thread_of_a_finished_run_stays(tmp_path: Path) -> None:
    def ours() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("rlinf-")}

    before = ours()
    drive(toys.program, SMALL, tmp_path, devices=1, kept=Kept())
    deadline = time.monotonic() + 10
    while ours() - before and time.monotonic() < deadline:
        for thread in threading.enumerate():
            if thread.name in ours() - before:
                thread.join(1.0)
    assert ours() - before == set()


class Holder(Worker):
    """Keeps the last toy of a step for the next one."""

    device = False

    def setup(self) -> None:
        self.kept: list[Any] = []

    @task
    def hold(self, made: In[Any], out: Out[Any]) -> None:
        late, self.kept = self.kept, []
        for toy in late:
            out.put(toy)
        for toy in made:
            if toy.id.endswith("p0/0") and self.step_index < self.cfg["until"]:
                self.carry(toy, f"train/{self.step_index + 1}")
                self.kept.append(toy)
            else:
                out.put(toy)

    @task
    def end(self, held: In[Any]) -> dict[str, float]:
        toys_ = list(held)
        self.trained(toys_)
        return {"count": len(toys_)}


def carrying(flow: Any, cfg: Any) -> None:
    maker, holder = flow.group("maker", toys.Maker, cfg), flow.group("holder", Holder, cfg)
    last = flow.group("last", Holder, cfg)
    for step in flow.steps(3):
        prompts, made, held = step.channels("prompts", "made", "held")
        named = [Prompt(f"{step.index}-p{i}", str(i), group_size=2) for i in range(2)]
        step.feed(prompts, named)
        maker.make(prompts, made)
        holder.hold(made, held)
        step.report(last.end(held))
        step.join()


def test_samples_can_be_carried_to_a_later_step_but_not_to_nowhere(tmp_path: Path) -> None:
    kept = drive(carrying, {"until": 2}, tmp_path, devices=1)
    assert [m["count"] for m in kept.metrics] == [3, 4, 5]
    with pytest.raises(AccountError, match=r"carried to steps that never came:\n  to train/3: 2-p0/0"):
        drive(carrying, {"until": 3}, tmp_path, devices=1)


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


class Thrower(Worker):
    device = False
    where = ""
    what: Any = None

    def hit(self, place: str) -> None:
        if Thrower.where == place:
            raise Thrower.what

    def setup(self) -> None:
        self.hit("setup")

    def teardown(self) -> None:
        self.hit("teardown")

    @task
    def work(self) -> dict[str, float]:
        self.hit("task")
        return {"x": 1.0}

    @task
    def strange_metrics(self) -> Any:
        return {"x": "many"}


def throwing(flow: Any, cfg: Any) -> None:
    thrower = flow.group("thrower", Thrower)
    for step in flow.steps(2):
        step.report(thrower.work())
        step.join()


@pytest.mark.parametrize("where", ["setup", "task", "teardown"])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (BaseException("odd"), "BaseException: odd"),
        (BadText(), r"BadText: \(its __str__ raised RuntimeError\)"),
        (Cancelled("mine"), "Cancelled: mine"),
        (ChannelPoisoned("mine too"), "ChannelPoisoned: mine too"),
    ],
)
def test_whatever_ends_a_task_is_named(tmp_path: Path, where: str, what: BaseException, text: str) -> None:
    Thrower.where, Thrower.what = where, what
    with pytest.raises(WorkerError, match=rf"thrower\[0\] failed in {where if where != 'task' else 'work'}.*{text}"):
        drive(throwing, None, tmp_path, devices=1)
    Thrower.where = ""
    assert len(drive(throwing, None, tmp_path, devices=1).metrics) == 2


@pytest.mark.parametrize(
    ("what", "bad"),
    [(ConfigError("no such model"), True), (MissingKeyError("no key 'x'"), False), (ZeroDivisionError("0"), False)],
)
def test_bad_input_that_a_worker_finds_is_told_from_its_own_faults(
    tmp_path: Path, what: BaseException, bad: bool
) -> None:
    for where in ("setup", "task"):
        Thrower.where, Thrower.what = where, what
        with pytest.raises(WorkerError, match=str(what)) as caught:
            drive(throwing, None, tmp_path, devices=1)
        assert caught.value.bad_input is bad and "hit" in caught.value.traceback_text
    Thrower.where = ""


def test_a_reported_value_that_is_no_number_names_the_task(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        thrower = flow.group("thrower", Thrower)
        for step in flow.steps(1):
            step.report(thrower.strange_metrics())
            step.join()

    with pytest.raises(TraceError, match=r"thrower\.strange_metrics\(\) is reported.* str 'x': str"):
        drive(program, None, tmp_path, devices=1)


def test_leaving_a_step_before_its_join_is_an_error_and_after_it_is_not(tmp_path: Path) -> None:
    def program(flow: Any, joined: Any) -> None:
        thrower = flow.group("thrower", Thrower)
        for step in flow.steps(3):
            thrower.work()
            if joined:
                step.join()
            if step.index == 1:
                break

    with pytest.raises(TraceError, match=r"left step train/1 before its join"):
        drive(program, False, tmp_path, devices=1)
    assert len(drive(program, True, tmp_path, devices=1).metrics) == 2


def test_a_driver_that_works_before_it_feeds_is_no_deadlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEADLOCK_AFTER_S", 0.1)
    busy = threading.Event()

    def program(flow: Any, cfg: Any) -> None:
        reader = flow.group("reader", Reader)
        for step in flow.steps(1):
            items = step.channels("items")
            handle = reader.tally(items)
            if hasattr(type(handle), "wait"):
                busy.wait(1.5)
            step.feed(items, [1, 2])
            step.report(handle)
            step.join()

    assert drive(program, None, tmp_path, devices=1).metrics[0]["sum"] == 3


@pytest.mark.parametrize("what", [SystemExit(3), BadText(), BaseException("odd")])
def test_a_feed_that_ends_in_any_way_is_named(tmp_path: Path, what: BaseException) -> None:
    def items() -> Any:
        yield 1
        raise what

    def program(flow: Any, cfg: Any) -> None:
        reader = flow.group("reader", Reader)
        for step in flow.steps(1):
            channel = step.channels("items")
            step.feed(channel, items)
            reader.tally(channel)
            step.join()

    with pytest.raises(WorkerError, match=r"the feed of channel 'train/0:items' failed: " + type(what).__name__):
        drive(program, None, tmp_path, devices=1)


def test_ranks_that_compute_together_cannot_be_debugged_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the 2 ranks of group 'adder' cannot compute together"):
        drive(toys.program, SMALL, tmp_path, devices=2)


class Batcher(Worker):
    device = False

    @task
    def write(self, items: Out[int]) -> None:
        items.put_many(range(10), keys=["a", "b"] * 5, weights=[2.0] * 10)
        items.put_many([])


def test_put_many_keeps_order_keys_weights_and_credit(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        writer, reader = flow.group("writer", Batcher), flow.group("reader", Reader)
        for step in flow.steps(1):
            items = step.channels("items")
            writer.write(items)
            step.report(cfg(reader, items))
            step.join()

    kept = drive(program, lambda r, c: r.first_of_key(c, "b"), tmp_path, devices=1, max_items=3)
    assert (kept.metrics[0]["value"], kept.metrics[0]["rest"]) == (1, 9)
    kept = drive(program, lambda r, c: r.weighted(c), tmp_path, devices=1)
    assert (kept.metrics[0]["batches"], kept.metrics[0]["items"]) == (2, 10)


def test_ranks_that_compute_together_join_in_portions(tmp_path: Path) -> None:
    def program(flow: Any, cfg: Any) -> None:
        maker = flow.group("maker", toys.Maker, cfg)
        doubler = flow.group("doubler", toys.Doubler, cfg)
        trainer = flow.group("trainer", toys.PairTrainer, cfg)
        for step in flow.steps(cfg["num_steps"]):
            prompts, plain, doubled = step.channels("prompts", "plain", "doubled")
            step.feed(prompts, lambda index=step.index: toys.prompts_of(index, cfg["prompts"], cfg["group_size"]))
            maker.make(prompts, plain)
            doubler.double(plain, doubled)
            step.report(trainer.add(plain, doubled), reduce="sum")
            step.join()

    for portion in (None, 3):
        found = drive(program, SMALL, tmp_path, plan="temporal", devices=2, portion=portion).metrics[0]
        pairs = [2 * (p + i) ** 2 for p in range(SMALL["prompts"]) for i in range(SMALL["group_size"])]
        assert found["pairs"] == sum(pairs)
        assert found["portions"] == 2 * (1 if portion is None else 3), "five groups, two at once, on both ranks"


class Met(Worker):
    collective = True
    process_group = False
    places: ClassVar[list[str]] = []

    @task
    def meet(self) -> None:
        with self.on_device():
            self.places.append(self.parallel.init_method)


def test_ranks_meet_at_another_place_at_each_start(tmp_path: Path) -> None:
    """A run that is killed leaves the file in which its ranks have met; one that goes on must not read it."""

    def program(flow: Any, cfg: Any) -> None:
        met = flow.group("met", Met)
        for step in flow.steps(1):
            met.meet()
            step.join()

    Met.places.clear()
    for start in (1, 2):
        drive(program, None, tmp_path, devices=2)
        assert len(Met.places) == 2 * start and len(set(Met.places)) == start
    assert all(place.startswith(f"file://{tmp_path}/.rendezvous-met-") for place in Met.places)
