"""A discrete-event run of a plan as the runtime carries it out, rank by rank.

Every rank that works alone, and every collective group, takes portions from what has come so far, waits for its devices
and lets what it makes go as it is made. The device lock's rules: all devices of a replica at once; among those that
wait the flow's order decides, then arrival; a holder keeps its devices while it can take another portion; who shares a
device with it is loaded only when it has been offloaded, unless one of them is resident or both form a cycle.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from rlinf_sched.costmodel import Cost, StreamCost
from rlinf_sched.graph import SchedError
from rlinf_sched.loop import Loop, loop_seconds
from rlinf_sched.planread import FlatPlan, Placed
from rlinf_sched.problem import Problem
from rlinf_sched.ranks import Server, StageState, Work
from rlinf_sched.simulator import Bar, Run

ALONE = 64
"""Ranks of a stage that are followed one by one; of more, all are taken for one."""
NUMBERS = 1024
"""Items of a step that are followed one by one; of more, several are taken for one."""


def run_plan(plan: FlatPlan, problem: Problem, *, seed: int | None = None, alone: int = ALONE) -> Run:
    """One step in steady state (what worked last in the step before is loaded). With a seed the times scatter as the
    costs say; without one they are expected values. Raises SchedError when the plan comes to no end."""
    return _Runtime(plan, problem, seed, alone).run()


def scatters(problem: Problem) -> bool:
    """Whether anything is random."""
    return any(isinstance(cost, StreamCost) or cost.scatter(1.0) > 0 for cost in problem.costs.values())


class _Runtime:
    def __init__(self, plan: FlatPlan, problem: Problem, seed: int | None, alone: int) -> None:
        self.plan, self.problem, self.alone = plan, problem, alone
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.shuffle = np.random.default_rng([seed or 0, 1])
        self.many = min(problem.items, NUMBERS)
        self.clock = 0.0
        self.number = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.waiting: list[Server] = []
        self.held_back: list[Server] = []
        self.bars: list[Bar] = []
        self.busy: dict[str, float] = {}
        self.switching = 0.0
        self.stages = self._stages()
        self._rivals([server for stage in self.stages.values() for server in stage.servers])

    # ------------------------------------------------------------------ set-up

    def _stages(self) -> dict[str, StageState]:
        pairs = {name: pair for pair in self.plan.loops for name in pair}
        found: dict[str, StageState] = {}
        home: dict[str, str] = {}
        for name in sorted(self.plan.stages, key=lambda n: self.plan.order[n]):
            pair = pairs.get(name)
            if pair is not None and home.get(name):
                continue
            made = self._loop(pair) if pair is not None else self._single(self.plan.stages[name])
            found[made.name] = made
            home |= dict.fromkeys(made.names, made.name)
        for a, b in self.problem.graph.edges:
            one, other = found[home[a]], found[home[b]]
            if one is not other and one not in other.before:
                one.after.append(other)
                other.before.append(one)
        return found

    def _single(self, placed: Placed) -> StageState:
        stage, cost = self.problem.graph.stages[placed.name], self.problem.costs[placed.name]
        ranks = len(placed.processes)
        devices = len(placed.devices) if stage.device else ranks
        lone = not stage.collective and stage.barrier != "batch" and ranks <= self.alone
        option = self._option(placed, cost)
        work = Work(stage, cost, devices, ranks if lone else 1, lone, option, self.problem.items, self.rng)
        portion = placed.portion
        if portion is not None and not stage.collective and not lone:  # ranks that are taken for one
            portion *= ranks
        group = round(stage.group * stage.per_item) if stage.barrier == "group" else 1
        reload = float(cost.reload(np.array([devices]))[0])
        part = cost.load / (cost.load + cost.offload) if cost.load + cost.offload > 0 else 0.5
        swaps = stage.device and stage.swappable
        made = StageState(
            (placed.name,),
            self.many,
            self.problem.items * stage.per_item / self.many,
            max(1, group),
            portion,
            stage.barrier == "batch",
            stage.collective and stage.barrier == "group",
            max(1, group) * ranks if stage.collective and stage.barrier == "group" else 1,
            work,
            cost.streams,
            reload * part * swaps,
            reload * (1 - part) * swaps,
        )
        resident = placed.resident or not stage.swappable
        places = [frozenset(p) for p in placed.processes] if lone else [placed.devices]
        made.servers = [Server(made, where, self.plan.order[placed.name], resident) for where in places]
        return made

    def _option(self, placed: Placed, cost: Cost) -> int:
        options = cost.options(self.problem.items)
        if placed.slots is not None and options != (0,):
            return placed.slots
        return options[-1] if options else 0

    def _loop(self, pair: tuple[str, str]) -> StageState:
        """A cycle works as one: it takes everything at once and lets it go at its end."""
        cycle = next(c for c in self.problem.graph.cycles if c.members == pair)
        sides = [(self.plan.stages[n], self.problem.graph.stages[n], self.problem.costs[n]) for n in pair]
        loop = Loop.of(cycle, sides, self.problem)

        def work(items: int) -> tuple[float, list[tuple[float, float]]]:
            seconds = loop_seconds(replace(loop, items=items), self.rng)
            return seconds, [(seconds, 1.0)]

        strict = max((s for _, s, _ in sides), key=lambda s: ("item", "group", "batch").index(s.barrier))
        shared = bool(sides[0][0].devices & sides[1][0].devices)
        both = [float(c.reload(np.array([max(len(p.devices), 1)]))[0]) * s.device * s.swappable for p, s, c in sides]
        reload = sum(both) if shared else max(both)
        batch = strict.barrier == "batch"
        per = self.problem.items / self.many
        half = reload / 2
        made = StageState(pair, self.many, per, strict.group, None, batch, False, 1, work, False, half, half)
        resident = all(p.resident or not s.swappable for p, s, _ in sides if s.device)
        order = min(self.plan.order[name] for name in pair)
        made.servers = [Server(made, sides[0][0].devices | sides[1][0].devices, order, resident)]
        return made

    def _rivals(self, servers: list[Server]) -> None:
        by_device: dict[int, list[Server]] = {}
        for server in servers:
            for device in server.devices:
                by_device.setdefault(device, []).append(server)
        for server in servers:
            near = {id(o): o for device in server.devices for o in by_device[device] if o is not server}
            for other in near.values():
                fits = server.resident or other.resident
                (server.beside if fits else server.rivals).append(other)
        for server in servers:
            names = {name for mine in server.stage.names for name in self.plan.gives_way.get(mine, ())}
            mates = (*server.rivals, *server.beside)
            server.takers = [other for other in mates if names & set(other.stage.names)]
        # The step before ended with the last stages of the flow.
        for server in sorted(servers, key=lambda s: -s.order):
            if all(other.state == "out" for other in server.rivals):
                server.state = "holding"

    # ------------------------------------------------------------------ running

    def run(self) -> Run:
        for stage in self.stages.values():
            stage.begin()
            stage.idle.extend(stage.servers)
        for stage in self.stages.values():
            self._wake(stage)
        self._settle()
        while self.events:
            self.clock, _, act = heapq.heappop(self.events)
            act()
            self._settle()
        stuck = [stage.name for stage in self.stages.values() if not stage.done]
        if stuck:
            raise SchedError(f"the plan comes to no end: {', '.join(stuck)} wait(s) for ever")
        used = max((bar.last for bar in self.bars), default=-1) + 1
        seconds = self.clock + self.problem.overhead
        return Run(seconds, self.busy, self.switching, tuple(self.bars), used)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, act))

    def _wake(self, stage: StageState) -> None:
        """Hand out portions to the ranks that wait, in the order in which they asked; end the stage when nothing is
        left."""
        while stage.idle and (count := stage.next()):
            self._take(stage.idle.popleft(), count)
        if not stage.done and not stage.running and stage.ended() and not stage.left():
            stage.done = True
            for number, rest in enumerate(stage.rest):  # what rounding has left
                if rest > 0:
                    self._deliver(stage, number, rest)
            for other in stage.after:
                self._wake(other)

    def _take(self, server: Server, count: int) -> None:
        server.held = server.stage.take(count)
        server.stage.running += 1
        server.items = count
        if not server.devices:
            self._begin(server)
            return
        if self._gives_way(server):
            self.held_back.append(server)
        else:
            self._ask(server)

    def _ask(self, server: Server) -> None:
        self.number += 1
        server.waiting = self.number
        self.waiting.append(server)

    def _gives_way(self, server: Server) -> bool:
        """Whether one that takes what it makes, on its devices, is at work or about to be."""
        return any(other.inside or other.waiting or other in self.held_back for other in server.takers)

    def _begin(self, server: Server) -> None:
        stage = server.stage
        seconds, outs = stage.work(server.items)
        held = deque(server.held)
        if stage.shuffles and len(held) > 1:
            held = deque(server.held[k] for k in self.shuffle.permutation(len(server.held)))
        for when, part in outs:
            self._at(self.clock + when, partial(self._out, stage, held, server.items * part))
        self._at(self.clock + seconds, lambda: self._end(server))
        self._bar(server, "work", seconds)
        server.portions += 1

    def _out(self, stage: StageState, held: deque[list[float]], items: float) -> None:
        """So many of the items of a portion leave."""
        while items > 1e-9 and held:
            head = held[0]
            amount = min(items, head[1])
            items -= amount
            head[1] -= amount
            if head[1] <= 1e-9:
                held.popleft()
            self._deliver(stage, int(head[0]), amount)
        for other in stage.after:
            self._wake(other)

    @staticmethod
    def _deliver(stage: StageState, number: int, items: float) -> None:
        if stage.rest[number] <= 0:
            return
        stage.rest[number] -= items
        if stage.rest[number] <= 1e-6 * stage.per:
            stage.rest[number] = 0.0
            for other in stage.after:
                other.arrive(number)

    def _end(self, server: Server) -> None:
        stage = server.stage
        stage.running -= 1
        server.inside = False
        count = stage.next()
        if count:
            server.more = not self._gives_way(server)
            self._take(server, count)
            return
        server.more = False
        stage.idle.append(server)
        self._wake(stage)

    def _bar(self, server: Server, what: str, seconds: float) -> None:
        stage = server.stage
        first, last = (min(server.devices), max(server.devices)) if server.devices else (0, -1)
        self.bars.append(Bar(stage.name, what, self.clock, self.clock + seconds, first, last, server.portions))
        if what == "switch":
            self.switching += seconds / len(stage.servers)
        else:
            server.total += seconds
            self.busy[stage.name] = max(self.busy.get(stage.name, 0.0), server.total)

    # ------------------------------------------------------------------ the device lock

    def _settle(self) -> None:
        for server in [server for server in self.held_back if not self._gives_way(server)]:
            self.held_back.remove(server)
            self._ask(server)
        reserved: list[Server] = []
        for server in sorted(self.waiting, key=lambda s: s.place):
            ahead = any(other in server.rivals for other in reserved)
            free = not any(other.inside for other in server.beside)
            if server.state == "holding":
                if free and (server.more or not ahead):
                    self._enter(server)
                continue
            if server.state == "out" and free and not ahead and all(o.state == "out" for o in server.rivals):
                server.state = "holding"
                self._enter(server, load=True)
                continue
            reserved.append(server)
        for server in reserved:
            for other in server.rivals:
                if other.state == "holding" and not other.busy and not self._before(other, server):
                    other.state = "offloading"
                    self._bar(other, "switch", other.stage.offload)
                    self._at(self.clock + other.stage.offload, lambda other=other: self._gone(other))  # type: ignore[misc]

    @staticmethod
    def _before(holder: Server, waiter: Server) -> bool:
        inside = any(other.inside for other in holder.beside)
        return bool(holder.waiting) and holder.place < waiter.place and inside

    @staticmethod
    def _gone(server: Server) -> None:
        server.state = "out"

    def _enter(self, server: Server, load: bool = False) -> None:
        self.waiting.remove(server)
        server.waiting = 0
        server.more = False
        server.inside = True
        seconds = server.stage.load if load else 0.0
        if seconds > 0:
            self._bar(server, "switch", seconds)
            self._at(self.clock + seconds, lambda: self._begin(server))
        else:
            self._begin(server)
