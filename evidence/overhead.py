"""Runtime overhead: three stages as a flow, and the same three by hand with bare Ray calls, in turn.

The stages do nothing but take their time: 10 ms or 1 ms an item, with an item of a few numbers or with 64 KiB of array
beside them. Each stage is a process of its own. A stage sleeps its time, so that three of them fit on two cores, and
takes what it slept too long off its next sleep: the time of N items is exact, and all that a step takes beyond the
ideal was spent between the stages.

Both are run by one program in one Ray, with object store enough for the peers: after each step of the flow come the
peers, with the same items.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common as common
import numpy as np

from rlinf_core import Flow, In, Out, Worker, recipe, task

PORTIONS = (1, 8)
WINDOW = 64
"""Items in flight between two stages: channels.max_items of the flow, calls or buffers of the peers."""


@dataclass(frozen=True)
class Case:
    """``seconds`` of each stage for an item, ``nbytes`` of array that it carries."""

    name: str
    seconds: float
    nbytes: int

    def items(self, length: float) -> int:
        """Items that take a stage ``length`` seconds, a whole number of portions."""
        return max(1, round(length / self.seconds / max(PORTIONS))) * max(PORTIONS)

    def ideal(self, items: int, portion: int) -> float:
        """Seconds of all items through three stages: the last portion leaves the first stage after ``items`` and then
        passes two more."""
        return (items + 2 * portion) * self.seconds


CASES = (
    Case("10 ms", 0.010, 0),
    Case("10 ms, 64 KiB", 0.010, 65536),
    Case("1 ms", 0.001, 0),
    Case("1 ms, 64 KiB", 0.001, 65536),
)


@dataclass
class Item:
    index: int
    seconds: float
    nbytes: int
    hops: int = 0
    data: Any = None


class Duty:
    """A stage's work: exactly the items' seconds, on average over the items."""

    def __init__(self) -> None:
        self._behind = 0.0

    def __call__(self, items: list[Item], first: bool = False) -> list[Item]:
        began = time.perf_counter()
        wanted = sum(item.seconds for item in items)
        for item in items:
            item.hops += 1
            if first and item.nbytes:
                item.data = np.zeros(item.nbytes, np.uint8)
        pause = wanted - self._behind - (time.perf_counter() - began)
        if pause > 0:
            time.sleep(pause)
        self._behind += time.perf_counter() - began - wanted
        return items


# ------------------------------------------------------------------ as a flow


class Stage(Worker):
    """A stage on a device of its own, written as stages are: portions inside device sections."""

    def setup(self) -> None:
        self.duty = Duty()

    @task
    def work(self, inbox: In[Item], outbox: Out[Item], first: bool) -> None:
        for portion in inbox.batches():
            with self.on_device():
                outbox.put_many(self.duty(portion, first))

    @task
    def last(self, inbox: In[Item]) -> dict[str, float]:
        hops = 0
        for portion in inbox.batches():
            with self.on_device():
                hops += sum(item.hops for item in self.duty(portion))
        return {"hops": float(hops)}


@dataclass
class Settings:
    num_steps: int = 2 * len(CASES)  # all cases in each round; the first round is short and warms up
    length: float = 2.0  # seconds of stage time in a measured step
    size: int = 1  # items of a batch, for the peers


@recipe(schema=Settings)
def stages(flow: Flow, cfg: Any) -> None:
    import ray

    a, b, c = (flow.group(name, Stage) for name in ("a", "b", "c"))
    peers = {name: form(cfg.size) for name, form in FORMS.items()} if ray.is_initialized() else {}  # not while traced
    for step in flow.steps(cfg.num_steps):
        case = CASES[step.index % len(CASES)]
        count = case.items(cfg.length if step.index >= len(CASES) else cfg.length / 10)
        items, before, began = make_items(case, count), burnt(), time.perf_counter()
        first, second, third = step.channels("first", "second", "third")
        step.feed(first, items)
        a.work(first, second, True)
        b.work(second, third, False)
        step.report(c.last(third))
        step.join()
        spent = {"seconds": time.perf_counter() - began, "cpu": burnt_since(before), "load": os.getloadavg()[0]}
        flow.record(f"flow/{step.index}", spent)
        for name, peer in peers.items():
            items = make_items(case, count)
            with peer as run:
                before, began = burnt(), time.perf_counter()
                hops = run([items[i : i + cfg.size] for i in range(0, count, cfg.size)])
                spent = {"seconds": time.perf_counter() - began, "cpu": burnt_since(before), "hops": float(hops)}
            flow.record(f"{name}/{step.index}", spent)


def make_items(case: Case, count: int) -> list[Item]:
    return [Item(i, case.seconds, case.nbytes) for i in range(count)]


def burnt() -> dict[int, float]:
    """Processor seconds so far of each thread below the experiment: the driver's, Ray's own, the stages'."""
    root, found = os.getppid(), {}
    parent: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    for pid in parent:
        above = pid
        while above not in (0, root):
            above = parent.get(above, 0)
        if above:
            for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                try:
                    found[int(thread.parent.name)] = int(thread.read_text().split()[0]) / 1e9
                except OSError:
                    continue
    return found


