"""The hub as a whole (channels, device lock, turns) under random flows, placements, portions, limits and deaths.

No thread and no socket: each rank is a generator that yields what it sends, and a seeded scheduler picks who goes on.
Checked: one replica at work on a device at a time, no two loaded that must not be, everything arrives exactly once at
every end of the flow, nothing stands still for ever, and a death ends the run by name.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rlinf_core.board import events as ev
from rlinf_core.board.dealing import DealtQueue, cannot_deal
from rlinf_core.board.entries import DRAINED, Want
from rlinf_core.board.queue import ReaderQueue
from rlinf_core.devicelock import DeviceLock
from rlinf_core.graph import CallSpec, FlowGraph, PhaseGraph, StageSpec
from rlinf_core.hub.core import HubCore
from rlinf_core.hub.messages import (
    DRIVER,
    Accepted,
    Acquire,
    AtSafePoint,
    Blocked,
    Call,
    CallResult,
    CallTimes,
    Cancel,
    ChannelArg,
    Granted,
    Hello,
    Offload,
    Offloaded,
    ReleaseDevices,
)
from rlinf_core.payload import Descriptor
from rlinf_core.plan import FlatPlan, GroupPlan
from rlinf_core.spill import spills

ITEMS, STEPS = 8, 2
Program = Generator[Any, Any, None]
Ask = tuple[str, Any]


@dataclass
class Flow:
    """A random flow: stage i reads one or two earlier channels and writes ``o<i>`` when somebody reads it."""

    graph: FlowGraph
    plan: FlatPlan
    inputs: dict[str, tuple[str, ...]]
    limit: int
    gets_inside: frozenset[str]
    deals: dict[tuple[str, str], str]
    """How a channel is dealt to a group that reads it; shared where it is not said."""


def random_flow(rng: random.Random) -> Flow:
    count = rng.randint(2, 5)
    names = [f"s{i}" for i in range(count)]
    inputs: dict[str, tuple[str, ...]] = {"s0": ("fed",)}
    for i in range(1, count):
        many = 2 if i > 1 and rng.random() < 0.3 else 1
        inputs[names[i]] = tuple(f"o{k}" for k in sorted(rng.sample(range(i), many)))
    read = {channel for channels in inputs.values() for channel in channels}
    stages, groups = {}, {}
    for order, name in enumerate(names):
        device, collective = rng.random() < 0.85, rng.random() < 0.4
        barrier = rng.choice(["item", "item", "group", "batch"])
        if barrier == "batch" and not collective:
            barrier = "item"
        ranks = rng.randint(1, 2)
        free = [0, 1, 2]
        rng.shuffle(free)
        wide = rng.random() < 0.2 and ranks == 1
        processes = tuple((tuple(free[:2]) if wide else (free[rank],)) if device else () for rank in range(ranks))
        stages[name] = StageSpec(name, None if device else ranks, device, collective, barrier)
        groups[name] = GroupPlan(name, processes, not device, order, collective)
    for name, group in groups.items():
        if group.devices:
            alone = not any(group.devices & o.devices for n, o in groups.items() if n != name)
            together = rng.choice(["", "", "", "set"])
            groups[name] = replace(group, resident=alone or rng.random() < 0.15, together=together)
    calls = tuple(CallSpec(n, "work", inputs[n], (f"o{i}",) if f"o{i}" in read else ()) for i, n in enumerate(names))
    graph = FlowGraph(stages, {"p": PhaseGraph("p", ("fed", *sorted(read - {"fed"})), ("fed",), calls)})
    graph.validate()
    portion: dict[str, int | None] = {}
    for name, channels in inputs.items():
        for channel in channels:
            batch = stages[name].barrier == "batch"
            portion[f"p:{channel}>{name}"] = None if batch else rng.choice([None, 1, 2, 3, 5])
    alternating = {
        name: frozenset(b for b in graph.downstream(name) if groups[b].devices & group.devices)
        for name, group in groups.items()
        if group.devices and rng.random() < 0.3
    }
    plan = FlatPlan(groups, portion, frozenset(spills(graph, groups, alternating)), alternating)
    inside = frozenset(n for n in names if groups[n].devices and rng.random() < 0.3)
    deals = {
        (channel, name): rng.choice(["round_robin", "weight"])
        for name, channels in inputs.items()
        for channel in channels[:1]
        if rng.random() < 0.5 and not cannot_deal("weight", stages[name].collective, stages[name].barrier)
    }
    return Flow(graph, plan, inputs, rng.choice([1, 2, 4, 100]), inside, deals)


@dataclass
class Rank:
    """One member: its program, what it waits for, and whether its state is on the device."""

    program: Program
    waits: Any = None
    started: bool = False
    done: bool = False
    loaded: bool = False
    inside: bool = False
    offload: bool = False
    rounds: int = 0
    patience: int = 99
    """How many gets it does not give up; a get with a timeout is withdrawn and asked again."""
    asked: Any = None
    cancelled: bool = False
    answers: dict[Any, Any] = field(default_factory=dict)
    unanswered: deque[Any] = field(default_factory=deque)
    """Puts that it went on without, oldest first."""
    window: int = 0
    """As many of them as it may have; 0: it waits for each."""


class World:
    def __init__(self, flow: Flow, rng: random.Random) -> None:
        self.flow, self.rng = flow, rng
        self.core = HubCore()
        self.ranks: dict[str, Rank] = {}
        self.got: dict[tuple[str, str], list[str]] = {}
        self.req = 0
        plan, phase = flow.plan, flow.graph.phases["p"]
        self.specs = plan.replica_specs()
        places = {
            f"{n}[{r}]": g.replica(r)
            for n, g in plan.groups.items()
            for r, devices in enumerate(g.processes)
            if devices
        }
        self.core.set_lock(DeviceLock(self.specs), places, plan.gives_way())
        self.send(DRIVER, Hello(DRIVER, 0, "", ("", 0)))
        for name, group in plan.groups.items():
            for rank in range(len(group.processes)):
                member = f"{name}[{rank}]"
                window = rng.choice([0, 1, 2, 8])
                self.ranks[member] = Rank(self.rank(name, rank), window=window, patience=rng.choice([0, 1, 99]))
                self.send(member, Hello(member, 0, "", ("", 0)))
        self.ranks[DRIVER] = Rank(self.feed())
        for step in range(STEPS):
            self.open(f"p/{step}", phase)

    def open(self, step: str, phase: PhaseGraph) -> None:
        flow, groups = self.flow, self.flow.plan.groups
        for channel in phase.channels:
            full = f"{step}:{channel}"
            self.send(DRIVER, ev.OpenChannel(full, step, flow.limit, 0, flow.plan.spills("p", channel)))
            for index in phase.readers(channel):
                name = phase.calls[index].group
                stage, ranks = flow.graph.stages[name], len(groups[name].processes)
                portion = flow.plan.portion_for("p", channel, name)
                ordered = stage.collective and stage.barrier == "group"
                deal: Any = flow.deals.get((channel, name), "shared")
                barrier: Any = stage.barrier
                self.send(
                    DRIVER,
                    ev.AddReader(full, name, ranks, stage.collective, barrier, portion, ordered, deal=deal),
                )
            for index in phase.writers(channel):
                for rank in range(len(groups[phase.calls[index].group].processes)):
                    self.send(DRIVER, ev.AddWriter(full, f"{phase.calls[index].group}[{rank}]#{index}"))
            if channel == "fed":
                self.send(DRIVER, ev.AddWriter(full, "driver#feed0"))
            self.send(DRIVER, ev.SealWriters(full))
        for index, call in enumerate(phase.calls):
            for rank in range(len(groups[call.group].processes)):
                member = f"{call.group}[{rank}]"
                outputs = tuple(ChannelArg(f"{step}:{c}", "out", f"{member}#{index}") for c in call.outputs)
                inputs = tuple(f"{step}:{c}" for c in call.inputs)
                number = int(step[2:]) * 100 + index
                self.send(DRIVER, Call(number, member, "task", "work", step, 0, b"", outputs, inputs))

    # What members do

    def feed(self) -> Program:
        for step in range(STEPS):
            for i in range(ITEMS):
                where, group = Descriptor(DRIVER, ("", 0), i, 0), f"g{i // 2}"
                item = ev.Item(where, ids=(f"{group}/{i % 2}",), group=group, group_size=2)
                yield "put", (f"p/{step}:fed", "driver#feed0", item)
            self.send(DRIVER, ev.CloseWriter(f"p/{step}:fed", "driver#feed0"))

    def rank(self, name: str, rank: int) -> Program:
        member, phase = f"{name}[{rank}]", self.flow.graph.phases["p"]
        index = next(i for i, call in enumerate(phase.calls) if call.group == name)
        outputs = phase.calls[index].outputs
        devices = bool(self.flow.plan.groups[name].processes[rank])
        inside_gets = devices and name in self.flow.gets_inside
        for step in range(STEPS):
            if inside_gets:
                yield "enter", member
            while True:
                entries = yield "get", (f"p/{step}", name, rank, inside_gets)
                if entries is None:
                    break
                if devices and not inside_gets:
                    yield "enter", member
                    yield "sync", None
                for entry in entries:
                    self.got.setdefault((f"p/{step}", name), []).append(entry.ids[0])
                    for channel in outputs:
                        mine = replace(entry, uid=-1, descriptor=Descriptor(member, ("", 0), 0, 0))
                        yield from self.put(member, (f"p/{step}:{channel}", f"{member}#{index}", mine))
                if devices and not inside_gets:
                    self.leave(member)
            if inside_gets:
                self.leave(member)
            yield from self.settle(member, 0)
            for channel in outputs:
                self.send(member, ev.CloseWriter(f"p/{step}:{channel}", f"{member}#{index}"))
            self.send(member, CallResult(step * 100 + index, member, True, b"", CallTimes(0, 0)))
            yield "pause", None

    def put(self, member: str, what: Any) -> Program:
        """Put as a task does: go on without the answer while no more than the window have none."""
        rank = self.ranks[member]
        if not rank.window:
            yield "put", what
            return
        self.req += 1
        req = (member, -self.req)
        rank.unanswered.append(req)
        channel, writer, item = what
        self.send(member, ev.Put(req=req, writer=writer, channel=channel, items=(item,), ahead=True))
        yield "pause", None
        yield from self.settle(member, rank.window)

    def settle(self, member: str, most: int) -> Program:
        rank = self.ranks[member]
        while len(rank.unanswered) > most:
            req = rank.unanswered.popleft()
            if req in rank.answers and self.rng.random() < 0.5:
                del rank.answers[req]  # it has seen the answer, else that and the following cross
            else:
                yield "blocked", req

    def leave(self, member: str) -> None:
        self.ranks[member].inside = False
        self.send(member, ReleaseDevices(member=member))

    # Traffic

    def send(self, member: str, message: Any) -> None:
        for to, what in self.core.handle(member, message):
            self.deliver(to, what)

    def deliver(self, to: str, what: Any) -> None:
        if to not in self.ranks:
            return
        rank = self.ranks[to]
        if isinstance(what, Offload):
            rank.offload = True
        elif isinstance(what, Cancel):
            rank.cancelled = True
        elif getattr(what, "req", None) is not None:
            rank.answers[what.req] = what

    def ask(self, member: str, kind: str, what: Any) -> Any:
        """Send a request of the member's program; returns what it waits for."""
        self.req += 1
        req = (member, self.req)
        if kind == "sync":
            return req
        if kind == "put":
            channel, writer, item = what
            self.send(member, ev.Put(req=req, writer=writer, channel=channel, items=(item,)))
        elif kind == "blocked":
            self.send(member, Blocked(what))
            return what
        elif kind in ("enter", "regain"):
            self.send(member, Acquire(req, member, kind == "regain"))
        elif kind == "get":
            step, name, rank, inside = what
            channels = [f"{step}:{c}" for c in self.flow.inputs[name]]
            if len(channels) == 1:
                event: Any = ev.Get(req=req, channel=channels[0], group=name, rank=rank, mode="portion", n=ev.PLAN)
            else:
                event = ev.JoinReader(
                    req=req, group=name, rank=rank, a=channels[0], b=channels[1], mode="portion", n=ev.PLAN
                )
            self.send(member, AtSafePoint(event) if inside else event)
            if inside and req not in self.ranks[member].answers:
                self.ranks[member].inside = False  # a safe point
        return req

    def answer(self, member: str, kind: str, what: Any) -> Any:
        if kind == "enter" or (kind == "get" and self.inside_get(member)):
            self.enter(member)
        if isinstance(what, ev.Deliver):
            self.send(member, ev.Fetched(uids=tuple(i.uid for i in what.items), group=member.partition("[")[0]))
            return what.items
        if isinstance(what, ev.DeliverJoined):
            uids = tuple(i.uid for pair in what.pairs for i in pair)
            self.send(member, ev.Fetched(uids=uids, group=member.partition("[")[0]))
            return [a for a, _ in what.pairs]
        if what is None or isinstance(what, ev.End):
            return None
        assert isinstance(what, ev.PutDone | Accepted | Granted), what
        return None

    def inside_get(self, member: str) -> bool:
        return member.partition("[")[0] in self.flow.gets_inside

    def enter(self, member: str) -> None:
        rank = self.ranks[member]
        mine, _ = self.core.lock_replica[member]
        for other, state in self.ranks.items():
            place = self.core.lock_replica.get(other)
            if place is None or place[0] == mine or not self.specs[place[0]].devices & self.specs[mine].devices:
                continue
            assert not state.inside, f"{member} and {other} are at work on one device"
            beside = self.specs[mine].fits_beside(self.specs[place[0]])
            assert beside or not state.loaded, f"{member} is let in while {other} is loaded"
        rank.inside = rank.loaded = True
        rank.rounds += 1

    # Running

    def actions(self) -> list[str]:
        return [m for m, r in self.ranks.items() if self.can_act(m, r)]

    def can_act(self, member: str, rank: Rank) -> bool:
        if rank.offload and (rank.done or rank.waits is not None):
            return True
        if not rank.done and rank.waits is not None and rank.waits[0] == "sync":
            return all(peer.rounds >= rank.rounds for peer in self.peers(member))
        if not rank.done and rank.waits is not None and self.gives_up(rank):
            return True
        return not rank.done and (rank.waits is None or rank.waits[1] in rank.answers)

    def gives_up(self, rank: Rank) -> bool:
        return rank.waits[0] == "get" and rank.patience <= 0

    def withdraw(self, member: str, rank: Rank) -> None:
        """The timeout of a get is over; its answer may be on its way."""
        rank.patience = 3
        self.send(member, ev.CancelRequest(req=rank.waits[1]))
        rank.waits = ("withdrawn", rank.waits[1])

    def peers(self, member: str) -> list[Rank]:
        """The ranks that compute together with it: none leaves a section before all have entered it."""
        name = member.partition("[")[0]
        group = self.flow.plan.groups[name]
        return [self.ranks[f"{name}[{r}]"] for r in range(len(group.processes))] if group.collective else []

    def act(self, member: str) -> None:
        rank = self.ranks[member]
        if rank.offload and (rank.done or rank.waits is not None):
            assert not rank.inside, f"{member} is asked to offload while it works"
            rank.offload = rank.loaded = False
            self.send(member, Offloaded(member=member))
            return
        value = None
        if rank.waits is not None:
            kind, req = rank.waits
            if kind == "get" and self.gives_up(rank):
                self.withdraw(member, rank)
                return
            if kind == "get":
                rank.patience -= self.rng.random() < 0.3
            if kind == "withdrawn":
                kind = "get"
                if isinstance(rank.answers[req], ev.CancelDone):
                    del rank.answers[req]
                    regain = self.inside_get(member)
                    rank.waits = ("regain", self.ask(member, "regain", member)) if regain else self.again(member, rank)
                    return
            if kind == "regain":
                del rank.answers[req]
                self.enter(member)
                rank.waits = self.again(member, rank)
                return
            if kind == "sync":
                rank.answers[req] = None
            value, rank.waits = self.answer(member, kind, rank.answers.pop(req)), None
        try:
            kind, what = rank.program.send(value if rank.started else None)
        except StopIteration:
            rank.done = True
            return
        rank.started = True
        if kind != "pause":
            rank.asked = what
            rank.waits = (kind, self.ask(member, kind, what))

    def again(self, member: str, rank: Rank) -> tuple[str, Any]:
        """The same get, asked anew."""
        return "get", self.ask(member, "get", rank.asked)

    def run(self) -> bool:
        """Act until nobody can; True when everybody is done."""
        while actions := self.actions():
            self.act(self.rng.choice(actions))
        return all(rank.done for rank in self.ranks.values())

    def complete(self) -> bool:
        wanted = sorted(f"g{i // 2}/{i % 2}" for i in range(ITEMS))
        names = self.flow.graph.stages
        return all(sorted(self.got.get((f"p/{s}", n), [])) == wanted for s in range(STEPS) for n in names)


