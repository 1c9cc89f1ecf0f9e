"""The device lock: its rules one by one, a model check over random runs, and locks that are wrong on purpose.

In the model every rank runs a number of sections. The exit of a section is collective: a rank leaves only
when all ranks of its replica have entered the same round, which is what makes the late-rank rule necessary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rlinf_core import devicelock
from rlinf_core.devicelock import (
    Acquire,
    AskOffload,
    Cancel,
    DeviceLock,
    Died,
    FreedByDeath,
    Grant,
    Idle,
    Loaded,
    Offloaded,
    Refused,
    Release,
    ReplicaSpec,
)
from rlinf_core.errors import PlanError


def spec(*devices: int, ranks: int = 1, order: int = 0, resident: bool = False, together: str = "") -> ReplicaSpec:
    return ReplicaSpec(frozenset(devices), ranks, order, resident, together)


def make(**replicas: ReplicaSpec) -> DeviceLock:
    return DeviceLock(replicas)


class TestRules:
    def test_all_devices_at_once_or_none(self) -> None:
        lock = make(a=spec(0), b=spec(1), wide=spec(0, 1, order=1))
        assert lock.handle(Acquire("a", 0)) == [Grant("a", 0, load=True)]
        assert lock.handle(Acquire("b", 0)) == [Grant("b", 0, load=True)]
        assert lock.handle(Acquire("wide", 0)) == []
        assert lock.handle(Release("a", 0)) == [AskOffload("a", "wide")]
        assert lock.handle(Offloaded("a")) == [], "device 0 alone is not taken"
        assert lock.holder_of(0) == ()
        assert lock.handle(Release("b", 0)) == [AskOffload("b", "wide")]
        assert lock.handle(Offloaded("b")) == [Grant("wide", 0, load=True)]
        assert lock.holder_of(0) == lock.holder_of(1) == ("wide",)

    def test_offload_is_lazy(self) -> None:
        lock = make(a=spec(0), b=spec(0, order=1))
        lock.handle(Acquire("a", 0))
        assert lock.handle(Release("a", 0)) == []
        assert lock.holder_of(0) == ("a",)
        assert lock.handle(Acquire("a", 0)) == [Grant("a", 0)], "still loaded: nothing to load"

    def test_entries_nest(self) -> None:
        lock = make(a=spec(0), b=spec(0, order=1))
        lock.handle(Acquire("a", 0))
        assert lock.handle(Acquire("a", 0)) == [Grant("a", 0)]
        lock.handle(Acquire("b", 0))
        assert lock.handle(Release("a", 0)) == []
        assert lock.handle(Release("a", 0)) == [AskOffload("a", "b")]

    def test_flow_order_among_waiters(self) -> None:
        lock = make(hold=spec(0), late=spec(0, order=2), early=spec(0, order=1))
        lock.handle(Acquire("hold", 0))
        lock.handle(Acquire("late", 0))
        lock.handle(Acquire("early", 0))
        assert lock.waiting() == (("early", 0), ("late", 0))
        lock.handle(Release("hold", 0))
        assert lock.handle(Offloaded("hold")) == [Grant("early", 0, load=True)]

    def test_a_first_waiter_reserves_its_devices(self) -> None:
        lock = make(hold=spec(0), wide=spec(0, 1, order=1), slim=spec(1, order=2), free=spec(2, order=3))
        lock.handle(Acquire("hold", 0))
        lock.handle(Acquire("wide", 0))
        assert lock.handle(Acquire("slim", 0)) == [], "device 1 is free but wide comes first"
        assert lock.handle(Acquire("free", 0)) == [Grant("free", 0, load=True)]

    def test_a_late_rank_is_let_in_though_others_wait(self) -> None:
        lock = make(team=spec(0, ranks=2, order=1), first=spec(0, order=0))
        assert lock.handle(Acquire("team", 0)) == [Grant("team", 0, load=True)]
        lock.handle(Acquire("first", 0))
        assert lock.handle(Acquire("team", 1)) == [Grant("team", 1, load=True)]

    def test_a_new_round_waits_while_others_do(self) -> None:
        lock = make(team=spec(0, ranks=2, order=0), other=spec(0, order=1))
        lock.handle(Acquire("team", 0))
        lock.handle(Acquire("team", 1))
        lock.handle(Acquire("other", 0))
        lock.handle(Release("team", 0))
        assert lock.handle(Acquire("team", 0)) == []
        assert lock.handle(Release("team", 1)) == [Grant("team", 0)], "producers before consumers"

    def test_more_keeps_the_devices_until_idle(self) -> None:
        lock = make(a=spec(0), b=spec(0, order=1))
        lock.handle(Acquire("a", 0))
        lock.handle(Acquire("b", 0))
        assert lock.handle(Release("a", 0, more=True)) == []
        assert lock.handle(Acquire("a", 0)) == [Grant("a", 0)]
        assert lock.handle(Release("a", 0, more=True)) == []
        assert "queued input" in lock.explain("b")
        assert lock.handle(Idle("a")) == [AskOffload("a", "b")]

    def test_a_consumer_with_queued_input_is_not_switched_out_for_a_producer(self) -> None:
        lock = make(consumer=spec(0, order=1), producer=spec(0, order=0))
        lock.handle(Acquire("consumer", 0))
        lock.handle(Acquire("producer", 0))
        lock.handle(Release("consumer", 0, more=True))
        assert lock.handle(Acquire("consumer", 0)) == [Grant("consumer", 0)]
        assert lock.handle(Release("consumer", 0)) == [AskOffload("consumer", "producer")]

    def test_idle_of_one_rank(self) -> None:
        lock = make(a=spec(0, ranks=2), b=spec(0, order=1))
        for rank in (0, 1):
            lock.handle(Acquire("a", rank))
        lock.handle(Acquire("b", 0))
        for rank in (0, 1):
            lock.handle(Release("a", rank, more=True))
        assert lock.handle(Idle("a", 0)) == []
        assert lock.handle(Idle("a", 1)) == [AskOffload("a", "b")]

    def test_every_rank_must_have_offloaded(self) -> None:
        lock = make(a=spec(0, ranks=2), b=spec(0, order=1))
        lock.handle(Acquire("a", 0))
        lock.handle(Acquire("b", 0))
        lock.handle(Release("a", 0))
        assert lock.handle(Offloaded("a", 0)) == []
        assert "ranks 1 have not yet" in lock.explain("b")
        assert lock.handle(Acquire("a", 1)) == [], "not while it offloads"
        assert lock.handle(Offloaded("a", 1)) == [Grant("a", 1, load=True)], "and it is first in the flow"

    def test_offloaded_unasked_changes_nothing(self) -> None:
        lock = make(a=spec(0))
        lock.handle(Acquire("a", 0))
        assert lock.handle(Offloaded("a")) == []
        assert lock.holder_of(0) == ("a",)

    def test_cpu_stages_are_granted_at_once(self) -> None:
        lock = make(cpu=spec(), gen=spec(0))
        assert lock.handle(Acquire("gen", 0)) == [Grant("gen", 0, load=True)]
        assert lock.handle(Acquire("cpu", 0)) == [Grant("cpu", 0, load=True)]

    def test_residents_take_turns_without_switching(self) -> None:
        lock = make(gen=spec(0, resident=True), train=spec(0, 1, resident=True, order=1))
        assert lock.handle(Acquire("gen", 0)) == [Grant("gen", 0, load=True)]
        assert lock.handle(Acquire("train", 0)) == []
        assert "device 0 with gen: in use by ranks 0" in lock.explain("train")
        assert lock.handle(Release("gen", 0)) == [Grant("train", 0, load=True)]
        assert lock.handle(Acquire("gen", 0)) == []
        assert lock.handle(Release("train", 0)) == [Grant("gen", 0)], "still loaded"
        assert lock.holder_of(0) == ("gen", "train")

    def test_a_resident_beside_swapped_ones(self) -> None:
        lock = make(stay=spec(0, resident=True), a=spec(0, order=1), b=spec(0, order=2))
        lock.handle(Acquire("stay", 0))
        assert lock.handle(Acquire("a", 0)) == [], "one at a time"
        assert lock.handle(Release("stay", 0)) == [Grant("a", 0, load=True)]
        assert lock.handle(Acquire("b", 0)) == []
        assert lock.handle(Release("a", 0)) == [AskOffload("a", "b")], "only what is swapped is asked"
        assert lock.handle(Offloaded("a", 0)) == [Grant("b", 0, load=True)]

    def test_a_set_is_loaded_together_and_offloaded_as_a_whole(self) -> None:
        lock = make(sim=spec(0, together="c"), policy=spec(0, order=1, together="c"), train=spec(0, order=2))
        lock.handle(Acquire("sim", 0))
        lock.handle(Acquire("policy", 0))
        assert lock.handle(Acquire("train", 0)) == []
        assert lock.handle(Release("sim", 0)) == [Grant("policy", 0, load=True)], "sim stays loaded meanwhile"
        assert lock.handle(Acquire("sim", 0)) == []
        assert lock.handle(Release("policy", 0)) == [Grant("sim", 0)], "nothing is loaded again"
        assert lock.handle(Release("sim", 0)) == [AskOffload("sim", "train"), AskOffload("policy", "train")]
        assert lock.handle(Offloaded("sim", 0)) == []
        assert lock.handle(Offloaded("policy", 0)) == [Grant("train", 0, load=True)]

    def test_who_waits_beside_is_not_offloaded_for_a_later_one(self) -> None:
        lock = make(stay=spec(0, resident=True), a=spec(0, order=1), b=spec(0, order=2))
        lock.handle(Acquire("a", 0))
        lock.handle(Release("a", 0))
        lock.handle(Acquire("stay", 0))
        lock.handle(Acquire("a", 0))
        assert lock.handle(Acquire("b", 0)) == [], "a is loaded and comes first"
        assert lock.handle(Release("stay", 0)) == [Grant("a", 0)]

    def test_cancel_frees_the_reservation(self) -> None:
        lock = make(hold=spec(0), wide=spec(0, 1, order=1), slim=spec(1, order=2))
        lock.handle(Acquire("hold", 0))
        lock.handle(Acquire("wide", 0))
        lock.handle(Acquire("slim", 0))
        assert lock.handle(Cancel("wide", 0)) == [Grant("slim", 0, load=True)]
        assert lock.handle(Cancel("wide", 0)) == []
        assert lock.handle(Cancel("slim", 0)) == [], "granted already: it releases"
        assert lock.inside("slim") == (0,)

    def test_death_frees_and_tells_the_waiters(self) -> None:
        lock = make(a=spec(0, 1, ranks=2), b=spec(0, order=1), c=spec(1, order=2))
        lock.handle(Acquire("a", 0))
        lock.handle(Acquire("b", 0))
        lock.handle(Acquire("c", 0))
        assert lock.handle(Died("a", "killed by signal 9")) == [
            FreedByDeath("a", frozenset({0, 1}), (("b", 0), ("c", 0)), "killed by signal 9"),
            Grant("b", 0, load=True),
            Grant("c", 0, load=True),
        ]
        assert lock.handle(Died("a")) == []
        assert lock.handle(Release("a", 0)) == []
        assert lock.handle(Acquire("a", 1)) == [Refused("a", 1, "a died: killed by signal 9")]
        assert lock.explain("a") == "a died: killed by signal 9"

    def test_unknown_names_and_ranks(self) -> None:
        lock = make(generator=spec(0))
        with pytest.raises(PlanError, match="did you mean 'generator'"):
            lock.handle(Acquire("genrator", 0))
        (refused,) = lock.handle(Acquire("generator", 3))
        assert isinstance(refused, Refused)
        assert "rank 3 is not one of the 1 ranks" in refused.reason

    def test_explain_names_the_holder(self) -> None:
        lock = make(gen=spec(0, ranks=2), ref=spec(0, order=1), actor=spec(0, order=2))
        assert lock.explain("gen") == "gen (device 0): not loaded, not waiting"
        lock.handle(Acquire("gen", 0))
        lock.handle(Loaded("gen", 0))
        lock.handle(Acquire("actor", 0))
        lock.handle(Acquire("ref", 0))
        text = lock.explain("actor")
        assert "actor waits for device 0 (ranks 0)" in text
        assert "device 0 with gen: in use by ranks 0, ranks 1 still loading" in text
        assert "ref is before it in the flow" in text
        lock.handle(Loaded("gen"))
        assert "loading" not in lock.explain("actor")


# ------------------------------------------------------------------ model


@dataclass
class Rank:
    replica: str
    rank: int
    left: int
    round: int = 0
    state: str = "out"  # out, waiting, inside
    more: bool = False


@dataclass
class World:
    """Ranks with work to do, and a lock. ``actions`` lists what can happen next."""

    specs: dict[str, ReplicaSpec]
    lock: Any
    rounds: int = 2
    ranks: dict[tuple[str, int], Rank] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    asked: dict[str, set[int]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name, one in self.specs.items():
            for rank in range(one.ranks):
                self.ranks[name, rank] = Rank(name, rank, self.rounds)

    def rivals(self, a: str, b: str) -> bool:
        """Whether they must not both be loaded."""
        one, other = self.specs[a], self.specs[b]
        return a != b and bool(one.devices & other.devices) and not one.fits_beside(other)

    def beside(self, a: str, b: str) -> bool:
        """Whether they share a device and may both be loaded."""
        return a != b and bool(self.specs[a].devices & self.specs[b].devices) and not self.rivals(a, b)

    def held_beside(self, name: str) -> bool:
        return any(self.beside(name, other) and self.inside(other) for other in self.specs)

    def at_rest(self, name: str) -> bool:
        """Neither it nor one of its set on its devices is at work or kept for queued input."""
        mine = self.specs[name].together
        team = [
            o for o in self.specs if o == name or (mine and self.specs[o].together == mine and self.beside(name, o))
        ]
        return not any(self.inside(o) or any(r.more for r in self.of(o)) for o in team)

    def feed(self, event: Any) -> None:
        waiting = {r.replica for r in self.ranks.values() if r.state == "waiting"}
        for out in self.lock.handle(event):
            if isinstance(out, Grant):
                self.granted(out, waiting)
            elif isinstance(out, AskOffload):
                assert not self.specs[out.replica].resident
                assert not self.inside(out.replica), "asked to offload while in use"
                assert not any(r.more for r in self.of(out.replica)), "asked though it has queued input"
                mine = self.specs[out.replica]
                for name, mate in self.specs.items():
                    if mine.together and mate.together == mine.together and mate.devices & mine.devices:
                        assert not self.inside(name), "asked while another one of its set is at work"
                assert out.replica not in self.asked
                self.asked[out.replica] = set(range(self.specs[out.replica].ranks))

    def granted(self, grant: Grant, waiting: set[str]) -> None:
        rank = self.ranks[grant.replica, grant.rank]
        assert rank.state == "waiting", "granted without asking"
        assert grant.replica not in self.dead
        if grant.replica not in self.loaded:
            assert grant.load
            mine = self.specs[grant.replica].order
            ahead = [w for w in waiting if self.rivals(w, grant.replica) and self.specs[w].order < mine]
            ahead = [w for w in ahead if any(r.state == "waiting" for r in self.of(w))]
            assert not ahead, "a consumer was let in before a producer that waits"
        for name in self.loaded:
            assert not self.rivals(name, grant.replica), "two replicas on one device"
        for name, other in self.specs.items():
            shares = name != grant.replica and other.devices & self.specs[grant.replica].devices
            assert not (shares and self.inside(name)), "two replicas at work on one device"
        assert grant.replica not in self.asked, "let in while it offloads"
        self.loaded.add(grant.replica)
        rank.state = "inside"
        rank.round += 1
        rank.left -= 1
        rank.more = False

    def of(self, replica: str) -> list[Rank]:
        return [r for r in self.ranks.values() if r.replica == replica]

    def inside(self, replica: str) -> list[Rank]:
        return [r for r in self.of(replica) if r.state == "inside"]

    def actions(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for key, rank in self.ranks.items():
            if rank.replica in self.dead:
                continue
            if rank.state == "out" and rank.left:
                found.append(("acquire", key))
            if rank.state == "inside" and all(r.round >= rank.round for r in self.of(rank.replica)):
                found.append(("leave", key))
        found += [("offload", (name, rank)) for name, ranks in self.asked.items() for rank in sorted(ranks)]
        return found

    def act(self, kind: str, key: Any, more: bool = False) -> None:
        name, index = key
        if kind == "offload":
            self.asked[name].discard(index)
            if not self.asked[name]:
                del self.asked[name]
                self.loaded.discard(name)
            self.feed(Offloaded(name, index))
            return
        rank = self.ranks[key]
        if kind == "acquire":
            rank.state = "waiting"
            self.feed(Acquire(name, index))
        elif kind == "leave":
            rank.state = "out"
            rank.more = more and rank.left > 0
            self.feed(Release(name, index, rank.more))

    def done(self) -> bool:
        return all(r.state == "out" and not r.left for r in self.ranks.values() if r.replica not in self.dead)

    def run(self, choose: Callable[[int], int]) -> bool:
        """Act until nothing can; True when all work was done, False for a deadlock."""
        while actions := self.actions():
            kind, key = actions[choose(len(actions))]
            self.act(kind, key)
        return self.done()


def worlds(chooser: random.Random, make_lock: Callable[[dict[str, ReplicaSpec]], Any]) -> World:
    specs = {
        f"r{i}": ReplicaSpec(
            frozenset(chooser.sample(range(4), chooser.randint(1, 3))),
            chooser.randint(1, 3),
            chooser.randint(0, 3),
            chooser.random() < 0.2,
            chooser.choice(["", "", "", "x", "y"]),
        )
        for i in range(chooser.randint(2, 5))
    }
    return World(specs, make_lock(specs))


def deadlocks(make_lock: Callable[[dict[str, ReplicaSpec]], Any], runs: int) -> int:
    found = 0
    for seed in range(runs):
        chooser = random.Random(seed)
        found += not worlds(chooser, make_lock).run(chooser.randrange)
    return found


class PerDevice:
    """The wrong lock: one lock per device, taken one after the other, as each replica happens to list them."""

    def __init__(self, specs: dict[str, ReplicaSpec]) -> None:
        self.want = {
            name: sorted(one.devices, key=lambda d: (d * 7 + i) % 5) for i, (name, one) in enumerate(specs.items())
        }
        self.owner: dict[int, str] = {}
        self.inside: dict[str, int] = {name: 0 for name in specs}
        self.waiting: dict[str, list[int]] = {name: [] for name in specs}

    def handle(self, event: Any) -> list[Any]:
        if isinstance(event, Acquire):
            self.waiting[event.replica].append(event.rank)
        elif isinstance(event, Release):
            self.inside[event.replica] -= 1
            if not self.inside[event.replica]:
                for device in self.want[event.replica]:
                    del self.owner[device]
        out: list[Any] = []
        for name, ranks in self.waiting.items():
            if not ranks:
                continue
            for device in self.want[name]:
                if self.owner.setdefault(device, name) != name:
                    break
            else:
                out += [Grant(name, rank, load=True) for rank in ranks]
                self.inside[name] += len(ranks)
                ranks.clear()
        return out


class PerDeviceWorld(World):
    """Only asks whether all work gets done: the wrong lock breaks the other rules as well."""

    def granted(self, grant: Grant, waiting: set[str]) -> None:
        rank = self.ranks[grant.replica, grant.rank]
        rank.state = "inside"
        rank.round += 1
        rank.left -= 1


def test_all_work_gets_done() -> None:
    assert deadlocks(DeviceLock, 400) == 0


def test_independent_locks_per_device_are_caught() -> None:
    """Negative control: the check that passes above does find deadlocks where there are some."""
    found = 0
    for seed in range(100):
        chooser = random.Random(seed)
        world = worlds(chooser, PerDevice)
        found += not PerDeviceWorld(world.specs, world.lock).run(chooser.randrange)
    assert found > 10


def test_without_the_late_rank_rule_it_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the rule itself."""
    monkeypatch.setattr(devicelock._Replica, "is_late", lambda self, rank: False)
    assert deadlocks(DeviceLock, 200) > 0


