"""GRPO of ``embodied/grpo_libero_vla`` whose trainer and policy also say which weights they have: what
``evidence/libero.py`` trains with, as ``program=evidence/_libero_recipe.py:program``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from rlinf_core import Flow, In, Out, Trajectory, task
from rlinf_embodied.data import Answered, Asked
from rlinf_embodied.recipes import phases
from rlinf_embodied.slots import training_slots
from rlinf_embodied.workers import Actor, PolicyWorker, Scorer, Simulator


def digest(weights: Iterable[tuple[str, Any]]) -> float:
    """48 bits of a hash of all names and numbers, which a metric holds exactly."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return float(int.from_bytes(found.digest()[:6], "big"))


class TellingActor(Actor):
    """Reports the weights after each update, and how far they went."""

    @task
    def train(self, trajectories: In[Trajectory]) -> dict[str, float]:
        before = self._copy()
        report = super().train(trajectories)
        after = self._copy()
        moved = [(after[name] - before[name]).double() for name in after]
        report["weights/digest"] = digest(after.items())
        report["weights/changed"] = float(sum(int((one != 0).sum()) for one in moved))
        report["weights/of"] = float(sum(one.numel() for one in moved))
        report["weights/moved"] = float(sum(float(one.square().sum()) for one in moved)) ** 0.5
        return report

    def _copy(self) -> dict[str, Any]:
        with self.on_device():
            return {name: tensor.detach().clone() for name, tensor in self.trainer.weights()}


class TellingPolicy(PolicyWorker):
    """Reports the version that it decides with, and the hash of its own weights."""

    def install_weights(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        given = list(weights)
        self.names = [name for name, _ in given]
        super().install_weights(version, given)

    @task
    def act(self, observations: In[Asked], actions: Out[Answered]) -> dict[str, float]:
        report = super().act(observations, actions)
        with self.on_device():
            own = self._there().policy.state_dict()
            found = digest((name, own[name]) for name in self.names)
        # The flow adds up what ranks report: as means, which are the trainer's numbers if those of all ranks are.
        report["policy/digest"] = found / self.world_size
        report["policy/version"] = self._there().version / self.world_size
        return report


def program(flow: Flow, cfg: Any) -> None:
    simulator = flow.group("simulator", Simulator, cfg)
    policy = flow.group("policy", TellingPolicy, cfg)
    actor = flow.group("actor", TellingActor, cfg)
    scorer = flow.group("scorer", Scorer, cfg)
    phases.begin(flow, simulator, policy, actor)
    for step in flow.steps(cfg.num_steps):
        trajectories = step.channels("trajectories")
        slots = step.channel("slots", deal="round_robin")
        step.feed(slots, training_slots(cfg, step.index))
        phases.rollout(step, simulator, policy, slots, trajectories)
        step.report(actor.train(trajectories))
        actor.publish_weights(to=policy)
        step.join()
    phases.evaluate(flow, cfg, simulator, policy, scorer, "after")
