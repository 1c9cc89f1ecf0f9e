"""The phases that the recipes have in common: beginning, evaluation, checkpoints, and going on from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlinf_core import Flow
from rlinf_core.flow import Group, Step
from rlinf_embodied.slots import evaluation_slots


def begin(flow: Flow, simulator: Group, policy: Group, actor: Group) -> None:
    """Build policy and trainer for the environments that the simulators have; in a run that goes on, from its
    checkpoint."""
    for step in flow.steps(1, name="describe"):
        simulator.describe()
        step.join()
    for step in flow.steps(1, name="begin"):
        policy.begin()
        actor.begin()
        if flow.resumed_steps:
            simulator.load_checkpoint(flow.resumed_path)
            actor.load_checkpoint(flow.resumed_path)
        actor.publish_weights(to=policy)
        step.join()


def evaluate(flow: Flow, cfg: Any, simulator: Group, policy: Group, scorer: Group, when: str) -> None:
    """``cfg.eval.episodes`` episodes in environments of their own, recorded under ``when``.

    Every episode is written to ``evaluations/<when>.jsonl``, ``cfg.eval.videos`` of them to ``<when>.mp4`` there.
    """
    for step in flow.steps(1, name="evaluate"):
        observations, actions, episodes = step.channels("observations", "actions", "episodes")
        slots = step.channel("slots", deal="round_robin")
        step.feed(slots, evaluation_slots(cfg))
        step.report(simulator.evaluate(slots, actions, observations, episodes), reduce="sum")
        step.report(policy.act(observations, actions), reduce="sum")
        step.report(scorer.evaluate(episodes, when, cfg.eval.episodes))
        flow.record(when, step.join())


def at_intervals(
    flow: Flow, cfg: Any, step: Step, evaluate: Callable[[str], None], simulator: Group, actor: Group
) -> None:
    """After a joined training step, the last one left out: evaluate every ``cfg.eval.every`` steps, and save every
    ``cfg.checkpoint.every``, in this order, so that a checkpoint knows how good it is."""
    if flow.every(step, cfg.eval.every) and not step.last:
        evaluate(f"step {step.index + 1}")
    if flow.every(step, cfg.checkpoint.every) and not step.last:
        save(flow, step.index + 1, simulator, actor)


def save(flow: Flow, steps_done: int, simulator: Group, actor: Group) -> None:
    """A checkpoint of the trainer and of where environments are, and the policy as a directory ``export/``."""
    with flow.checkpoint(steps_done) as path:
        for step in flow.steps(1, name="save"):
            actor.save_checkpoint(path)
            simulator.save_checkpoint(path)
            actor.export()
            step.join()