REPLICAS = st.lists(
    st.builds(
        ReplicaSpec,
        devices=st.frozensets(st.integers(0, 3), max_size=3),
        ranks=st.integers(1, 3),
        order=st.integers(0, 3),
        resident=st.sampled_from([False, False, False, True]),
        together=st.sampled_from(["", "", "x", "y"]),
    ),
    min_size=1,
    max_size=4,
)


class Machine(RuleBasedStateMachine):
    """Random runs with deaths, cancellations, replicas that keep their devices, residents and sets."""

    @initialize(replicas=REPLICAS)
    def start(self, replicas: list[ReplicaSpec]) -> None:
        specs = {f"r{i}": one for i, one in enumerate(replicas)}
        self.world = World(specs, DeviceLock(specs), rounds=3)

    @rule(data=st.data(), more=st.booleans())
    def act(self, data: st.DataObject, more: bool) -> None:
        actions = self.world.actions()
        if actions:
            kind, key = data.draw(st.sampled_from(actions))
            self.world.act(kind, key, more)

    @rule(data=st.data())
    def idle(self, data: st.DataObject) -> None:
        kept = sorted({r.replica for r in self.world.ranks.values() if r.more})
        if kept:
            name = data.draw(st.sampled_from(kept))
            for rank in self.world.of(name):
                rank.more = False
            self.world.feed(Idle(name))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [key for key, r in self.world.ranks.items() if r.state == "waiting"]
        if waiting:
            key = data.draw(st.sampled_from(waiting))
            self.world.ranks[key].state = "out"
            self.world.feed(Cancel(*key))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        alive = sorted(set(self.world.specs) - self.world.dead)
        if alive and data.draw(st.integers(0, 9)) == 0:
            name = data.draw(st.sampled_from(alive))
            self.world.dead.add(name)
            self.world.loaded.discard(name)
            self.world.asked.pop(name, None)
            for rank in self.world.of(name):
                rank.state, rank.left, rank.more = "out", 0, False
            self.world.feed(Died(name, "killed"))

    @rule(data=st.data())
    def nest(self, data: st.DataObject) -> None:
        inside = [key for key, r in self.world.ranks.items() if r.state == "inside"]
        if inside:
            key = data.draw(st.sampled_from(inside))
            assert self.world.lock.handle(Acquire(*key)) == [Grant(*key)]
            assert self.world.lock.handle(Release(*key)) == []

    @invariant()
    def the_lock_agrees(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in self.world.specs:
            inside = tuple(sorted(r.rank for r in self.world.inside(name)))
            assert self.world.lock.inside(name) == inside
            assert self.world.lock.explain(name)

    @invariant()
    def no_wake_up_is_lost(self) -> None:
        """A waiter is held up by a loaded rival, an earlier waiter, or its own replica's round or offload."""
        if not hasattr(self, "world"):
            return
        world = self.world
        waiting = {r.replica for r in world.ranks.values() if r.state == "waiting"}
        for name in waiting:
            rivals = [other for other in world.specs if world.rivals(name, other)]
            held = [other for other in rivals if other in world.loaded]
            beside = [o for o in world.specs if o != name and world.beside(name, o)]
            idle = [o for o in held if world.at_rest(o) and not (o in waiting and world.held_beside(o))]
            ahead = [o for o in rivals if o in waiting and world.specs[o].order <= world.specs[name].order]
            own = name in world.asked or world.inside(name)
            at_work = [o for o in beside if world.inside(o)]
            later = [o for o in beside if o in waiting]  # a new round gives way to who waits beside
            if name not in world.loaded:
                assert all(other in world.asked for other in idle), "an idle holder was not asked to offload"
            assert held or ahead or own or at_work or (name in world.loaded and later), "nothing holds it up"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in {r.replica for r in self.world.ranks.values() if r.more}:
            for rank in self.world.of(name):
                rank.more = False
            self.world.feed(Idle(name))
        assert self.world.run(lambda n: n - 1), "a deadlock"
        assert self.world.lock.waiting() == ()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
