"""Stages that sleep instead of computing, so that a plan for many devices can be run and timed on any machine.

The times are drawn per item from distributions with long tails, keyed by (seed, step, item), and grow with portion and
ranks in ways that no formula states to the planner: it sees what ``rlinf profile`` measures. What the stages pass on
is hashed at every stage, so that two plans can be compared bit by bit.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlinf_core import In, Out, Prompt, Worker, join, task

# ------------------------------------------------------------------ what moves


@dataclass
class Item:
    """A sample or an episode. ``weight``: its share of the work, 1 on average; ``value``: hash of what was done."""

    id: str
    group: str
    group_size: int
    weight: float = 1.0
    value: int = 0

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


@dataclass
class Observation:
    """What the simulated environments of one sub-batch show, or (on the way back) what to do in them."""

    key: tuple[int, int]  # rank of the simulator, number of the sub-batch
    round: int
    envs: list[str]
    values: list[int]


def questions(step: int, count: int, group_size: int) -> list[Prompt]:
    """What is fed to a step: prompts that are answered ``group_size`` times each."""
    return [Prompt(f"{step:03d}-{i:03d}", "", group_size=group_size) for i in range(count)]


# ------------------------------------------------------------------ how long it takes


@dataclass
class Decoding:
    """Generation: a rank decodes up to ``slots`` samples at once, a decoding step takes alpha + beta · active."""

    slots: int = 8
    alpha: float = 0.004
    beta: float = 0.0002
    tokens: float = 100.0  # mean length of a response
    shape: float = 0.9  # of the Weibull distribution of lengths: below 1 the tail is longer than an exponential one
    longest: float = 6.0  # times the mean, where a response is cut
    load: float = 0.1
    offload: float = 0.1
    bytes: int = 0  # of a device, while loaded


@dataclass
class Work:
    """Any other stage: ``fixed`` a portion, ``item`` · weight · luck an item, both growing with the ranks.

    With n ranks an item takes n**``power`` times as long (what they tell each other), a portion ``log2`` · log2(n)
    more.
    ``tail``: standard deviation of the logarithm of an item's luck, whose mean is 1.
    """

    fixed: float = 0.02
    item: float = 0.02
    power: float = 0.2
    log2: float = 0.01
    tail: float = 0.4
    load: float = 0.1
    offload: float = 0.1
    bytes: int = 0  # of a device, while loaded


def luck(tail: float, *key: object) -> float:
    """A log-normal number of mean 1 (cut at 8), the same for the same key."""
    drawn = random.Random("/".join(map(str, key))).lognormvariate(-tail * tail / 2, tail)
    return min(drawn, 8.0)


def decode(lengths: Sequence[int], slots: int, alpha: float, beta: float) -> Iterator[tuple[float, int]]:
    """(seconds from the start, index) of each sample in the order in which they finish; a free slot is refilled."""
    active = [(length, index) for index, length in enumerate(lengths[:slots])]
    heapq.heapify(active)
    following = len(active)
    done, seconds = 0, 0.0
    while active:
        end, index = heapq.heappop(active)
        seconds += (end - done) * (alpha + beta * (len(active) + 1))
        done = end
        if following < len(lengths):
            heapq.heappush(active, (done + lengths[following], following))
            following += 1
        yield seconds, index


class Stopwatch:
    """Sleeps until points in time rather than for durations, so that late awakenings do not add up."""

    def __init__(self) -> None:
        self._at = self._began = time.monotonic()

    def until(self, seconds: float) -> None:
        """Sleep until so many seconds after the start."""
        self._at = self._began + seconds
        time.sleep(max(0.0, self._at - time.monotonic()))

    def spend(self, seconds: float) -> None:
        self.until(self._at - self._began + seconds)


def hashed(value: int, *key: object) -> int:
    """32 bits that depend on all that is given."""
    text = "/".join(map(str, (value, *key)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


# ------------------------------------------------------------------ the stages


class Stage(Worker):
    """Has its state on a device or not, and takes its time to change that.

    Each rank leaves a diary of its sections and switches in the run directory, from which Gantt charts are drawn.
    """

    def setup(self) -> None:
        self.diary: list[tuple[str, str, float, float]] = []  # step, what, from, to

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with super().on_device(), self._noting("work"):
            yield

    def onload(self) -> None:
        with self._noting("load"):
            time.sleep(self.cfg.load)

    def offload(self) -> None:
        with self._noting("offload"):
            time.sleep(self.cfg.offload)

    def memory_bytes(self) -> int | None:
        return self.cfg.bytes or None

    def teardown(self) -> None:
        folder = self.run_dir / "diary"
        folder.mkdir(exist_ok=True)
        (folder / f"{self.name}-{self.rank}.json").write_text(json.dumps(self.diary))

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        began = time.time()
        yield
        self.diary.append((self.step, what, began, time.time()))

    def seconds(self, items: Iterable[Item]) -> float:
        """For one portion of this rank; ``cfg`` is a ``Work``."""
        c = self.cfg
        portion = sum(i.weight * luck(c.tail, self.seed, self.step, self.name, i.id) for i in items)
        return float(c.fixed + c.log2 * math.log2(self.world_size) + c.item * portion * self.world_size**c.power)


class Generator(Stage):
    """Answers every prompt ``group_size`` times; each answer goes on as soon as it is finished. ``cfg``: Decoding."""

    @task
    def generate(self, prompts: In[Prompt], samples: Out[Item]) -> None:
        for portion in prompts.batches():
            with self.on_device():
                watch = Stopwatch()
                items = [self._answer(prompt, i) for prompt in portion for i in range(prompt.group_size)]
                lengths = [max(1, round(item.weight * self.cfg.tokens)) for item in items]
                for seconds, index in decode(lengths, self.slots or self.cfg.slots, self.cfg.alpha, self.cfg.beta):
                    watch.until(seconds)
                    samples.put(items[index], weight=items[index].weight)

    def _answer(self, prompt: Prompt, index: int) -> Item:
        name, c = f"{prompt.id}/{index}", self.cfg
        drawn = random.Random(f"{self.seed}/{self.step}/{name}").weibullvariate(1.0, c.shape)
        weight = min(drawn / math.gamma(1 + 1 / c.shape), c.longest)
        return Item(name, prompt.id, prompt.group_size, weight, hashed(0, self.name, self.step, name))


class Forward(Stage):
    """One pass over samples that leaves a value: reference log-probs, a critic. ``cfg``: Work."""

    @task
    def forward(self, samples: In[Item], scored: Out[Item]) -> None:
        for portion in samples.batches():
            with self.on_device():
                Stopwatch().spend(self.seconds(portion))
                for item in portion:
                    item.value = hashed(item.value, self.name)
                scored.put_many(portion, weights=[item.weight for item in portion])


class Reward(Forward):
    """The same without a device: rules that check answers."""

    device = False


class Trainer(Stage):
    """Ranks that train together; ``flow.group(…, barrier=…)`` says whether it needs the whole batch. ``cfg``: Work."""

    collective = True
    process_group = False  # they only sleep
    barrier = "batch"

    @task
    def train(self, samples: In[Item]) -> dict[str, float]:
        taken: list[Item] = []
        for portion in samples.batches():
            with self.on_device():
                Stopwatch().spend(self.seconds(portion))
            taken += portion
        self.trained(taken)
        return {"samples": len(taken), "checksum": sum(hashed(item.value, item.id) for item in taken)}


class JoiningTrainer(Trainer):
    """Takes every sample from two stages at once."""

    @task
    def train_on_both(self, left: In[Item], right: In[Item]) -> dict[str, float]:
        taken: list[Item] = []
        for pairs in join(left, right, by="id").batches():
            with self.on_device():
                Stopwatch().spend(self.seconds(one for one, _ in pairs))
            for one, other in pairs:
                one.value = hashed(one.value, other.value)
                taken.append(one)
        self.trained(taken)
        return {"samples": len(taken), "checksum": sum(hashed(item.value, item.id) for item in taken)}


class Simulator(Stage):
    """Owns environments and steps them as the policy says, sub-batch by sub-batch. ``cfg``: a ``Rollout``."""

    @task(ends=True)
    def rollout(self, actions: In[Observation], observations: Out[Observation], episodes: Out[Item]) -> None:
        mine = [f"{self.step}/{i:03d}" for i in range(self.rank, self.cfg.envs, self.world_size)]
        size = actions.portion or max(1, len(mine))
        parts = [mine[i : i + size] for i in range(0, len(mine), size)]
        for number, envs in enumerate(parts):
            first = Observation((self.rank, number), 0, envs, [hashed(0, env) for env in envs])
            observations.put(first, key=first.key, weight=len(envs))
        values: dict[str, int] = {}
        for turn in range(1, self.cfg.rounds + 1):
            for number in range(len(parts)):
                action = actions.get(key=(self.rank, number))
                with self.on_device():
                    Stopwatch().spend(self._step_seconds(action))
                shown = [hashed(value, "state", turn) for value in action.values]
                values.update(zip(action.envs, shown, strict=True))
                if turn < self.cfg.rounds:
                    observations.put(
                        Observation(action.key, turn, action.envs, shown), key=action.key, weight=len(shown)
                    )
        observations.close()
        episodes.put_many([Item(env, env, 1, 1.0, values[env]) for env in mine])

    def _step_seconds(self, action: Observation) -> float:
        """Environments of a sub-batch are stepped one after the other; some steps (contacts, resets) take long."""
        c = self.cfg
        lucks = [luck(c.tail, self.seed, env, action.round) for env in action.envs]
        return float(c.fixed + c.env * sum(lucks))


class Policy(Stage):
    """Says what to do in all environments of a sub-batch at once. ``cfg``: a ``Work``."""

    @task
    def act(self, observations: In[Observation], actions: Out[Observation]) -> None:
        for seen in observations:
            with self.on_device():
                Stopwatch().spend(self.cfg.fixed + self.cfg.item * len(seen.envs) ** 0.8)
            chosen = [hashed(value, "action") for value in seen.values]
            actions.put(Observation(seen.key, seen.round, seen.envs, chosen), key=seen.key, weight=len(chosen))
