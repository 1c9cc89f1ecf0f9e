"""A recipe of your own: a bandit that is learnt by policy gradient, in three stages and plain Python.

    rlinf run examples/my_recipe.py
    rlinf run examples/my_recipe.py plan=spatial cluster.virtual_devices=1 lr=0.1 'arms=[0.1,0.9]'

Copy it and change it. The stages are ordinary classes, the program at the end is ordinary code; where and when each
stage runs is the plan's business. Heavy imports belong into methods, so that reading the file stays cheap.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rlinf_core import Flow, In, Out, Worker, recipe, task


@dataclass
class Pull:
    """One pull of an arm. ``account_ids`` puts it on the step's account: it must not get lost on the way."""

    id: str
    arm: int = -1
    reward: float = 0.0

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


@dataclass
class Settings:
    """Keys of this recipe, beside those that every recipe has."""

    num_steps: int = 20
    pulls_per_step: int = 200
    lr: float = 0.2
    arms: list[float] = field(default_factory=lambda: [0.2, 0.8, 0.4])  # chance of a reward


class Player(Worker):
    """Chooses arms. A stage on devices: it may have several ranks, which share the pulls."""

    def setup(self) -> None:
        self.preferences = [0.0] * len(self.cfg.arms)

    @task
    def play(self, pulls: In[Pull], played: Out[Pull]) -> None:
        for portion in pulls.batches():
            with self.on_device():
                for pull in portion:
                    # keyed by the pull, so that it does not matter which rank draws it
                    luck = random.Random(f"{self.seed}/{pull.id}")
                    pull.arm = luck.choices(range(len(self.preferences)), softmax(self.preferences))[0]
                    played.put(pull)

    def install_weights(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        self.preferences = dict(weights)["preferences"].tolist()


class Casino(Worker):
    """Pays out. Needs no device."""

    device = False

    @task
    def pay(self, played: In[Pull], paid: Out[Pull]) -> None:
        for pull in played:
            luck = random.Random(f"{self.seed}/{pull.id}/luck")
            pull.reward = float(luck.random() < self.cfg.arms[pull.arm])
            paid.put(pull)


class Learner(Worker):
    """Raises the preference of arms that pay better than the average."""

    device = False

    def setup(self) -> None:
        self.preferences = [0.0] * len(self.cfg.arms)

    @task
    def learn(self, paid: In[Pull]) -> dict[str, float]:
        pulls = sorted(paid, key=lambda pull: pull.id)
        chances = softmax(self.preferences)
        mean = sum(pull.reward for pull in pulls) / len(pulls)
        for pull in pulls:
            for arm, chance in enumerate(chances):
                gradient = (arm == pull.arm) - chance
                self.preferences[arm] += self.cfg.lr * (pull.reward - mean) * gradient / math.sqrt(len(pulls))
        self.trained(pulls)
        return {"reward/mean": mean, **{f"chance/arm_{arm}": chance for arm, chance in enumerate(chances)}}

    def weights(self) -> Iterator[tuple[str, Any]]:
        import torch

        yield "preferences", torch.tensor(self.preferences, dtype=torch.float64)


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


@recipe(schema=Settings)
def bandit(flow: Flow, cfg: Any) -> None:
    player = flow.group("player", Player, cfg)
    casino = flow.group("casino", Casino, cfg)
    learner = flow.group("learner", Learner, cfg)
    for step in flow.steps(cfg.num_steps):
        pulls, played, paid = step.channels("pulls", "played", "paid")
        step.feed(pulls, [Pull(f"{step.full_name}/{i:04d}") for i in range(cfg.pulls_per_step)])
        player.play(pulls, played)
        casino.pay(played, paid)
        step.report(learner.learn(paid))
        learner.publish_weights(to=player)
        metrics = step.join()
        if step.last:
            flow.record("bandit", metrics)
