"""PPO of rlinf-embodied with stages that wait besides: what ``evidence/embodied_plans.py`` runs on virtual devices.

Environments (CartPole), policy, channels and program are the shipped ones; every stage also waits for as long as a
heavier one would compute, so that eight devices can be had on two cores. The trainer only waits.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core import Flow, In, Trajectory, Worker, task
from rlinf_core.config import recipe
from rlinf_embodied.data import Answered, Asked
from rlinf_embodied.envs import Box, EnvSpec, PerEnv, StepResult, Text, VectorEnv
from rlinf_embodied.slots import training_slots
from rlinf_embodied.specfile import read_spec
from rlinf_embodied.workers import Actor, PolicyWorker, Simulator

SIDE = 64


@dataclass
class Waits:
    """Seconds: ``fixed`` at once and ``item`` for each environment, times ranks ** ``power``; ``log2`` for each
    doubling of the ranks. ``tail``: deviation of the logarithm of an environment's luck, whose mean is 1."""

    fixed: float = 0.002
    item: float = 0.002
    power: float = 0.0
    log2: float = 0.0
    tail: float = 0.0

    def seconds(self, ranks: int, lucks: Sequence[float]) -> float:
        return self.fixed + self.log2 * math.log2(ranks) + self.item * sum(lucks) * ranks**self.power


@dataclass
class Stages:
    simulator: Waits = field(default_factory=Waits)
    policy: Waits = field(default_factory=Waits)
    actor: Waits = field(default_factory=Waits)


@dataclass
class Settings:
    num_steps: int = 4
    num_envs: int = 24
    num_stages: int = 1
    rollout_steps: int = 10
    pictures: bool = False  # instead of CartPole, pictures of 64 x 64 and an instruction
    waits: Stages = field(default_factory=Stages)


def waits(cfg: Any) -> Waits:
    return Waits(**cfg.to_dict())


class Noting(Worker):
    """Leaves a diary of its work in the run directory, from which Gantt charts are drawn."""

    def setup(self) -> None:
        self.diary: list[tuple[str, str, float, float]] = []
        super().setup()

    @contextmanager
    def working(self) -> Iterator[None]:
        began = time.time()
        yield
        self.diary.append((self.step, "work", began, time.time()))

    def teardown(self) -> None:
        super().teardown()
        folder = self.run_dir / "diary"
        folder.mkdir(exist_ok=True)
        (folder / f"{self.name}-{self.rank}.json").write_text(json.dumps(self.diary))


class Slowly:
    """Environments whose steps take longer; everything else is theirs."""

    def __init__(
        self, env: VectorEnv, cost: Waits, ranks: int, working: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._env, self._cost, self._ranks, self._steps = env, cost, ranks, 0
        self._working = working

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, actions: NDArray[Any], active: NDArray[np.bool_] | None = None) -> StepResult:
        with self._working():
            return self._slow_step(actions, active)

    def _slow_step(self, actions: NDArray[Any], active: NDArray[np.bool_] | None) -> StepResult:
        began = time.monotonic()
        self._steps += 1
        result = self._env.step(actions, active)
        tail = self._cost.tail
        lucks = [
            random.Random(f"{env}/{self._steps}").lognormvariate(-tail * tail / 2, tail)
            for place, env in enumerate(self._env.indices)
            if active is None or active[place]
        ]
        rest = self._cost.seconds(self._ranks, lucks) - (time.monotonic() - began)
        time.sleep(max(0.0, rest))
        return result


class Picture:
    """A light square on a dark picture, which goes where it is sent."""

    def reset(self, seed: int) -> dict[str, Any]:
        self.place = np.random.default_rng(seed).uniform(-0.5, 0.5, 2)
        return self._seen()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool]:
        self.place = np.clip(self.place + 0.1 * np.asarray(action, np.float64).reshape(2), -1.0, 1.0)
        return self._seen(), -float(np.abs(self.place).sum()), False, False

    def render(self) -> NDArray[np.uint8]:
        picture = np.full((SIDE, SIDE, 3), 30, np.uint8)
        x, y = ((self.place + 1) / 2 * (SIDE - 8)).astype(int)
        picture[y : y + 8, x : x + 8] = 220
        return picture

    def close(self) -> None:
        pass

    def _seen(self) -> dict[str, Any]:
        return {"image": self.render(), "instruction": "bring the square to the middle"}


class Pictures(PerEnv):
    """What a vision-language-action policy needs to see, without a simulator's cost."""

    def make(self, index: int) -> Picture:
        return Picture()

    def describe(self, env: Any) -> EnvSpec:
        shape = (SIDE, SIDE, 3)
        seen = {"image": Box(np.zeros(shape), np.full(shape, 255.0), "uint8"), "instruction": Text()}
        return EnvSpec(seen, Box(np.full(2, -1.0), np.full(2, 1.0)), 50)


class SlowSimulator(Noting, Simulator):
    def _make_env(self, indices: Sequence[int], what: str = "") -> VectorEnv:
        pictures = self.cfg.pictures
        env = Pictures(self.cfg.env, indices, self.seed) if pictures else super()._make_env(indices, what)
        return Slowly(env, waits(self.cfg.waits.simulator), self.world_size, self.working)


class SlowPolicy(Noting, PolicyWorker):
    def _answer(self, asked: Asked) -> Answered:
        with self.working():
            began = time.monotonic()
            answer = super()._answer(asked)
            seconds = waits(self.cfg.waits.policy).seconds(self.world_size, [1.0] * len(asked.keys))
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        return answer


class WaitingActor(Noting, Actor):
    process_group = False  # its ranks tell each other nothing

    def setup(self) -> None:
        super().setup()
        self.policy: Any = None

    @task
    def begin(self) -> None:
        from rlinf_embodied.policies import load_policy

        self.policy = load_policy(self.cfg, read_spec(self.run_dir), self.seed)

    @task
    def train(self, trajectories: In[Trajectory]) -> dict[str, float]:
        steps = 0
        for mine in trajectories.batches():
            with self.on_device(), self.working():
                time.sleep(waits(self.cfg.waits.actor).seconds(self.world_size, [1.0] * len(mine)))
                self.trained(mine)
            steps += sum(len(one.arrays["rewards"]) for one in mine)
        return {"trained_steps": float(steps)}

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield from self.policy.state_dict().items()


@recipe(schema=Settings, groups={"env": "gymnasium", "model": "mlp", "trainer": "torch", "algorithm": "embodied_ppo"})
def program(flow: Flow, cfg: Any) -> None:
    simulator = flow.group("simulator", SlowSimulator, cfg)
    policy = flow.group("policy", SlowPolicy, cfg)
    actor = flow.group("actor", WaitingActor, cfg)
    for step in flow.steps(1, name="describe"):
        simulator.describe()
        step.join()
    for step in flow.steps(1, name="begin"):
        policy.begin()
        actor.begin()
        step.join()
    for step in flow.steps(cfg.num_steps):
        observations, actions, trajectories = step.channels("observations", "actions", "trajectories")
        slots = step.channel("slots", deal="round_robin")
        step.feed(slots, training_slots(cfg, step.index))
        step.report(simulator.rollout(slots, actions, observations, trajectories), reduce="sum")
        step.report(policy.act(observations, actions), reduce="sum")
        step.report(actor.train(trajectories), reduce="sum")
        actor.publish_weights(to=policy)
        step.join()