def burnt_since(before: dict[int, float]) -> float:
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in burnt().items())


# ------------------------------------------------------------------ by hand


class Actor:
    """The same stage as a plain Ray actor, with what each way of connecting them needs."""

    def __init__(self) -> None:
        self._duty = Duty()

    def first(self, items: list[Item]) -> list[Item]:
        return self._duty(items, True)

    def work(self, items: list[Item]) -> list[Item]:
        return self._duty(items)

    def last(self, items: list[Item]) -> int:
        return sum(item.hops for item in self._duty(items))

    def source(self, batches: list[list[Item]]) -> Iterator[list[Item]]:
        for batch in batches:
            yield self.first(batch)

    def through(self, before: Any, window: int, batches: list[list[Item]]) -> Iterator[list[Item]]:
        import ray

        for reference in _stream(before.source, window).remote(batches):
            yield self.work(ray.get(reference))

    def sink(self, before: Any, first: Any, window: int, batches: list[list[Item]]) -> int:
        import ray

        references = _stream(before.through, window).remote(first, window, batches)
        return sum(self.last(ray.get(reference)) for reference in references)


def _stream(method: Any, window: int) -> Any:
    return method.options(num_returns="streaming", _generator_backpressure_num_objects=window)


class Peer:
    """Three actors; inside ``with`` they are ready to be run."""

    def __init__(self, size: int) -> None:
        import ray

        kind = ray.remote(num_cpus=0)(Actor)
        self.a, self.b, self.c = kind.remote(), kind.remote(), kind.remote()
        self.window = WINDOW // size

    def __enter__(self) -> Callable[[list[list[Item]]], int]:
        return self.run

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""

    def run(self, batches: list[list[Item]]) -> int:
        raise NotImplementedError

    def bounded(self, batches: list[list[Item]], submit: Callable[[list[Item]], Any], most: int) -> int:
        """Submit all, never more than ``most`` under way."""
        import ray

        pending: deque[Any] = deque()
        hops = 0
        for batch in batches:
            if len(pending) >= most:
                hops += ray.get(pending.popleft())
            pending.append(submit(batch))
        return hops + sum(ray.get(reference) for reference in pending)


class Chained(Peer):
    """The driver chains calls by references and waits only so that no more than the window are under way."""

    def run(self, batches: list[list[Item]]) -> int:
        return self.bounded(
            batches, lambda x: self.c.last.remote(self.b.work.remote(self.a.first.remote(x))), 2 * self.window
        )


class Streamed(Peer):
    """Streaming generators: each stage iterates over the one before; the driver does nothing."""

    def run(self, batches: list[list[Item]]) -> int:
        import ray

        return int(ray.get(self.c.sink.remote(self.b, self.a, self.window, batches)))


class Compiled(Peer):
    """A compiled graph: the stages hand over through shared memory, which each of them polls without a pause. It is
    compiled before and taken down after each measurement."""

    def __enter__(self) -> Callable[[list[list[Item]]], int]:
        from ray.dag import InputNode

        with InputNode() as given:
            graph = self.c.last.bind(self.b.work.bind(self.a.first.bind(given)))
        self.graph = graph.experimental_compile(_max_inflight_executions=self.window, _buffer_size_bytes=1 << 20)
        self.run([[]])
        return self.run

    def __exit__(self, *_: object) -> None:
        self.graph.teardown()

    def run(self, batches: list[list[Item]]) -> int:
        return self.bounded(batches, self.graph.execute, self.window)


FORMS: dict[str, type[Peer]] = {"chained": Chained, "streamed": Streamed, "compiled": Compiled}
CALLS = ("chained", "streamed")
KEYS = ("seconds", "over_us", "cpu_us")


# ------------------------------------------------------------------ the comparison