def run(seed: int) -> World:
    rng = random.Random(seed)
    world = World(random_flow(rng), rng)
    if not world.run():
        raise AssertionError(f"seed {seed}: nothing moves any more\n{world.core.report()}\n{world.flow.plan}")
    return world


@pytest.mark.parametrize("block", range(10))
def test_everything_arrives_once_and_nothing_stands_still(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        assert run(seed).complete(), f"seed {seed}"


def test_dealing_is_tried() -> None:
    """Negative control: ranks that end before their share is read are noticed."""

    def early(queue: DealtQueue, want: Want) -> Any:
        return DRAINED if queue.ended else ReaderQueue.take(queue, want)

    flows = [random_flow(random.Random(seed)) for seed in range(100)]
    assert sum(bool(flow.deals) for flow in flows) > 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DealtQueue, "take", early)
        worlds = [World(flow, random.Random(seed)) for seed, flow in enumerate(flows)]
        assert not all(world.run() and world.complete() for world in worlds)


def test_a_death_ends_the_run_by_name() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        world = World(random_flow(rng), rng)
        for _ in range(rng.randint(1, 120)):
            actions = world.actions()
            if not actions:
                break
            world.act(rng.choice(actions))
        victim = rng.choice([m for m in world.ranks if m != DRIVER])
        devices = world.core.lock_replica.get(victim)
        for to, what in world.core.lost(victim):
            world.deliver(to, what)
        assert world.core.failure is not None and world.core.failure.member == victim
        assert world.core.members.keys() == world.ranks.keys() - {victim}
        assert all(r.cancelled for m, r in world.ranks.items() if m not in (victim, DRIVER))
        if devices is not None and world.core.lock is not None:
            assert not world.core.lock.inside(devices[0]), "a dead replica is out of its section"


