"""Simulator and policy that feed each other, then a trainer; everything can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_core import In, Out, Worker, task


@dataclass
class Env:
    id: str
    state: int

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


@dataclass
class Block:
    """Observations or actions of one sub-batch."""

    place: tuple[int, int]
    values: list[int]


class Loading(Worker):
    def setup(self) -> None:
        self.loaded = False
        self.onloads = 0

    def onload(self) -> None:
        assert not self.loaded
        self.loaded = True
        self.onloads += 1

    def offload(self) -> None:
        self.loaded = False


class Simulator(Loading):
    @task(ends=True)
    def rollout(
        self, envs: In[Env], actions: In[Block], observations: Out[Block], episodes: Out[Env]
    ) -> dict[str, float]:
        before = self.onloads
        mine = [env for portion in envs.batches() for env in portion]
        size = actions.portion or max(1, len(mine))
        parts = [mine[i : i + size] for i in range(0, len(mine), size)]
        for k, part in enumerate(parts):
            block = Block((self.rank, k), [env.state for env in part])
            observations.put(block, key=block.place, weight=len(part))
        for turn in range(self.cfg["rounds"]):
            for k, part in enumerate(parts):
                block = actions.get(key=(self.rank, k))
                with self.on_device():
                    assert self.loaded
                    for env, action in zip(part, block.values, strict=True):
                        env.state += action
                if turn + 1 < self.cfg["rounds"]:
                    block = Block((self.rank, k), [env.state for env in part])
                    observations.put(block, key=block.place, weight=len(part))
        observations.close()
        for env in mine:
            episodes.put(env)
        return {"onloads": float(self.onloads - before), "sub_batches": float(len(parts))}


class Policy(Loading):
    @task
    def act(self, observations: In[Block], actions: Out[Block]) -> None:
        for portion in observations.batches():
            with self.on_device():
                assert self.loaded
                for block in portion:
                    answer = [2 * value + 1 for value in block.values]
                    actions.put(Block(block.place, answer), key=block.place, weight=len(answer))


class Unending(Simulator):
    @task
    def rollout(self, envs: In[Env], actions: In[Block], observations: Out[Block], episodes: Out[Env]) -> None:
        """As the other one, but nobody says that it ends the cycle."""


class Trainer(Loading):
    collective = True
    process_group = False
    barrier = "batch"

    @task
    def train(self, episodes: In[Env]) -> dict[str, float]:
        total = 0
        for portion in episodes.batches():
            with self.on_device():
                assert self.loaded
                total += sum(env.state for env in portion)
                self.trained(portion)
        return {"total": float(total)}


def program(flow: Any, cfg: Any, simulator: type[Simulator] = Simulator) -> None:
    sim = flow.group("simulator", simulator, cfg)
    policy = flow.group("policy", Policy, cfg)
    trainer = flow.group("trainer", Trainer, cfg)
    for step in flow.steps(cfg["num_steps"]):
        envs, observations, actions, episodes = step.channels("envs", "observations", "actions", "episodes")
        step.feed(envs, lambda index=step.index: [Env(f"e{index}.{i}", i) for i in range(cfg["envs"])])
        step.report(sim.rollout(envs, actions, observations, episodes), reduce="sum")
        policy.act(observations, actions)
        step.report(trainer.train(episodes), reduce="sum")
        step.join()


def endless(flow: Any, cfg: Any) -> None:
    program(flow, cfg, Unending)


def expected(cfg: Any) -> list[float]:
    def after(state: int) -> int:
        for _ in range(cfg["rounds"]):
            state += 2 * state + 1
        return state

    return [float(sum(after(i) for i in range(cfg["envs"])))] * int(cfg["num_steps"])