def measure(length: float, rounds: int, portion: int) -> list[dict[str, Any]]:
    """One run on the Ray that is there: a row for each round, case and form."""
    folder, _ = common.run_recipe(
        __file__,
        "plan=spatial",
        f"portion={portion}",
        f"size={portion}",
        f"length={length}",
        f"num_steps={(rounds + 1) * len(CASES)}",
        f"channels.max_items={WINDOW}",
    )
    records = common.summary(folder)
    found = []
    for row in common.rows(folder, "train")[len(CASES) :]:
        index = row["step"]
        case = CASES[index % len(CASES)]
        items = case.items(length)
        flow = records[f"flow/{index}"]
        measured = {"flow": (flow["seconds"], flow["cpu"], row["hops"])}
        for form in FORMS:
            peer = records[f"{form}/{index}"]
            measured[form] = (peer["seconds"], peer["cpu"], peer["hops"])
        for form, (seconds, cpu, hops) in measured.items():
            if hops != 3 * items:
                raise RuntimeError(f"{form}, {case.name}: {hops:.0f} stages were passed, not {3 * items}")
            over = (seconds - case.ideal(items, portion)) / items
            found.append(
                {"portion": portion, "case": case.name, "round": index // len(CASES), "form": form, "items": items,
                 "seconds": seconds, "over_us": over * 1e6, "cpu_us": cpu / items * 1e6, "load": flow["load"]}
            )  # fmt: skip
    return found


@contextlib.contextmanager
def started_ray() -> Iterator[None]:
    """A Ray with three device slots, which the run of the flow finds by ``RAY_ADDRESS``."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        resources={f"rlinf_slot_{i}": 1 for i in range(3)},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=512 << 20,
    )
    os.environ["RAY_ADDRESS"] = context.address_info["address"]
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]
        ray.shutdown()


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--runs", {"type": int, "default": 2, "help": "runs for each portion, in turn"}),
        ("--rounds", {"type": int, "default": 3, "help": "measured rounds of a run"}),
        ("--length", {"type": float, "default": 2.0, "help": "seconds of stage time in a step"}),
    )
    # Ray lowers the priority of its workers, of the flow's and the peers' alike; on a busy machine that is measured.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name in Ray
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # bare actors import this file
    data = []
    for _ in range(args.runs):
        for portion in PORTIONS:
            with started_ray():
                data += measure(args.length, args.rounds, portion)
    common.write(args.out, "Runtime overhead", report(data, args), data)


TEXT = """\
Steps of {length:g} s of stage time. *over*: microseconds an item beyond the ideal (N items and the fill, nothing for
handing over). *ratio*: seconds of the flow to those of the peer in the same round. Median (min-max) of {rounds} rounds.
*calls*: the faster of the two forms with ordinary calls, case by case. At most {window} items wait between two stages
in all forms; a portion of 8 is a list of 8 for the peers. Two cores, shared with other work: load {load}.

{table}
Microseconds an item, medians: beyond the ideal / processor time of all processes (driver, Ray's own, stages).

{ways}
{forms}
"""


def whole(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def report(data: list[dict[str, Any]], args: Any) -> str:
    lines, ways = [], []
    for portion in PORTIONS:
        for case in CASES:
            rows = [r for r in data if r["portion"] == portion and r["case"] == case.name]
            forms = {f: [r for r in rows if r["form"] == f] for f in ("flow", *FORMS)}
            middle = {f: {k: statistics.median(r[k] for r in found) for k in KEYS} for f, found in forms.items()}
            best = min(CALLS, key=lambda f: middle[f]["seconds"])
            shown = (forms["flow"], forms[best], forms["compiled"])
            line = [case.name, portion, f"{case.ideal(case.items(args.length), portion):.2f}"]
            line += [common.spread([r["seconds"] for r in found]) for found in shown]
            line += [whole([r["over_us"] for r in found]) for found in shown]
            for peer in shown[1:]:
                pairs = zip(shown[0], peer, strict=True)
                line.append(common.spread([x["seconds"] / y["seconds"] for x, y in pairs]))
            lines.append(line)
            ways.append([case.name, portion, *(f"{m['over_us']:.0f} / {m['cpu_us']:.0f}" for m in middle.values())])
    header = ["stage time", "portion", "ideal s", "flow s", "calls s", "compiled s"]
    header += ["flow over", "calls over", "compiled over", "ratio to calls", "ratio to compiled"]
    return ((__doc__ or "").partition("\n\n")[2] + "\n" + TEXT).format(
        length=args.length,
        rounds=args.runs * args.rounds,
        window=WINDOW,
        load=common.spread([r["load"] for r in data]),
        table=common.table(header, lines),
        ways=common.table(["stage time", "portion", "flow", *FORMS], ways),
        forms="\n".join(f"- {name}: {' '.join((form.__doc__ or '').split())}" for name, form in FORMS.items()),
    )


if __name__ == "__main__":
    main()