def standing_still(seeds: int) -> list[World]:
    found = []
    for seed in range(seeds):
        rng = random.Random(seed)
        world = World(random_flow(rng), rng)
        if not world.run():
            found.append(world)
    return found


def seen(world: World) -> bool:
    """Whether the hub knows that nothing moves: what a rank awaits of its peers alone it cannot know."""
    return world.core.stuck() or any(r.waits is not None and r.waits[0] == "sync" for r in world.ranks.values())


@pytest.mark.parametrize("broken", ["spill", "idle", "starving"])
def test_without_one_of_the_rules_it_stands_still(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the check above does find what each rule is there for."""
    if broken == "spill":
        monkeypatch.setattr(FlatPlan, "spills", lambda self, phase, channel: False)
    elif broken == "idle":
        monkeypatch.setattr(HubCore, "_idle", lambda self, member: [])
    else:
        monkeypatch.setattr("rlinf_core.board.channel.Channel.starving", lambda self: False)
    stuck = standing_still(300)
    assert stuck
    assert all(seen(world) for world in stuck)


def test_a_put_that_is_waited_for_later_is_a_wait_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the hub would take a writer that is blocked for one at work, and never say that nothing moves."""
    monkeypatch.setattr("rlinf_core.board.channel.Channel.starving", lambda self: False)
    monkeypatch.setattr(HubCore, "_blocked", lambda self, member, req: [])
    assert not all(seen(world) for world in standing_still(300))
